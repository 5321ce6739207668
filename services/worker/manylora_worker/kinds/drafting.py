"""Whether a draft model's guesses pay for one sequence, and how many a step has. Pure.

A guess costs the draft model's share of a token, and a row more in the step. Where a flow's guesses have not paid, its
next sequences begin with a pause; after each pause a few guesses are tried.
"""

from __future__ import annotations

MOST_GUESSES = 8  # of one step
_FIRST_GUESSES = 2
_ROW = 0.15  # of a step's time without guesses, that a row more takes
_FIRST_GAIN = 0.5
_TRIAL_GAIN = 0.25
_WEIGHT = 0.4  # of one step
_FIRST_PAUSE = 32  # tokens
_LONGEST_PAUSE = 1024
_GOOD_STEPS = 16  # in a row, after which a pause is short again


class Drafting:
    """pays: whether the flow's guesses did of late."""

    __slots__ = ("_gain", "_goes_on_at", "_good", "_length", "_pause", "_row_cost", "pays")

    def __init__(self, share: float, num_tokens: int, *, pays: bool = True) -> None:
        self._row_cost = share + _ROW
        self._length = _FIRST_GUESSES
        self._pause = _FIRST_PAUSE
        self._good = 0
        self.pays = pays
        self._gain = _FIRST_GAIN if pays else _TRIAL_GAIN  # of a step, in tokens of one without guesses
        self._goes_on_at = 0 if pays else num_tokens + _FIRST_PAUSE

    def length(self, num_tokens: int) -> int:
        """Of the guesses behind so many tokens; 0: none."""
        return self._length if num_tokens >= self._goes_on_at else 0

    def judged(self, num_tokens: int, num_guesses: int, num_right: int) -> None:
        self._gain += _WEIGHT * (num_right - num_guesses * self._row_cost - self._gain)
        self.pays = self._gain >= 0
        longest = min(MOST_GUESSES, 2 * num_guesses)
        self._length = max(self._length, longest) if num_right == num_guesses else num_right + 1
        self._good += 1
        if self._good >= _GOOD_STEPS:
            self._pause = _FIRST_PAUSE
        if self.pays:
            return
        self._goes_on_at = num_tokens + self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        self._good, self._length, self._gain = 0, _FIRST_GUESSES, _TRIAL_GAIN
