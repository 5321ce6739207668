"""What every transport does around a handler: bytes that are no message, errors that are nobody's business."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from google.protobuf.message import Message
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
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    other = error_of("/path", KeyError("secret"), {"traceparent": traceparent})
    assert caplog.records[-1].manylora_fields["trace_id"] == "a" * 32  # type: ignore[attr-defined]
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
        self.slow_now = 0
        self.slow_refusal: ManyloraError | None = None
        self.too_fast: ManyloraError | None = None

    async def before_entering(self, call: object) -> Callable[[], Closed]:
        return self.enter

    def enter(self) -> Closed:
        if self.refusal is not None:
            raise self.refusal
        self.inside += 1
        return self

    async def before_refusal(self, call: object, refusal: ManyloraError) -> None:
        pass

    def slow(self) -> Callable[[], None]:
        if self.slow_refusal is not None:
            raise self.slow_refusal
        self.slow_now += 1
        return self.caught_up

    def caught_up(self) -> None:
        self.slow_now -= 1

    async def before_parsing(self, size_bytes: int) -> None:
        self.parsed.append(size_bytes)
        if self.too_fast is not None:
            raise self.too_fast

    def release(self) -> None:
        self.inside -= 1


def admission(gate: Closed | None, *messages: bytes) -> Admission:
    left = list(messages)

    async def read() -> bytes | None:
        return left.pop(0) if left else None

    enter = None if gate is None else gate.enter
    return Admission(enter, Closed.max_message_bytes, None, admin_pb2.TenantInfo, read)  # type: ignore[arg-type]


async def test_who_is_refused_at_the_gate_is_not_read() -> None:
    async def read() -> bytes:
        raise AssertionError("read")

    with pytest.raises(NotFound):
        Admission(Closed(NotFound("x")).enter, 100, None, admin_pb2.TenantInfo, read)  # type: ignore[arg-type]


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
        await Admission(Closed().enter, 100, None, admin_pb2.TenantInfo, read).single()  # type: ignore[arg-type]


async def test_a_late_message_has_a_place_until_it_is_there_or_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handling, "SLOW_S", 0.01)
    message, gate, going_on = admin_pb2.TenantInfo(tenant_id="t"), Closed(), asyncio.Event()

    async def read() -> bytes:
        await going_on.wait()
        return message.SerializeToString()

    def asked() -> asyncio.Task[Message]:
        return asyncio.create_task(
            Admission(gate.enter, gate.max_message_bytes, None, admin_pb2.TenantInfo, read).single()
        )  # type: ignore[arg-type]

    given_up, waiting = asked(), asked()
    await asyncio.sleep(0.05)
    assert gate.slow_now == 2
    given_up.cancel()
    gate.slow_refusal = NotFound("too many")
    with pytest.raises(NotFound, match="too many"):
        await asked()
    going_on.set()
    assert await waiting == message
    assert gate.slow_now == 0


async def test_too_large_a_message_is_not_parsed_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "parse_request", None)
    data, gate = inference_pb2.GenerateRequest(text="x" * 200).SerializeToString(), Closed()
    with pytest.raises(InvalidRequest, match="text: has 200 bytes") as caught:
        await Admission(gate.enter, gate.max_message_bytes, None, inference_pb2.GenerateRequest, _reads(data)).single()  # type: ignore[arg-type]
    frames = traceback.walk_tb(caught.value.__traceback__)
    assert not any(data in frame.f_locals.values() for frame, _ in frames if frame.f_code.co_name == "_parsed")


async def test_what_comes_too_fast_is_refused_later_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "REFUSAL_DELAY_S", 0.05)
    data, gate = inference_pb2.GenerateRequest(text="x" * 20).SerializeToString(), Closed()
    gate.too_fast = NotFound("slower")
    began = time.perf_counter()
    with pytest.raises(NotFound, match="slower") as caught:
        await Admission(gate.enter, gate.max_message_bytes, None, inference_pb2.GenerateRequest, _reads(data)).single()  # type: ignore[arg-type]
    assert time.perf_counter() - began >= 0.04
    frames = traceback.walk_tb(caught.value.__traceback__)
    assert not any(data in frame.f_locals.values() for frame, _ in frames if frame.f_code.co_name == "_parsed")


async def test_a_large_messages_parts_are_counted_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Closed()
    gate.max_message_bytes = 1 << 20
    fine = inference_pb2.GenerateRequest(text="x" * 100_000)
    assert (
        await Admission(gate.enter, gate.max_message_bytes, None, type(fine), _reads(fine.SerializeToString())).single()
        == fine
    )  # type: ignore[arg-type]
    monkeypatch.setattr(handling, "parse_request", None)
    crowd = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * 20_000)
    )
    with pytest.raises(InvalidRequest, match="chat: has too many parts"):
        await Admission(
            gate.enter, gate.max_message_bytes, None, type(crowd), _reads(crowd.SerializeToString())
        ).single()  # type: ignore[arg-type]


def _reads(data: bytes) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return data

    return read
