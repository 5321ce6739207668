"""So much of each tenant, so much in all, and nobody pushes a neighbour's out alone."""

from __future__ import annotations

import random

from manylora_router.history.shelf import Shelf


def test_a_full_tenant_loses_its_own_oldest() -> None:
    shelf: Shelf[int] = Shelf(most=100, most_of_tenant=3)
    shelf.put("quiet", "a", 1)
    for number in range(50):
        shelf.put("loud", str(number), number)
    assert list(shelf.newest("loud")) == [49, 48, 47]
    assert list(shelf.newest("quiet")) == [1]
    assert list(shelf.newest("")) == [49, 48, 47, 1]
    assert list(shelf.newest("nobody")) == []


def test_a_full_shelf_loses_its_oldest() -> None:
    shelf: Shelf[int] = Shelf(most=3, most_of_tenant=3)
    for number in range(5):
        shelf.put(f"tenant-{number}", "a", number)
    assert list(shelf.newest("")) == [4, 3, 2]
    assert shelf.get("tenant-0", "a") is None
    assert shelf.find("a") == 2
    assert shelf.find("b") is None


def test_what_is_put_again_is_the_newest_and_counts_once() -> None:
    shelf: Shelf[int] = Shelf(most=9, most_of_tenant=2)
    for key in "aba":
        shelf.put("t", key, ord(key))
    shelf.put("t", "c", 0)
    assert shelf.get("t", "b") is None
    assert shelf.get("t", "a") == ord("a")
    assert len(shelf) == 2


def test_bounds_hold_whatever_comes() -> None:
    rng = random.Random(5)
    shelf: Shelf[int] = Shelf(most=40, most_of_tenant=7)
    for number in range(3000):
        tenant = f"t{min(rng.randrange(30), rng.randrange(30))}"
        shelf.put(tenant, str(rng.randrange(20)), number)
        assert len(shelf) <= 40
        assert len(list(shelf.newest(tenant))) <= 7
    assert len(list(shelf.newest(""))) == len(shelf) == sum(len(own) for own in shelf._of.values())
