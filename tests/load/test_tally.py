from __future__ import annotations

import math
from random import Random

import pytest
from manylora.load.planning.mix import Slo, Tenant
from manylora.load.planning.schedule import Planned
from manylora.load.planning.sizes import Length
from manylora.load.tally import Histogram, Sample, Tally, jain


def sample(due_s: float = 10.0, slo: Slo | None = None) -> Sample:
    tenant = Tenant("a", Length(1, 1), Length(1, 1), slo=slo or Slo())
    return Sample(Planned(0.0, tenant, "", (), 3, 1), due_s, sent_s=10.5)


def answered(slo: Slo | None = None) -> Sample:
    found = sample(slo=slo)
    for now in (11.0, 11.2, 11.4):
        found.token(now)
    found.output_tokens, found.prompt_tokens, found.ended_s = 5, 7, 11.5
    return found


def test_percentiles_are_right_to_a_hundredth() -> None:
    rng, histogram = Random(1), Histogram()
    values = sorted(rng.lognormvariate(-3, 1) for _ in range(20_000))
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 90, 99, 100):
        assert histogram.percentile(percent) == pytest.approx(
            values[math.ceil(len(values) * percent / 100) - 1], rel=0.01
        )
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert math.isnan(Histogram().percentile(50))
    assert math.isnan(Histogram().mean)


def test_times_count_from_when_a_request_was_due() -> None:
    found = answered()
    assert found.ttft_s == pytest.approx(1.0)
    assert found.e2e_s == pytest.approx(1.5)
    assert found.tpot_s == pytest.approx(0.1)
    assert found.gaps_s == pytest.approx([0.2, 0.2])


def test_what_is_good_meets_every_limit() -> None:
    assert answered(Slo(1001, 101, 1501)).meets(Slo(1001, 101, 1501))
    for slo in (Slo(ttft_ms=999), Slo(tpot_ms=99), Slo(e2e_ms=1499)):
        assert not answered().meets(slo)
    failed = answered()
    failed.error = "500"
    assert not failed.meets(Slo())
    short = sample()
    short.token(11.0)
    short.ended_s = 11.0
    assert short.meets(Slo(tpot_ms=1))  # it has no second token


def test_a_tally_counts_and_sums() -> None:
    tally, other = Tally(), Tally()
    tally.add(answered(Slo(ttft_ms=1)))
    broken = answered()
    broken.error, broken.output_tokens = "connection lost", None
    other.add(broken)
    assert (tally.completed, tally.good, tally.output_tokens) == (1, 0, 5)
    assert (other.completed, other.errors["connection lost"], other.output_tokens, other.ttft.count) == (0, 1, 3, 0)
    untold = answered()
    untold.output_tokens = None
    tally.add(untold)
    assert tally.by_chunks == 1


def test_jain() -> None:
    assert jain([2, 2, 2]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert math.isnan(jain([0, 0]))
