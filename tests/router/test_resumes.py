"""The budget of answers that other workers go on with, and such answers as their callers see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from manylora.v1 import admin_pb2, common_pb2, scheduler_pb2, worker_pb2
from manylora_router.guard.resumes import MAX_TENANTS, RESUMES_BURST, RESUMES_PER_S, Resumes
from manylora_router.request.losses import MAX_FRUITLESS
from manylora_shared.errors import Code
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.policy import TenantQuotas
from router_fakes import (
    ADMIN,
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

ACME, OTHER = TenantId("acme"), TenantId("other")
LONG = "abcdefghij" * 20


def test_a_budget_is_a_tenants_own_and_fills_again() -> None:
    resumes, quotas = Resumes(), TenantQuotas(resumes_per_s=2, resumes_burst=3)
    assert [resumes.take(ACME, quotas, 0.0) for _ in range(4)] == [True, True, True, False]
    assert resumes.take(OTHER, quotas, 0.0)
    assert [resumes.take(ACME, quotas, 0.5) for _ in range(2)] == [True, False]
    assert [resumes.take(ACME, TenantQuotas(resumes_per_s=4), at) for at in (0.5, 0.75)] == [False, True]


def test_without_a_word_in_the_policy_the_default_holds() -> None:
    resumes = Resumes()
    assert all(resumes.take(ACME, TenantQuotas(), 0.0) for _ in range(RESUMES_BURST))
    assert not resumes.take(ACME, TenantQuotas(), 0.0)
    assert sum(resumes.take(ACME, TenantQuotas(), 1.0) for _ in range(100)) == RESUMES_PER_S


def test_the_tenants_that_are_known_are_bounded() -> None:
    resumes = Resumes()
    for number in range(MAX_TENANTS + 10):
        resumes.take(TenantId(f"t{number}"), TenantQuotas(), 0.0)
    assert len(resumes._buckets) == MAX_TENANTS


async def cut(cluster: RouterCluster, answer: Answer, *, frames: int = 4, **fields: object) -> Answer:
    """Its worker dies behind so many frames."""
    stream = cluster.open(text_request(max_tokens=200, **fields))
    for _ in range(frames):
        answer.frames.append(await stream.read())
    running = next(worker for worker in cluster.workers if worker.running)
    cluster.network.kill(running.worker_id)
    return await read_all(stream, answer)


def test_the_next_worker_gets_what_was_emitted_and_all_that_matters_of_the_request() -> None:
    async def test(cluster: RouterCluster) -> None:
        sampling = common_pb2.SamplingParams(temperature=0.7, min_tokens=5, frequency_penalty=0.5)
        answer = await cut(cluster, Answer(), sampling=sampling)
        assert (answer.error, answer.text) == (None, LONG)
        first, second = cluster.workers[0].executed[0], cluster.workers[1].executed[0]
        emitted = list(second.emitted[0].token_ids)
        assert 0 < len(emitted) < 200
        assert emitted == ids_of(LONG)[: len(emitted)]
        second.ClearField("emitted")
        assert second == first, "the drawn seed is the same"
        asked, again = cluster.scheduler.enqueued
        assert (asked.resumed, again.resumed) == (False, True)
        assert again.prompt_tokens == asked.prompt_tokens + len(emitted)
        assert again.max_new_tokens == asked.max_new_tokens - len(emitted)
        await cluster.at_rest()
        ((_, settled),) = cluster.scheduler.settled
        assert settled == asked.prompt_tokens + 200
        told = [(c.worker_id, c.reached_worker, c.worker_unavailable) for c in cluster.scheduler.closed]
        status = await cluster.client.call(ADMIN["GetStatus"], admin_pb2.GetStatusRequest(), timeout=10)
        assert status.resumed == 1
        assert told == [("worker-0", False, True), ("worker-1", True, False)]

    simulate(test, script=say(LONG, pause_s=0.01))


def test_a_stop_string_across_the_loss_is_found() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cut(cluster, Answer(), frames=3, stop=["jabcdefghija"])
        assert (answer.error, answer.text) == (None, "abcdefghi")
        assert answer.finished.usage.resumed == 1

    simulate(test, script=say(LONG, pause_s=0.05))


def test_each_choice_goes_on_where_it_stood_and_an_ended_one_not_at_all() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        if not request.emitted:
            yield tokens(1, 0, ids_of("whole"), choice=1, finish=common_pb2.FINISH_REASON_STOP, stop_token_id=2)
            yield tokens(2, 0, ids_of("ab"))
            await asyncio.sleep(10.0)
        assert [list(each.token_ids) for each in request.emitted] == [ids_of("ab"), [], []]
        assert [each.has_ended for each in request.emitted] == [False, True, False]
        yield tokens(1, 2, ids_of("cd"), finish=common_pb2.FINISH_REASON_STOP, stop_token_id=2)
        yield tokens(2, 0, ids_of("late"), choice=2, finish=common_pb2.FINISH_REASON_STOP, stop_token_id=2)
        yield finished(3)

    async def test(cluster: RouterCluster) -> None:
        answer = await cut(cluster, Answer(), frames=2, n=3)
        assert answer.error is None
        assert [answer.text_of(choice) for choice in range(3)] == ["abcd", "whole", "late"]
        again = cluster.scheduler.enqueued[1]
        assert (again.sequences, again.max_new_tokens) == (2, 2 * 198)
        assert answer.finished.usage.completion_tokens == 4 + 5 + 4

    simulate(test, script=script)


def test_a_prompt_is_scored_once_for_its_caller() -> None:
    async def test(cluster: RouterCluster) -> None:
        sampling = common_pb2.SamplingParams(prompt_logprobs=1)
        answer = await cut(cluster, Answer(), frames=3, sampling=sampling)
        assert (answer.error, answer.text) == (None, LONG)
        assert sum(len(frame.prompt_logprobs) for frame in answer.frames) == len("hi") - 1
        assert not cluster.workers[1].executed[0].sampling.HasField("prompt_logprobs")

    simulate(test, script=say(LONG, pause_s=0.05))


def test_a_worker_that_stops_in_order_hands_over_at_nobodys_expense() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        first = len(request.emitted[0].token_ids) if request.emitted else 0
        if first == 30:
            yield tokens(1, first, ids_of("z"), finish=common_pb2.FINISH_REASON_LENGTH)
            yield finished(2)
        else:
            yield tokens(1, first, ids_of("y"))
            yield finished(2, common_pb2.OUTCOME_WORKER_LOST, "it is draining", cached_prompt_tokens=1)

    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "quotas: {resumes_per_s: 1}\n")
        answer = await cluster.ask(text_request(max_tokens=31))
        assert (answer.error, answer.text) == (None, "y" * 30 + "z")
        usage = answer.finished.usage
        assert (usage.resumed, usage.prompt_tokens, usage.cached_prompt_tokens) == (30, 2, 1)
        assert all(closed.reached_worker for closed in cluster.scheduler.closed)
        await cluster.at_rest()
        assert [tokens for _, tokens in cluster.scheduler.settled] == [2 - 1 + 31]

    simulate(test, script=script)


def test_who_is_given_up_everywhere_ends() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        yield finished(1, common_pb2.OUTCOME_WORKER_LOST, "it is draining")

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request())
        assert answer.finished.outcome == common_pb2.OUTCOME_WORKER_LOST
        assert len(cluster.scheduler.enqueued) == 1 + MAX_FRUITLESS

    simulate(test, script=script)


def test_a_prompt_that_brings_workers_down_does_so_twice() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        first = len(request.emitted[0].token_ids) if request.emitted else 0
        yield tokens(1, first, ids_of("ab"))

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request())
        assert answer.error is not None
        assert answer.error.code is Code.UNAVAILABLE
        assert "workers failed again and again" in answer.error.message
        assert sum(len(worker.executed) for worker in cluster.workers) == 2
        assert answer.ids_of() == ids_of("abab")
        again = await cluster.ask(text_request())
        assert (again.frames, again.error.label if again.error else "") == ([], "quarantined")

    simulate(test, script=script)


def test_a_budget_that_is_used_up_ends_the_answer() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "quotas: {resumes_per_s: 1}\n")
        streams = [cluster.open(text_request(f"p{number}", max_tokens=200)) for number in range(2)]
        await until(lambda: sum(worker.running for worker in cluster.workers) == 2)
        await asyncio.sleep(0.1)
        for worker in cluster.workers:
            cluster.network.kill(worker.worker_id)
        answers = await asyncio.gather(*(read_all(stream) for stream in streams))
        assert all(answer.finished.outcome == common_pb2.OUTCOME_WORKER_LOST for answer in answers)
        assert sum("quotas.resumes_per_s" in answer.error.message for answer in answers if answer.error) == 1

    simulate(test, script=say(LONG, pause_s=0.05))


def test_a_refusal_of_the_scheduler_ends_it_with_what_it_used() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.lease_tokens = 1000
        stream = cluster.open(text_request(max_tokens=200))
        answer = Answer()
        for _ in range(4):
            answer.frames.append(await stream.read())
        cluster.scheduler.refusal = scheduler_pb2.Refusal(code=Code.UNAVAILABLE.value, message="no worker is serving")
        cluster.network.kill("worker-0")
        await read_all(stream, answer)
        assert answer.finished.outcome == common_pb2.OUTCOME_WORKER_LOST
        assert answer.error is not None
        assert "no other worker goes on with it: no worker is serving" in answer.error.message
        await cluster.at_rest()
        ((_, settled),) = cluster.scheduler.settled
        assert settled == 2 + len(answer.ids_of())

    simulate(test, script=say(LONG, pause_s=0.05))


def test_it_is_never_resumed_past_its_deadline() -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.open(text_request(max_tokens=200), timeout=2.0)
        answer = Answer()
        for _ in range(4):
            answer.frames.append(await stream.read())
        cluster.scheduler.holds = True
        cluster.network.kill("worker-0")
        await read_all(stream, answer)
        assert answer.finished.outcome == common_pb2.OUTCOME_DEADLINE_EXCEEDED
        await until(lambda: bool(cluster.scheduler.withdrawn))

    simulate(test, script=say(LONG, pause_s=0.05))
