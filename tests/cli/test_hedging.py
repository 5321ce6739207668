"""Hedged calls: late ones alone, within a share, the loser cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message
from manylora.client.streams.hedging import HedgePolicy, Hedging
from manylora_shared.errors import Code, RpcError


class Late:
    has_message = False

    def __init__(self, after_s: float, answer: Any) -> None:
        self.is_cancelled = False
        self._after_s = after_s
        self._answer = answer

    async def read(self) -> Any:
        await asyncio.sleep(self._after_s)
        if isinstance(self._answer, RpcError):
            raise self._answer
        return self._answer

    async def write(self, message: Message) -> None: ...

    async def close_send(self) -> None: ...

    def cancel(self) -> None:
        self.is_cancelled = True


LOST = RpcError(Code.UNAVAILABLE, "gone")


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (Late(0.0, "a"), Late(0.0, "b"), "a"),
        (Late(9.0, "a"), Late(0.0, "b"), "b"),
        (Late(0.05, "a"), Late(9.0, "b"), "a"),
        (Late(0.05, LOST), Late(0.2, "b"), "b"),
        (Late(0.2, "a"), Late(0.0, LOST), "a"),
    ],
)
async def test_the_first_that_answers(first: Late, second: Late, told: str) -> None:
    stream, message = await Hedging(HedgePolicy(after_s=0.02)).first(first, lambda: second)
    assert message == told
    assert stream is (first if told == "a" else second)
    assert not stream.is_cancelled  # type: ignore[attr-defined]


async def test_where_both_fail_the_firsts_error_is_told() -> None:
    other = RpcError(Code.INTERNAL, "no")
    with pytest.raises(RpcError) as failed:
        await Hedging(HedgePolicy(after_s=0.0)).first(Late(0.01, LOST), lambda: Late(0.02, other))
    assert failed.value is LOST


async def test_no_more_than_a_share_is_hedged() -> None:
    hedging = Hedging(HedgePolicy(after_s=0.0, share=0.1, burst=2.0))
    for _ in range(30):
        await hedging.first(Late(0.001, "a"), lambda: Late(9.0, "b"))
    assert hedging.sent == 2 + 30 // 10 - 1 or hedging.sent == 2 + 30 // 10
    assert hedging.won == 0


async def test_who_is_cancelled_cancels_both() -> None:
    first, second = Late(9.0, "a"), Late(9.0, "b")
    waiting = asyncio.create_task(Hedging(HedgePolicy(after_s=0.0)).first(first, lambda: second))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (first.is_cancelled, second.is_cancelled) == (True, True)
