from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st
from manylora_scheduler.core.timers import Moments, Timed, Timers, earlier
from manylora_shared.process.heap import collector_paused


def drain(timers: Timers[str], now: float) -> list[str]:
    due = []
    while (key := timers.pop_due(now)) is not None:
        due.append(key)
    return due


def test_due_in_order_and_once() -> None:
    timers: Timers[str] = Timers()
    for key, at in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("d", 5.0)):
        timers.set(key, at)
    assert timers.next_at() == 1.0
    assert drain(timers, 2.0) == ["a", "b", "c"]
    assert timers.next_at() == 5.0
    timers.cancel("d")
    timers.cancel("unknown")
    assert timers.next_at() is None


def test_setting_again_moves() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 3.0)
    assert drain(timers, 2.0) == []
    timers.set("a", 2.5)
    assert drain(timers, 3.0) == ["a"]
    assert len(timers) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.integers(0, 9),
            st.sampled_from(["set", "after", "after", "cancel", "cancel", "time", "pop"]),
        ),
        max_size=400,
    )
)
def test_as_a_dict_would(actions: list[tuple[str, int, str]]) -> None:
    timers: Timers[str] = Timers()
    model: dict[str, tuple[float, int]] = {}
    now = 0.0
    for order, (key, number, action) in enumerate(actions):
        if action == "cancel":
            timers.cancel(key)
            model.pop(key, None)
        elif action == "set":
            timers.set(key, now + number)
            model[key] = (now + number, order)
        elif action == "after":
            timers.set_after(key, now, float(number % 3))
            model[key] = (now + number % 3, order)
        elif action == "time":
            now += number / 4
        else:
            due = sorted((at, order, key) for key, (at, order) in model.items() if at <= now)
            assert drain(timers, now) == [key for _, _, key in due]
            for _, _, key in due:
                del model[key]
        assert len(timers) == len(model)
        assert timers.next_at() == min((at for at, _ in model.values()), default=None)
    assert len(timers._heap) + sum(map(len, timers._lanes.values())) == timers._num_entries
    left = sorted((at, order, key) for key, (at, order) in model.items())
    assert drain(timers, now + 10.0) == [key for _, _, key in left]


def test_stale_entries_are_bounded() -> None:
    timers: Timers[int] = Timers()
    for i in range(10_000):
        timers.set(i, 1e9 - i)
        timers.set_after(-i - 1, float(i), 5.0)
        timers.cancel(i - 10)
        timers.cancel(-(i - 10))
        assert timers._num_entries <= 2 * len(timers) + 66


# ---- one moment for each thing


class Thing(Timed):
    __slots__ = ("__weakref__", "name")

    def __init__(self, name: int) -> None:
        self.name = name
        self.due_in = None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 9),
            st.sampled_from(["set", "after", "after", "cancel", "cancel", "time", "pop"]),
        ),
        max_size=400,
    )
)
def test_moments_as_a_dict_would(actions: list[tuple[int, int, str]]) -> None:
    moments: Moments[Thing] = Moments()
    things = [Thing(i) for i in range(6)]
    model: dict[int, float] = {}
    now = 0.0

    def pop_due() -> None:
        due = []
        while (thing := moments.pop_due(now)) is not None:
            assert thing.due_in is None
            due.append(thing.name)
        assert sorted(due) == sorted(name for name, at in model.items() if at <= now)
        assert [model[name] for name in due] == sorted(model[name] for name in due)
        for name in due:
            del model[name]

    for name, number, action in actions:
        if action == "cancel":
            moments.cancel(things[name])
            model.pop(name, None)
        elif action == "set":
            moments.set(things[name], now + number)
            model[name] = now + number
        elif action == "after":
            moments.set_after(things[name], now, float(number % 3))
            model[name] = now + number % 3
        elif action == "time":
            now += number / 4
        else:
            pop_due()
        assert len(moments) == len(model)
        assert {thing.name for thing in moments} == model.keys()
        assert moments.next_at() == min(model.values(), default=None)
    now += 10.0
    pop_due()
    assert not model


def test_cancelled_things_leave_nothing_and_are_not_kept_alive() -> None:
    """One waits for long, before tens of thousands that are cancelled one after the other."""
    moments: Moments[Thing] = Moments()
    first = Thing(0)
    moments.set_after(first, 0.0, 1e9)
    with collector_paused():
        for i in range(10_000):
            in_lane, in_heap = Thing(i), Thing(-i)
            moments.set_after(in_lane, float(i), 1e9)
            moments.set(in_heap, 1e9 - i)
            gone = weakref.ref(in_lane)
            moments.cancel(in_lane)
            moments.cancel(in_heap)
            del in_lane
            assert gone() is None
            assert sum(len(lane.things) for lane in moments._lanes.values()) <= 73
            assert len(moments._heap) <= 66
    assert [moments.pop_due(1e9), moments.pop_due(2e9)] == [first, None]


def test_the_earlier_of_two_moments_that_may_never_come() -> None:
    assert (earlier(None, None), earlier(1.0, None), earlier(None, 2.0)) == (None, 1.0, 2.0)
    assert (earlier(1.0, 2.0), earlier(2.0, 1.0), earlier(0.0, 0.0)) == (1.0, 1.0, 0.0)
