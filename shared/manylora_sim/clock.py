"""Wall-clock time that stands still until it is told, for tests."""

from __future__ import annotations


class FakeClock:
    def __init__(self, unix_s: float = 1_700_000_000.0) -> None:
        self._unix_s = unix_s

    def now_unix_s(self) -> float:
        return self._unix_s

    def advance(self, seconds: float) -> None:
        self._unix_s += seconds
