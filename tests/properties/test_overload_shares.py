"""Nobody within its share is refused, shed or capped for what others ask for: whole clusters in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.gates.demand import Demand
from manylora_scheduler.gates.overload import OverloadGate
from manylora_shared.fairness.costs import QUANTUM_TOKENS
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.overload import LEVELS, STACK_INDEX, OverloadView, Rung, TenantView, rung_of

from tests.properties.overload_parties import (
    BATCH,
    INTERACTIVE,
    STEP_S,
    VICTIM,
    Parties,
    Party,
    played,
    victim_waits_s,
)

PATIENT = Party("attacker", INTERACTIVE, 20, 1880, streams=160)
MODEST = Party(VICTIM, INTERACTIVE, 20, 10, per_s=4.0)


def check_victim(model: Parties) -> None:
    asked, denied = model.asked[VICTIM], model.denied[VICTIM]
    assert asked >= 20
    assert (denied, model.capped[VICTIM], model.lapsed[VICTIM]) == (0, 0, 0), f"of {asked}; levels {model.view}"


def test_a_patient_tenant_makes_nobody_else_overloaded() -> None:
    model = played([PATIENT, MODEST])
    check_victim(model)
    assert model.denied["attacker"] > 100, "there is nothing to give up"
    assert rung_of(model.most_level) in (Rung.NONE, Rung.TURNS), "it is the attacker's own matter"


@pytest.mark.parametrize("victims", list(QosClass))
@pytest.mark.parametrize("qos_class", list(QosClass))
def test_a_level_lets_nobody_within_its_share_wait_for_long_answers(qos_class: QosClass, victims: QosClass) -> None:
    model = played([replace(PATIENT, qos_class=qos_class), replace(MODEST, qos_class=victims)], slots=32)
    check_victim(model)
    waits_s = victim_waits_s(model)
    assert waits_s[int(0.95 * len(waits_s))] <= (QUANTUM_TOKENS + 2) * STEP_S


def test_what_waits_for_long_is_demand_for_as_long() -> None:
    model = played([replace(PATIENT, output_tokens=8000, streams=300), MODEST], until_s=50.0, overload=False)
    assert model.core.num_queued > 100
    tops = model.overload._demand.tops
    assert tops(TenantId("attacker"))[0] > 4.0
    assert tops(TenantId("victim"))[0] < 0.5


def test_no_level_takes_anything_of_who_is_within_its_share() -> None:
    victim, attacker = TenantId("victim"), TenantId("attacker")
    tops = (0.5, 0.7, 1.0)
    for level in range(LEVELS + 1):
        view = OverloadView(level, 0.0, {victim: TenantView(tops, level, 0.0), attacker: TenantView((2.0, 4.0, 6.0))})
        for qos_class in QosClass:
            assert view.admits(victim, qos_class, "r")
            assert view.keeps(victim, qos_class, "r")
            assert view.place_limit(victim, qos_class) >= 1.0
            assert view.output_cap(victim, qos_class) is None
            assert view.admits(TenantId("unlisted"), qos_class, "r")
    assert not replace(view, is_crowded=True).admits(TenantId("unlisted"), BATCH, "r")


ATTACKERS = {
    "patient": PATIENT,
    "long": replace(PATIENT, output_tokens=8000),
    "prompts": replace(PATIENT, prompt_tokens=1800, output_tokens=100),
    "choices": replace(PATIENT, output_tokens=400, streams=60, sequences=4),
    "hasty": replace(PATIENT, output_tokens=64, retry_s=0.1),
    "once": replace(PATIENT, retry_s=10_000.0),
    "just all slots": replace(PATIENT, streams=64),
    "pauses": replace(PATIENT, output_tokens=200, pause_s=5.0),
}


@pytest.mark.wide
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("qos_class", list(QosClass))
@pytest.mark.parametrize("name", list(ATTACKERS))
def test_every_kind_of_attacker(name: str, qos_class: QosClass, workers: int) -> None:
    for victims in QosClass:
        attacker = replace(ATTACKERS[name], qos_class=qos_class)
        victim = replace(MODEST, qos_class=victims)
        check_victim(played([attacker, victim], workers=workers, slots=64 // workers))


@pytest.mark.parametrize("seed", range(4))
def test_attackers_of_several_kinds_at_once(seed: int) -> None:
    rng = random.Random(seed)
    parties = [
        replace(ATTACKERS[rng.choice(list(ATTACKERS))], name=f"attacker{i}", qos_class=rng.choice(list(QosClass)))
        for i in range(rng.randint(1, 3))
    ]
    victim = replace(MODEST, qos_class=rng.choice(list(QosClass)))
    check_victim(played([*parties, victim], workers=rng.choice((1, 2)), slots=32, until_s=40.0, seed=seed))


def _queued_fades(owner: type[Demand]) -> Callable[..., None]:
    came, left = owner.came, owner.left

    def changed(self: Demand, flow: FlowKey, cost: float, now: float) -> None:
        came(self, flow, cost, now)
        left(self, flow, cost, now, is_granted=False)

    return changed


MUTANTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "the cluster's level takes from everybody": (
        OverloadView,
        "is_within",
        lambda _: lambda view, tenant_id, qos_class: False,
    ),
    "everybody is within a share": (
        OverloadView,
        "is_within",
        lambda _: lambda view, tenant_id, qos_class: True,
    ),
    "the share is turned round": (
        OverloadView,
        "is_within",
        lambda _: lambda view, t, q: t in view.tenants and view.tenants[t].tops[STACK_INDEX[q]] > 1.0,
    ),
    "who is within twice a share is not refused": (
        OverloadView,
        "is_within",
        lambda _: lambda view, t, q: t not in view.tenants or view.tenants[t].tops[STACK_INDEX[q]] <= 32.0,
    ),
    "what is queued fades": (Demand, "came", lambda _: _queued_fades(Demand)),
    "what is queued is not counted": (Demand, "came", lambda _: lambda *args: None),
    "there is no capacity": (Demand, "_note_most", lambda _: lambda self, now: None),
    "a tenant's waiting is the cluster's": (
        OverloadGate,
        "_attribute",
        lambda _: lambda self, samples: ({flow.qos_class: sample for flow, sample in samples}, {}),
    ),
    "there are no own levels, and no attribution": (OverloadGate, "_attribute", lambda _: lambda self, s: ({}, {})),
    "who asks for more has more": (Demand, "_find_unit", lambda _: lambda self, now: 1e9),
}


def check_all() -> None:
    test_a_patient_tenant_makes_nobody_else_overloaded()
    test_what_waits_for_long_is_demand_for_as_long()
    test_no_level_takes_anything_of_who_is_within_its_share()


@pytest.mark.mutants
@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, make = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    with pytest.raises(AssertionError):
        check_all()
