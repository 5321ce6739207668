"""A service's event loop: uvloop's, with an exact clock, before which no timer ends (docs/decisions/0035)."""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import termios
import time
from array import array
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

import uvloop
from grpc._cython import cygrpc

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class ServiceLoop(uvloop.Loop):
    def add_reader(self, fd: Any, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts) -> None:
        if isinstance(fd, socket.socket) and _is_grpcs(callback):
            super().add_reader(fd, _told_once, fd, callback)
        else:
            super().add_reader(fd, callback, *args)

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


def _is_grpcs(callback: Any) -> bool:
    told = getattr(getattr(callback, "func", None), "__self__", None)
    return isinstance(told, cygrpc.PollerCompletionQueue)


# grpc.aio's thread writes a byte for each event, and waits where the socket holds no more (278 on Linux). Its handler
# reads one byte and takes all events that are there. So behind a burst the thread, which reads the connections too,
# would go on by one event in a pass of the event loop. The handler needs one of the bytes.
def _told_once(told: socket.socket, handle: Callable[[], object]) -> None:
    held = array("i", [0])
    fcntl.ioctl(told, termios.FIONREAD, held)
    if held[0] > 1:
        told.recv(held[0] - 1)
    handle()


def run(main: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(main)
