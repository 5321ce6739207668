"""A change of leader: the next one's clock is the last one's, and nobody gains by the change."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from manylora_scheduler.core import core as core_module
from manylora_scheduler.core.core import Core
from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    PolicyChanged,
    RouterConnected,
    SendGrant,
    Tick,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.reports import FlowTokens, StartedRequest
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.core.succession import MAX_WAIT_S, MIN_WAIT_S, ClockSnapshot
from manylora_shared.ids import QosClass, RequestId, TenantId, WorkerId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy

from tests.scheduler.helpers import ROUTER, Desk, flow, grants, report, request, started

TENANTS = {"t0": 1, "t1": 2, "t2": 4, "t3": 1}
SLOTS = 3
W0 = WorkerId("w0")


class World:
    """Two workers with room for three, and what they really do. Any number of cores may watch it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.waiting: dict[RequestId, QueuedRequest] = {}
        self.running: dict[str, dict[RequestId, QueuedRequest]] = {"w0": {}, "w1": {}}
        self.totals: dict[str, dict[FlowKey, FlowTokens]] = {"w0": {}, "w1": {}}
        self.next_id = 0

    def core(self, predecessor: ClockSnapshot | None = None) -> Core:
        """A new leader, before anybody has come to it."""
        core = Core(predecessor=predecessor)
        core.apply(Tick(), self.now)
        for tenant, weight in TENANTS.items():
            classes = {qos_class: ClassPolicy(weight) for qos_class in QosClass}
            core.apply(PolicyChanged(TenantId(tenant), TenantPolicy(TenantId(tenant), classes)), self.now)
        core.apply(RouterConnected(ROUTER, 1), self.now)
        for worker in self.running:
            core.apply(WorkerJoined(WorkerId(worker), f"{worker}:1", "cpu", 4096), self.now)
        return core

    def new_request(self, tenant: str) -> QueuedRequest:
        self.next_id += 1
        new = request(
            f"q{self.next_id}",
            tenant=tenant,
            prompt_tokens=self.rng.randint(1, 200),
            max_new_tokens=self.rng.randint(1, 100),
        )
        self.waiting[new.request_id] = new
        return new

    def snapshot_of(self, worker: str) -> WorkerReported:
        running = [StartedRequest(r.request_id, r.flow, 1) for r in self.running[worker].values()]
        what = report(
            snapshot=True, slots=SLOTS, running=len(running), adapters={}, started=running, flows=self.totals[worker]
        )
        return WorkerReported(WorkerId(worker), what)

    def grant(self, commands: Iterable[Command]) -> list[str]:
        """What a core granted; it runs."""
        granted = []
        for command in commands:
            if isinstance(command, SendGrant):
                self.running[command.worker_id][command.request.request_id] = self.waiting.pop(
                    command.request.request_id
                )
                granted.append(command.request.request_id)
        return granted

    def work(self, worker: str) -> WorkerReported:
        """Something is computed for each, and the oldest request ends."""
        ended: list[str] = []
        known = [started(r.request_id, r.flow.tenant_id) for r in self.running[worker].values()]
        for i, running in enumerate(list(self.running[worker].values())):
            before = self.totals[worker].get(running.flow, FlowTokens(0, 0))
            self.totals[worker][running.flow] = FlowTokens(
                before.prompt_tokens + (running.prompt_tokens if i == 0 else 0),
                before.output_tokens + self.rng.randint(0, 60),
            )
            if i == 0:
                ended.append(running.request_id)
                del self.running[worker][running.request_id]
        what = report(
            slots=SLOTS,
            running=len(self.running[worker]),
            started=known,
            finished=ended,
            flows=self.totals[worker],
        )
        return WorkerReported(WorkerId(worker), what)

    def begin(self) -> Core:
        core = self.core()
        for tenant in TENANTS:
            for _ in range(80):
                core.apply(Enqueued(1, self.new_request(tenant)), self.now)
        for worker in self.running:
            self.grant(core.apply(self.snapshot_of(worker), self.now))
        return core

    def rounds(self, cores: list[Core], count: int) -> list[list[str]]:
        """The same things happen to all cores; the first one's grants count. Returns each core's grants."""
        found: list[list[str]] = [[] for _ in cores]
        for _ in range(count):
            self.now += 0.001
            done = self.work(self.rng.choice(list(self.running)))
            for i, core in enumerate(cores):
                commands = core.apply(done, self.now)
                found[i] += [r for r, _ in grants(commands)]
                if i == 0:
                    self.grant(commands)
                core.check_invariants()
        return found

    def take_over(self, predecessor: ClockSnapshot) -> Core:
        """A new leader, and all that come to it: the workers, the router with what waits."""
        core = self.core(predecessor)
        for worker in self.running:
            assert not grants(core.apply(self.snapshot_of(worker), self.now))
        for waiting in self.waiting.values():
            assert not grants(core.apply(Enqueued(1, waiting), self.now)), "granted before all was heard"
        core.check_invariants()
        return core


@pytest.mark.parametrize("sim_seed", range(5))
@pytest.mark.parametrize("age", [0, 25])
def test_the_next_leader_grants_as_the_last_one_would_have(
    sim_seed: int, age: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All flows are backlogged. What was done since the snapshot comes with the counters: settled tags are equal to the
    last digit, however old the snapshot is; what is reserved differs for grants that it does not have. How long flows
    have waited is left out: a new leader counts that anew."""
    monkeypatch.setattr(core_module, "AGING_PER_S", 0)
    world = World(sim_seed)
    old = world.begin()
    world.rounds([old], 60)
    saved = old.clock_snapshot()
    world.rounds([old], age)
    new = world.take_over(saved)
    assert new.next_wakeup() == pytest.approx(world.now + MIN_WAIT_S)
    world.now += MIN_WAIT_S
    for core in (old, new):
        assert not core.apply(Tick(), world.now)
        core.check_invariants()
    for tenant in TENANTS:
        key = flow(tenant)
        tags = [core._queue.books[key].settled for core in (old, new)]
        assert tags[0] == tags[1], tenant
    if not age:
        by_old, by_new = world.rounds([old, new], 60)
        assert by_old == by_new
        assert old._queue.virtual_time == new._queue.virtual_time


def test_a_leader_change_gives_no_flow_an_advantage() -> None:
    """Five changes in a row, each from an old snapshot: shares stay what the weights say."""
    world = World(7)
    leader = world.begin()
    world.rounds([leader], 10)
    served_before = {tenant: served(world, tenant) for tenant in TENANTS}
    for _ in range(5):
        saved = leader.clock_snapshot()
        for tenant in TENANTS:
            for _ in range(40):
                leader.apply(Enqueued(1, world.new_request(tenant)), world.now)
        world.rounds([leader], 60)
        leader = world.take_over(saved)
        world.now += MIN_WAIT_S
        leader.apply(Tick(), world.now)
        world.rounds([leader], 20)
    gained = {tenant: (served(world, tenant) - served_before[tenant]) / w for tenant, w in TENANTS.items()}
    largest_unit = 200 + 2 * 100
    assert min(gained.values()) > 3_000, "enough was done for shares to show"
    spread = max(gained.values()) - min(gained.values())
    # Two flows' formula: reservations of all slots, one unit and the boost each.
    assert spread <= 2 * (2 * SLOTS * largest_unit + largest_unit + 512)
    assert spread <= 0.35 * max(gained.values())


def served(world: World, tenant: str) -> int:
    totals = [flows.get(flow(tenant), FlowTokens(0, 0)) for flows in world.totals.values()]
    return sum(t.prompt_tokens + 2 * t.output_tokens for t in totals)


def test_a_flow_that_the_snapshot_does_not_know_begins_where_the_others_are() -> None:
    world = World(3)
    old = world.begin()
    saved = old.clock_snapshot()
    world.rounds([old], 100)
    world.new_request("newcomer")
    new = world.take_over(saved)
    world.now += MIN_WAIT_S
    new.apply(Tick(), world.now)
    least = min(new._queue.tag_of(flow(tenant)) for tenant in TENANTS)
    assert new._queue.tag_of(flow("newcomer")) == new._queue.virtual_time == least


def test_dispatch_does_not_wait_for_ever_for_a_worker_that_stays_silent() -> None:
    world = World(1)
    saved = world.begin().clock_snapshot()
    new = world.core(saved)
    assert not grants(new.apply(world.snapshot_of("w0"), world.now))
    world.running["w0"].clear()
    assert not grants(new.apply(world.snapshot_of("w0"), world.now))
    for waiting in world.waiting.values():
        assert not grants(new.apply(Enqueued(1, waiting), world.now))
    assert not grants(new.apply(Tick(), MIN_WAIT_S))
    assert len(grants(new.apply(Tick(), MAX_WAIT_S))) == SLOTS
    new.check_invariants()


def test_reservations_of_what_runs_are_taken_over_and_refunded_once() -> None:
    world = World(2)
    old = world.begin()
    saved = old.clock_snapshot()
    assert len(saved.reserved) == 2 * SLOTS
    new = world.take_over(saved)
    world.now += MIN_WAIT_S
    new.apply(Tick(), world.now)
    assert new.num_granted == 2 * SLOTS
    reserved = {tenant: new._queue.reserved_by(flow(tenant)) for tenant in TENANTS}
    assert reserved == {tenant: old._queue.reserved_by(flow(tenant)) for tenant in TENANTS}
    again = new.clock_snapshot()
    assert sorted(again.reserved) == sorted(saved.reserved), "the one after it can take them over as well"
    new.apply(WorkerLeft(W0), world.now)
    new.check_invariants()
    assert new.num_granted == SLOTS
    assert sum(new._queue.reserved_by(flow(tenant)) for tenant in TENANTS) < sum(reserved.values())


def test_a_worker_that_only_lost_its_lease_is_charged_for_what_it_did_meanwhile() -> None:
    desk = Desk()
    key = flow("acme")
    desk.worker("w0", slots=1)
    desk.enqueue("a")
    desk.report("w0", slots=1, running=1, started=[started("a")], flows={key: FlowTokens(10, 5)})
    desk.apply(WorkerLeft(W0))
    desk.enqueue("b")
    desk.worker("w0", slots=1, running=1, started=[started("a")], flows={key: FlowTokens(10, 25)})
    assert desk.core.view.flow_views(desk.now)[0].served_cost == 10 + 2 * 25
    desk.apply(WorkerLeft(W0))
    desk.apply(WorkerJoined(W0, "elsewhere:2", "cpu", 4096))
    desk.report("w0", snapshot=True, slots=1, flows={key: FlowTokens(100, 100)})
    assert desk.core.view.flow_views(desk.now)[0].served_cost == 10 + 2 * 25, "a new process, of which nothing is known"


def test_a_worker_that_began_anew_while_nobody_led_is_charged_for_all_that_it_did() -> None:
    """Seed 7 of the simulation: what its old process had counted was taken for the new one's, which so did work for
    nothing and was charged twice for other work."""
    world = World(3)
    world.totals["w0"] = {flow("acme"): FlowTokens(100, 50), flow("bolt"): FlowTokens(30, 10)}
    saved = world.begin().clock_snapshot()
    assert saved.counted["w0"] == {flow("acme"): 200, flow("bolt"): 50}
    world.running["w0"].clear()
    world.totals["w0"] = {flow("bolt"): FlowTokens(40, 10)}
    new = world.take_over(saved)
    for tokens in (FlowTokens(10, 0), FlowTokens(20, 5)):
        world.now += 1.0
        world.totals["w0"][flow("acme")] = tokens
        what = report(slots=SLOTS, flows={flow("acme"): tokens})
        new.apply(WorkerReported(W0, what), world.now)
    assert new.clock_snapshot().counted["w0"] == {flow("acme"): 30, flow("bolt"): 60}
    assert new._flows.served_cost(flow("acme")) == 30
    assert new._flows.served_cost(flow("bolt")) == 60


def test_a_worker_that_began_anew_and_did_nothing_yet_has_nothing_counted() -> None:
    world = World(4)
    world.totals["w0"] = {flow("acme"): FlowTokens(100, 50)}
    saved = world.begin().clock_snapshot()
    world.running["w0"].clear()
    world.totals["w0"] = {}
    new = world.take_over(saved)
    world.now += 1.0
    new.apply(WorkerReported(W0, report(slots=SLOTS, flows={flow("acme"): FlowTokens(150, 60)})), world.now)
    assert new._flows.served_cost(flow("acme")) == 270
