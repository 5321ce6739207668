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


@contextmanager
def collector_paused() -> Iterator[None]:
    """For making many small objects that live for a moment: they would start one full collection after the other."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
