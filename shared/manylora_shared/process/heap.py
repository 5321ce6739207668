from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
