"""A router and its tenants' quotas: no token passes its lease, and what was used is settled once, to the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from manylora.v1 import common_pb2, scheduler_pb2, worker_pb2
from manylora_router.request.token_lease import LEASE_WAIT_S
from manylora_shared.errors import Code, QuotaBreach, RpcError
from router_fakes import (
    STARTED,
    Answer,
    RouterCluster,
    finished,
    ids_of,
    read_all,
    say,
    simulate,
    text_request,
    tokens,
    until,
)

PROMPT = "hi"
LONG = "x" * 200


def used(answer: Answer) -> int:
    return int(answer.finished.usage.prompt_tokens + answer.finished.usage.completion_tokens)


def test_what_an_end_means_to_the_scheduler_travels_with_what_comes_next() -> None:
    """Its grant is closed and its lease settled: each message costs the scheduler more than to take what it says."""

    async def test(cluster: RouterCluster) -> None:
        for _ in range(3):
            await cluster.ask(text_request(PROMPT, max_tokens=5))
        assert len(cluster.scheduler.closed) == len(cluster.scheduler.settled) == 2, "the third has just ended"
        assert cluster.scheduler.num_messages == 3, "one as each comes"
        await until(lambda: len(cluster.scheduler.settled) == 3)
        assert len(cluster.scheduler.closed) == 3
        assert cluster.scheduler.num_messages == 4

    simulate(test)


def test_what_was_used_is_settled_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        answers = await asyncio.gather(*(cluster.ask(text_request(PROMPT, max_tokens=n)) for n in (1, 5, 30)))
        await until(lambda: len(cluster.scheduler.settled) == 3)
        assert sorted(used_tokens for _, used_tokens in cluster.scheduler.settled) == sorted(used(a) for a in answers)
        assert len({request_id for request_id, _ in cluster.scheduler.settled}) == 3
        assert sum(used(a) for a in answers) == cluster.app.scheduler.counters.settled_tokens
        assert {used(a) - len(ids_of(PROMPT)) for a in answers} == {1, 5, len(ids_of("hello world"))}

    simulate(test)


def test_a_lease_grows_while_the_answer_streams() -> None:
    async def test(cluster: RouterCluster) -> None:
        prompt_tokens = len(ids_of(PROMPT))
        cluster.scheduler.lease_tokens = prompt_tokens + 5
        cluster.scheduler.grows_by = 7
        answer = await cluster.ask(text_request(PROMPT, max_tokens=100))
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert answer.finished.usage.completion_tokens == 100
        assert answer.text == "x" * 100
        assert len(cluster.scheduler.wanted) >= 13

    simulate(test, script=say(LONG))


def test_nothing_is_handed_out_before_the_lease_covers_it() -> None:
    async def test(cluster: RouterCluster) -> None:
        prompt_tokens = len(ids_of(PROMPT))
        cluster.scheduler.lease_tokens = prompt_tokens + 6
        cluster.scheduler.answers_wants = False
        stream = cluster.open(text_request(PROMPT, max_tokens=40))
        answer = Answer()
        reading = asyncio.create_task(read_all(stream, answer))
        await until(lambda: bool(cluster.scheduler.wanted))
        await asyncio.sleep(1.0)
        request_id = cluster.scheduler.wanted[0]
        assert len(answer.ids_of()) <= 6
        given = cluster.scheduler.lease_tokens
        while given < prompt_tokens + 40:
            cluster.scheduler.answer_want(request_id)
            given += 10
            await asyncio.sleep(0.5)
            assert prompt_tokens + len(answer.ids_of()) <= given
        await reading
        assert answer.finished.usage.completion_tokens == 40

    simulate(test, script=say(LONG))


@pytest.mark.parametrize("cached", [4, 1000])
def test_what_a_worker_found_of_a_prompt_is_credited(cached: int) -> None:
    """At most the prompt; the caller is told of all that it used."""

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(PROMPT, max_tokens=5))
        await until(lambda: len(cluster.scheduler.settled) == 1)
        assert used(answer) == len(ids_of(PROMPT)) + 5
        assert answer.finished.usage.cached_prompt_tokens == min(cached, len(ids_of(PROMPT)))
        ((_, settled),) = cluster.scheduler.settled
        assert settled == used(answer) - min(cached, len(ids_of(PROMPT)))

    simulate(test, script=say(LONG, cached_prompt_tokens=cached))


def test_a_lease_that_does_not_grow_ends_the_stream_in_order() -> None:
    async def test(cluster: RouterCluster) -> None:
        prompt_tokens = len(ids_of(PROMPT))
        cluster.scheduler.lease_tokens = prompt_tokens + 10
        cluster.scheduler.grows_by = None
        answer = await cluster.ask(text_request(PROMPT, max_tokens=100))
        assert answer.finished.outcome == common_pb2.OUTCOME_QUOTA_EXHAUSTED
        assert answer.finished.usage.completion_tokens == 10
        assert answer.text == "x" * answer.finished.usage.completion_tokens
        assert answer.error is not None
        assert (answer.error.code, answer.error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 1.5)
        assert answer.error.label == "quota_exhausted"
        (breach,) = answer.error.breaches
        assert (breach.quota, breach.tenant_id, breach.limit) == ("classes.standard.token_bucket", "acme", 7)
        await cluster.at_rest()
        assert cluster.scheduler.settled == [(cluster.scheduler.wanted[0], used(answer))]

    simulate(test, script=say(LONG))


def test_what_may_be_told_does_not_wait_for_tokens_that_may_not() -> None:
    """The lease covers the prompt alone; a worker's first tokens come with its beginning."""

    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.lease_tokens = len(ids_of(PROMPT))
        loop = asyncio.get_running_loop()
        began = loop.time()
        stream = cluster.open(text_request(PROMPT, max_tokens=40))
        cluster.scheduler.answers_wants = False
        first = await stream.read()
        assert loop.time() - began < 1.0
        assert first.HasField("started")
        assert not first.HasField("delta")
        await until(lambda: bool(cluster.scheduler.wanted))
        cluster.scheduler.answer_want(cluster.scheduler.wanted[0])
        cluster.scheduler.answers_wants = True
        answer = await read_all(stream, Answer(frames=[first]))
        assert len(answer.ids_of()) == 40

    simulate(test, script=say(LONG, pause_s=0.0), delay_s=0.001)


def test_a_scheduler_that_does_not_answer_ends_the_stream() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.lease_tokens = len(ids_of(PROMPT)) + 10
        cluster.scheduler.answers_wants = False
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await cluster.ask(text_request(PROMPT, max_tokens=100))
        assert answer.finished.outcome == common_pb2.OUTCOME_QUOTA_EXHAUSTED
        assert loop.time() - began < LEASE_WAIT_S + 1

    simulate(test, script=say(LONG))


def test_a_request_that_the_quotas_do_not_admit() -> None:
    async def test(cluster: RouterCluster) -> None:
        breach = scheduler_pb2.QuotaBreach(quota="quotas.concurrency", tenant_id="acme", limit=3, description="3 run")
        for hint in (0.25, None):
            cluster.scheduler.refusal = scheduler_pb2.Refusal(
                code=int(Code.RESOURCE_EXHAUSTED), message="quotas.concurrency: 3 run", breaches=[breach],
                retry_after_s=hint,
            )  # fmt: skip
            answer = await cluster.ask(text_request(PROMPT))
            assert answer.frames == []
            assert answer.error is not None
            assert (answer.error.code, answer.error.label) == (Code.RESOURCE_EXHAUSTED, "quota_exceeded")
            assert answer.error.retry_after_s == hint
            assert [(b.quota, b.limit, b.description) for b in answer.error.breaches] == [
                ("quotas.concurrency", 3, "3 run")
            ]
        await cluster.at_rest()
        assert cluster.scheduler.settled == []

    simulate(test)


def test_a_request_that_its_tenants_memory_never_holds_is_refused_by_the_first_worker() -> None:
    """No second worker is tried, and the caller hears which bound it is."""

    async def test(cluster: RouterCluster) -> None:
        breach = QuotaBreach("quotas.kv_hbm_mb_hard", "acme", 5, "it may come to hold more")
        for worker in cluster.workers:
            worker.refuse_with = RpcError(Code.RESOURCE_EXHAUSTED, "too long", breaches=[breach])
        answer = await cluster.ask(text_request(PROMPT))
        assert answer.frames == []
        assert answer.error is not None
        assert (answer.error.code, answer.error.label) == (Code.RESOURCE_EXHAUSTED, "quota_exceeded")
        assert answer.error.retry_after_s is None
        assert list(answer.error.breaches) == [breach]
        await cluster.at_rest()
        assert [(c.reached_worker, c.worker_unavailable) for c in cluster.scheduler.closed] == [(False, False)]

    simulate(test)


def test_callers_that_leave_settle_what_they_got() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.lease_tokens = 1000
        stream = cluster.open(text_request(PROMPT, max_tokens=150))
        got = 0
        while got < 20:
            frame = await stream.read()
            got += len(frame.delta.token_ids)
        stream.cancel()
        await cluster.at_rest()
        ((_, settled),) = cluster.scheduler.settled
        assert len(ids_of(PROMPT)) + got <= settled < len(ids_of(PROMPT)) + 150
        cluster.scheduler.holds = True
        waiting = cluster.open(text_request(PROMPT))
        await until(lambda: bool(cluster.scheduler.queued))
        waiting.cancel()
        await until(lambda: len(cluster.scheduler.settled) == 2)
        assert cluster.scheduler.settled[-1][1] == 0
        assert len(cluster.scheduler.settled) == 2

    simulate(test, script=say(LONG, pause_s=0.01))


def test_a_new_stream_tells_the_scheduler_of_all_leases() -> None:
    async def test(cluster: RouterCluster) -> None:
        scheduler = cluster.scheduler
        scheduler.lossy = True
        scheduler.lease_tokens = 30
        scheduler.answers_wants = False
        running = asyncio.create_task(cluster.ask(text_request(PROMPT, max_tokens=100)))
        await until(lambda: bool(scheduler.wanted))
        scheduler.drop_lines()
        await until(lambda: len(scheduler.held) == 2)
        (held,) = scheduler.held[1]
        assert (held.request_id, held.tenant_id, held.tokens) == (scheduler.wanted[0], "acme", 30)
        assert held.max_tokens == len(ids_of(PROMPT)) + 100
        # It asks again on the new stream for what the old one did not answer.
        await until(lambda: len(scheduler.wanted) == 2)
        scheduler.grows_by, scheduler.answers_wants = 100, True
        scheduler.answer_want(held.request_id)
        answer = await running
        assert answer.finished.usage.completion_tokens == 100
        await cluster.at_rest()
        assert [used_tokens for _, used_tokens in scheduler.settled] == [used(answer)]

    simulate(test, script=say(LONG))


def test_deadlines_hold_while_a_lease_is_waited_for() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.lease_tokens = len(ids_of(PROMPT)) + 4
        cluster.scheduler.answers_wants = False
        answer: Any = await cluster.ask(text_request(PROMPT, max_tokens=100), timeout=2.0)
        assert answer.finished.outcome == common_pb2.OUTCOME_DEADLINE_EXCEEDED

    simulate(test, script=say(LONG))


async def _many_choices(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    """Two choices whose tokens come in one message each time, with logprobs; the second ends first."""
    yield STARTED

    def part(choice: int, first: int, count: int, **more: Any) -> worker_pb2.ChoiceTokens:
        ids = [3 + choice] * count
        logprobs = [common_pb2.PositionLogprobs(logprob=-float(first + i)) for i in range(count)]
        return worker_pb2.ChoiceTokens(choice=choice, first_position=first, token_ids=ids, logprobs=logprobs, **more)

    end = common_pb2.FINISH_REASON_LENGTH
    chunks = [
        [part(0, 0, 30), part(1, 0, 40, finish_reason=end)],
        [part(0, 30, 50, finish_reason=end)],
    ]
    for frame, choices in enumerate(chunks, 1):
        await asyncio.sleep(0.001)
        yield worker_pb2.ExecuteResponse(frame=frame, tokens=worker_pb2.TokenChunk(choices=choices))
    yield finished(3)


@pytest.mark.parametrize("grows_by", [1, 7, 1000])
def test_messages_are_cut_where_the_lease_ends_and_nothing_is_lost(grows_by: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.lease_tokens = len(ids_of(PROMPT)) + 3
        cluster.scheduler.grows_by = grows_by
        sampling = common_pb2.SamplingParams(top_logprobs=0)
        answer = await cluster.ask(text_request(PROMPT, max_tokens=100, n=2, sampling=sampling))
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED
        for choice, length in ((0, 80), (1, 40)):
            assert answer.ids_of(choice) == [3 + choice] * length
            deltas = [f.delta for f in answer.frames if f.HasField("delta") and f.delta.choice == choice]
            assert [p.logprob for d in deltas for p in d.logprobs] == [-float(i) for i in range(length)]
        assert [end.finish_reason for end in answer.finished.choices] == [common_pb2.FINISH_REASON_LENGTH] * 2
        await cluster.at_rest()
        assert [used_tokens for _, used_tokens in cluster.scheduler.settled] == [len(ids_of(PROMPT)) + 120]

    simulate(test, script=_many_choices)


async def _overrun(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    yield STARTED
    yield tokens(1, 0, [5] * 40)
    yield finished(2, common_pb2.OUTCOME_SLOW_READER, "more than 4096 tokens were not read")


def test_a_worker_that_gives_up_on_a_held_up_stream_is_the_quotas_doing() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.lease_tokens = len(ids_of(PROMPT)) + 3
        cluster.scheduler.grows_by = 40
        answer = await cluster.ask(text_request(PROMPT, max_tokens=100))
        assert answer.finished.outcome == common_pb2.OUTCOME_QUOTA_EXHAUSTED
        cluster.scheduler.lease_tokens = None
        answer = await cluster.ask(text_request(PROMPT, max_tokens=100))
        assert answer.finished.outcome == common_pb2.OUTCOME_SLOW_READER

    simulate(test, script=_overrun)
