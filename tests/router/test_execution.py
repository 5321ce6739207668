"""Generate, end to end through the router, with a scheduler and workers that do what each test says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from manylora.v1 import common_pb2, inference_pb2, worker_pb2
from manylora_router.text.service import TokenIdsOnlyText
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, RpcError
from router_fakes import (
    STARTED,
    Answer,
    FakeWorker,
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

SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_text_streams_and_ends_with_one_terminal_frame(seed: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request("hi"), x_adapter_id="upper", x_request_class="interactive")
        assert answer.error is None
        assert answer.text == "hello world"
        assert answer.ids_of() == ids_of("hello world")
        started = answer.frames[0].started
        assert started.adapter_version == "a" * 64
        assert started.prompt_tokens == 2
        end = answer.finished
        assert end.outcome == common_pb2.OUTCOME_COMPLETED
        assert end.choices[0].finish_reason == common_pb2.FINISH_REASON_STOP
        assert end.choices[0].stop_token_id == 2
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, 11)
        assert end.timings.queue_ms == 1.5
        assert end.timings.prefill_ms == 3.0
        assert 0 < end.timings.ttft_ms < end.timings.total_ms
        assert end.worker_id == "worker-0"
        request = cluster.workers[0].executed[0]
        assert request.sampling.seed == started.seed
        assert list(request.stop_token_ids) == [2]
        assert (request.n, request.max_tokens, request.epoch) == (1, 32, 1)
        enqueued = cluster.scheduler.enqueued[0]
        assert (enqueued.tenant_id, enqueued.adapter_uid, enqueued.adapter_id) == ("acme", f"{'a' * 64}@acme", "upper")
        assert enqueued.qos_class == common_pb2.QOS_CLASS_INTERACTIVE
        assert (enqueued.prompt_tokens, enqueued.max_new_tokens, enqueued.sequences) == (2, 32, 1)
        await cluster.at_rest()
        assert [c.reached_worker for c in cluster.scheduler.closed] == [True]

    simulate(test, seed=seed)


def test_many_streams_at_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        answers = await asyncio.gather(*(cluster.ask(text_request(f"p{i}")) for i in range(64)))
        assert {a.text for a in answers} == {"hello world"}
        assert all(a.finished.outcome == common_pb2.OUTCOME_COMPLETED for a in answers)
        assert len({a.frames[0].started.request_id for a in answers}) == 64
        assert cluster.app.calls.counters.completed == 64

    simulate(test)


@pytest.mark.parametrize("seed", SEEDS)
def test_caller_that_leaves_before_the_grant_withdraws(seed: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.holds = True
        stream = cluster.open(text_request())
        await until(lambda: bool(cluster.scheduler.queued))
        stream.cancel()
        await cluster.at_rest()
        await until(lambda: bool(cluster.scheduler.withdrawn))
        assert cluster.scheduler.queued == {}
        assert cluster.scheduler.num_grants == 0

    simulate(test, seed=seed)


@pytest.mark.parametrize("seed", range(20))
def test_withdrawal_that_crosses_its_grant(seed: int) -> None:
    """The grant is on its way while the caller leaves: it is closed, as one that no worker saw or one that ended."""

    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.holds = True
        stream = cluster.open(text_request())
        await until(lambda: bool(cluster.scheduler.queued))
        cluster.scheduler.grant(next(iter(cluster.scheduler.queued)))
        await asyncio.sleep(seed * 0.0003)
        stream.cancel()
        await cluster.at_rest()
        await until(lambda: bool(cluster.scheduler.closed))
        (closed,) = cluster.scheduler.closed
        assert not closed.worker_unavailable, "who left says nothing of the worker"

    simulate(test, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_caller_that_leaves_in_mid_stream_frees_the_worker(seed: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.open(text_request(max_tokens=200))
        for _ in range(3):
            await stream.read()
        stream.cancel()
        await cluster.at_rest()
        assert sum(w.cancelled for w in cluster.workers) == 1
        assert cluster.app.calls.counters.cancelled == 1

    simulate(test, seed=seed, script=say("x" * 1000, pause_s=0.01))


def test_workers_that_are_never_reached_end_the_request() -> None:
    async def test(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            assert worker.server is not None
            await worker.server.stop(0.0)
        answer = await cluster.ask(text_request())
        assert answer.finished.outcome == common_pb2.OUTCOME_WORKER_LOST
        assert answer.error is not None
        assert answer.error.code is Code.UNAVAILABLE
        assert "worker-" in answer.error.message
        assert len(cluster.scheduler.enqueued) == 5

    simulate(test)


def test_deadline_in_the_queue_withdraws() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.holds = True
        answer = await cluster.ask(text_request(), timeout=0.5)
        assert answer.finished.outcome == common_pb2.OUTCOME_DEADLINE_EXCEEDED
        assert answer.error is not None
        assert answer.error.code is Code.DEADLINE_EXCEEDED
        assert 0.3 < cluster.scheduler.enqueued[0].timeout_s < 0.5
        await cluster.at_rest()
        await until(lambda: bool(cluster.scheduler.withdrawn))

    simulate(test)


@pytest.mark.parametrize("per_frame", [1, 2, 5, 100])
def test_stop_string_across_frames(per_frame: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(max_tokens=100, stop=["never", "o w"]))
        assert answer.error is None
        assert answer.text == "hell"
        end = answer.finished
        assert end.choices[0].finish_reason == common_pb2.FINISH_REASON_STOP
        assert end.choices[0].stop_string == "o w"
        assert end.usage.completion_tokens == 7
        assert answer.ids_of() == ids_of("hello w")

    simulate(test, script=say("hello world, and so on for ever" * 3, per_frame=per_frame, pause_s=0.01))


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(stop=["world!"]))
        assert answer.text == "hello world"
        assert answer.finished.choices[0].stop_token_id == 2

    simulate(test)


def test_half_characters_are_never_sent() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(max_tokens=100))
        assert answer.text == "naïve — 日本語 🎉"
        assert all("\ufffd" not in f.delta.text for f in answer.frames)
        cut = await cluster.ask(text_request(max_tokens=3))
        assert cut.text == "na\ufffd"
        assert cut.finished.choices[0].finish_reason == common_pb2.FINISH_REASON_LENGTH

    simulate(test, script=say("naïve — 日本語 🎉", per_frame=1))


def test_choices_stop_each_for_itself() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        assert request.n == 3
        yield STARTED
        frame = 1
        texts = ["ab.cd" * 3, "abcdefgh", "x" * 8]
        for position in range(8):
            await asyncio.sleep(0.05)
            for choice, text in enumerate(texts):
                is_last = choice > 0 and position == 7
                yield tokens(
                    frame,
                    position,
                    ids_of(text[position]),
                    choice=choice,
                    finish=common_pb2.FINISH_REASON_LENGTH if is_last else common_pb2.FINISH_REASON_UNSPECIFIED,
                )
                frame += 1
        yield finished(frame)

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(n=3, stop=["."], max_tokens=8))
        assert [answer.text_of(c) for c in range(3)] == ["ab", "abcdefgh", "xxxxxxxx"]
        end = answer.finished
        assert [c.choice for c in end.choices] == [0, 1, 2]
        assert [c.stop_string for c in end.choices] == [".", "", ""]
        assert end.usage.completion_tokens == 3 + 8 + 8
        assert cluster.workers[0].stopped_choices == [0]
        assert cluster.scheduler.enqueued[0].sequences == 3
        assert cluster.scheduler.enqueued[0].max_new_tokens == 24

    simulate(test, script=script)


@pytest.mark.parametrize("n", [1, 2])
def test_the_workers_figures_come_with_a_request_that_its_stop_strings_end(n: int) -> None:
    """The worker ends a request once it was told to stop all of its choices."""
    workers: list[FakeWorker] = []

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        frame = 1
        for position in range(100):
            await asyncio.sleep(0.01)
            running = [choice for choice in range(n) if choice not in workers[0].stopped_choices]
            for choice in running:
                yield tokens(frame, position, ids_of("abcdef"[position % 6]), choice=choice)
                frame += 1
            if not running:
                break
        yield finished(frame)

    async def test(cluster: RouterCluster) -> None:
        workers.append(cluster.workers[0])
        answer = await cluster.ask(text_request(n=n, stop=["ef"], max_tokens=100))
        assert answer.error is None
        assert [answer.text_of(c) for c in range(n)] == ["abcd"] * n
        timings = answer.finished.timings
        assert (timings.prefill_ms, timings.decode_ms) == (3.0, 5.0)
        assert sorted(cluster.workers[0].stopped_choices) == list(range(n))
        await cluster.at_rest()
        assert cluster.workers[0].cancelled == 0

    simulate(test, script=script)


def test_a_worker_that_does_not_stop_is_not_waited_for_long() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        for position in range(100):
            await asyncio.sleep(0.05)
            yield tokens(1 + 2 * position, position, ids_of("abcdef"[position % 6]), choice=0)
            yield tokens(2 + 2 * position, position, ids_of("abcdef"[position % 6]), choice=1)

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(n=2, stop=["ef"], max_tokens=100))
        assert [answer.text_of(c) for c in range(2)] == ["abcd", "abcd"]
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert answer.finished.usage.completion_tokens == 12
        assert answer.finished.timings.total_ms < 2000
        await cluster.at_rest()
        assert cluster.workers[0].cancelled == 1


def test_a_worker_that_dies_after_the_last_stop_string_takes_nothing_away() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        yield tokens(1, 0, ids_of("abcdef"))
        raise RpcError(Code.INTERNAL, "broken")

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(stop=["ef"]))
        assert (answer.error, answer.text) == (None, "abcd")
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED

    simulate(test, script=script)


@pytest.mark.parametrize(
    ("outcome", "seen", "code"),
    [
        (common_pb2.OUTCOME_ADAPTER_FAILED, common_pb2.OUTCOME_ADAPTER_FAILED, Code.FAILED_PRECONDITION),
        (common_pb2.OUTCOME_ADAPTER_UNAVAILABLE, common_pb2.OUTCOME_ADAPTER_UNAVAILABLE, Code.UNAVAILABLE),
        (common_pb2.OUTCOME_SLOW_READER, common_pb2.OUTCOME_SLOW_READER, Code.RESOURCE_EXHAUSTED),
        (common_pb2.OUTCOME_INTERNAL, common_pb2.OUTCOME_INTERNAL, Code.INTERNAL),
        (common_pb2.OUTCOME_COMPLETED, common_pb2.OUTCOME_INTERNAL, Code.INTERNAL),
    ],
)
def test_outcomes_of_the_worker(outcome: common_pb2.Outcome, seen: common_pb2.Outcome, code: Code) -> None:
    """COMPLETED before its choice ended is a fault of the worker."""

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        yield tokens(1, 0, ids_of("ab"))
        yield finished(2, outcome, "because")

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request())
        assert answer.finished.outcome == seen
        assert answer.finished.usage.completion_tokens == 2
        assert answer.error is not None
        assert answer.error.code is code

    simulate(test, script=script)


def test_a_bug_ends_one_request_with_its_outcome(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __init__(self, prompt_token_ids: Sequence[int], skips_special: bool, kept: object) -> None:
            pass

        def push(self, token_ids: list[int]) -> str:
            raise ZeroDivisionError

        def finish(self) -> str:
            return ""

    async def test(cluster: RouterCluster) -> None:
        cluster.app.calls.texts.default.detokenizer = Broken  # type: ignore[method-assign]
        answer = await cluster.ask(text_request())
        assert answer.finished.outcome == common_pb2.OUTCOME_INTERNAL
        assert answer.error is not None
        assert answer.error.code is Code.INTERNAL
        assert answer.error.message == "internal error"

    simulate(test)
    assert "ZeroDivisionError" in caplog.text


def test_unread_stream_holds_up_only_its_worker() -> None:
    async def test(cluster: RouterCluster) -> None:
        unread = cluster.open(text_request(max_tokens=200))
        await unread.read()
        for _ in range(5):
            assert (await cluster.ask(text_request(max_tokens=5))).finished.usage.completion_tokens == 5
        unread.cancel()

    simulate(test, script=say("x" * 1000, pause_s=0.001))


def test_seeds() -> None:
    async def seed_of(
        cluster: RouterCluster, request: inference_pb2.GenerateRequest | None = None, **metadata: str
    ) -> int:
        answer = await cluster.ask(request or text_request(), **metadata)
        return answer.frames[0].started.seed

    async def test(cluster: RouterCluster) -> None:
        sampling = common_pb2.SamplingParams(seed=7, temperature=0.5)
        assert await seed_of(cluster, text_request(sampling=sampling), idempotency_key="own") == 7
        assert cluster.workers[0].executed[0].sampling.temperature == 0.5
        first = await seed_of(cluster, idempotency_key="k")
        assert await seed_of(cluster, idempotency_key="k") == first
        assert await seed_of(cluster, idempotency_key="k2") != first
        assert await seed_of(cluster, idempotency_key="k", x_tenant_id="other") != first
        assert await seed_of(cluster) != await seed_of(cluster)

    simulate(test)


def test_token_ids_only() -> None:
    async def test(cluster: RouterCluster) -> None:
        refused = await cluster.ask(text_request())
        assert refused.error is not None
        assert refused.error.code is Code.FAILED_PRECONDITION
        prompt = inference_pb2.TokenIds(ids=[3, 4, 5])
        stop = await cluster.ask(inference_pb2.GenerateRequest(token_ids=prompt, stop=["x"]))
        assert stop.error is not None
        assert stop.error.code is Code.FAILED_PRECONDITION
        answer = await cluster.ask(inference_pb2.GenerateRequest(token_ids=prompt, ignore_eos=True))
        assert answer.text == ""
        assert answer.ids_of() == ids_of("hello world")
        assert list(cluster.workers[0].executed[0].prompt_token_ids) == [3, 4, 5]
        assert list(cluster.workers[0].executed[0].stop_token_ids) == []

    simulate(test, text=TokenIdsOnlyText())


def test_refusals_name_the_field_and_leave_nothing() -> None:
    async def test(cluster: RouterCluster) -> None:
        sampling = common_pb2.SamplingParams(top_p=1.5)
        answer = await cluster.ask(
            text_request("", sampling=sampling, max_tokens=10_000), x_request_class="urgent", x_priority="high"
        )
        assert answer.frames == []
        assert answer.error is not None
        assert answer.error.code is Code.INVALID_ARGUMENT
        assert {v.field for v in answer.error.violations} == {
            "prompt.text",
            "sampling.top_p",
            "max_tokens",
            "x-request-class",
            "x-priority",
        }
        assert cluster.scheduler.enqueued == []

    simulate(test)


def test_foreign_and_absent_adapters_answer_alike() -> None:
    async def test(cluster: RouterCluster) -> None:
        foreign = await cluster.ask(text_request(), x_adapter_id="secret")
        await cluster.store.delete(keys.adapter("other", "secret"))
        await asyncio.sleep(1.0)
        absent = await cluster.ask(text_request(), x_adapter_id="secret")
        assert foreign.error is not None
        assert absent.error is not None
        assert foreign.error.code is Code.NOT_FOUND
        assert str(foreign.error) == str(absent.error)
        unknown = await cluster.ask(text_request(), x_tenant_id="nobody")
        assert unknown.error is not None
        assert unknown.error.code is Code.NOT_FOUND

    simulate(test)


def test_a_tenant_that_may_not_stream_gets_its_answer_whole() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "security: {can_stream: false}\n")
        await until(lambda: "can_stream" in cluster.app.directory.tenants["acme"].policy_yaml)
        loop = asyncio.get_running_loop()
        came_at: list[float] = []
        stream = cluster.open(text_request(max_tokens=12))
        answer = Answer()
        while (frame := await stream.read()) is not None:
            came_at.append(loop.time())
            answer.frames.append(frame)
        assert answer.text == "x" * 12
        assert answer.finished.usage.completion_tokens == 12
        assert came_at[-1] - came_at[0] < 0.5
        streamed: list[float] = []
        stream = cluster.open(text_request(max_tokens=12), x_tenant_id="other")
        while await stream.read() is not None:
            streamed.append(loop.time())
        assert streamed[-1] - streamed[0] > 2

    simulate(test, script=say("x" * 50, per_frame=1, pause_s=0.25))


def test_tenant_limits_hold() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "quotas: {max_prompt_tokens: 4, max_output_tokens: 6}\n")
        await asyncio.sleep(0.1)
        answer = await cluster.ask(text_request("12345", max_tokens=7))
        assert answer.error is not None
        assert [v.field for v in answer.error.violations] == ["prompt.text", "max_tokens"]
        assert (await cluster.ask(text_request("1234"))).finished.usage.completion_tokens == 6

    simulate(test)


def test_store_that_is_away_changes_nothing_for_requests() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.store_server.set_up(False)
        await asyncio.sleep(10.0)
        assert (await cluster.ask(text_request(), x_adapter_id="upper")).text == "hello world"
        cluster.store_server.set_up(True)
        await asyncio.sleep(3.0)
        assert keys.router("router-0") in cluster.store_server.keys

    simulate(test)


def test_spans_of_a_request() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"

    async def test(cluster: RouterCluster) -> None:
        await cluster.ask(text_request(), x_adapter_id="upper", traceparent=parent)
        await cluster.at_rest()
        spans = {s["name"]: s for s in cluster.telemetry.recorded()}
        names = ("request", "admission", "queue_wait", "stream", "stream_write")
        assert set(spans) == {f"manylora.{name}" for name in names}
        assert {s["trace_id"] for s in spans.values()} == {"a" * 32}
        root = spans["manylora.request"]
        assert root["parent_id"] == "b" * 16
        assert {s["parent_id"] for s in spans.values() if s is not root} == {root["span_id"]}
        for span in spans.values():
            assert span["attributes"]["manylora.tenant.id"] == "acme"
            assert span["attributes"]["manylora.class"] == "standard"
            assert span["attributes"]["manylora.adapter.id"] == "upper"
            assert span["status"]["code"] == "OK"
        sent = cluster.workers[0].metadata[0]
        assert sent["traceparent"].split("-")[2] == spans["manylora.stream"]["span_id"]
        queued = cluster.scheduler.enqueued[0].traceparent
        assert queued.split("-")[2] == spans["manylora.queue_wait"]["span_id"]
        told, written = root["attributes"], spans["manylora.stream_write"]["attributes"]
        assert told["gen_ai.operation.name"] == "text_completion"
        assert told["gen_ai.provider.name"] == "manylora"
        assert told["gen_ai.request.model"] == "upper"
        assert told["gen_ai.response.model"] == "upper@1"
        assert told["gen_ai.response.finish_reasons"] in (("stop",), ("length",))
        assert told["gen_ai.response.time_to_first_chunk"] == told["manylora.ttft_ms"] / 1e3
        assert told["gen_ai.output.type"] == "text"
        assert told["gen_ai.usage.output_tokens"] == told["manylora.output_tokens"] > 0
        assert written["manylora.writes"] >= 1
        assert written["manylora.slowest_write_ms"] <= written["manylora.write_ms"]

    simulate(test)


def test_what_its_caller_does_not_sample_has_no_span() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.ask(text_request(), traceparent=f"00-{'a' * 32}-{'b' * 16}-00")
        await cluster.at_rest()
        assert cluster.telemetry.recorded() == []
        assert cluster.workers[0].metadata[0]["traceparent"].endswith("-00")

    simulate(test)


@pytest.mark.parametrize("seed", range(10))
def test_storm(seed: int) -> None:
    """Callers that come and go, workers that break, a scheduler that blinks: one outcome each, nothing is left."""

    async def test(cluster: RouterCluster) -> None:
        rng = random.Random(seed)
        cluster.scheduler.lossy = True
        outcomes: list[int] = []

        async def one(index: int) -> None:
            await asyncio.sleep(rng.random() * 5)
            timeout = rng.choice([None, None, 0.3, 3.0])
            stop = rng.choice([[], ["x" * 20]])
            stream = cluster.open(text_request(max_tokens=rng.randint(1, 200), stop=stop), timeout=timeout)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.5)
                stream.cancel()
                return
            answer = await read_all(stream)
            if answer.frames and (answer.error is None or answer.frames[-1].HasField("finished")):
                outcomes.append(answer.finished.outcome)
                assert (answer.error is None) == (answer.finished.outcome == common_pb2.OUTCOME_COMPLETED)

        async def trouble() -> None:
            for _ in range(8):
                await asyncio.sleep(rng.random())
                which = rng.randrange(3)
                if which == 0:
                    cluster.scheduler.drop_lines()
                elif which == 1:
                    cluster.network.drop_connections("router", f"worker-{rng.randrange(2)}")
                else:
                    cluster.network.partition("router", "scheduler")
                    await asyncio.sleep(rng.random() * 4)
                    cluster.network.heal()

        await asyncio.gather(trouble(), *(one(i) for i in range(60)))
        assert common_pb2.OUTCOME_COMPLETED in outcomes

    simulate(test, seed=seed, script=say("x" * 1000, pause_s=0.01))
