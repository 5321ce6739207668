"""Threads with a stack for native code that recurses as deep as a caller's text says: it would overflow another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

STACK_BYTES = 256 << 20  # of address space: what is not reached takes no memory

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOCK = threading.Lock()  # the size is the process's, of whichever thread starts next


class DeepThreads(ThreadPoolExecutor):
    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        with _LOCK:
            before = threading.stack_size(STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(before)
