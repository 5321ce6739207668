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
