"""For tests that measure what work costs: a collection of the heap of thousands of tests is not of that work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """What is there now is not looked at, as of services, which freeze what they start with."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
