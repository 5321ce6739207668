"""A second front, without gRPC: it builds the request, iterates the frames, and needs to know nothing else."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from manylora.v1 import common_pb2
from manylora_router.front.generation import generate
from manylora_router.guard.admission import ChatPrompt, RequestInput, TokenPrompt
from manylora_router.request.frames import Frame
from manylora_shared.errors import (
    Code,
    DeadlineExceeded,
    InvalidRequest,
    ManyloraError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    WorkerLost,
)
from router_fakes import RouterCluster, ids_of, plain_request, say, simulate, until
from test_permits import lost


class Door:
    """What such a front has seen of one request."""

    def __init__(self, cluster: RouterCluster, request: RequestInput) -> None:
        self.frames: list[Frame] = []
        self.error: ManyloraError | None = None
        self._app = cluster.app
        self._request = request

    async def ask(self, *, stop_after: int | None = None) -> Door:
        frames = generate(self._request, intake=self._app.intake, calls=self._app.calls)
        try:
            async with aclosing(frames):
                async for frame in frames:
                    self.frames.append(frame)
                    if len(self.frames) == stop_after:
                        break
        except ManyloraError as e:
            self.error = e
        return self

    @property
    def text(self) -> str:
        return "".join(frame.delta.text for frame in self.frames if frame.delta is not None)


def test_frames_tell_the_whole_answer_in_order() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = await plain_request(cluster, adapter="upper", request_class="interactive")
        door = await Door(cluster, request).ask()
        assert (door.text, door.error) == ("hello world", None)
        assert [frame.number for frame in door.frames] == list(range(len(door.frames)))
        started, finished = door.frames[0].started, door.frames[-1].finished
        assert started is not None
        assert (started.adapter_version, len(started.prompt_token_ids), started.degraded) == ("a" * 64, 2, None)
        assert finished is not None
        assert finished.outcome == common_pb2.OUTCOME_COMPLETED
        assert finished.choices[0].finish_reason == common_pb2.FINISH_REASON_STOP
        assert (finished.choices[0].stop_token_id, finished.choices[0].stop_string) == (2, None)
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 11)
        assert sum(frame.finished is not None for frame in door.frames) == 1
        assert cluster.app.calls.counters.completed == 1

    simulate(test)


def test_prompts_of_every_kind() -> None:
    async def test(cluster: RouterCluster) -> None:
        goes_on = ChatPrompt([("user", "hi"), ("assistant", "oh")], continue_final_message=True)
        prompts = [TokenPrompt(ids_of("hi")), ChatPrompt([("user", "hi")]), goes_on]
        doors = [await Door(cluster, await plain_request(cluster, prompt)).ask() for prompt in prompts]
        assert [door.text for door in doors] == ["hello world"] * 3
        asked = [list(request.prompt_token_ids) for worker in cluster.workers for request in worker.executed]
        assert sorted(asked) == sorted([ids_of("hi"), ids_of("user: hi\n"), ids_of("user: hi\nassistant: oh")])

    simulate(test)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"authorization": ""}, Unauthenticated),
        ({"authorization": "Bearer mlk-nobody"}, Unauthenticated),
        ({"tenant": "nobody"}, NotFound),
        ({"tenant": ""}, InvalidRequest),
        ({"adapter": "secret"}, NotFound),
        ({"request_class": "urgent"}, InvalidRequest),
        ({"max_tokens": 10_000}, InvalidRequest),
    ],
)
def test_a_refusal_has_no_frames_and_leaves_nothing(fields: dict[str, object], error: type[ManyloraError]) -> None:
    async def test(cluster: RouterCluster) -> None:
        door = await Door(cluster, await plain_request(cluster, **fields)).ask()
        assert type(door.error) is error
        assert 400 <= door.error.http.status < 500
        assert door.frames == []
        assert cluster.scheduler.enqueued == []
        assert cluster.app.calls.counters.rejected == 1

    simulate(test)


def test_a_tenants_key_speaks_for_nobody_else() -> None:
    async def test(cluster: RouterCluster) -> None:
        key = await cluster.put_key(tenant="other")
        request = await plain_request(cluster, authorization=f"Bearer {key}")
        assert isinstance((await Door(cluster, request).ask()).error, PermissionDenied)

    simulate(test)


def test_a_failure_comes_after_its_last_frame_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(cluster: RouterCluster) -> None:
        door = await Door(cluster, await plain_request(cluster)).ask()
        assert isinstance(door.error, WorkerLost)
        assert door.error.code is Code.UNAVAILABLE
        assert door.frames[-1].finished is not None
        assert door.frames[-1].finished.outcome == common_pb2.OUTCOME_WORKER_LOST
        assert cluster.app.calls.counters.failed == 1

    simulate(test, script=lost)
    assert [each.getMessage() for each in caplog.records].count("a request failed") == 1


def test_a_deadline_is_the_requests_own() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.holds = True
        door = await Door(cluster, await plain_request(cluster, time_remaining_s=0.5)).ask()
        assert isinstance(door.error, DeadlineExceeded)
        await until(lambda: bool(cluster.scheduler.withdrawn))

    simulate(test)


@pytest.mark.parametrize("seed", range(5))
def test_cancelled_in_the_middle_it_frees_the_worker(seed: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        door = Door(cluster, await plain_request(cluster, max_tokens=200))
        task = asyncio.create_task(door.ask())
        await until(lambda: len(door.frames) == 3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await cluster.at_rest()
        assert sum(worker.cancelled for worker in cluster.workers) == 1
        assert cluster.app.calls.counters.cancelled == 1

    simulate(test, seed=seed, script=say("x" * 1000, pause_s=0.01))


def test_cancelled_before_the_grant_it_withdraws() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.scheduler.holds = True
        task = asyncio.create_task(Door(cluster, await plain_request(cluster)).ask())
        await until(lambda: bool(cluster.scheduler.queued))
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: bool(cluster.scheduler.withdrawn))
        assert cluster.app.calls.counters.cancelled == 1

    simulate(test)


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_that_stops_ends_its_request(seed: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        door = await Door(cluster, await plain_request(cluster, max_tokens=200)).ask(stop_after=2)
        assert len(door.frames) == 2
        await cluster.at_rest()
        assert sum(worker.cancelled for worker in cluster.workers) == 1
        assert cluster.app.calls.counters.cancelled == 1

    simulate(test, seed=seed, script=say("x" * 1000, pause_s=0.01))


def test_who_may_not_stream_gets_all_frames_at_the_end() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "security: {can_stream: false}\n")
        await until(lambda: not cluster.app.directory.policy_of("acme").security.can_stream)  # type: ignore[arg-type, union-attr]
        running = Door(cluster, await plain_request(cluster))
        task = asyncio.create_task(running.ask())
        await until(lambda: any(worker.running for worker in cluster.workers))
        await asyncio.sleep(0.02)
        assert running.frames == []
        await task
        assert running.text == "hello world"

    simulate(test, script=say("hello world", pause_s=0.1))
