from __future__ import annotations

import statistics
from collections import Counter
from random import Random

import pytest
from manylora.load.planning.fields import BadMix
from manylora.load.planning.sizes import Length, Weighted, length_of, zipf_weights


def test_forms_of_a_length() -> None:
    assert length_of(128, "x") == Length(128, 128)
    assert length_of("64 - 512", "x") == Length(64, 512)
    assert length_of({"mean": 100, "cv": 0.5, "max": 400}, "x") == Length(1, 400, 100, 0.5)


@pytest.mark.parametrize(
    "value", [0, -1, True, "a", "5-", "9-3", [3], {"cv": 1}, {"mean": 5, "most": 3}, {"mean": 5, "min": 9, "max": 2}]
)
def test_what_is_no_length_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(BadMix, match=r"^tenants\.a\.prompt_tokens"):
        length_of(value, "tenants.a.prompt_tokens")


def test_drawn_lengths_have_their_mean_and_their_ends() -> None:
    rng = Random(1)
    drawn = [Length(10, 400, 100.0, 0.5).draw(rng) for _ in range(5000)]
    assert statistics.mean(drawn) == pytest.approx(100, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(50, rel=0.1)
    assert min(drawn) >= 10
    assert max(drawn) <= 400
    assert {Length(3, 5).draw(rng) for _ in range(100)} == {3, 4, 5}


def test_adapters_are_used_as_zipf_says() -> None:
    rng, weighted = Random(1), Weighted(zipf_weights(100, 1.0))
    counts = Counter(weighted.draw(rng) for _ in range(100_000))
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert set(counts) <= set(range(100))
    assert len(set(zipf_weights(5, 0.0))) == 1
