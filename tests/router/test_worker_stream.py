"""One Execute stream: a worker that is not reached, that is lost, and that loses output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import Code, RpcError
from router_fakes import (
    STARTED,
    Answer,
    RouterCluster,
    ids_of,
    read_all,
    say,
    simulate,
    text_request,
    tokens,
)


@pytest.mark.parametrize("how", ["gone", "draining", "full", "still running it"])
def test_worker_that_is_not_reached_goes_unnoticed(how: str) -> None:
    async def test(cluster: RouterCluster) -> None:
        worker = cluster.workers[0]
        if how == "gone":
            assert worker.server is not None
            await worker.server.stop(0.0)
        else:
            codes = {"draining": Code.FAILED_PRECONDITION, "full": Code.RESOURCE_EXHAUSTED}
            worker.refuse_with = RpcError(codes.get(how, Code.ALREADY_EXISTS), "not now")
        answer = await cluster.ask(text_request())
        assert answer.error is None
        assert answer.text == "hello world"
        assert answer.finished.worker_id == "worker-1"
        await cluster.at_rest()
        told = [(c.reached_worker, c.worker_unavailable) for c in cluster.scheduler.closed]
        assert told == [(False, True), (True, False)]
        assert len({e.request_id for e in cluster.scheduler.enqueued}) == 1

    simulate(test)


@pytest.mark.parametrize("silently", [False, True])
def test_worker_lost_in_mid_stream(silently: bool) -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = Answer()
        stream = cluster.open(text_request(max_tokens=200))
        for _ in range(4):
            answer.frames.append(await stream.read())
        loop = asyncio.get_running_loop()
        lost_at = loop.time()
        cluster.network.kill("worker-0", silently=silently)
        await read_all(stream, answer)
        assert loop.time() - lost_at < 3.1 + 0.5
        assert answer.error is None
        assert answer.text == "x" * 200
        assert answer.ids_of() == ids_of("x" * 200)
        end = answer.finished
        assert (end.usage.completion_tokens, end.usage.resumed, end.worker_id) == (200, 1, "worker-1")
        assert [f.frame for f in answer.frames] == list(range(len(answer.frames)))

    simulate(test, script=say("x" * 1000, pause_s=0.01))


def test_deadline_in_mid_stream_ends_with_its_frame() -> None:
    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request(max_tokens=200), timeout=0.5)
        assert answer.finished.outcome == common_pb2.OUTCOME_DEADLINE_EXCEEDED
        assert answer.finished.usage.completion_tokens == len(answer.ids_of()) > 0
        assert answer.error is not None
        assert answer.error.code is Code.DEADLINE_EXCEEDED
        await cluster.at_rest()
        assert sum(w.cancelled for w in cluster.workers) == 1

    simulate(test, script=say("x" * 1000, pause_s=0.02))


@pytest.mark.parametrize(("frame", "position"), [(3, 2), (2, 3), (2, 1)])
def test_gaps_in_the_workers_stream_are_no_silent_loss(frame: int, position: int) -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        yield tokens(1, 0, ids_of("ab"))
        yield tokens(frame, position, ids_of("cd"))

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request())
        assert answer.finished.outcome == common_pb2.OUTCOME_INTERNAL
        assert answer.error is not None
        assert "output was lost" in answer.error.message

    simulate(test, script=script)


def test_stream_that_just_ends_is_a_lost_worker() -> None:
    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED

    async def test(cluster: RouterCluster) -> None:
        answer = await cluster.ask(text_request())
        assert answer.finished.outcome == common_pb2.OUTCOME_WORKER_LOST

    simulate(test, script=script)
