"""Nobody within its share is refused, shed or capped for what others ask for: whole clusters in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from manylora_scheduler.core.core import Core, CoreLimits
from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.gates.demand import DEFAULT_COST, DEMAND_WINDOW_S, SLACK, Demand
from manylora_scheduler.gates.overload import OverloadGate
from manylora_shared.fairness.costs import QUANTUM_TOKENS
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.overload import (
    LEVELS,
    STACK,
    STACK_INDEX,
    LevelController,
    OverloadView,
    Rung,
    TenantView,
    output_cap,
    rung_of,
)

from tests.properties import test_demand
from tests.properties.overload_parties import (
    BATCH,
    INTERACTIVE,
    STEP_S,
    VICTIM,
    Parties,
    Party,
    play_random,
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
            assert view.output_cap(victim, qos_class, "r") is None
            assert view.admits(TenantId("unlisted"), qos_class, "r")
    assert not replace(view, is_crowded=True).admits(TenantId("unlisted"), BATCH, "r")


@pytest.mark.parametrize("qos_class", list(QosClass))
def test_who_waits_within_its_share_does_not_take_their_share_from_others(qos_class: QosClass) -> None:
    """Its requests come in groups that wait for one another, and raise the cluster's level to the top."""
    busy = Party("busy", qos_class, 100, 400, streams=60, retry_s=1.0)
    waits = Party("waits", INTERACTIVE, 20, 10, per_s=1.0, group=5, sequences=8)
    model = played([busy, waits], slots=8)
    (worker,) = model.workers.values()
    tokens = {flow.tenant_id: count.output_tokens for flow, count in worker._tokens.items()}
    assert model.overload._demand.tops(TenantId("waits"))[0] < 1.0
    assert sum(tokens.values()) > 0.9 * 8 * 60.0 / STEP_S, "all slots work"


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


def check_cast(seed: int, requests: int, until_s: float) -> None:
    model = play_random(seed, requests, until_s)
    assert model.asked[VICTIM] >= requests
    taken = model.denied[VICTIM], model.capped[VICTIM], model.lapsed[VICTIM]
    assert taken == (0, 0, 0), f"seed {seed}: {model.parties.values()}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_attackers_drawn_from_a_grammar(seed: int) -> None:
    check_cast(1000 + seed, 400, 25.0)


@pytest.mark.wide
@pytest.mark.parametrize("seeds", [range(first, first + 8) for first in range(0, 96, 8)], ids=str)
def test_attackers_drawn_from_a_grammar_over_a_minute_and_a_thousand_requests(seeds: range) -> None:
    for seed in seeds:
        check_cast(seed, 1000, 60.0)


# ---- random demands, against an account of their own


class Account:
    """What each tenant asks for, by class, as of `now`."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.rng = rng
        self.weights = {flow: rng.choice((1, 1, 2, 4, 16)) for flow in _flows(rng.randint(1, 12))}
        self.demand = Demand(lambda flow: self.weights.get(flow, 1))
        self.sums: dict[FlowKey, list[float]] = {}
        """Queued, refused, granted, done."""
        for _ in range(rng.randint(1, 60)):
            self._something()
        self.demand.weigh(self.now)

    def _something(self) -> None:
        rng, demand = self.rng, self.demand
        passed_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 5.0)))
        self.now += passed_s
        for sums in self.sums.values():
            sums[1:] = [cost * math.exp(-passed_s / DEMAND_WINDOW_S) for cost in sums[1:]]
        flow, cost = rng.choice(list(self.weights)), math.exp(rng.uniform(math.log(2.0), math.log(1e5)))
        sums = self.sums.setdefault(flow, [0.0] * 4)
        what = rng.choice(("came", "came", "granted", "refused", "refused early", "done"))
        match what:
            case "came":
                demand.came(flow, cost, self.now)
                sums[0] += cost
            case "granted" | "refused":
                cost = sums[0] * rng.random()
                demand.left(flow, cost, self.now, is_granted=what == "granted")
                sums[0] -= cost
                sums[2 if what == "granted" else 1] += cost
            case "refused early":
                requests = rng.randint(1, 20)
                index = STACK_INDEX[flow.qos_class]
                mean = demand._tenants[flow.tenant_id].means[index] if flow.tenant_id in demand._tenants else 0.0
                demand.was_refused(flow, requests, self.now)
                sums[1] += requests * (mean or DEFAULT_COST)
            case _:
                demand.was_done(flow, cost, self.now)
                sums[3] += cost

    def cost(self, flow: FlowKey) -> float:
        queued, refused, granted, done = self.sums.get(flow, [0.0] * 4)
        return queued + refused + max(granted, done)

    def by_tenant(self) -> dict[TenantId, tuple[float, int]]:
        """What a tenant asks for in all, and its weight."""
        found: dict[TenantId, tuple[float, int]] = {}
        for flow in self.sums:
            if self.cost(flow) > 0.0:
                cost, weight = found.get(flow.tenant_id, (0.0, 0))
                found[flow.tenant_id] = cost + self.cost(flow), weight + self.weights[flow]
        return found

    def unit(self) -> float:
        """What a unit of weight may ask for, max-min fair: by bisection."""
        tenants = self.by_tenant().values()
        capacity = SLACK * self.demand._capacity(self.now)
        most = max((cost / weight for cost, weight in tenants), default=0.0)
        if capacity <= 1.0 or sum(cost for cost, _ in tenants) <= capacity:
            return most
        low, high = 0.0, most
        for _ in range(100):
            middle = (low + high) / 2
            fits = sum(min(cost, middle * weight) for cost, weight in tenants) <= capacity
            low, high = (middle, high) if fits else (low, middle)
        return low


def _flows(tenants: int) -> list[FlowKey]:
    return [FlowKey(TenantId(f"t{index}"), qos_class) for index in range(tenants) for qos_class in STACK]


def check_demand(seed: int) -> None:
    rng = random.Random(f"demand {seed}")
    account = Account(rng)
    gate = OverloadGate(Core(CoreLimits()))
    gate._demand = account.demand
    gate._cluster._level = rng.choice((float(LEVELS), rng.uniform(0.0, LEVELS)))
    tenants = account.by_tenant()
    for tenant_id in tenants:
        if rng.random() < 0.5:
            gate._own[tenant_id] = LevelController()
            gate._own[tenant_id]._level = rng.uniform(0.0, LEVELS)
    gate._view = view = gate._make_view()
    unit = account.unit()
    for tenant_id, (_, weight) in tenants.items():
        total = 0.0
        for qos_class in STACK:
            total += account.cost(FlowKey(tenant_id, qos_class))
            ids = [f"{rng.getrandbits(64):016x}" for _ in range(3)]
            if total <= unit * weight:
                assert view.place_limit(tenant_id, qos_class) >= 1.0
                assert all(view.admits(tenant_id, qos_class, r) and view.keeps(tenant_id, qos_class, r) for r in ids)
                assert all(view.output_cap(tenant_id, qos_class, r) is None for r in ids)
                assert gate.goes_beyond(FlowKey(tenant_id, qos_class))
            elif total > 1.05 * unit * weight:
                assert view.is_quiet or tenant_id in view.tenants
                for r in ids:
                    if view.height_of(tenant_id, qos_class, r) < 1.0:
                        assert view.admits(tenant_id, qos_class, r)
                        assert view.keeps(tenant_id, qos_class, r)
                        assert view.output_cap(tenant_id, qos_class, r) is None
                    elif view.level == LEVELS:
                        assert not view.admits(tenant_id, qos_class, r), "what is above gives way"


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_random_demands(first: int) -> None:
    for seed in range(first, first + 500):
        check_demand(seed)


@pytest.mark.wide
@pytest.mark.parametrize("first", range(2000, 12_000, 1000))
def test_ten_thousand_random_demands(first: int) -> None:
    for seed in range(first, first + 1000):
        check_demand(seed)


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
    "there is no capacity": (Demand, "_capacity", lambda _: lambda self, now: 0.0),
    "a tenant's waiting is the cluster's": (
        OverloadGate,
        "_attribute",
        lambda _: lambda self, samples: ({flow.qos_class: sample for flow, sample in samples}, {}),
    ),
    "there are no own levels, and no attribution": (OverloadGate, "_attribute", lambda _: lambda self, s: ({}, {})),
    "who asks for more has more": (Demand, "_find_unit", lambda _: lambda self, now: 1e9),
    "what was granted can be done": (Demand, "_capacity", lambda _: lambda self, now: self._granted / self._scale(now)),
    "a share is half of one": (Demand, "_find_unit", lambda real: lambda self, now: real(self, now) / 2),
    "a share is an even part": (
        Demand,
        "_find_unit",
        lambda _: lambda self, now: SLACK * self._capacity(now) / sum(b.weight for b in self._buckets.values()),
    ),
    "weights count for nothing": (Demand, "_weights", lambda _: lambda self, tenant_id: (1, 1, 1)),
    "a class is judged by the next one's demand": (
        OverloadView,
        "is_within",
        lambda _: lambda view, t, q: t not in view.tenants or view.tenants[t].tops[-1] <= 1.0,
    ),
    "what is refused is no demand": (Demand, "was_refused", lambda _: lambda *args: None),
    "those nearest to their share are listed": (Demand, "furthest", lambda real: lambda self, n: real(self, 9999)[-1:]),
    "a level takes all of who is above its share": (
        OverloadView,
        "_limit",
        lambda real: lambda view, t, q, rung: math.inf if view.is_within(t, q) else 0.0,
    ),
    "only interactive requests take turns for slots": (
        OverloadGate,
        "goes_beyond",
        lambda real: lambda self, flow: flow.qos_class is INTERACTIVE and real(self, flow),
    ),
    "every batch answer is capped": (
        OverloadView,
        "output_cap",
        lambda _: lambda view, t, q, r: output_cap(view.level) if q is BATCH else None,
    ),
}


def check_all() -> None:
    test_a_patient_tenant_makes_nobody_else_overloaded()
    test_what_waits_for_long_is_demand_for_as_long()
    test_no_level_takes_anything_of_who_is_within_its_share()
    test_demand.test_what_was_granted_and_is_not_done_is_nothing_that_the_cluster_can_do()
    for seed in range(300):
        check_demand(seed)


@pytest.mark.mutants
@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, make = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    with pytest.raises(AssertionError):
        check_all()
