"""What became of requests: one by one while they run, then counted. Bounded memory, however long a run is."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from manylora.load.planning.mix import Slo
from manylora.load.planning.schedule import Planned

_STEP = math.log(1.01)
_LEAST = 1e-6


class Histogram:
    """Seconds, each known to a hundredth of itself."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._by_step: Counter[int] = Counter()

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self._by_step[math.floor(math.log(max(value, _LEAST)) / _STEP)] += 1

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """The least value that so many percent are not above; NaN where there is none."""
        left = max(1, math.ceil(self.count * percent / 100))
        for step in sorted(self._by_step):
            left -= self._by_step[step]
            if left <= 0:
                return math.exp((step + 0.5) * _STEP)
        return math.nan


@dataclass
class Sample:
    """Times by one clock, in seconds. due_s: when it should have been sent; all latencies count from there."""

    planned: Planned
    due_s: float
    sent_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    ended_s: float = math.nan
    gaps_s: list[float] = field(default_factory=list)
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int | None = None  # None: the server did not tell
    error: str = ""  # of few kinds, by which they are counted
    detail: str = ""

    def token(self, now: float) -> None:
        """Some of the answer is here."""
        if self.chunks:
            self.gaps_s.append(now - self.last_s)
        else:
            self.first_s = now
        self.last_s = now
        self.chunks += 1

    @property
    def tokens(self) -> int:
        return self.chunks if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """NaN below two tokens."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 and self.chunks else math.nan

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    def meets(self, slo: Slo) -> bool:
        found = ((self.ttft_s, slo.ttft_ms), (self.tpot_s, slo.tpot_ms), (self.e2e_s, slo.e2e_ms))
        return not self.error and not any(
            limit_ms is not None and value_s * 1e3 > limit_ms for value_s, limit_ms in found
        )


@dataclass
class Tally:
    sent: int = 0
    running: int = 0
    completed: int = 0
    good: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    by_chunks: int = 0  # answers whose tokens the server did not tell
    errors: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)

    def add(self, sample: Sample) -> None:
        """One that has ended. What a failed one gave counts as tokens, and its times do not."""
        self.sent += 1
        self.prompt_tokens += sample.prompt_tokens
        self.cached_tokens += sample.cached_tokens
        self.output_tokens += sample.tokens
        self.by_chunks += sample.output_tokens is None and not sample.error
        if sample.error:
            self.errors[sample.error] += 1
            return
        self.completed += 1
        self.good += sample.meets(sample.planned.tenant.slo)
        for histogram, values in (
            (self.ttft, [sample.ttft_s]),
            (self.tpot, [sample.tpot_s]),
            (self.itl, sample.gaps_s),
            (self.e2e, [sample.e2e_s]),
        ):
            for value in values:
                if not math.isnan(value):
                    histogram.add(value)


def jain(values: list[float]) -> float:
    """Jain's index: 1 where all are equal, 1/n where one has all. NaN where there is nothing to share."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else math.nan
