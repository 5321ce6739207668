"""Circuit breakers, state by state."""

from __future__ import annotations

import pytest
from manylora_router.guard.circuits import (
    ADAPTER_THRESHOLD,
    FORGET_S,
    JITTER,
    MAX_CIRCUITS,
    MAX_OPEN_S,
    MIN_OPEN_S,
    PROBE_S,
    TENANT_THRESHOLD,
    Breakers,
)
from manylora_router.guard.permits import Fault
from manylora_shared.errors import CircuitOpen, Code
from manylora_shared.ids import TenantId

from tests.properties.guard_rig import ACME, DOWN, OTHER, UP, is_let_in, make, opened, run


def test_a_row_of_failures_opens_the_adapters_circuit_and_nothing_else() -> None:
    guard = make()
    for _ in range(ADAPTER_THRESHOLD - 1):
        run(guard, Fault.ADAPTER, 0.0)
        assert is_let_in(guard, 0.0)
    run(guard, Fault.ADAPTER, 0.0)
    with pytest.raises(CircuitOpen) as error:
        guard.admit(ACME, UP, (5,), 0.0)
    assert error.value.code is Code.UNAVAILABLE
    assert error.value.retry_after_s is not None
    assert MIN_OPEN_S * (1 - JITTER) <= error.value.retry_after_s <= MIN_OPEN_S
    assert is_let_in(guard, 0.0, adapter=DOWN)
    assert is_let_in(guard, 0.0, adapter=None)
    assert is_let_in(guard, 0.0, tenant=OTHER)
    assert guard.circuits(0.0, tenant_id=OTHER) == []
    assert [state.scope for state in guard.circuits(0.0, tenant_id=ACME)] == [(ACME, UP)]


@pytest.mark.parametrize("between", ["success", "time"])
def test_a_row_that_is_broken_opens_nothing(between: str) -> None:
    guard, now = make(), 0.0
    for _ in range(4):
        for _ in range(ADAPTER_THRESHOLD - 1):
            run(guard, Fault.ADAPTER, now)
        if between == "success":
            run(guard, Fault.NONE, now)
        else:
            now += FORGET_S + 0.01
    assert guard.circuits(now) == []


def test_one_probe_is_let_through_and_decides() -> None:
    guard = make()
    until = opened(guard)
    assert not is_let_in(guard, until - 0.001)
    probe = guard.admit(ACME, UP, (1,), until)
    with pytest.raises(CircuitOpen):
        guard.admit(ACME, UP, (2,), until)
    assert guard.circuits(until)[0].is_half_open
    changes = guard.ended(probe, Fault.NONE, until + 1).changes
    assert [(change.scope, change.open_s) for change in changes] == [((ACME, UP), None)]
    assert guard.circuits(until + 1) == []
    assert is_let_in(guard, until + 1)


def test_a_probe_that_fails_opens_it_for_longer_and_the_time_is_capped() -> None:
    guard = make(3)
    until, times = opened(guard), []
    for _ in range(12):
        probe = guard.admit(ACME, UP, (1,), until)
        (change,) = guard.ended(probe, Fault.ADAPTER, until).changes
        assert change.open_s is not None
        times.append(change.open_s)
        until += change.open_s
    for index, open_s in enumerate(times):
        most = min(MAX_OPEN_S, MIN_OPEN_S * 2.0 ** (index + 1))
        assert most * (1 - JITTER) <= open_s <= most
    assert len(set(times)) == len(times), "jitter"


def test_a_probe_without_a_verdict_makes_room_for_the_next() -> None:
    guard = make()
    until = opened(guard)
    guard.ended(guard.admit(ACME, UP, (1,), until), Fault.NO_VERDICT, until)
    probe = guard.admit(ACME, UP, (1,), until)
    assert not is_let_in(guard, until)
    assert is_let_in(guard, until + PROBE_S), "one that does not end is not waited for"
    late = guard.admit(ACME, UP, (1,), until + PROBE_S)
    guard.ended(probe, Fault.ADAPTER, until + PROBE_S)
    guard.ended(late, Fault.NONE, until + PROBE_S)
    assert is_let_in(guard, until + PROBE_S), "the one that was given up decides nothing"


def test_a_probes_first_token_closes_it_but_one_failure_more_opens_it_for_longer() -> None:
    guard = make()
    until = opened(guard)
    probe = guard.admit(ACME, UP, (1,), until)
    guard.began(probe, "w-0", until)
    guard.answered(probe)
    assert is_let_in(guard, until)
    (change,) = guard.ended(probe, Fault.INTERNAL, until + 1).changes
    assert change.open_s is not None
    assert change.open_s > MIN_OPEN_S


def test_whoever_was_let_in_before_it_opened_decides_nothing() -> None:
    guard = make()
    before = [guard.admit(ACME, UP, (1,), 0.0) for _ in range(4)]
    until = opened(guard)
    guard.ended(before[0], Fault.ADAPTER, 0.1)
    guard.ended(before[1], Fault.NONE, 0.1)
    assert guard.circuits(0.1)[0].retry_after_s == pytest.approx(until - 0.1)
    guard.ended(before[2], Fault.ADAPTER, until)
    guard.ended(before[3], Fault.NONE, until)
    assert guard.circuits(until)[0].openings == 1


def test_a_tenants_circuit_needs_failures_of_two_adapters() -> None:
    guard = make()
    breakers, permit = Breakers(lambda: 0.0), object()
    for _ in range(5 * TENANT_THRESHOLD):
        breakers.failed([(ACME,)], permit, UP, 0.0)
    assert breakers.states(0.0) == []
    for _ in range(ADAPTER_THRESHOLD):
        run(guard, Fault.ADAPTER, 0.0, adapter=UP)
        run(guard, Fault.ADAPTER, 0.0, adapter=DOWN)
    assert {state.scope for state in guard.circuits(0.0)} == {(ACME, UP), (ACME, DOWN), (ACME,)}
    with pytest.raises(CircuitOpen, match="this tenant"):
        guard.admit(ACME, None, (1,), 0.0)
    assert is_let_in(guard, 0.0, tenant=OTHER)


def test_circuits_are_bounded() -> None:
    breakers = Breakers(lambda: 0.0)
    for index in range(MAX_CIRCUITS + 5):
        breakers.failed([(TenantId(f"t{index}"),)], object(), None, 0.0)
    assert len(breakers) == MAX_CIRCUITS
