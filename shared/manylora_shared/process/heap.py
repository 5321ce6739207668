from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROWTH_BYTES = 64 << 20
LOOK_EVERY_S = 5.0


def freeze_started() -> None:
    # What start-up made lives as long as the process. A full collection that walks it holds up all streams for tenths
    # of a second.
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """For a process that keeps hundreds of thousands of objects, none of them in a cycle."""
    # At the collector's own pace a long backlog cost half of the scheduler's time, and nothing was ever found. Here a
    # new object is looked at once, while it is in the processor's cache, and the heap once in ten million objects.
    gc.set_threshold(100, 10_000, 10)


def collect_less() -> None:
    """For a process whose calls keep hundreds of thousands of objects for as long as they are under way."""
    # At the collector's own pace it took a quarter of a router's time under a flood, in pauses of up to 0.8 s.
    gc.set_threshold(1_000, 100, 200)


@contextmanager
def collector_paused() -> Iterator[None]:
    # Many small objects that live for a moment would start one full collection after the other.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def resident_bytes() -> int:
    """Linux alone tells."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def give_back() -> None:
    """Runs until it is cancelled. Where memory has grown, what is free of it goes back to the system.

    glibc by itself keeps what a flood of large messages or connections took. Another libc: ends at once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    least = resident_bytes()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = resident_bytes()
        if now > least + GROWTH_BYTES:
            await asyncio.to_thread(trim, 0)
            now = least = resident_bytes()
        least = min(least, now)
