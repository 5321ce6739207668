"""Who is named in metrics: bounded, and in time those that are used most."""

from __future__ import annotations

from manylora_shared.tenancy.top_names import RANK_S, TopNames


def test_ten_thousand_names_are_bounded_and_the_greatest_get_in() -> None:
    names: TopNames[str] = TopNames(10)
    for _ in range(3):
        for number in range(10_000):
            names.used(f"t{number}", 1)
    assert len(names) == 10
    now = 0.0
    assert names.rank(now) == []
    lost: list[str] = []
    for _ in range(20):
        now += RANK_S
        for number in range(9_000, 9_010):
            names.used(f"t{number}", 1_000)
        gone = names.rank(now)
        assert len(gone) <= 8, "few series begin and end at a time"
        assert names.rank(now + 1) == []
        lost += gone
        assert len(names) == 10
    assert all(names.is_named(f"t{number}") for number in range(9_000, 9_010))
    assert len(lost) == 10, "and stay"


def test_equals_do_not_take_turns() -> None:
    names: TopNames[int] = TopNames(2)
    lost: list[int] = []
    for turn in range(10):
        for name in range(4):
            names.used(name, 5)
        lost += names.rank(turn * RANK_S)
    assert lost == []
