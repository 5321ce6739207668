"""Whose a failure is, and random histories of circuits and quarantine together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_router.guard.circuits import (
    ADAPTER_THRESHOLD,
)
from manylora_router.guard.permits import Fault, Permit
from manylora_shared.errors import CircuitOpen, Quarantined
from manylora_shared.ids import TenantId

from tests.properties.guard_rig import ACME, DOWN, OTHER, UP, make, run

SHARED = (Fault.WORKER_LOST, Fault.INTERNAL)


@pytest.mark.parametrize("fault", SHARED)
def test_a_workers_failure_counts_only_for_who_was_alone_there(fault: Fault) -> None:
    guard = make()
    for turn in range(3 * ADAPTER_THRESHOLD):
        now = float(turn)
        mine, theirs = guard.admit(ACME, UP, (turn,), now), guard.admit(OTHER, DOWN, (turn,), now)
        guard.began(mine, "w-0", now)
        guard.began(theirs, "w-0", now)
        guard.ended(theirs, fault, now + 0.1)
        guard.ended(mine, fault, now + 0.2)
    assert guard.circuits(99.0) == []
    for turn in range(ADAPTER_THRESHOLD):
        now = 100.0 + turn
        mine, theirs = guard.admit(ACME, UP, (turn, 1), now), guard.admit(OTHER, DOWN, (turn, 1), now)
        guard.began(mine, "w-0", now)
        guard.began(theirs, "w-1", now)
        guard.ended(mine, fault, now + 0.1)
        guard.ended(theirs, Fault.NONE, now + 0.1)
    assert [state.scope for state in guard.circuits(104.5)] == [(ACME, UP)]


def test_who_left_is_remembered_only_while_somebody_runs_who_was_there() -> None:
    guard, last = make(), Permit(ACME, UP, ())
    for turn in range(50):
        early = guard.admit(TenantId(f"t{turn}"), UP, (1,), float(turn))
        late = guard.admit(ACME, UP, (2,), float(turn))
        guard.began(early, "w-0", float(turn))
        guard.began(late, "w-0", turn + 0.5)
        guard.ended(early, Fault.NO_VERDICT, turn + 0.6)
        if turn:
            guard.ended(last, Fault.NONE, turn + 0.7)
        last = late
    assert set(guard._workers["w-0"]._left) == {"t49"}
    guard.ended(last, Fault.NONE, 99.0)
    assert guard._workers == {}


@pytest.mark.parametrize("fault", [*SHARED, Fault.ADAPTER])
def test_one_failure_counts_once_however_many_requests_it_ended(fault: Fault) -> None:
    guard = make()
    permits = [guard.admit(ACME, UP, (i,), 0.0) for i in range(4 * ADAPTER_THRESHOLD)]
    for permit in permits:
        guard.began(permit, "w-0", 0.0)
    for late, permit in enumerate(permits):
        guard.ended(permit, fault, 1.0 + late)  # slow callers notice late
    assert guard.circuits(30.0) == []


def test_an_adapter_that_does_not_load_counts_whoever_else_is_there() -> None:
    guard = make()
    neighbour = guard.admit(OTHER, DOWN, (1,), 0.0)
    guard.began(neighbour, "w-0", 0.0)
    for turn in range(ADAPTER_THRESHOLD):
        run(guard, Fault.ADAPTER, 1.0 + turn)
    assert [state.scope for state in guard.circuits(ADAPTER_THRESHOLD + 0.1)] == [(ACME, UP)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_no_history_of_others_refuses_a_tenant_that_never_failed(seed: int) -> None:
    """The victim's requests end well, or are ended by failures of workers that it shares."""
    rng, guard = random.Random(seed), make(seed)
    victim, attackers = TenantId("victim"), [TenantId("evil-0"), TenantId("evil-1")]
    running: list[Permit] = []
    now, fresh = 0.0, 0
    for _ in range(400):
        now += rng.choice([0.001, 0.01, 0.5, 3.0])
        if rng.random() < 0.5:
            fresh += 1
            tenant = rng.choice([victim, *attackers])
            prompt = (fresh,) if tenant is victim else (rng.randrange(3),)
            try:
                permit = guard.admit(tenant, rng.choice([UP, None]), prompt, now)
            except (CircuitOpen, Quarantined):
                assert tenant is not victim
                continue
            guard.began(permit, rng.choice(["w-0", "w-1"]), now)
            running.append(permit)
        elif rng.random() < 0.4 and any(p.tenant is not victim for p in running):
            # An attacker's request takes its worker with it: all there end, in any order, one caller after another.
            worker = rng.choice([p for p in running if p.tenant is not victim]).worker_id
            ended = [p for p in running if p.worker_id == worker]
            running = [p for p in running if p.worker_id != worker]
            rng.shuffle(ended)
            for permit in ended:
                now += rng.choice([0.0, 0.2])
                guard.ended(permit, rng.choice(SHARED), now)
        elif running:
            permit = running.pop(rng.randrange(len(running)))
            of_attackers = [Fault.NO_VERDICT, Fault.ADAPTER]
            guard.ended(permit, Fault.NONE if permit.tenant is victim else rng.choice(of_attackers), now)
    assert guard.circuits(now, tenant_id=victim) == []
    assert guard.num_quarantined(now, tenant_id=victim) == 0
    for permit in running:
        guard.ended(permit, Fault.NO_VERDICT, now)
    assert guard.num_running == 0
