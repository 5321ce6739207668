"""A request over several routers that die, stop or are full: its caller gets one whole answer, or one clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from google.protobuf.message import Message
from manylora.client import Client, Delta, Finished, HedgePolicy, RequestFailed, RetryPolicy, Started, SyncClient
from manylora.v1 import common_pb2, inference_pb2
from manylora_shared.errors import Code, RpcError
from manylora_shared.transport.base import Channel, Method, Stream

QUICK = RetryPolicy(base_delay_s=0.001, resume_s=0.2)
Script = Sequence[inference_pb2.GenerateResponse | RpcError | float]


def frame(number: int, text: str = "", *, started: str = "", ended: bool = False) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(frame=number)
    if started:
        message.started.request_id, message.started.resume_token, message.started.seed = (
            started,
            f"token of {started}",
            7,
        )
    if text:
        message.delta.text = text
        message.delta.token_ids.extend(map(ord, text))
    if ended:
        message.finished.outcome = common_pb2.OUTCOME_COMPLETED
    return message


def failure(label: str = "unavailable", code: Code = Code.UNAVAILABLE, after_s: float | None = None) -> RpcError:
    error = RpcError(code, label, retry_after_s=after_s)
    error.label = label
    return error


class Routers:
    """What each stream says, in the order in which they are opened."""

    def __init__(self, *scripts: Script) -> None:
        self.asked: list[tuple[str, inference_pb2.GenerateRequest, Mapping[str, str]]] = []
        self.cancelled: list[int] = []
        self._scripts = list(scripts)

    async def serve(self, address: str, services: Any) -> Any:
        raise AssertionError("a client serves nothing")

    def connect(self, address: str) -> Channel:
        return _Router(self, address)

    def next(self) -> Script:
        return self._scripts.pop(0)


class _Router:
    def __init__(self, routers: Routers, address: str) -> None:
        self._routers = routers
        self._address = address

    async def call(self, method: Method, request: Message, **more: Any) -> Any:
        raise AssertionError(f"{method.path} is not asked here")

    def stream(self, method: Method, request: Message | None = None, **more: Any) -> Stream:
        assert isinstance(request, inference_pb2.GenerateRequest)
        self._routers.asked.append((self._address, request, more["metadata"]))
        return _Stream(self._routers, len(self._routers.asked) - 1)

    async def close(self) -> None:
        pass


class _Stream:
    has_message = False

    def __init__(self, routers: Routers, number: int) -> None:
        self._routers = routers
        self._number = number
        self._script = list(routers.next())

    async def read(self) -> Any:
        while self._script:
            step = self._script.pop(0)
            if isinstance(step, RpcError):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                return step
        return None

    async def write(self, message: Message) -> None:
        raise AssertionError("one request is sent")

    async def close_send(self) -> None: ...

    def cancel(self) -> None:
        self._routers.cancelled.append(self._number)


BEGIN: Script = [frame(0, started="a"), frame(1, "he")]


async def test_an_answer_goes_on_at_the_next_router() -> None:
    routers = Routers(
        [*BEGIN, failure()],
        [failure("unreachable")],
        [frame(2, "l", started="b"), failure("draining", after_s=0.1)],
        [frame(3, "lo", started="c", ended=True)],
    )
    async with Client("one:1,two:2", key="", retry=QUICK, transport=routers) as client:
        stream = client.generate("hi", max_tokens=9)
        events = [event async for event in stream]
    assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Finished]
    result = stream.result()
    assert (result.text, result.seed, result.request_id) == ("hello", 7, "c")
    assert [address for address, _, _ in routers.asked] == ["one:1", "two:2", "one:1", "two:2"]
    first, *others = [request for _, request, _ in routers.asked]
    assert first.resumable
    assert not first.HasField("resume")
    assert [(r.resume.token, r.resume.next_frame) for r in others] == [
        ("token of a", 2),
        ("token of a", 2),
        ("token of b", 3),
    ]
    assert list(others[-1].resume.emitted[0].token_ids) == [ord(c) for c in "hel"]


@pytest.mark.parametrize(
    "error",
    [
        failure("worker_lost"),
        failure("quota_exhausted", Code.RESOURCE_EXHAUSTED, 0.01),
        failure("internal", Code.INTERNAL),
    ],
)
async def test_what_is_the_requests_own_fault_is_told(error: RpcError) -> None:
    routers = Routers([*BEGIN, error])
    async with Client("one:1,two:2", key="", retry=QUICK, transport=routers) as client:
        with pytest.raises(RequestFailed) as failed:
            await client.complete("hi")
    assert failed.value.reason == error.label.upper()
    assert failed.value.result is not None
    assert failed.value.result.text == "he"


async def test_one_that_is_asked_to_wait_waits() -> None:
    refused = failure("quota_exceeded", Code.RESOURCE_EXHAUSTED, 0.01)
    routers = Routers([*BEGIN, failure()], [refused], [frame(2, "!", started="b", ended=True)])
    async with Client("one:1,two:2", key="", retry=QUICK, transport=routers) as client:
        assert (await client.complete("hi")).text == "he!"


@pytest.mark.parametrize("retry", [None, RetryPolicy(resume_s=0.0), QUICK])
async def test_it_is_tried_for_so_long_or_not_at_all(retry: RetryPolicy | None) -> None:
    routers = Routers([*BEGIN, failure()], *([failure("unreachable")] for _ in range(2000)))
    async with Client("one:1,two:2", key="", retry=retry, transport=routers) as client:
        with pytest.raises(RequestFailed) as failed:
            await client.complete("hi")
    assert failed.value.code == "UNAVAILABLE"
    assert (len(routers.asked) > 3) == (retry is QUICK)
    assert routers.asked[0][1].resumable == (retry is QUICK)


async def test_a_router_that_takes_nothing_costs_no_attempt() -> None:
    routers = Routers([failure("draining")], [failure("unreachable")], [frame(0, "ok", started="a", ended=True)])
    once = RetryPolicy(max_attempts=1)
    async with Client("one:1,two:2,three:3", key="", retry=once, transport=routers) as client:
        assert (await client.complete("hi")).text == "ok"


async def test_the_first_of_two_answers_counts() -> None:
    routers = Routers([1.0, frame(0, "slow")], [frame(0, "fast", started="b", ended=True)])
    async with Client("one:1,two:2", key="", hedge=HedgePolicy(after_s=0.01), transport=routers) as client:
        assert (await client.complete("hi")).text == "fast"
        assert client.hedging is not None
        assert (client.hedging.sent, client.hedging.won) == (1, 1)
    assert [address for address, _, _ in routers.asked] == ["one:1", "two:2"]
    assert all(metadata["x-hedge"] for _, _, metadata in routers.asked)
    assert 0 in routers.cancelled


async def test_a_call_with_a_key_is_never_sent_twice_at_once() -> None:
    routers = Routers([0.05, frame(0, "slow", started="a", ended=True)])
    async with Client("one:1,two:2", key="", hedge=HedgePolicy(after_s=0.01), transport=routers) as client:
        assert (await client.complete("hi", idempotency_key="k")).text == "slow"
    assert "x-hedge" not in routers.asked[0][2]


async def test_the_router_that_has_the_key_is_found() -> None:
    elsewhere = failure("answered_elsewhere", Code.ABORTED, 0.01)
    routers = Routers([elsewhere], [elsewhere], [elsewhere], [elsewhere], [frame(0, "ok", started="a", ended=True)])
    async with Client("one:1,two:2,three:3", key="", retry=QUICK, transport=routers) as client:
        assert (await client.complete("hi", idempotency_key="k")).text == "ok"
    assert [address for address, _, _ in routers.asked] == ["one:1", "two:2", "three:3", "one:1", "two:2"]
    routers = Routers(*([elsewhere] for _ in range(99)))
    async with Client("one:1,two:2", key="", retry=QUICK, transport=routers) as client:
        with pytest.raises(RequestFailed, match="ABORTED"):
            await client.complete("hi", idempotency_key="k")


def test_the_blocking_client_goes_on_too() -> None:
    routers = Routers([*BEGIN, failure()], [frame(0, started="b"), frame(1, "llo", ended=True)])
    with SyncClient("one:1,two:2", key="", retry=QUICK, transport=routers) as client:
        events = list(client.generate("hi", max_tokens=9))
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "hello"
