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


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.booleans()), max_size=400))
def test_as_a_dict_would(actions: list[tuple[str, int, bool]]) -> None:
    timers: Timers[str] = Timers()
    model: dict[str, int] = {}
    for key, at, cancel in actions:
        if cancel:
            timers.cancel(key)
            model.pop(key, None)
        else:
            timers.set(key, float(at))
            model[key] = at
        assert len(timers) == len(model)
        assert timers.next_at() == min(model.values(), default=None)
    assert len(timers._heap) <= 2 * len(model) + 65
    assert sorted(drain(timers, 10.0)) == sorted(model)
