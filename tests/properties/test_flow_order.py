"""Places by key and need, against a plain sorted list."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.fairness.flow_group import Place
from manylora_shared.fairness.flow_order import FlowOrder


def by_order(places: list[Place[int]]) -> list[int]:
    return [place.flow for place in sorted(places, key=lambda place: (place.key, place.order))]


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([3, 1 << 20, 1 << 60]))
def test_whatever_happens_it_is_the_sorted_list(seed: int, num_actions: int, most: int) -> None:
    rng = random.Random(seed)
    order: FlowOrder[int] = FlowOrder()
    places = [Place(i, i) for i in range(12)]
    inside: list[Place[int]] = []
    for _ in range(num_actions):
        place = rng.choice(places)
        if place.group is not None and rng.random() < 0.3:
            order.drop(place)
            inside.remove(place)
        else:
            if place.group is None:
                inside.append(place)
            order.put(place, rng.randrange(most), rng.randrange(3))
        expected = by_order(inside)
        found = order.first()
        assert (found.flow if found is not None else None) == (expected[0] if expected else None)
        if rng.random() < 0.3:
            heads: dict[object, int] = {}
            for flow in expected:
                heads.setdefault(places[flow].need, flow)
            assert [place.flow for place in order.heads()] == list(heads.values())
        limit = rng.randrange(14)
        assert [place.flow for place in order.first_places(limit)] == expected[:limit]
        order.check_invariants()
        assert order.size == len(inside)


def test_equal_keys_go_by_age() -> None:
    order: FlowOrder[int] = FlowOrder()
    for i in (2, 0, 1):
        order.put(Place(i, i), 7, "same")
    assert [place.flow for place in order.first_places(9)] == [0, 1, 2]
