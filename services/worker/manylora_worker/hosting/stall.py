"""Whether an engine gets nowhere: pure. Its turns are looked at every LOOK_S, and looks are counted in the place of
time: a process that was stopped, or a machine that slept, has looked once.
"""

from __future__ import annotations

from typing import NamedTuple

LOOK_S = 0.5
_TIMES_LONGEST = 4  # an engine on a slow machine is judged by the longest turn that it has ended
_FIRST_TURNS = 32  # in which memory is touched for the first time, and it is learnt how long steps take
_TIMES_FIRST = 6


class Progress(NamedTuple):
    turns: int  # begun so far
    is_at_rest: bool  # it waits for something to do, and there is nothing


class StallJudge:
    """stall_s: 0: an engine may take any time."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._turns = -1
        self._looks = 0
        self._longest_looks = 0

    def look(self, progress: Progress) -> float | None:
        """Every LOOK_S. The seconds for which the engine has stood still, once they are too many."""
        if progress.turns != self._turns or progress.is_at_rest:
            self._longest_looks = max(self._longest_looks, self._looks)
            self._turns, self._looks = progress.turns, 0
            return None
        self._looks += 1
        stood_s = self._looks * LOOK_S
        least_s = self._stall_s * (_TIMES_FIRST if progress.turns <= _FIRST_TURNS else 1)
        bound_s = max(least_s, _TIMES_LONGEST * self._longest_looks * LOOK_S)
        return stood_s if self._stall_s and stood_s >= bound_s else None
