"""How many blocks adapters should have: bounds hold, and who is short gets its home."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_worker.memory.arena import HOLD_S, LOOK_S, ArenaLimits, ArenaPolicy

LIMITS = ArenaLimits(total=100, floor=10, home=30, ceiling=60)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(LIMITS.floor, LIMITS.ceiling),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(LOOK_S, 3.0)), max_size=80),
)
def test_bounds_hold_and_who_is_short_gets_its_home(start: int, looks: list[tuple[bool, bool, float]]) -> None:
    policy, now, blocks = ArenaPolicy(LIMITS), 0.0, start
    for kv_is_short, adapters_are_short, wait_s in looks:
        now += wait_s
        after = policy.wanted(blocks, kv_is_short=kv_is_short, adapters_are_short=adapters_are_short, now=now)
        assert LIMITS.floor <= after <= LIMITS.ceiling
        if kv_is_short and blocks > LIMITS.home:
            assert after < blocks, "KV takes back what is its"
        if adapters_are_short and blocks < LIMITS.home:
            assert after > blocks
        if not (kv_is_short or adapters_are_short):
            assert after == blocks
        blocks = after
    for _ in range(200):
        now += LOOK_S
        blocks = policy.wanted(blocks, kv_is_short=True, adapters_are_short=True, now=now)
    assert blocks == LIMITS.home


def test_what_was_given_beyond_home_does_not_swing_back_at_once() -> None:
    policy = ArenaPolicy(LIMITS)
    short: dict[str, Any] = {"kv_is_short": False, "adapters_are_short": True}
    grown = policy.wanted(30, **short, now=0.0)
    assert grown > 30
    kv = {"kv_is_short": True, "adapters_are_short": False}
    assert policy.wanted(30, **kv, now=LOOK_S) == 30, "adapters grew beyond home a moment ago"
    assert policy.wanted(30, **kv, now=HOLD_S) < 30


@pytest.mark.parametrize("bounds", [(0, 1, 1, 2), (9, 3, 2, 4), (9, 2, 4, 3), (4, 1, 2, 4)])
def test_what_are_no_bounds(bounds: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="floor"):
        ArenaLimits(*bounds)


def test_bounds_of_settings() -> None:
    assert ArenaLimits.of(100, 20, 10, 80) == ArenaLimits(120, 10, 20, 70), "KV keeps half of its own"
    assert ArenaLimits.of(100, 20, 20, 20) is None, "nothing moves"
