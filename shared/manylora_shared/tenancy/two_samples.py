"""Evidence that one of two streams of outcomes has the larger mean, by betting: it may be looked at at any time.

An e-process of products of the e-variables of Turner, Ly and Grünwald, "Generic E-variables for exact sequential
k-sample tests that allow for optional stopping" (2024), mixed over several alternatives. While the first mean is larger
by no more than a margin it ever reaches 1 / alpha with a probability of at most alpha (Ville's inequality).
"""

# A block has m outcomes of the first stream with mean a and n of the second with mean b, all in [0, 1]. Against the
# null a <= b + margin stands an alternative (p, q), chosen before the block; (s, t), s = t + margin, is the point of
# the null that is nearest to it in m KL(p, s) + n KL(q, t). An outcome x of the first multiplies by 1 + (x - s) u with
# u = (p - s) / (s (1 - s)): by p / s for 1 and (1 - p) / (1 - s) for 0; one of the second by 1 + (x - t) v likewise.
# The expectation's logarithm is at most m log(1 + (a - s) u) + n log(1 + (b - t) v), which is concave in (a, b), with
# the gradient (m u, n v) at (s, t); that m u = -n v is what makes that point the nearest. So in the null it is nowhere
# more than it is there: 0.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

Outcomes = Mapping[float, int]  # how many of each value

ALTERNATIVES = (0.02, 0.06, 0.15, 0.35, 0.6, 0.9)  # of the way from the null's edge to 1
_PRIOR = 0.1, 1.0  # what the second stream's mean is taken for before it was seen, and how many outcomes that is worth
_MEMORY = 4_000  # outcomes of the second stream; older ones count half, again and again
_EDGE = 1e-3
_HALVINGS = 30
_MAX_LOG = 500.0


@dataclass(frozen=True)
class Evidence:
    """logs: of the wealth against each alternative. The totals are all that was taken."""

    logs: tuple[float, ...] = (0.0,) * len(ALTERNATIVES)
    recent_sum: float = 0.0
    recent_count: float = 0.0
    first_sum: float = 0.0
    first_count: int = 0
    second_sum: float = 0.0
    second_count: int = 0

    @property
    def value(self) -> float:
        """The e-process."""
        return sum(math.exp(min(log, _MAX_LOG)) for log in self.logs) / len(self.logs)

    @property
    def means(self) -> tuple[float, float]:
        return self.first_sum / max(1, self.first_count), self.second_sum / max(1, self.second_count)

    def take(self, first: Outcomes, second: Outcomes, margin: float) -> Self:
        """A block: what came in one stretch of time of both streams. One that lacks either is no evidence."""
        (first_sum, m), (second_sum, n) = _sum(first), _sum(second)
        logs = self.logs
        if m and n:
            base = (_PRIOR[0] * _PRIOR[1] + self.recent_sum) / (_PRIOR[1] + self.recent_count)
            logs = tuple(
                max(-_MAX_LOG, min(_MAX_LOG, log + _gain(first, second, (m, n), base, part, margin)))
                for log, part in zip(self.logs, ALTERNATIVES, strict=True)
            )
        fade = 0.5 if self.recent_count + n > _MEMORY else 1.0
        return replace(
            self,
            logs=logs,
            recent_sum=fade * (self.recent_sum + second_sum),
            recent_count=fade * (self.recent_count + n),
            first_sum=self.first_sum + first_sum,
            first_count=self.first_count + m,
            second_sum=self.second_sum + second_sum,
            second_count=self.second_count + n,
        )


def _sum(outcomes: Outcomes) -> tuple[float, int]:
    return sum(value * count for value, count in outcomes.items()), sum(outcomes.values())


def _gain(first: Outcomes, second: Outcomes, sizes: tuple[int, int], base: float, part: float, margin: float) -> float:
    """`part`: of the way from the null's edge to 1, the alternative."""
    q = min(max(base, _EDGE), 1.0 - margin - 2 * _EDGE)
    p = min(q + margin + part * (1.0 - q - margin), 1.0 - _EDGE)
    if p <= q + margin:
        return 0.0
    s, t = _nearest(p, q, sizes, margin)
    u, v = (p - s) / (s * (1.0 - s)), (q - t) / (t * (1.0 - t))
    return sum(count * math.log1p((x - s) * u) for x, count in first.items()) + sum(
        count * math.log1p((x - t) * v) for x, count in second.items()
    )


def _nearest(p: float, q: float, sizes: tuple[int, int], margin: float) -> tuple[float, float]:
    """Of the null's points (t + margin, t); t is between q and p - margin."""
    m, n = sizes
    low, high = q, p - margin
    for _ in range(_HALVINGS):
        t = (low + high) / 2
        s = t + margin
        if m * (s - p) / (s * (1.0 - s)) + n * (t - q) / (t * (1.0 - t)) < 0.0:
            low = t
        else:
            high = t
    return (low + high) / 2 + margin, (low + high) / 2
