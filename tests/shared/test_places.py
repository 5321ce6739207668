"""Places: who holds few is let in, and nobody fills what all share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.errors import Overloaded
from manylora_shared.transport.places import Places


def entered(places: Places, account: str, most: int) -> int:
    for count in range(most):
        try:
            places.enter(account)
        except Overloaded:
            return count
    return most


def test_one_that_takes_all_it_can_leaves_the_kept_and_half_of_the_rest() -> None:
    places = Places(100, kept=20, few=4)
    assert entered(places, "greedy", 1_000) == 40
    assert entered(places, "second", 1_000) == 20
    with pytest.raises(Overloaded, match="40 calls of greedy"):
        places.enter("greedy")


def test_a_place_that_is_left_can_be_taken_again() -> None:
    places = Places(100, kept=20, few=4)
    taken = entered(places, "greedy", 1_000)
    with places.held("other"):
        assert places.num_held == taken + 1
    for _ in range(taken):
        places.leave("greedy")
    assert places.num_held == 0
    assert entered(places, "greedy", 1_000) == taken


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200),
    st.integers(1, 8),
)
def test_who_holds_few_is_refused_only_where_nothing_is_free(steps: list[tuple[int, bool]], few: int) -> None:
    capacity, kept = 40, 10
    places = Places(capacity, kept=kept, few=few)
    held = dict.fromkeys(range(6), 0)
    for account, enters in steps:
        if not enters:
            if held[account]:
                held[account] -= 1
                places.leave(str(account))
            continue
        free = capacity - sum(held.values())
        fits = free > 0 if held[account] < few else held[account] < free - kept
        try:
            places.enter(str(account))
        except Overloaded:
            assert not fits
        else:
            assert fits
            held[account] += 1
        assert places.num_held == sum(held.values()) <= capacity
