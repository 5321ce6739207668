from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manylora_scheduler.timers import Timers


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
