"""Wall-clock time, for timestamps that people read. Durations and deadlines use the event loop's time, never this.

Owns no state but FakeClock's reading. The simulation and the tests pass a FakeClock; `__main__` passes SystemClock.
"""

from __future__ import annotations

import time
from typing import Protocol


class WallClock(Protocol):
    def now_unix_s(self) -> float:
        """Seconds since the Unix epoch. May jump in either direction."""


class SystemClock:
    def now_unix_s(self) -> float:
        return time.time()


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self, start_unix_s: float = 1_700_000_000.0) -> None:
        self._now_unix_s = start_unix_s

    def now_unix_s(self) -> float:
        return self._now_unix_s

    def advance(self, seconds: float) -> None:
        """Moves the clock; a negative value is a jump back, as a real wall clock may make."""
        self._now_unix_s += seconds
