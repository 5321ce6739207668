"""The fit behind the packaged curves."""

from __future__ import annotations

import pytest

from bench.curves import features, fit


def test_the_fit_finds_the_parts_and_none_below_zero() -> None:
    rows = [[1.0, n, 16.0 * n, 16.0 * (1 + n % 3)] for n in (1, 8, 32, 64)]
    assert fit(rows, [0.5 + 0.002 * row[2] + 0.01 * row[3] for row in rows]) == pytest.approx(
        [0.5, 0, 0.002, 0.01], abs=1e-3
    )
    assert min(fit(rows, [1.0 - 0.01 * row[1] for row in rows])) >= 0


def test_mixed_ranks_are_summed_in_turn() -> None:
    assert features({"batch": 8, "adapters": 6, "rank": [8, 64]}) == [1.0, 8, 216, 64]
