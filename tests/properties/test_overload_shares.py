"""Nobody within its share is refused, shed or capped for what others ask for: whole clusters in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from manylora_scheduler.core.events import Enqueued, SendGrant, SendRefusal
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.gates.demand import Demand
from manylora_scheduler.gates.overload import OverloadGate
from manylora_shared.errors import Code
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_shared.tenancy.overload import LEVELS, STACK_INDEX, OverloadView, Rung, TenantView, rung_of

from bench.overload_model import Model
from bench.overload_scenario import Scenario
from bench.overload_worker import Call

INTERACTIVE, STANDARD, BATCH = QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Party:
    """One tenant's callers: `streams` that each ask again, or requests at a steady rate."""

    name: str
    qos_class: QosClass
    prompt_tokens: int
    output_tokens: int
    streams: int = 0
    per_s: float = 0.0
    retry_s: float = 4.0
    """How long a stream waits after a refusal."""
    pause_s: float = 0.0
    """How long it waits after an answer."""
    sequences: int = 1


class Parties(Model):
    """The model of bench/ with callers of these kinds in place of its own."""

    def __init__(self, scenario: Scenario, parties: list[Party]) -> None:
        super().__init__(scenario)
        self.parties = {party.name: party for party in parties}
        self.asked = dict.fromkeys(self.parties, 0)
        self.denied = dict.fromkeys(self.parties, 0)
        self.capped = dict.fromkeys(self.parties, 0)
        self.most_level = 0
        """The cluster's."""
        self._whose: dict[RequestId, Party] = {}
        for party in parties:
            for _ in range(party.streams):
                self.at(0.0, lambda party=party: self.ask(party))  # type: ignore[misc]
            if party.per_s:
                self.at(self.rng.random() / party.per_s, lambda party=party: self._steady(party))  # type: ignore[misc]

    def _steady(self, party: Party) -> None:
        self.ask(party)
        self.at(self.now + 1.0 / party.per_s, lambda: self._steady(party))

    def ask(self, party: Party) -> None:
        flow = FlowKey(TenantId(party.name), party.qos_class)
        request_id = RequestId(f"{self.rng.getrandbits(64):016x}")
        self.asked[party.name] += 1
        ends_by = self.now + PATIENCE_S
        tokens = party.output_tokens * party.sequences
        request = QueuedRequest(
            request_id=request_id,
            router_id=self.router,
            flow=flow,
            prompt_tokens=party.prompt_tokens,
            max_new_tokens=tokens,
            deadline=ends_by,
            sequences=party.sequences,
        )
        self._whose[request_id] = party
        if not self.view.admits(flow.tenant_id, party.qos_class, request_id):
            if not self.refused:
                self.at(self.now + 0.1, self._tell_refused)
            self.refused[flow] = self.refused.get(flow, 0) + 1
            self._deny(party)
            return
        self.calls[request_id] = Call(request, tokens, self.now, ends_by)
        self.apply(Enqueued(1, request))

    def _deny(self, party: Party) -> None:
        self.denied[party.name] += 1
        if party.streams:
            self.at(self.now + party.retry_s, lambda: self.ask(party))

    def _take(self, command: object) -> None:
        if isinstance(command, SendGrant):
            self.capped[self._whose[command.request.request_id].name] += command.max_output_tokens is not None
        if isinstance(command, SendRefusal) and command.code is Code.RESOURCE_EXHAUSTED:
            self._deny(self._whose[command.request.request_id])
        super()._take(command)  # type: ignore[arg-type]

    def _hear(self, view: OverloadView) -> None:
        super()._hear(view)
        self.most_level = max(self.most_level, view.level)

    def _was_refused(self, flow: FlowKey, hint_s: float) -> None:
        pass

    def _end(self, call: Call) -> None:
        party = self._whose[call.request.request_id]
        super()._end(call)
        if party.streams:
            self.at(self.now + party.pause_s, lambda: self.ask(party))


def played(
    parties: list[Party],
    *,
    until_s: float = 60.0,
    workers: int = 1,
    slots: int = 64,
    seed: int = 1,
    overload: bool = True,
) -> Parties:
    scenario = Scenario(
        load=0.0,
        base_load=0.0,
        overload=overload,
        workers=workers,
        slots=slots,
        parked=slots,
        until_s=until_s,
        ends_s=until_s,
        begins_s=0.0,
        measured_from_s=0.0,
        seed=seed,
    )
    model = Parties(scenario, parties)
    model.run()
    return model


PATIENT = Party("attacker", INTERACTIVE, 20, 1880, streams=160)
VICTIM = Party("victim", INTERACTIVE, 20, 10, per_s=4.0)


def check_victim(model: Parties) -> None:
    asked, denied = model.asked["victim"], model.denied["victim"]
    assert asked >= 20
    assert (denied, model.capped["victim"]) == (0, 0), f"of {asked}; levels {model.view}"


def test_a_patient_tenant_makes_nobody_else_overloaded() -> None:
    model = played([PATIENT, VICTIM])
    check_victim(model)
    assert model.denied["attacker"] > 100, "there is nothing to give up"
    assert rung_of(model.most_level) in (Rung.NONE, Rung.TURNS), "it is the attacker's own matter"


def test_what_waits_for_long_is_demand_for_as_long() -> None:
    model = played([replace(PATIENT, output_tokens=8000, streams=300), VICTIM], until_s=50.0, overload=False)
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
        victim = replace(VICTIM, qos_class=victims)
        check_victim(played([attacker, victim], workers=workers, slots=64 // workers))


@pytest.mark.parametrize("seed", range(4))
def test_attackers_of_several_kinds_at_once(seed: int) -> None:
    rng = random.Random(seed)
    parties = [
        replace(ATTACKERS[rng.choice(list(ATTACKERS))], name=f"attacker{i}", qos_class=rng.choice(list(QosClass)))
        for i in range(rng.randint(1, 3))
    ]
    victim = replace(VICTIM, qos_class=rng.choice(list(QosClass)))
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
