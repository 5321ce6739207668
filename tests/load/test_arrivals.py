"""Each process keeps its mean rate, has the spread that it is named for, and comes again by its seed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from random import Random

import pytest
from manylora.load.planning.arrivals import Constant, Diurnal, Gamma, OnOff, Poisson, Process

ALL = [Constant(20.0), Poisson(20.0), Gamma(20.0, 2.5), OnOff(20.0, 2.0, 6.0), Diurnal(20.0, 50.0, 0.9)]


def until(process: Process, seconds: float, seed: int = 3) -> list[float]:
    return list(itertools.takewhile(lambda at_s: at_s < seconds, process.times(Random(seed))))


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("process", ALL, ids=lambda process: type(process).__name__)
def test_mean_order_and_seed(process: Process) -> None:
    found = until(process, 2000.0)
    assert len(found) == pytest.approx(40_000, rel=0.1)
    assert found == sorted(found)
    assert found[0] >= 0
    assert found == until(process, 2000.0)
    assert isinstance(process, Constant) or found != until(process, 2000.0, seed=4)


def test_the_spread_of_gaps_is_the_process_s() -> None:
    def cv(process: Process) -> float:
        found = gaps(until(process, 3000.0))
        return statistics.pstdev(found) / statistics.mean(found)

    assert cv(Constant(20.0)) == pytest.approx(0, abs=1e-6)
    assert cv(Poisson(20.0)) == pytest.approx(1, rel=0.05)
    assert cv(Gamma(20.0, 2.5)) == pytest.approx(2.5, rel=0.1)
    assert cv(Gamma(20.0, 0.5)) == pytest.approx(0.5, rel=0.1)
    assert cv(OnOff(20.0, 2.0, 6.0)) > 5


def test_poisson_counts_are_as_spread_as_their_mean() -> None:
    counts = [0] * 2000
    for at_s in until(Poisson(20.0), 2000.0):
        counts[int(at_s)] += 1
    assert statistics.pvariance(counts) == pytest.approx(20, rel=0.12)


def test_nothing_comes_in_the_time_off() -> None:
    found = gaps(until(OnOff(20.0, 2.0, 6.0), 4000.0))
    silences = [gap for gap in found if gap > 1]
    assert statistics.mean(silences) == pytest.approx(6, rel=0.25)
    # within a period they come at four times the mean
    assert 1 / statistics.mean(gap for gap in found if gap <= 1) == pytest.approx(80, rel=0.1)


def test_a_day_has_its_least_at_the_beginning_and_its_most_in_the_middle() -> None:
    process = Diurnal(20.0, 50.0, 0.9)
    by_tenth = [0] * 10
    for at_s in until(process, 5000.0):
        by_tenth[int(at_s % 50 / 5)] += 1
    for tenth, count in enumerate(by_tenth):
        mean = statistics.mean(process.rate_at(tenth * 5 + step / 20) for step in range(100))
        assert count == pytest.approx(mean * 500, rel=0.15, abs=60)
    assert process.rate_at(0) == pytest.approx(2)
    assert process.rate_at(25) == pytest.approx(38)
    assert math.isclose(process.rate_at(50), process.rate_at(0))
