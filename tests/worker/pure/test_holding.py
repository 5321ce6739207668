from __future__ import annotations

from manylora_worker.kinds.holding import Holding


def test_blocks_count_for_as_long_as_they_are_held() -> None:
    holding = Holding(is_shared=False)
    holding.take([1, 2], 2, 10.0)
    holding.take([3], 1, 12.0)
    holding.give([1, 2, 3], 3, 15.0)
    assert (holding.num_held, holding.block_seconds(99.0)) == (0, 2 * 2 + 3 * 3)


def test_what_choices_share_counts_once() -> None:
    holding = Holding(is_shared=True)
    holding.take([1, 2], 2, 0.0)
    holding.take([1, 2], 2, 1.0)  # another choice
    holding.give([2], 1, 2.0)
    holding.take([3], 1, 2.0)  # which writes a copy
    assert (holding.num_held, holding.block_seconds(4.0)) == (3, 2 * 2 + 3 * 2)
    holding.give([1, 2], 2, 4.0)
    holding.give([1, 3], 2, 5.0)
    assert (holding.num_held, holding.block_seconds(9.0)) == (0, 12.0)


def test_time_that_comes_late_takes_nothing_back() -> None:
    holding = Holding(is_shared=False)
    holding.take([1], 1, 5.0)
    holding.take([2], 1, 4.0)
    assert holding.block_seconds(6.0) == 2.0
