"""What every transport does around a handler: bytes that are no message, errors that are nobody's business."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from manylora.v1 import admin_pb2
from manylora_shared.errors import Code, InternalError, InvalidRequest, NotFound, RpcError
from manylora_shared.transport.handling import close_iterator, error_of, parse_request, parse_response

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
