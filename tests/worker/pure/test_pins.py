"""What policies pin, which pins the worker can keep, and what it says of the others."""

from __future__ import annotations

from manylora_shared.ids import AdapterName, AdapterUid
from manylora_worker.adapters.pins import NO_ROOM_TO_PIN, Pin, PinBook

from tests.worker.pure.rooms import A, B

UP, DOWN = AdapterUid("up"), AdapterUid("down")


def pin(name: str, uid: AdapterUid | None, size_bytes: int = 4) -> Pin:
    return Pin(AdapterName(name), uid, size_bytes)


def book() -> PinBook:
    return PinBook(10, lambda tenant: 1)


def problems(pins: PinBook, *ready: AdapterUid) -> list[str]:
    return [state.problem for state in pins.states(A, lambda uid: uid in ready)]


def test_pins_that_leave_room_for_the_largest_are_wanted() -> None:
    pins = book()
    pins.set({A: [pin("x", UP)], B: [pin("y", DOWN)]}, largest_bytes=2)
    assert pins.is_due
    assert list(pins.resolve(lambda uid: 0)) == [(A, UP), (B, DOWN)]
    assert not pins.is_due
    assert problems(pins) == [""]


def test_the_first_ones_come_first_where_not_all_have_room() -> None:
    pins = book()
    pins.set({A: [pin("x", UP), pin("y", DOWN)]}, largest_bytes=5)
    assert list(pins.resolve(lambda uid: 0)) == [(A, UP)]
    assert problems(pins) == ["", NO_ROOM_TO_PIN]
    pins.set({A: [pin("x", UP), pin("y", DOWN)]}, largest_bytes=2)
    assert list(pins.resolve(lambda uid: 0)) == [(A, UP), (A, DOWN)]
    assert problems(pins) == ["", ""]


def test_the_size_that_was_learned_counts_where_it_is_greater() -> None:
    pins = book()
    pins.set({A: [pin("x", UP)]}, largest_bytes=2)
    assert list(pins.resolve(lambda uid: 9)) == []
    assert problems(pins) == [NO_ROOM_TO_PIN]


def test_two_names_of_the_same_bytes_are_one_adapter() -> None:
    pins = book()
    pins.set({A: [pin("x", UP), pin("y", UP)]}, largest_bytes=5)
    assert pins.uids_of(A) == [UP]
    assert list(pins.resolve(lambda uid: 0)) == [(A, UP)]
    assert problems(pins, UP) == ["", ""]


def test_a_name_of_nothing_is_told() -> None:
    pins = book()
    pins.set({A: [pin("x", None)]}, largest_bytes=1)
    assert list(pins.resolve(lambda uid: 0)) == []
    assert problems(pins) == ["no adapter has this name"]


def test_a_load_that_failed_is_told_until_it_is_known_how_the_next_went() -> None:
    pins = book()
    pins.set({A: [pin("x", UP)]}, largest_bytes=1)
    pins.resolve(lambda uid: 0)
    pins.failed(A, UP, "broken")
    assert list(pins.resolve(lambda uid: 0)) == [], "not again by itself"
    assert problems(pins) == ["broken"]
    pins.set({A: [pin("x", UP)]}, largest_bytes=1)
    assert list(pins.resolve(lambda uid: 0)) == [(A, UP)]
    assert problems(pins) == ["broken"], "it is tried, and nothing is known yet"
    pins.arrived(UP)
    assert problems(pins) == [""]
