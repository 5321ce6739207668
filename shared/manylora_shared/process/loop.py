"""A service's event loop: uvloop's, with an exact clock, before which no timer ends (docs/decisions/0035)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

import uvloop

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class ServiceLoop(uvloop.Loop):
    def time(self) -> float:
        return time.monotonic()

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(time.monotonic() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """What is due already has no `when`."""
        delay_s = when - time.monotonic()
        if delay_s > 0 and math.isfinite(delay_s):
            # libuv counts this clock's whole milliseconds: from the one that it is in to the first not before `when`.
            delay_s = (math.ceil(when * 1e3) - math.floor((when - delay_s) * 1e3)) / 1e3
        return super().call_later(delay_s, callback, *args, context=context)


def run(main: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(main)
