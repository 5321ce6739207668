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
def test_who_holds_few_is_refused_only_for_its_part_of_what_is_kept(steps: list[tuple[int, bool]], few: int) -> None:
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
        fits = held[account] < free - kept or (held[account] < few and held[account] * kept < free * few)
        try:
            places.enter(str(account))
        except Overloaded:
            assert not fits
        else:
            assert fits
            held[account] += 1
        assert places.num_held == sum(held.values()) <= capacity


@pytest.mark.parametrize("colluders", [0, 1, 10, 64, 200])
def test_however_many_take_all_they_can_the_next_one_has_its_part(colluders: int) -> None:
    """Sixty-four that came once all was taken had all that was kept, and the next one nothing."""
    kept, few = 1_024, 16
    places = Places(16_384, kept=kept, few=few)
    for account in range(8 + colluders):
        entered(places, str(account), 20_000)
    expected = few * (1 - few / kept) ** colluders
    assert entered(places, "another", few) >= max(1, int(expected) - 1)
