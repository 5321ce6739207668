"""The event loop of a service's process: uvloop's, with an exact clock (docs/decisions/0035).

uvloop's own time is the millisecond in which the loop's pass began, so what is measured by it is off by a pass, and its
timers may end up to a millisecond and a half early. Services measure times to the first token by the loop's time, and
do what is due when it is: here time is the system's monotonic clock, read anew, and no timer ends before its time.
"""

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
    """See the module. A timer ends up to two milliseconds late."""

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
        """Of what is returned only `cancel` and `cancelled` may be used: what is due already has no `when`."""
        delay_s = when - time.monotonic()
        if delay_s > 0 and math.isfinite(delay_s):
            # libuv counts this clock's whole milliseconds: from the one that it is in to the first not before `when`.
            delay_s = (math.ceil(when * 1e3) - math.floor((when - delay_s) * 1e3)) / 1e3
        return super().call_later(delay_s, callback, *args, context=context)


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(main)
