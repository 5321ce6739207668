"""Circuit breakers, quarantine and whose a failure is: state by state, and in random histories."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from manylora_router.guard.permits import Ended, Fault, Guard, Permit
from manylora_router.guard.quarantine import MAX_PROMPTS, MEMORY_S, QUARANTINE_S, Quarantine
from manylora_shared.errors import CircuitOpen, Code, Quarantined
from manylora_shared.ids import AdapterUid, TenantId

ACME, OTHER = TenantId("acme"), TenantId("other")
UP, DOWN = AdapterUid("a" * 64), AdapterUid("b" * 64)
SHARED = (Fault.WORKER_LOST, Fault.INTERNAL)


def make(seed: int = 0) -> Guard:
    rng = random.Random(seed)
    return Guard(random=rng.random, getrandbits=rng.getrandbits)


def run(
    guard: Guard,
    fault: Fault,
    now: float,
    *,
    tenant: TenantId = ACME,
    adapter: AdapterUid | None = UP,
    prompt: Sequence[int] = (1, 2),
    worker: str = "w-0",
) -> Ended:
    """One request by itself, from its admission to its end, in no time."""
    permit = guard.admit(tenant, adapter, prompt, now)
    guard.began(permit, worker, now)
    return guard.ended(permit, fault, now + 1e-6)


def is_let_in(guard: Guard, now: float, *, tenant: TenantId = ACME, adapter: AdapterUid | None = UP) -> bool:
    """Asks without leaving a mark."""
    try:
        guard.ended(guard.admit(tenant, adapter, (9, 9, 9), now), Fault.NO_VERDICT, now)
    except CircuitOpen:
        return False
    return True


def opened(guard: Guard, now: float = 0.0) -> float:
    """Opens acme's circuit of UP. Returns when its time is over."""
    for _ in range(ADAPTER_THRESHOLD):
        run(guard, Fault.ADAPTER, now)
    return now + guard.circuits(now)[0].retry_after_s


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


def test_a_prompt_that_was_there_at_two_failures_is_quarantined_for_a_while() -> None:
    guard = make()
    run(guard, Fault.WORKER_LOST, 0.0, prompt=(6, 6), worker="w-0")
    run(guard, Fault.WORKER_LOST, 5.0, prompt=(6, 6), worker="w-1")
    with pytest.raises(Quarantined) as error:
        guard.admit(ACME, UP, [6, 6], 6.0)
    assert (error.value.code, error.value.retry_after_s) == (Code.FAILED_PRECONDITION, None)
    assert error.value.message.endswith(f"it is refused for another {QUARANTINE_S:.0f} s"), "rounded up"
    assert guard.quarantines(6.0) == {ACME: (1, pytest.approx(QUARANTINE_S - 1.0))}
    assert guard.quarantines(6.0, tenant_id=OTHER) == {}
    assert (guard.num_quarantined(6.0), guard.num_quarantined(6.0, tenant_id=ACME)) == (1, 1)
    assert guard.num_quarantined(6.0, tenant_id=OTHER) == 0
    for tenant, adapter, prompt in ((OTHER, UP, (6, 6)), (ACME, DOWN, (6, 6)), (ACME, None, (6, 6)), (ACME, UP, (6,))):
        guard.ended(guard.admit(tenant, adapter, prompt, 6.0), Fault.NO_VERDICT, 6.0)
    until = 5.0 + 1e-6 + QUARANTINE_S
    again = guard.admit(ACME, UP, (6, 6), until)
    guard.began(again, "w-0", until)
    assert guard.ended(again, Fault.WORKER_LOST, until + 0.5).is_quarantined
    with pytest.raises(Quarantined):  # once more is enough now
        guard.admit(ACME, UP, (6, 6), until + 1)


def test_an_operator_lifts_a_tenants_quarantine_and_no_others() -> None:
    guard = make()
    for tenant in (ACME, OTHER):
        for turn in range(2):
            run(guard, Fault.WORKER_LOST, 10.0 * turn, tenant=tenant, prompt=(6,))
    run(guard, Fault.WORKER_LOST, 20.0, prompt=(7,))
    assert guard.lift_quarantine(ACME, 21.0) == 1
    assert list(guard.quarantines(21.0)) == [OTHER]
    for prompt in ((6,), (7,)):  # strikes are forgotten too: two more are needed again
        assert not run(guard, Fault.WORKER_LOST, 22.0, prompt=prompt).is_quarantined
    assert run(guard, Fault.WORKER_LOST, 23.0, prompt=(6,)).is_quarantined
    assert guard.lift_quarantine(TenantId("acm"), 24.0) == 0, "no tenant by the beginning of its name"
    assert sorted(guard.quarantines(24.0)) == sorted([ACME, OTHER])


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.NO_VERDICT, Fault.ADAPTER])
def test_what_is_no_failure_of_a_worker_is_no_strike(fault: Fault) -> None:
    guard = make()
    run(guard, Fault.WORKER_LOST, 0.0, prompt=(6,), adapter=None)
    for turn in range(3):
        run(guard, fault, 1.0 + turn, prompt=(6,), adapter=None)
    if fault is Fault.NONE:  # cleared, so the next strike is a first one
        run(guard, Fault.WORKER_LOST, 10.0, prompt=(6,), adapter=None)
    guard.ended(guard.admit(ACME, None, (6,), 11.0), Fault.NO_VERDICT, 11.0)


def test_strikes_of_one_failure_count_once_and_old_ones_are_forgotten() -> None:
    guard = make()
    twins = [guard.admit(ACME, UP, (6,), 0.0) for _ in range(3)]
    for twin in twins:
        guard.began(twin, "w-0", 0.0)
    for late, twin in enumerate(twins):
        guard.ended(twin, Fault.WORKER_LOST, 1.0 + late)
    assert guard.num_quarantined(4.0) == 0
    run(guard, Fault.WORKER_LOST, 4.0 + MEMORY_S, prompt=(6,))
    assert guard.num_quarantined(5.0 + MEMORY_S) == 0
    run(guard, Fault.WORKER_LOST, 6.0 + MEMORY_S, prompt=(6,))
    assert guard.num_quarantined(7.0 + MEMORY_S) == 1


def test_the_quarantine_is_bounded_and_keeps_no_prompt() -> None:
    quarantine = Quarantine(random.Random(0).getrandbits)
    for index in range(MAX_PROMPTS + 5):
        quarantine.strike(ACME, UP, (index, 77_777), worker_id="w", since=0.0, now=1.0)
    assert len(quarantine) == MAX_PROMPTS
    again = Quarantine(random.Random(1).getrandbits)
    again.strike(ACME, UP, (MAX_PROMPTS, 77_777), worker_id="w", since=0.0, now=1.0)
    assert not set(again._records) & set(quarantine._records), "digests are of one process"


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
