"""Wall-clock time, for people. Durations use the event loop's time."""

from __future__ import annotations

import time
from typing import Protocol


class WallClock(Protocol):
    def now_unix_s(self) -> float:
        """May jump in either direction."""


class SystemClock:
    def now_unix_s(self) -> float:
        return time.time()


class FakeClock:
    def __init__(self, start_unix_s: float = 1_700_000_000.0) -> None:
        self._now_unix_s = start_unix_s

    def now_unix_s(self) -> float:
        return self._now_unix_s

    def advance(self, seconds: float) -> None:
        self._now_unix_s += seconds
