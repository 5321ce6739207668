"""adapter_shares: what tenants get of an adapter tier, which pins are honoured, and which policies are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.tenancy.adapter_shares import honoured_pins, max_min, pins_problem

_TENANTS = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 40), min_size=n, max_size=n),
        st.lists(st.integers(1, 9), min_size=n, max_size=n),
        st.lists(st.integers(0, 12), min_size=n, max_size=n),
    )
)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, derandomize=True)
@given(tenants=_TENANTS, capacity=st.integers(0, 120))
def test_shares_are_max_min_fair(tenants: tuple[list[int], list[int], list[int]], capacity: int) -> None:
    wants, weights, floors = (dict(enumerate(values)) for values in tenants)
    shares = max_min(wants, weights, capacity, floors)
    least = {t: min(floors[t], wants[t]) for t in wants}
    assert sum(shares.values()) <= max(capacity, sum(least.values()))
    for t, share in shares.items():
        assert least[t] <= share <= wants[t]
        for other, theirs in shares.items():
            # Who does not get what it wants has no less by weight than anybody above its floor, but for a byte of
            # rounding each.
            if share < wants[t] and theirs > least[other] + 1:
                assert (share + 1) / weights[t] >= (theirs - 1) / weights[other]
    if sum(wants.values()) <= capacity:
        assert shares == wants
    elif sum(least.values()) < capacity:
        assert sum(shares.values()) >= capacity - len(wants) - sum(weights.values()) / 2**19, "room was left over"


def test_what_nobody_wants_is_borrowed() -> None:
    assert max_min({"a": 10, "b": 100}, {"a": 1, "b": 1}, 60) == {"a": 10, "b": 50}
    assert max_min({"a": 100, "b": 100}, {"a": 1, "b": 3}, 80) == {"a": 20, "b": 60}
    assert max_min({"a": 100, "b": 100}, {"a": 1, "b": 3}, 80, {"a": 35}) == {"a": 35, "b": 45}


@pytest.mark.long
@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    pins=st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(1, 9), max_size=4)),
    capacity=st.integers(0, 40),
    largest=st.integers(0, 9),
)
def test_pins_leave_room_for_the_largest_adapter(pins: dict[str, list[int]], capacity: int, largest: int) -> None:
    honoured = honoured_pins(pins, dict.fromkeys(pins, 1), capacity, largest)
    kept = sum(size for t, sizes in pins.items() for size, each in zip(sizes, honoured[t], strict=True) if each)
    assert kept <= max(0, capacity - largest)
    if sum(map(sum, pins.values())) <= capacity - largest:
        assert all(all(each) for each in honoured.values())


def test_a_greedy_tenants_pins_do_not_push_out_anothers() -> None:
    honoured = honoured_pins({"a": [3] * 10, "b": [4]}, {"a": 1, "b": 1}, 20, 4)
    assert honoured["b"] == [True]
    assert honoured["a"] == [True] * 4 + [False] * 6


def _problem(
    own: list[int], *, others: dict[str, list[int]] | None = None, registered: dict[str, int], own_other: int = 0
) -> str | None:
    pins = {"me": own, **(others or {})}
    weights = dict.fromkeys((*pins, *registered), 7)
    return pins_problem("me", pins, registered, weights, 100, own_other=own_other, largest=20)


def test_pins_above_the_tenants_share_are_refused() -> None:
    registered = {"me": 60, "x": 90, "y": 90}
    assert _problem([10, 20], registered=registered) is None
    said = _problem([20, 20], registered=registered)
    assert said is not None
    assert "the pinned adapters take 40 bytes: more than the tenant's share, 34 of the 100 bytes" in said
    assert "beside 2 other tenants" in said
    said = _problem([10, 20], registered=registered, own_other=10)
    assert said is not None
    assert "another of its adapters 10" in said


def test_one_pin_is_within_any_share() -> None:
    registered = {f"t{i}": 90 for i in range(50)}
    assert _problem([20], registered=registered) is None
    assert _problem([10, 10], registered=registered) is not None


def test_all_pins_together_leave_room_for_one_adapter() -> None:
    registered = {"me": 20, "x": 70}
    assert _problem([10], others={"x": [70]}, registered=registered) is None
    said = _problem([11], others={"x": [70]}, registered=registered)
    assert said is not None
    assert "those that other tenants have pinned 70: more than the 80" in said
    assert _problem([], others={"x": [90]}, registered=registered) is None, "who pins nothing is not at fault"
