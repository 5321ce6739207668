"""The core against a small true world: routers that answer grants, workers that run and report late, and faults.

The world knows what really runs; the core only hears of it. Checked after every step: no worker ever has more granted
and running than it takes, and beyond its slots and its flow's share of them nothing is granted of whose flow something
waits there; every enqueue gets exactly one answer; room is used while somebody can use it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from manylora_scheduler.core.core import Core, CoreLimits
from manylora_scheduler.core.events import (
    Command,
    Dropped,
    Enqueued,
    Event,
    GrantClosed,
    PolicyChanged,
    RouterConnected,
    RouterDisconnected,
    SendDedicate,
    SendGrant,
    SendPrefetch,
    SendRefusal,
    Tick,
    Withdrawn,
    WorkerDedicated,
    WorkerDisconnected,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.reports import (
    TO_EVERYBODY,
    FlowLoad,
    FlowTokens,
    Owner,
    Residency,
    StartedRequest,
    ToldOwner,
)
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_shared.errors import Code
from manylora_shared.ids import AdapterUid, QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy

from tests.scheduler.helpers import report, request

REPORT_DELAY_S = 0.05
GRANT_HELD_S = 9.0
"""A router that has not reached a worker by then gives its grant back."""
ROUTERS = ["r0", "r1"]


@dataclass
class Asked:
    """A request in the world. state: waiting, granted, running, ended (the worker is done, the router has not said so)
    or done."""

    request: QueuedRequest
    state: str = "waiting"
    worker: str = ""
    address: str = ""
    granted_at: float = 0.0


@dataclass
class TrueWorker:
    name: str
    slots: int
    blocks: int
    places: int = 0
    """Beyond the slots."""
    generation: int = 0
    up: bool = False
    connected: bool = False
    running: dict[RequestId, int] = field(default_factory=dict)
    held: dict[RequestId, None] = field(default_factory=dict)
    """Of these, those that cannot use a slot."""
    flows: dict[FlowKey, FlowTokens] = field(default_factory=dict)
    new: list[StartedRequest] = field(default_factory=list)
    gone: list[RequestId] = field(default_factory=list)
    dirty: bool = False
    ordered: Owner | None = None
    """As the scheduler said last."""
    owner: ToldOwner = TO_EVERYBODY
    reported: dict[FlowKey, None] = field(default_factory=dict)
    """Flows of which it has reported sequences."""

    @property
    def address(self) -> str:
        return f"{self.name}:{self.generation}"

    @property
    def used(self) -> int:
        return sum(self.running.values())

    def loads(self, flow_of: Mapping[RequestId, FlowKey], start: int) -> dict[FlowKey, FlowLoad]:
        """Slots go round: they are given out from the `start`-th request on."""
        slots, loads = self.slots, dict.fromkeys(self.reported, FlowLoad(0, 0, 0))
        order = list(self.running.items())
        start %= max(1, len(order))
        for request_id, sequences in [*order[start:], *order[:start]]:
            flow = flow_of[request_id]
            load = loads.get(flow, FlowLoad(0, 0, 0))
            if request_id in self.held:
                load = load._replace(held=load.held + sequences)
            else:
                slotted = min(slots, sequences)
                slots -= slotted
                load = FlowLoad(load.slotted + slotted, load.ready + sequences - slotted, load.held)
            loads[flow] = load
        self.reported = {flow: None for flow, load in loads.items() if any(load)}
        return loads


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core(CoreLimits(max_queued=40, max_queued_per_tenant=25, worker_wait_s=5.0))
        self.now = 0.0
        self.sessions = dict.fromkeys(ROUTERS, 0)
        self.next_session = 1
        self.asked: dict[RequestId, Asked] = {}
        self.answers: dict[RequestId, int] = {}
        self.next_id = 0
        self.workers: dict[str, TrueWorker] = {}
        self.told: dict[str, dict[FlowKey, FlowLoad]] = {}
        """What each worker said last."""
        self.told_owners: dict[str, ToldOwner] = {}
        self.reports = 0

    @initialize(
        sizes=st.lists(
            st.tuples(st.integers(1, 6), st.integers(2, 20), st.sampled_from([0, 1, 6])), min_size=1, max_size=3
        )
    )
    def build(self, sizes: list[tuple[int, int, int]]) -> None:
        self.workers = {f"w{i}": TrueWorker(f"w{i}", *size) for i, size in enumerate(sizes)}
        for router in ROUTERS:
            self.router_connects(router)
        self.worker_up("w0")
        self.control_connects("w0")

    # ---- the wire

    def apply(self, event: Event) -> None:
        for command in self.core.apply(event, self.now):
            self.receive(command)

    def receive(self, command: Command) -> None:
        if isinstance(command, (SendPrefetch, Dropped)):
            return
        if isinstance(command, SendDedicate):
            worker = self.workers[command.worker_id]
            if worker.connected:
                worker.ordered = command.owner
            return
        asked = self.asked[command.request.request_id]
        if self.sessions[command.request.router_id] != command.session:
            return
        assert asked.state == "waiting", f"answered twice: {command}"
        if isinstance(command, SendRefusal):
            asked.state = "done"
            assert command.code is not Code.OK
        elif isinstance(command, SendGrant):
            worker = self.workers[command.worker_id]
            asked.state, asked.worker, asked.granted_at = "granted", command.worker_id, self.now
            asked.address = command.worker_address
            if not command.repeated:
                assert worker.connected
                owner, is_ready, _ = self.told_owners[worker.name]
                assert is_ready, "it is changing whose it is"
                asking = Owner(command.request.adapter_uid or AdapterUid(""), command.request.flow.tenant_id)
                assert owner in (None, asking), "it is somebody else's"
                pending = [a for a in self.asked.values() if a.state == "granted" and a.address == worker.address]
                known = worker.used + sum(a.request.sequences for a in pending)
                most = worker.slots + worker.places
                assert known <= most, f"{worker.name} takes {most} sequences and gets {known}"
                used = known - sum(load.held for load in self.told[worker.name].values())
                if used > worker.slots:
                    flow = command.request.flow
                    others = sum(a.request.sequences for a in pending if a is not asked and a.request.flow == flow)
                    load = self.told[worker.name].get(flow, FlowLoad(0, 0, 0))
                    if others or load.ready:
                        mine = others + load.unheld + asked.request.sequences
                        weight_of = self.core._queue.weight_of
                        share = worker.slots * weight_of(flow) // sum(map(weight_of, self.flows_on(worker, pending)))
                        is_few = 4 * (others + load.ready) < share
                        assert mine <= share or is_few, "enough of the flow waits there, and it has used its share"

    def flows_on(self, worker: TrueWorker, pending: Collection[Asked]) -> set[FlowKey]:
        """Flows that have sequences there or are granted."""
        told = {flow for flow, load in self.told[worker.name].items() if load.unheld}
        return told | {asked.request.flow for asked in pending}

    def close(self, asked: Asked, *, reached: bool) -> None:
        session = self.sessions[asked.request.router_id]
        if session:
            request_id, worker_id = asked.request.request_id, WorkerId(asked.worker)
            closed = GrantClosed(session, asked.request.router_id, request_id, worker_id, reached, not reached)
            self.apply(closed)

    def pick(self, data: st.DataObject, *states: str) -> Asked | None:
        found = [a for a in self.asked.values() if a.state in states]
        return data.draw(st.sampled_from(found), label="request") if found else None

    def send_report(self, worker: TrueWorker, *, snapshot: bool = False) -> None:
        started = worker.new
        if snapshot:
            started = [s for s in self.all_started(worker) if s.request_id in worker.running]
        what = report(
            snapshot=snapshot,
            slots=worker.slots,
            running=worker.used,
            blocks=worker.blocks,
            free=max(0, worker.blocks - worker.used),
            adapters={"u0": Residency.DEVICE} if snapshot else {},
            started=started,
            finished=[] if snapshot else worker.gone,
            flows=worker.flows,
            most=worker.slots + worker.places,
        )
        self.reports += 1
        loads = worker.loads({r: a.request.flow for r, a in self.asked.items()}, self.reports)
        what = replace(what, loads=loads, owner=worker.owner)
        self.told_owners[worker.name] = worker.owner
        self.told[worker.name] = loads
        worker.new, worker.gone, worker.dirty = [], [], False
        self.apply(WorkerReported(WorkerId(worker.name), what))

    def all_started(self, worker: TrueWorker) -> list[StartedRequest]:
        return [
            StartedRequest(request_id, self.asked[request_id].request.flow, sequences)
            for request_id, sequences in worker.running.items()
        ]

    def end_on_worker(self, asked: Asked, tokens: int) -> None:
        worker = self.workers[asked.worker]
        worker.held.pop(asked.request.request_id, None)
        if worker.running.pop(asked.request.request_id, None) is not None:
            before = worker.flows.get(asked.request.flow, FlowTokens(0, 0))
            worker.flows[asked.request.flow] = FlowTokens(
                before.prompt_tokens + asked.request.prompt_tokens, before.output_tokens + tokens
            )
            worker.gone.append(asked.request.request_id)
            worker.dirty = True

    # ---- routers

    @rule(
        router=st.sampled_from(ROUTERS),
        tenant=st.sampled_from(["t0", "t1", "t2"]),
        qos_class=st.sampled_from(list(QosClass)),
        prompt_tokens=st.integers(1, 200),
        sequences=st.sampled_from([1, 1, 1, 2, 4]),
        adapter=st.sampled_from([None, "u0", "u1"]),
        priority=st.sampled_from([0, 0, 3]),
        timeout_s=st.none() | st.floats(0, 8),
        count=st.sampled_from([1, 1, 3, 9]),
    )
    def enqueue(self, router: str, timeout_s: float | None, count: int, **what: object) -> None:
        if not self.sessions[router]:
            return
        for _ in range(count):
            deadline = None if timeout_s is None else self.now + timeout_s
            new = request(f"q{self.next_id}", router=router, deadline=deadline, **what)  # type: ignore[arg-type]
            self.next_id += 1
            self.asked[new.request_id] = Asked(new)
            self.apply(Enqueued(self.sessions[router], new))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        asked = self.pick(data, "waiting")
        if asked is not None and self.sessions[asked.request.router_id]:
            asked.state = "done"
            self.apply(Withdrawn(self.sessions[asked.request.router_id], asked.request.request_id))

    @rule(data=st.data(), again=st.booleans(), order=st.booleans())
    def grant_is_not_usable(self, data: st.DataObject, again: bool, order: bool) -> None:
        """The router could not reach the worker; it may ask again, before or after it says so."""
        asked = self.pick(data, "granted")
        if asked is None:
            return
        session = self.sessions[asked.request.router_id]
        before = Asked(asked.request, "done", asked.worker)
        if again and session and order:
            asked.state = "waiting"
            self.apply(Enqueued(session, asked.request))
            if asked.worker == before.worker and asked.state == "granted":
                return  # it came back to the same worker: what the router says of it now would mean the new grant
            self.close(before, reached=False)
            return
        asked.state = "waiting" if again else "done"
        self.close(before, reached=False)
        if again and session and asked.state == "waiting":
            self.apply(Enqueued(session, asked.request))

    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        asked = self.pick(data, "granted")
        if asked is None:
            return
        worker = self.workers[asked.worker]
        if not worker.up or worker.address != asked.address:
            return
        asked.state = "running"
        worker.running[asked.request.request_id] = asked.request.sequences
        worker.new.append(StartedRequest(asked.request.request_id, asked.request.flow, asked.request.sequences))
        worker.dirty = True

    @rule(data=st.data(), tokens=st.integers(0, 300))
    def finish(self, data: st.DataObject, tokens: int) -> None:
        asked = self.pick(data, "running")
        if asked is not None:
            self.end_on_worker(asked, tokens)
            asked.state = "ended"

    @rule(data=st.data(), is_held=st.booleans())
    def reader_stops_or_goes_on(self, data: st.DataObject, is_held: bool) -> None:
        asked = self.pick(data, "running")
        if asked is not None and asked.request.request_id in self.workers[asked.worker].running:
            worker = self.workers[asked.worker]
            if is_held:
                worker.held[asked.request.request_id] = None
            else:
                worker.held.pop(asked.request.request_id, None)
            worker.dirty = True

    @rule(data=st.data())
    def router_is_done(self, data: st.DataObject) -> None:
        asked = self.pick(data, "ended")
        if asked is not None:
            asked.state = "done"
            self.close(asked, reached=True)

    @rule(router=st.sampled_from(ROUTERS))
    def router_connects(self, router: str) -> None:
        """The stream is new: whatever waits is enqueued again."""
        self.sessions[router] = self.next_session
        self.next_session += 1
        self.apply(RouterConnected(RouterId(router), self.sessions[router]))
        for asked in list(self.asked.values()):
            if asked.request.router_id == router and asked.state == "waiting":
                self.apply(Enqueued(self.sessions[router], asked.request))

    @rule(router=st.sampled_from(ROUTERS), grants_lost=st.booleans())
    def router_disconnects(self, router: str, grants_lost: bool) -> None:
        if self.sessions[router]:
            self.apply(RouterDisconnected(RouterId(router), self.sessions[router]))
            self.sessions[router] = 0
        for asked in self.asked.values():
            if grants_lost and asked.request.router_id == router and asked.state == "granted":
                asked.state = "waiting"

    # ---- workers

    @rule(name=st.sampled_from(["w0", "w1", "w2"]))
    def worker_up(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and not worker.up:
            worker.up = True
            worker.generation += 1
            self.apply(WorkerJoined(WorkerId(name), worker.address, "cpu", 4096))

    @rule(name=st.sampled_from(["w0", "w1", "w2"]))
    def worker_dies(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.up:
            return
        worker.up = worker.connected = worker.dirty = False
        worker.running, worker.flows, worker.new, worker.gone = {}, {}, [], []
        worker.held, worker.reported = {}, {}
        worker.ordered, worker.owner = None, TO_EVERYBODY
        for asked in self.asked.values():
            if asked.worker == name and asked.state in ("running", "ended"):
                asked.state = "ended"
        self.apply(WorkerLeft(WorkerId(name)))

    @rule(
        name=st.sampled_from(["w0", "w1", "w2"]),
        owner=st.none() | st.builds(Owner, st.sampled_from(["u0", "u1"]), st.sampled_from(["t0", "t1"])),
    )
    def is_dedicated(self, name: str, owner: Owner | None) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.up:
            self.apply(WorkerDedicated(WorkerId(name), owner))

    @rule(name=st.sampled_from(["w0", "w1", "w2"]), fails=st.sampled_from([False, False, True]))
    def obeys(self, name: str, fails: bool) -> None:
        """An order is heard, and done once nothing runs there."""
        worker = self.workers.get(name)
        if worker is None or not worker.up or worker.owner == (worker.ordered, True, ""):
            return
        is_there = not worker.running and not worker.owner.is_ready
        worker.owner = ToldOwner(worker.ordered, is_there)
        if is_there and fails and worker.ordered is not None:
            worker.owner = ToldOwner(None, True, "it does not fit")
        worker.dirty = True

    @rule(name=st.sampled_from(["w0", "w1", "w2"]))
    def control_connects(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.up:
            worker.connected = True
            self.send_report(worker, snapshot=True)

    @rule(name=st.sampled_from(["w0", "w1", "w2"]))
    def control_breaks(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.connected:
            worker.connected = False
            self.apply(WorkerDisconnected(WorkerId(name)))

    @rule(name=st.sampled_from(["w0", "w1", "w2"]))
    def reports(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.connected:
            self.send_report(worker)

    # ---- the rest

    @rule(tenant=st.sampled_from(["t0", "t1"]), weight=st.none() | st.integers(1, 20))
    def policy(self, tenant: str, weight: int | None) -> None:
        classes = {qos_class: ClassPolicy(weight or 1) for qos_class in QosClass}
        policy = TenantPolicy(TenantId(tenant), classes) if weight else None
        self.apply(PolicyChanged(TenantId(tenant), policy))

    def next_moment(self) -> float:
        """When something happens by itself, but not before the time between reports has passed."""
        if any(worker.connected and worker.dirty for worker in self.workers.values()):
            return self.now + REPORT_DELAY_S
        moments = [a.granted_at + GRANT_HELD_S for a in self.asked.values() if a.state == "granted"]
        wakeup = self.core.next_wakeup()
        if wakeup is not None:
            moments.append(wakeup)
        return max(self.now + REPORT_DELAY_S, min(moments, default=math.inf))

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.3, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        """In steps, so that workers report as often as they promise; routers do not sit on a grant for long."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.next_moment())
            for asked in self.asked.values():
                if asked.state == "granted" and self.now >= asked.granted_at + GRANT_HELD_S:
                    asked.state = "done"
                    self.close(asked, reached=False)
            for worker in self.workers.values():
                if worker.connected and worker.dirty:
                    self.send_report(worker)
            wakeup = self.core.next_wakeup()
            if wakeup is not None and wakeup <= self.now:
                self.apply(Tick())

    @invariant()
    def books_agree(self) -> None:
        self.core.check_invariants()

    @invariant()
    def no_room_is_wasted(self) -> None:
        assert self.core._dispatch.next_pick(self.now) is None
        assert self.core.is_restoring or self.core._dispatch.next_own(self.now) is None

    def teardown(self) -> None:
        """Everything heals: then every request ends and nothing is left."""
        for name in self.workers:
            self.worker_up(name)
            self.control_connects(name)
            self.is_dedicated(name, None)
        for router in ROUTERS:
            if not self.sessions[router]:
                self.router_connects(router)
        for _ in range(400):
            for asked in list(self.asked.values()):
                if asked.state == "granted" and asked.address != self.workers[asked.worker].address:
                    asked.state = "done"
                    self.close(asked, reached=False)
                elif asked.state == "granted":
                    asked.state = "running"
                    worker = self.workers[asked.worker]
                    worker.running[asked.request.request_id] = asked.request.sequences
                    flow = asked.request.flow
                    worker.new.append(StartedRequest(asked.request.request_id, flow, asked.request.sequences))
                    worker.dirty = True
                elif asked.state == "running":
                    self.end_on_worker(asked, 10)
                    asked.state = "ended"
                elif asked.state == "ended":
                    asked.state = "done"
                    self.close(asked, reached=True)
            for name in self.workers:
                self.obeys(name, fails=False)
            self.time_passes(0.1)
            if all(a.state == "done" for a in self.asked.values()) and not self.core.num_granted:
                break
        self.time_passes(12.0)
        self.core.check_invariants()
        left = [a for a in self.asked.values() if a.state != "done"]
        assert not left, left
        assert self.core.num_queued == self.core.num_granted == 0
        assert self.core._queue.num_flows == 0
        assert len(self.core._tickets) == self.core._tickets.num_returned == 0
        assert self.core.next_wakeup() is None or self.core._dispatch.unreached or self.workers


TestWorld = pytest.mark.long(World.TestCase)
TestWorld.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
