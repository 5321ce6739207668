"""Overload control at the scheduler: what it measures, refuses, sheds, caps and tells."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from helpers import ROUTER, flow, grants, report, request
from manylora_scheduler.core.core import Core, CoreLimits
from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    Event,
    RouterConnected,
    RouterDisconnected,
    RoutersRefused,
    SendGrant,
    SendOverload,
    SendRefusal,
    Tick,
    Withdrawn,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.reports import FlowLoad, StartedRequest
from manylora_scheduler.gates.overload import TICK_S, OverloadGate
from manylora_scheduler.gates.queue_delay import OverloadTargets
from manylora_shared.errors import Code
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.tenancy.overload import LEVELS, OverloadView, TenantView, output_cap

from bench.overload_model import run
from bench.overload_result import Result, percentile
from bench.overload_scenario import ClassLoad, Scenario

INTERACTIVE, STANDARD, BATCH = QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH
WORKER = WorkerId("w0")


class Desk:
    """A gate with a router and a worker of some slots, and its clock."""

    def __init__(self, *, slots: int = 2, enabled: bool = True, targets: OverloadTargets | None = None) -> None:
        self.core = Core(CoreLimits())
        self.gate = OverloadGate(self.core, targets, enabled=enabled)
        self.slots = slots
        self.now = 0.0
        self.running: list[RequestId] = []
        self.told: list[Command] = []
        self.next_id = 0
        self.apply(RouterConnected(ROUTER, 1))
        self.apply(WorkerJoined(WORKER, "w0:1", "cpu", 4096))
        self.report(snapshot=True)

    def apply(self, event: Event) -> list[Command]:
        commands = self.gate.apply(event, self.now)
        self.core.check_invariants()
        self.gate.check_invariants()
        self.told += commands
        for command in commands:
            if isinstance(command, SendGrant):
                self.running.append(command.request.request_id)
        return commands

    def report(self, *, snapshot: bool = False, finished: Iterable[str] = ()) -> list[Command]:
        started = [StartedRequest(r, flow(), 1) for r in self.running]
        self.running = [r for r in self.running if r not in finished]
        return self.apply(
            WorkerReported(
                WORKER,
                report(
                    snapshot=snapshot,
                    slots=self.slots,
                    running=len(self.running),
                    started=started,
                    finished=finished,
                ),
            )
        )

    def enqueue(self, tenant: str = "acme", qos_class: QosClass = STANDARD, **what: object) -> list[Command]:
        self.next_id += 1
        name = what.pop("name", f"{tenant}-{qos_class.value}-{self.next_id}")
        return self.apply(Enqueued(1, request(str(name), tenant=tenant, qos_class=qos_class, **what)))  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until - 1e-9:
            at = self.gate.next_wakeup()
            self.now = min(until, at if at is not None else until)
            self.apply(Tick())

    def refusals(self) -> list[SendRefusal]:
        return [command for command in self.told if isinstance(command, SendRefusal)]

    def until_level(self, level: int, tenant: str = "x") -> None:
        for _ in range(600):
            if self.level(tenant) >= level:
                return
            self.wait(TICK_S)
        pytest.fail(f"level {level} is not reached")

    def level(self, tenant: str) -> int:
        view = self.gate.view
        return max(view.level, view.tenants.get(TenantId(tenant), TenantView()).level)

    def beyond(self, tenant: str, *classes: QosClass) -> None:
        """Routers have refused far more than a share of the tenant's requests."""
        self.apply(RoutersRefused(tuple((flow(tenant, qos_class), 1000) for qos_class in classes)))

    def fill(self, tenants: Iterable[str] = ("a", "b", "c", "d")) -> None:
        """All slots are taken, and interactive requests of tenants within their share wait."""
        for i in range(self.slots):
            self.enqueue("hog", INTERACTIVE, name=f"hog{i}", prompt_tokens=2000)
        for tenant in tenants:
            self.enqueue(tenant, INTERACTIVE)


def test_a_quiet_cluster_is_left_alone() -> None:
    desk = Desk()
    assert grants(desk.enqueue()) == [("acme-standard-1", "w0")]
    desk.wait(5.0)
    assert desk.gate.view.is_quiet
    assert desk.gate.next_wakeup() is None or desk.gate.next_wakeup() == desk.core.next_wakeup()
    assert not [c for c in desk.told if isinstance(c, SendOverload | SendRefusal)]


def test_waiting_raises_the_level_and_routers_are_told() -> None:
    desk = Desk()
    desk.fill()
    desk.wait(6.0)
    views = [command.view for command in desk.told if isinstance(command, SendOverload)]
    assert views[-1] == desk.gate.view
    assert max(view.level for view in views) > 32
    late = desk.apply(RouterConnected(RouterId("another"), 7))
    (told,) = [command for command in late if isinstance(command, SendOverload)]
    assert (told.router_id, told.view) == ("another", desk.gate.view)


def test_batch_is_refused_before_anything_else_is() -> None:
    desk = Desk()
    desk.fill()
    desk.beyond("x", BATCH)
    desk.until_level(32)
    refused = [c for c in desk.enqueue("x", BATCH) if isinstance(c, SendRefusal)]
    assert [r.code for r in refused] == [Code.RESOURCE_EXHAUSTED]
    assert refused[0].retry_after_s is not None
    assert refused[0].retry_after_s > 0.4
    assert "overloaded" in refused[0].message
    assert not [c for c in desk.enqueue("x", INTERACTIVE) if isinstance(c, SendRefusal)]
    assert not [c for c in desk.enqueue("x", STANDARD) if isinstance(c, SendRefusal)]
    assert desk.gate.state().counts[BATCH].refused == 1


def test_queued_work_is_shed_in_the_order_of_sacrifice() -> None:
    desk = Desk()
    desk.fill()
    for i in range(12):
        desk.enqueue("xyz"[i % 3], BATCH)
        desk.enqueue("xyz"[i % 3], STANDARD)
    for tenant in "xyz":
        desk.beyond(tenant, STANDARD)
    desk.until_level(LEVELS)
    order = [r.request.flow.qos_class for r in desk.refusals()]
    assert order.count(BATCH) == 12
    assert 6 <= order.count(STANDARD) < 12, "each keeps what its share holds"
    assert order.index(STANDARD) > max(i for i, q in enumerate(order) if q is BATCH)
    assert INTERACTIVE not in order or order.index(INTERACTIVE) > max(i for i, q in enumerate(order) if q is STANDARD)
    counts = desk.gate.state().counts
    assert (counts[BATCH].shed, counts[STANDARD].shed) == (12, order.count(STANDARD))


def test_what_one_tick_sheds_is_in_order_too() -> None:
    """Batch, standard, interactive; in a class the furthest above its share first."""
    desk = Desk()
    desk.fill([])
    for i in range(24):
        desk.enqueue("near" if i % 2 else "far", list(QosClass)[i % 3])
    tops = {"far": (40.0, 80.0, 120.0), "near": (5.0, 10.0, 15.0)}
    everything = OverloadView(LEVELS, math.inf, {TenantId(t): TenantView(tops[t]) for t in tops})
    desk.gate._view = everything
    desk.told = list(desk.gate._shed(list(desk.gate._book.flows), desk.now))
    desk.gate.check_invariants()
    order = [r.request.flow for r in desk.refusals()]
    assert [f.qos_class for f in order] == [BATCH] * 8 + [STANDARD] * 8 + [INTERACTIVE] * 8
    assert [f.tenant_id for f in order] == (["far"] * 4 + ["near"] * 4) * 3
    assert all(r.retry_after_s for r in desk.refusals())


def test_batch_that_is_granted_meanwhile_has_less_output_and_says_so() -> None:
    desk = Desk()
    desk.fill(["a"])
    desk.enqueue("b", BATCH, max_new_tokens=4000, sequences=2, name="long")
    desk.enqueue("c", BATCH, max_new_tokens=20, sequences=2, name="short")
    desk.beyond("b", BATCH)
    desk.beyond("c", BATCH)
    desk.until_level(40)
    desk.report()
    desk.apply(Withdrawn(1, RequestId("a-interactive-3")))
    desk.report(finished=["hog0", "hog1"])
    desk.report(finished=["long"])
    desk.report(finished=["short"])
    given = {c.request.request_id: c for c in desk.told if isinstance(c, SendGrant)}
    level, cap = given[RequestId("long")].overload_level, given[RequestId("long")].max_output_tokens
    assert 40 <= level <= 48
    assert cap == output_cap(level)
    assert given[RequestId("short")].max_output_tokens is None, "it asked for less than the cap"
    assert given[RequestId("hog0")].max_output_tokens is None
    assert desk.gate.state().counts[BATCH].capped == 1


def test_turns_come_before_refusals() -> None:
    desk = Desk()
    shares = desk.core._flows.share
    plain = shares(flow("a", INTERACTIVE))
    desk.fill()
    desk.until_level(1)
    assert not desk.refusals()
    raised = shares(flow("a", INTERACTIVE))
    assert raised.weight == 64 * plain.weight
    assert (raised.base / raised.weight, raised.cap / raised.weight) == (
        plain.base / plain.weight,
        plain.cap / plain.weight,
    ), "boosts are the same in virtual time"
    assert desk.core.view.weight_of(flow("a", INTERACTIVE)) == plain.weight, "what a share is does not change"
    for i in range(4):
        desk.apply(Withdrawn(1, RequestId(f"{'abcd'[i]}-interactive-{desk.next_id - 3 + i}")))
    desk.report()
    desk.report(finished=["hog0", "hog1"])
    desk.wait(10.0)
    assert desk.gate.view.is_quiet
    assert shares(flow("a", INTERACTIVE)) == plain


def test_who_floods_a_class_gets_no_turns_for_it() -> None:
    desk = Desk()
    desk.fill()
    for i in range(60):
        desk.enqueue("flood", INTERACTIVE, prompt_tokens=2000, name=f"f{i}")
    desk.until_level(1)
    assert desk.core.view.weight_of(flow("flood", INTERACTIVE)) == desk.core.view.weight_of(flow("a", INTERACTIVE))
    assert desk.gate.factor(flow("flood", INTERACTIVE)) == 1
    assert desk.gate.factor(flow("a", INTERACTIVE)) > desk.gate.factor(flow("a", STANDARD)) > 1
    assert desk.gate.factor(flow("a", BATCH)) == 1
    assert desk.gate.goes_beyond(flow("a", INTERACTIVE))
    assert desk.gate.goes_beyond(flow("a", STANDARD))
    assert not desk.gate.goes_beyond(flow("flood", INTERACTIVE))


def test_waiting_for_a_slot_on_a_worker_is_waiting() -> None:
    """What was granted beyond the slots has left the queue, and waits all the same."""
    desk = Desk()
    for i in range(2):
        desk.enqueue(f"t{i}", INTERACTIVE)
    loads = {flow(f"t{i}", INTERACTIVE): FlowLoad(0, 1, 0) for i in range(2)}
    told = report(slots=2, running=2)
    object.__setattr__(told, "loads", loads)
    desk.apply(WorkerReported(WORKER, told))
    desk.enqueue("x", BATCH)  # somebody waits, so the ticks go on
    desk.wait(1.0)
    assert all(desk.level(f"t{i}") > 0 for i in range(2))
    object.__setattr__(told, "loads", {f: FlowLoad(1, 0, 0) for f in loads})
    desk.apply(WorkerReported(WORKER, told))
    desk.wait(30.0)
    assert all(desk.level(f"t{i}") <= 1 for i in range(2))


def test_a_tick_looks_through_some_flows_and_all_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora_scheduler.gates.queue_delay.MAX_LOOKED_AT", 4)
    desk = Desk()
    desk.fill([])
    for i in range(40):
        desk.enqueue(f"t{i}", INTERACTIVE)
        desk.beyond(f"t{i}", INTERACTIVE)
    for _ in range(400):
        desk.wait(TICK_S)
    assert desk.core.num_queued == 0, "whatever is given up is found"
    assert len(desk.refusals()) >= 36, "but for those that were granted when others ended"
    desk.wait(3.0)
    assert not desk.gate._book.flows


def test_an_admitted_request_that_comes_again_is_not_refused() -> None:
    desk = Desk()
    desk.enqueue("x", BATCH, name="mine")
    assert desk.core.view.is_known(RequestId("mine"))
    desk.fill()
    desk.enqueue("x", BATCH, name="waits")
    desk.beyond("x", BATCH)
    desk.until_level(32)
    before = len(desk.refusals())
    desk.enqueue("x", BATCH, name="mine")
    desk.enqueue("x", BATCH, name="waits")
    assert len(desk.refusals()) == before


def test_an_answer_that_is_resumed_is_neither_refused_nor_shed_nor_cut() -> None:
    desk = Desk()
    desk.fill(["a"])
    desk.enqueue("x", BATCH, name="waits")
    desk.enqueue("x", BATCH, name="resumed", max_new_tokens=4000, is_resumed=True)
    desk.beyond("x", BATCH)
    desk.until_level(40)
    desk.enqueue("x", BATCH, name="late", max_new_tokens=4000, is_resumed=True)
    desk.wait(2.0)
    refused = [refusal.request.request_id for refusal in desk.refusals()]
    assert "waits" in refused
    assert not {"resumed", "late"} & set(refused)
    desk.report()
    desk.apply(Withdrawn(1, RequestId("a-interactive-1")))
    desk.report(finished=[f"hog{i}" for i in range(desk.slots)])
    given = [c for c in desk.told if isinstance(c, SendGrant) and c.request.is_resumed]
    assert given
    assert not any(grant.max_output_tokens for grant in given)


def test_where_everybody_is_above_a_share_it_is_the_clusters_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def flooded(listed: int) -> Desk:
        monkeypatch.setattr("manylora_scheduler.gates.overload.MAX_LISTED", listed)
        desk = Desk(slots=8)
        for i in range(40):
            desk.enqueue(f"t{i % 8}", INTERACTIVE)
        desk.wait(3.0)
        return desk

    few, many = flooded(8), flooded(4)
    assert few.gate.view.level == 0
    assert all(few.level(f"t{i}") > 0 for i in range(8))
    assert many.gate.view.level > 0
    assert len(many.gate.view.tenants) == 4
    assert len(many.gate._own) == 4


def test_an_outage_is_no_overload() -> None:
    desk = Desk()
    desk.fill()
    desk.apply(WorkerLeft(WORKER))
    for qos_class in QosClass:
        desk.enqueue("x", qos_class)
    desk.wait(20.0)
    assert desk.gate.view.is_quiet
    assert not desk.refusals()


def test_switched_off_it_measures_and_gives_nothing_up() -> None:
    desk = Desk(enabled=False)
    desk.fill()
    desk.enqueue("x", BATCH)
    desk.wait(20.0)
    assert desk.gate.view.is_quiet
    assert not desk.refusals()


def test_targets_are_settings() -> None:
    patient, hasty = (Desk(targets=OverloadTargets(interactive_s=s)) for s in (30.0, 0.1))
    for desk in (patient, hasty):
        desk.fill()
        desk.wait(2.0)
    assert patient.gate.view.is_quiet
    assert not hasty.gate.view.is_quiet


def test_the_book_follows_whatever_becomes_of_requests() -> None:
    desk = Desk()
    desk.fill()
    desk.enqueue("x", STANDARD, deadline=1.0)
    desk.enqueue("x", STANDARD, name="mine")
    desk.apply(Enqueued(99, request("stale")))  # of a stream that is another by now
    desk.apply(Enqueued(1, request("mine", tenant="x", router="thief")))
    desk.apply(Withdrawn(1, RequestId("mine")))
    desk.wait(2.0)
    desk.apply(RouterDisconnected(ROUTER, 1))
    assert desk.core.num_queued == 0
    desk.wait(60.0)
    assert desk.gate.view.is_quiet
    assert desk.gate.next_wakeup() is None


def test_what_routers_refused_is_demand() -> None:
    desk = Desk()
    desk.enqueue("a")
    desk.enqueue("b")
    for _ in range(20):
        desk.apply(RoutersRefused(((flow("a"), 50), (flow("b", BATCH), 1))))
        desk.wait(0.2)
        desk.enqueue("b")
    demand = desk.gate._demand
    assert demand.tops(TenantId("a"))[1] > 4 * demand.tops(TenantId("b"))[1]
    state = desk.gate.state()
    assert (state.counts[STANDARD].refused_by_routers, state.counts[BATCH].refused_by_routers) == (1000, 20)


def ttft_p95_s(result: Result) -> float:
    return percentile(result.ttft_s[INTERACTIVE], 0.95)


@pytest.fixture(scope="module")
def at_one() -> Result:
    return run(Scenario(load=1.0, until_s=60.0))


@pytest.mark.long
def test_three_times_the_load_costs_neither_goodput_nor_interactive_latency(at_one: Result) -> None:
    three, without = run(Scenario(load=3.0, until_s=60.0)), run(Scenario(load=3.0, overload=False, until_s=60.0))
    assert three.good_tokens >= 0.95 * at_one.good_tokens
    assert ttft_p95_s(three) <= 1.5 * ttft_p95_s(at_one)
    assert ttft_p95_s(three) <= 0.2
    assert three.completed[INTERACTIVE] >= 0.97 * three.offered[INTERACTIVE]
    assert three.completed[BATCH] == 0, "batch goes first"
    assert ttft_p95_s(without) > 4 * ttft_p95_s(three), "the load is too small to need any control"


@pytest.mark.long
def test_a_load_that_just_fits_is_not_refused(at_one: Result) -> None:
    assert at_one.refused[BATCH] <= 0.02 * at_one.offered[BATCH]
    assert not at_one.refused[STANDARD]
    assert not at_one.refused[INTERACTIVE]


@pytest.mark.wide
def test_callers_that_ask_again_at_once_complete_as_much_as_without_control() -> None:
    """Two workers with 24 slots, and streams that each ask for something else as soon as they are refused."""
    mix = {qos_class: ClassLoad(1 / 3, (2, 150), (4, 64), 60.0) for qos_class in QosClass}
    scenario = Scenario(
        load=0.0, streams=64, mix=mix, workers=2, slots=24, parked=64, tenants=3, until_s=25.0, measured_from_s=5.0
    )
    controlled, free = run(scenario), run(replace(scenario, overload=False))
    assert sum(controlled.completed.values()) >= 0.95 * sum(free.completed.values())
    assert sum(controlled.refused.values()) <= 0.1 * sum(controlled.completed.values())


@pytest.mark.wide
def test_a_flood_costs_the_flooder_alone() -> None:
    flooded = run(Scenario(load=4.0, base_load=0.6, flooder=True))
    assert flooded.refused[INTERACTIVE] > 10_000
    flooder = max(flooded.refused_tenants, key=lambda f: flooded.refused_tenants[f])[0]
    others = sum(n for f, n in flooded.refused_tenants.items() if f[0] != flooder)
    offered = sum(n for f, n in flooded.offered_tenants.items() if f[0] != flooder)
    assert others <= 0.02 * offered


@pytest.mark.wide
def test_after_a_spike_everything_is_admitted_again() -> None:
    spike = run(Scenario(load=10.0, base_load=0.7, ends_s=40.0, measured_from_s=70.0, until_s=90.0))
    assert spike.at_rest_s is not None
    assert spike.at_rest_s < 16.0
    assert sum(spike.refused.values()) == 0
    assert ttft_p95_s(spike) < 0.1


@pytest.mark.wide
def test_the_same_seed_is_one_run() -> None:
    first, second = (run(Scenario(load=3.0, until_s=40.0)) for _ in range(2))
    assert (first.levels, first.good_tokens) == (second.levels, second.good_tokens)
    assert max(level for _, level in first.levels) <= LEVELS
