"""The garbage collector, for processes that must not pause. Owns nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_started() -> None:
    """To be called once a service is built, before it serves.

    What start-up made (modules, the model, tables) lives as long as the process. Taken out of the collector's sight, it
    is not walked again by every full collection, which would hold up all streams for tenths of a second.
    """
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """For a process that keeps hundreds of thousands of objects for seconds, none of them in a cycle.

    The collector's own pace looks at each new object three times, and at the whole heap whenever it has grown by a
    quarter. With a long backlog that was up to half of the scheduler's time, and nothing was ever found: reference
    counts free all of it. Cycles are made by few things (errors with their tracebacks, streams that ended), and can
    wait: here a new object is looked at once, and the whole heap once in some ten million objects.

    A look at few objects finds them, and what they refer to, still in the processor's cache: with a hundred at a time
    an object costs two thirds of what it costs with two thousand. The first number counts what came beyond what went:
    where a backlog stands still, some ten times as many new objects are looked at, for some tenths of a millisecond.
    """
    gc.set_threshold(100, 10_000, 10)


@contextmanager
def collector_paused() -> Iterator[None]:
    """For making many small objects that live for a moment: they would start one full collection after the other. And
    for what may not be interrupted by what a collection frees."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
