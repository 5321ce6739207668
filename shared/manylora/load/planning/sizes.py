"""How long prompts and answers are, and which adapter a request names."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from manylora.load.planning.fields import BadMix, Fields, shown

MAX_TOKENS = 1 << 24
MOST_CV = 100.0  # beyond it a drawn value is nearly always at one of its ends
_DIGITS = len(str(MAX_TOKENS))


@dataclass(frozen=True)
class Length:
    """Log-normal of this mean and coefficient of variation, cut at both ends; uniform where cv is None."""

    least: int
    most: int
    mean: float = 0.0
    cv: float | None = None

    def draw(self, rng: Random) -> int:
        if self.cv is None:
            return rng.randint(self.least, self.most)
        variance = math.log(1 + self.cv**2)
        value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return min(max(round(value), self.least), self.most)


def length_of(value: object, path: str) -> Length:
    """128, "64-512", or {mean, cv, min, max}. Raises BadMix."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _within(value, value, path)
    if isinstance(value, str):
        first, dash, last = (part.strip() for part in value.partition("-"))
        if all(part.isdecimal() and len(part) <= _DIGITS for part in ((first, last) if dash else (first,))):
            return _within(int(first), int(last if dash else first), path)
    if isinstance(value, dict):
        fields = Fields(value, path)
        mean, cv = (
            fields.number("mean", at_least=1, at_most=MAX_TOKENS),
            fields.number("cv", 1.0, at_least=0, at_most=MOST_CV),
        )
        range_ = _within(
            fields.count("min", 1, at_most=MAX_TOKENS), fields.count("max", MAX_TOKENS, at_most=MAX_TOKENS), path
        )
        fields.end()
        return Length(range_.least, range_.most, mean, cv)
    raise BadMix(f"{path}: must be a number, LEAST-MOST or a mapping with mean, not {shown(value)}")


def _within(least: int, most: int, path: str) -> Length:
    if not 1 <= least <= most <= MAX_TOKENS:
        raise BadMix(f"{path}: {shown(least)} to {shown(most)} is no range of token counts: 1 to {MAX_TOKENS}")
    return Length(least, most)


class Weighted:
    """Draws indices of `weights`."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._sums = list(itertools.accumulate(weights))

    def draw(self, rng: Random) -> int:
        return min(bisect.bisect_right(self._sums, rng.random() * self._sums[-1]), len(self._sums) - 1)


def zipf_weights(count: int, exponent: float) -> list[float]:
    """The k-th, from 1 on, weighs k to the power of -exponent: 0 makes all equal."""
    return [rank**-exponent for rank in range(1, count + 1)]
