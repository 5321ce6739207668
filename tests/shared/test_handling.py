"""What every transport does around a handler: bytes that are no message, errors that are nobody's business."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from manylora.v1 import admin_pb2, inference_pb2
from manylora_shared.errors import (
    Code,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ManyloraError,
    NotFound,
    RpcError,
)
from manylora_shared.transport import handling
from manylora_shared.transport.handling import Admission, close_iterator, error_of, parse_request, parse_response

BAD = b"\xff\xff\xff"


def test_bytes_that_are_no_message_are_the_senders_fault() -> None:
    with pytest.raises(InvalidRequest, match="TenantInfo"):
        parse_request(admin_pb2.TenantInfo, BAD)
    with pytest.raises(RpcError) as error:
        parse_response(admin_pb2.TenantInfo, BAD)
    assert error.value.code is Code.INTERNAL
    message = admin_pb2.TenantInfo(tenant_id="t")
    assert parse_request(admin_pb2.TenantInfo, message.SerializeToString()) == message


def test_our_errors_pass_and_others_stay_here(caplog: pytest.LogCaptureFixture) -> None:
    ours = NotFound("x")
    assert error_of("/path", ours) is ours
    assert caplog.text == ""
    other = error_of("/path", KeyError("secret"))
    assert isinstance(other, InternalError)
    assert "secret" not in other.message
    assert "/path" in caplog.text
    assert "secret" in caplog.text


async def test_a_cancellation_of_the_task_goes_on_and_one_from_within_is_a_bug() -> None:
    found: list[object] = []

    async def handler() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as raised:
            try:
                error_of("/path", raised)
            except asyncio.CancelledError:
                found.append("cancelled")
                raise

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert found == ["cancelled"]
    assert isinstance(error_of("/path", asyncio.CancelledError()), InternalError)


async def test_an_iterator_that_is_left_early_is_closed() -> None:
    closed: list[bool] = []

    async def answers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    iterator = answers()
    assert await anext(iterator) == 1
    await close_iterator(iterator)
    assert closed == [True]
    await close_iterator(iter([1]))


class Closed:
    """A gate that lets in whom it is told to, and what it saw."""

    max_message_bytes = 100
    owner = "acme"

    def __init__(self, refusal: ManyloraError | None = None) -> None:
        self.refusal = refusal
        self.parsed: list[int] = []
        self.inside = 0

    def enter(self, call: object) -> Closed:
        if self.refusal is not None:
            raise self.refusal
        self.inside += 1
        return self

    async def before_parsing(self, size_bytes: int) -> None:
        self.parsed.append(size_bytes)

    def release(self) -> None:
        self.inside -= 1


def admission(gate: Closed | None, *messages: bytes) -> Admission:
    left = list(messages)

    async def read() -> bytes | None:
        return left.pop(0) if left else None

    return Admission(gate, None, admin_pb2.TenantInfo, read)  # type: ignore[arg-type]


async def test_who_is_refused_at_the_gate_is_not_read() -> None:
    async def read() -> bytes:
        raise AssertionError("read")

    with pytest.raises(NotFound):
        Admission(Closed(NotFound("x")), None, admin_pb2.TenantInfo, read)  # type: ignore[arg-type]


async def test_who_is_let_in_is_read_and_leaves_once() -> None:
    gate, message = Closed(), admin_pb2.TenantInfo(tenant_id="t")
    data = message.SerializeToString()
    let_in = admission(gate, data)
    assert await let_in.single() == message
    assert (gate.inside, gate.parsed) == (1, [len(data)])
    let_in.end()
    let_in.end()
    assert gate.inside == 0
    assert [m async for m in admission(gate, data, data)] == [message, message]
    assert await admission(None, data).single() == message


async def test_a_call_that_ends_without_its_request_is_told_so() -> None:
    with pytest.raises(InvalidRequest, match="request: the call ended without one"):
        await admission(Closed()).single()


async def test_a_request_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "REQUEST_TIMEOUT_S", 0.01)

    async def read() -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(DeadlineExceeded, match="not there after"):
        await Admission(Closed(), None, admin_pb2.TenantInfo, read).single()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (inference_pb2.GenerateRequest(text="x" * 200), "prompt.text: has 200 bytes; a request has at most 100 in all"),
        (inference_pb2.GenerateRequest(text="x", stop=["y" * 9] * 20), "stop: has 180 bytes"),
        (inference_pb2.GenerateRequest(stop_token_ids=[1] * 150), "stop_token_ids: has 150 bytes"),
    ],
)
async def test_of_too_large_a_request_the_largest_field_is_named_unparsed(
    message: Message, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handling, "parse_request", None)
    data = message.SerializeToString()
    gate = Closed()
    with pytest.raises(InvalidRequest, match=told):
        await Admission(gate, None, type(message), _reads(data)).single()  # type: ignore[arg-type]
    assert gate.parsed == []


@given(st.binary(min_size=101, max_size=400))
def test_any_bytes_over_the_limit_are_refused_and_no_more(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        asyncio.run(Admission(Closed(), None, inference_pb2.GenerateRequest, _reads(data)).single())  # type: ignore[arg-type]


def _reads(data: bytes) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return data

    return read
