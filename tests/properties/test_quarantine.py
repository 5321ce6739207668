"""Prompts that were there when workers failed."""

from __future__ import annotations

import random

import pytest
from manylora_router.guard.permits import Fault
from manylora_router.guard.quarantine import MAX_PROMPTS, MEMORY_S, QUARANTINE_S, Quarantine
from manylora_shared.errors import Code, Quarantined
from manylora_shared.ids import TenantId

from tests.properties.guard_rig import ACME, DOWN, OTHER, UP, make, run


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
