"""Which prompts wait for the next step, so that their sequences do not end together: by itself, and in the engine."""

from __future__ import annotations

import collections

import pytest
from manylora_shared.fairness.costs import QUANTUM_TOKENS
from manylora_worker.planning.staggering import Staggering

from tests.properties.engine_rig import A, B, Rig

SLOTS = QUANTUM_TOKENS


def with_credit(slots: int) -> Staggering:
    staggering = Staggering(slots, QUANTUM_TOKENS)
    for _ in range(100):
        staggering.planned(0)
    return staggering


@pytest.mark.parametrize(("slots", "in_a_step"), [(1, 1), (16, 1), (17, 2), (64, 4)])
def test_as_many_prompts_end_in_a_step_as_slots_that_are_spread_over_a_quantum(slots: int, in_a_step: int) -> None:
    staggering = with_credit(slots)
    assert [staggering.holds_back(count) for count in range(in_a_step + 2)] == [False] * in_a_step + [True] * 2


def test_without_credit_nothing_is_held_back() -> None:
    assert not Staggering(SLOTS, QUANTUM_TOKENS).holds_back(10)


@pytest.mark.parametrize("waiting", [1, 5, 15])
def test_slots_are_idle_for_a_fortieth_of_their_time_at_most(waiting: int) -> None:
    """However many wait: prompts that would all begin are held back whenever they may be."""
    staggering, idle, steps = with_credit(SLOTS), 0, 4000
    for _ in range(steps):
        num_idle = waiting if staggering.holds_back(1) else 0
        idle += num_idle
        staggering.planned(num_idle)
    assert 0.9 * steps * SLOTS / 40 <= idle <= steps * SLOTS / 40 + SLOTS + waiting


def _begun_together(slots: int, *, output: int, steps: int) -> tuple[Rig, dict[int, int]]:
    """A backlog of equal requests. Returns the engine and, by step, how many ended in the last half of these."""
    rig = Rig.make(4000, slots, batch_tokens=512)
    ended: dict[int, int] = collections.Counter()
    for step in range(steps):
        while len(rig.core.request_ids()) < 2 * slots:
            rig.add(A, 8, output)
        before = len(rig.ended)
        rig.step()
        if step >= steps // 2:
            ended[step] = len(rig.ended) - before
    return rig, ended


@pytest.mark.long
def test_equal_requests_that_began_together_come_to_end_one_after_the_other() -> None:
    _, ended = _begun_together(SLOTS, output=QUANTUM_TOKENS, steps=2000)
    assert max(ended.values()) <= 2
    assert sum(ended.values()) >= 0.97 * 1000 * SLOTS / (QUANTUM_TOKENS + 1), "slots are not idle for it"


@pytest.mark.long
@pytest.mark.parametrize("output", [1, 4, 9])
def test_requests_shorter_than_a_quantum_lose_little_by_it(output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots have to be filled faster than spread ends would let them."""
    _, ended = _begun_together(SLOTS, output=output, steps=2000)
    monkeypatch.setattr(Staggering, "holds_back", lambda self, num_ended: False)
    _, at_once = _begun_together(SLOTS, output=output, steps=2000)
    assert sum(ended.values()) >= 0.96 * sum(at_once.values())


@pytest.mark.parametrize("after", range(200, 206))
def test_who_is_behind_its_share_is_not_held_back(after: int) -> None:
    """All of its requests begin together, in the first step in which its turn has come."""
    rig, _ = _begun_together(SLOTS, output=QUANTUM_TOKENS, steps=after)
    rig.core._planner._staggering = with_credit(SLOTS)
    newcomers = [rig.add(B, 8, 1) for _ in range(3)]
    for _ in range(2):
        rig.step()
    assert all(newcomer in rig.ended for newcomer in newcomers)
