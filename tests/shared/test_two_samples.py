from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.tenancy.two_samples import ALTERNATIVES, Evidence, _gain

MEANS = st.floats(0.0, 1.0)


def binomial(n: int, k: int, mean: float) -> float:
    return math.comb(n, k) * mean**k * (1.0 - mean) ** (n - k)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    base=MEANS,
    part=st.sampled_from(ALTERNATIVES),
    margin=st.sampled_from([0.0, 0.01, 0.1]),
    second=MEANS,
    less=MEANS,
)
def test_nothing_is_to_be_won_while_the_null_holds(
    sizes: tuple[int, int], base: float, part: float, margin: float, second: float, less: float
) -> None:
    """Exactly, over all that a block can show."""
    m, n = sizes
    first = min(1.0, second + margin) * less
    expected = 0.0
    for i in range(m + 1):
        for j in range(n + 1):
            gain = _gain({1.0: i, 0.0: m - i}, {1.0: j, 0.0: n - j}, sizes, base, part, margin)
            expected += binomial(m, i, first) * binomial(n, j, second) * math.exp(gain)
    assert expected <= 1.0 + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 0.9), st.sampled_from(ALTERNATIVES), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_values_between_count_by_their_mean(base: float, part: float, x: float, y: float) -> None:
    """An outcome between 0 and 1 wins what a coin of that mean would on average: so the bound holds for scores too."""

    def of(first: float, second: float) -> float:
        return math.exp(_gain({first: 1}, {second: 1}, (1, 1), base, part, 0.05))

    coins = [((x, 1.0), (1.0 - x, 0.0)), ((y, 1.0), (1.0 - y, 0.0))]
    mixed = sum(p * q * of(first, second) for p, first in coins[0] for q, second in coins[1])
    assert of(x, y) == pytest.approx(mixed)


def run(
    rng: np.random.Generator, first: float, second: float, *, share: float, margin: float, limit: float
) -> int | None:
    """After how many outcomes of the first stream the limit was reached."""
    evidence = Evidence()
    while evidence.first_count < 1_000:
        outcomes = [
            {1.0: (ones := int(rng.binomial(size, mean))), 0.0: size - ones}
            for size, mean in ((max(1, int(rng.binomial(40, share))), first), (40, second))
        ]
        evidence = evidence.take(outcomes[0], outcomes[1], margin)
        if evidence.value >= limit:
            return evidence.first_count
    return None


@pytest.mark.parametrize(("first", "second", "margin"), [(0.1, 0.1, 0.0), (0.15, 0.1, 0.05), (0.0, 0.0, 0.01)])
def test_looking_at_every_block_raises_no_more_alarms_than_said(first: float, second: float, margin: float) -> None:
    rng = np.random.default_rng(11)
    found = [run(rng, first, second, share=0.3, margin=margin, limit=20.0) for _ in range(100)]
    assert sum(each is not None for each in found) <= 5


@pytest.mark.parametrize(
    ("first", "second", "most"), [(1.0, 0.0, 30), (0.2, 0.0, 120), (0.6, 0.2, 150), (0.3, 0.05, 200)]
)
def test_what_is_worse_is_found_soon(first: float, second: float, most: int) -> None:
    rng = np.random.default_rng(7)
    found = [run(rng, first, second, share=0.1, margin=0.02, limit=500.0) for _ in range(20)]
    assert all(each is not None and each <= most for each in found), found


def test_a_block_of_one_stream_alone_is_no_evidence() -> None:
    evidence = Evidence().take({1.0: 50}, {}, 0.0).take({}, {0.0: 50}, 0.0)
    assert (evidence.value, evidence.means) == (1.0, (1.0, 0.0))
    assert evidence.take({1.0: 9}, {0.0: 9}, 0.0).value > 20.0
