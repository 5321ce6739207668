"""When requests come: seconds from the run's beginning, ascending and, but for a trace, without end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias


@dataclass(frozen=True)
class Constant:
    rate: float  # requests a second, of this and the others in the mean

    def times(self, rng: Random) -> Iterator[float]:
        del rng
        number = 0
        while True:
            yield number / self.rate
            number += 1


@dataclass(frozen=True)
class Poisson:
    rate: float

    def times(self, rng: Random) -> Iterator[float]:
        at_s = 0.0
        while True:
            at_s += rng.expovariate(self.rate)
            yield at_s


@dataclass(frozen=True)
class Gamma:
    """cv: standard deviation of the gaps by their mean; 1 is Poisson, above it requests come in bursts."""

    rate: float
    cv: float

    def times(self, rng: Random) -> Iterator[float]:
        at_s, shape = 0.0, 1 / self.cv**2
        while True:
            at_s += rng.gammavariate(shape, 1 / (shape * self.rate))
            yield at_s


@dataclass(frozen=True)
class OnOff:
    """Poisson in periods of `on_s` in the mean, nothing in those of `off_s` between them."""

    rate: float
    on_s: float
    off_s: float

    def times(self, rng: Random) -> Iterator[float]:
        rate = self.rate * (self.on_s + self.off_s) / self.on_s
        at_s = 0.0
        while True:
            ends_s = at_s + rng.expovariate(1 / self.on_s)
            while (at_s := at_s + rng.expovariate(rate)) < ends_s:
                yield at_s
            at_s = ends_s + (rng.expovariate(1 / self.off_s) if self.off_s else 0.0)


@dataclass(frozen=True)
class Diurnal:
    """A sine that begins at its least, by thinning (Lewis and Shedler 1979). swing: 0 is Poisson, 1 falls to 0."""

    rate: float
    period_s: float
    swing: float

    def times(self, rng: Random) -> Iterator[float]:
        greatest = self.rate * (1 + self.swing)
        at_s = 0.0
        while True:
            at_s += rng.expovariate(greatest)
            if rng.random() * greatest < self.rate_at(at_s):
                yield at_s

    def rate_at(self, at_s: float) -> float:
        return self.rate * (1 - self.swing * math.cos(2 * math.pi * at_s / self.period_s))


@dataclass(frozen=True)
class TraceRow:
    """blocks: of the prompt, from its beginning: two prompts share those whose names are equal. Empty: not told."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """speed: times as fast as it was. length_scale: of its prompts and outputs. block_tokens: before scaling."""

    rows: tuple[TraceRow, ...]
    speed: float = 1.0
    length_scale: float = 1.0
    block_tokens: int = 512


@dataclass(frozen=True)
class Closed:
    """No times: each stream sends when its last answer has ended."""

    streams: int
    think_s: float = 0.0


Process: TypeAlias = Constant | Poisson | Gamma | OnOff | Diurnal
Arrivals: TypeAlias = Process | Trace | Closed
