"""Overload control at the scheduler's leader: what it measures, and what follows for requests. Pure.

Owns the level controllers of one term (manylora_shared/overload.py), the book of queued requests by flow in which
waiting is measured, the tenants' demand and the counts of what was given up. It stands between the quotas and the core:
an event passes here on its way in, and the core's commands on their way out. It does four things:

* refuses an Enqueued whose class and place the level excludes (routers do the same earlier, by the view that they were
  told last);
* every TICK_S, while anything is queued or a level is above 0: measures, moves the levels, and tells all routers what
  changed;
* takes out of the queue what the new levels exclude: batch before standard before interactive, in a class the furthest
  above its share first;
* caps the output of batch requests that are granted while the level says so.

What is measured is how many requests are in the queue for longer than their class's target: of those that were granted
since the last tick, and of the oldest of each flow that still waits. Flows whose tenant is within its share move the
cluster's level, those of another tenant that tenant's own. While no worker takes requests nobody's waiting counts: that
is an outage, and giving up other requests would not end it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from manylora_shared.errors import Code
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.overload import (
    ADMISSION,
    NO_SAMPLE,
    STACK,
    WARNING_PART,
    LevelController,
    OverloadView,
    Sample,
    TenantView,
    class_of,
    kept_part,
    place_of,
    refusal_message,
    retry_after_s,
    rung_of,
)

from manylora_scheduler.core import Core
from manylora_scheduler.demand import Demand
from manylora_scheduler.events import (
    Command,
    Dropped,
    Enqueued,
    Event,
    PolicyChanged,
    RouterConnected,
    RoutersRefused,
    SendGrant,
    SendOverload,
    SendRefusal,
    Shed,
    Tick,
    WorkerDisconnected,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.neighbours import FlowWait, Neighbours, Noisy
from manylora_scheduler.request import FlowKey, QueuedRequest
from manylora_scheduler.timers import earlier

TICK_S = 0.1
MAX_LOOKED_AT = 512
"""Flows that a tick looks through; of more, all in turn, over several ticks. Those that it sees stand for the rest."""
MAX_WAITS = 1_024
"""Flows whose waiting is compared in a look for noisy neighbours; of more a sample."""
LOOK_S = 1.0
"""Between two looks for noisy neighbours."""
MAX_STEP_S = 1.0
"""A tick never counts for longer than this."""
WITHIN_SHARE = 1.25
"""Demand in shares up to which a tenant's waiting is the cluster's matter: what it asks for fluctuates."""
MAX_LISTED = 256
"""Tenants in a view, those with levels of their own first, then those furthest above their share; and tenants with
levels of their own. Where more than these are above their share no one of them is the cause, so the others' waiting is
the cluster's."""
MAX_SHED_PER_TICK = 100
PRECEDENCE = {QosClass.INTERACTIVE: 64, QosClass.STANDARD: 16, QosClass.BATCH: 1}
"""By what weights are multiplied while anything is given up."""
_MAX_SHARES = 1024.0
_MIN_TARGET_S = 1e-3
_COMPACT_SLACK = 64
_STEPS_PER_SHARE = 64
"""Demand is told in such parts of a share, so that it does not change with every request."""
_NOBODY = TenantId("")
"""Is in no view: stands for all that are not."""
_INDEX = {qos_class: index for index, qos_class in enumerate(STACK)}
_Samples = dict[QosClass, Sample]
_SHED_ORDER = (QosClass.BATCH, QosClass.STANDARD, QosClass.INTERACTIVE)


@dataclass(frozen=True)
class OverloadTargets:
    """Queueing time that is aimed at, in seconds. A batch request's target is half of the time its caller gives it."""

    interactive_s: float = 0.2
    standard_s: float = 2.0


@dataclass(slots=True)
class ClassCounts:
    refused_by_routers: int = 0
    refused: int = 0
    shed: int = 0
    capped: int = 0

    def by_stage(self) -> dict[str, int]:
        """By the names that metrics have for it."""
        return {
            "router": self.refused_by_routers,
            "admission": self.refused,
            "queue": self.shed,
            "output": self.capped,
        }


@dataclass(frozen=True)
class OverloadState:
    """For a status."""

    view: OverloadView
    late_parts: Mapping[QosClass, float | None]
    """Of tenants within their share: the part of requests that waited longer than the target; None: nobody waited."""
    targets: OverloadTargets
    counts: Mapping[QosClass, ClassCounts]
    demand: Mapping[TenantId, float]
    """In shares, of the view's tenants."""
    noisy: tuple[Noisy, ...]


@dataclass(slots=True)
class _Waiting:
    router_id: RouterId
    since: float
    cost: float
    place: float
    target_s: float | None
    """None: it may wait as long as it takes."""


@dataclass(slots=True)
class _FlowBook:
    queued: dict[RequestId, _Waiting] = field(default_factory=dict)
    """In the order in which they came."""
    highest: list[tuple[float, RequestId]] = field(default_factory=list)
    """A heap of (negated place, request): the greatest place first. Entries of requests that left linger."""
    count: float = 0.0
    """Requests with a target that were granted since the last tick; `warned` and `late` as in Sample."""
    warned: float = 0.0
    late: float = 0.0

    def queue(self, request_id: RequestId, waiting: _Waiting) -> None:
        self.queued[request_id] = waiting
        heapq.heappush(self.highest, (-waiting.place, request_id))
        if len(self.highest) > 2 * len(self.queued) + _COMPACT_SLACK:
            self.highest = [(-w.place, r) for r, w in self.queued.items()]
            heapq.heapify(self.highest)

    def from_place(self, limit: float, count: int) -> list[RequestId]:
        """The queued requests with a place of `limit` or more, so many at most, the greatest place first. They are to
        leave the queue: they are not found again."""
        found: list[RequestId] = []
        while self.highest and -self.highest[0][0] >= limit and len(found) < count:
            place, request_id = heapq.heappop(self.highest)
            waiting = self.queued.get(request_id)
            if waiting is not None and waiting.place == -place:
                found.append(request_id)
        return found

    def add(self, wait_s: float, target_s: float, stands_for: float = 1.0, warning_part: float = WARNING_PART) -> None:
        self.count += stands_for
        self.warned += stands_for * (wait_s > warning_part * target_s)
        self.late += stands_for * (wait_s > target_s)


class OverloadGate:
    """The core behind overload control: the same seam, `apply` and `next_wakeup`."""

    def __init__(self, core: Core, targets: OverloadTargets | None = None, *, enabled: bool = True) -> None:
        """
        Args:
            core: of this term.
            targets: see OverloadTargets.
            enabled: whether anything is given up. Waiting, demand and noisy neighbours are measured either way.
        """
        self._core = core
        self._targets = targets or OverloadTargets()
        self._enabled = enabled
        self._demand = Demand(core.weight_of)
        self._neighbours = Neighbours()
        self._flows: dict[FlowKey, _FlowBook] = {}
        self._granted: dict[FlowKey, None] = {}
        """Flows of which something was granted since the last tick."""
        self._round: list[FlowKey] = []
        """Flows that are still to be looked through, from the end."""
        self._ready: dict[WorkerId, dict[FlowKey, float]] = {}
        """Flows that have sequences on a worker which wait for a slot there, and since when they have had some."""
        self._offset = 0
        """Where the next sample of those begins."""
        self._longest: dict[QosClass, FlowKey] = {}
        """Of each class the flow with most that is queued, as far as it was looked through."""
        self._num_queued = 0
        self._cluster = LevelController()
        self._own: dict[TenantId, LevelController] = {}
        self._view = OverloadView()
        self._counts = {qos_class: ClassCounts() for qos_class in QosClass}
        self._noisy: tuple[Noisy, ...] = ()
        self._ticked_at = 0.0
        self._tick_at: float | None = None
        self._looked_at = 0.0
        self._is_used = False
        """Something was granted since the last tick."""

    @property
    def view(self) -> OverloadView:
        return self._view

    def apply(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Enqueued():
                refusal = self._on_enqueued(event, now)
                if refusal is not None:
                    commands.append(refusal)
                    event = Tick()
            case RoutersRefused():
                for flow, requests in event.flows:
                    self._demand.was_refused(flow, requests, now)
                    self._counts[flow.qos_class].refused_by_routers += requests
                event = Tick()
            case WorkerReported():
                self._note_ready(event, now)
                if event.report.tenants or event.report.snapshot:
                    self._neighbours.memory(event.worker_id, event.report, now)
            case WorkerLeft():
                self._neighbours.worker_left(event.worker_id)
                self._ready.pop(event.worker_id, None)
            case WorkerDisconnected():
                self._ready.pop(event.worker_id, None)
            case PolicyChanged(policy=None):
                self._own.pop(event.tenant_id, None)
        commands += self._seen(self._core.apply(event, now), now)
        if isinstance(event, PolicyChanged):
            self._demand.reweigh(event.tenant_id)
        if isinstance(event, Enqueued) and not self._core.is_queued(event.request.request_id):
            self._leave(event.request)  # the core did not take it: its router's stream is another by now
        if isinstance(event, RouterConnected) and not self._view.is_quiet:
            commands.append(SendOverload(self._view, event.router_id))
        if self._tick_at is not None and now >= self._tick_at:
            commands += self._tick(now)
        elif self._tick_at is None and (self._num_queued or self._is_used):
            self._ticked_at, self._tick_at = now, now + TICK_S
        return commands

    def next_wakeup(self) -> float | None:
        return earlier(self._core.next_wakeup(), self._tick_at)

    def state(self) -> OverloadState:
        demand = {tenant_id: self._demand.tops(tenant_id)[-1] for tenant_id in self._view.tenants}
        late = {qos_class: self._cluster.late_part(qos_class) for qos_class in QosClass}
        return OverloadState(self._view, late, self._targets, self._counts, demand, self._noisy)

    def check_invariants(self) -> None:
        assert self._num_queued == sum(len(book.queued) for book in self._flows.values())
        assert self._num_queued == self._core.num_queued
        assert all(self._core.is_queued(request_id) for book in self._flows.values() for request_id in book.queued)

    # ---- requests

    def _on_enqueued(self, event: Enqueued, now: float) -> SendRefusal | None:
        request, flow = event.request, event.request.flow
        if self._core.is_queued(request.request_id):
            return None
        cost = float(self._core.expected_cost(request))
        if not self._core.is_known(request.request_id):  # else it is another attempt, or a repetition: it was admitted
            self._demand.came(flow, cost, now)
            if not self._view.admits(flow.tenant_id, flow.qos_class, request.request_id):
                self._counts[flow.qos_class].refused += 1
                message, hint_s = self._why_refused(flow, request.request_id)
                return SendRefusal(request, event.session, Code.RESOURCE_EXHAUSTED, message, hint_s)
        waiting = _Waiting(request.router_id, now, cost, place_of(request.request_id), self._target_s(request, now))
        self._flows.setdefault(flow, _FlowBook()).queue(request.request_id, waiting)
        self._num_queued += 1
        return None

    def _note_ready(self, event: WorkerReported, now: float) -> None:
        if event.report.snapshot:
            self._ready.pop(event.worker_id, None)
        for flow, load in event.report.loads.items():
            if load.ready:
                self._ready.setdefault(event.worker_id, {}).setdefault(flow, now)
            elif event.worker_id in self._ready:
                self._ready[event.worker_id].pop(flow, None)

    def _target_s(self, request: QueuedRequest, now: float) -> float | None:
        target_s = self._class_target_s(request.flow.qos_class)
        if target_s is None and request.deadline is not None:
            return max(_MIN_TARGET_S, (request.deadline - now) / 2)
        return target_s

    def _class_target_s(self, qos_class: QosClass) -> float | None:
        """None: it is half of what each request's caller gives it."""
        match qos_class:
            case QosClass.INTERACTIVE:
                return self._targets.interactive_s
            case QosClass.STANDARD:
                return self._targets.standard_s
            case QosClass.BATCH:
                return None

    def _seen(self, commands: list[Command], now: float) -> list[Command]:
        """Notes what the core did with requests; grants get their caps."""
        for command in commands:
            if isinstance(command, SendGrant):
                if not command.repeated:
                    self._on_granted(command, now)
            elif isinstance(command, SendRefusal | Dropped):
                self._leave(command.request)
        return commands

    def _on_granted(self, grant: SendGrant, now: float) -> None:
        request, flow = grant.request, grant.request.flow
        self._is_used = True
        waiting = self._leave(request)
        if waiting is not None:
            self._demand.was_granted(waiting.cost, now)
            if waiting.target_s is not None:
                self._flows[flow].add(now - waiting.since, waiting.target_s)
                self._granted[flow] = None
        if request.adapter_uid is not None:
            self._neighbours.granted(flow.tenant_id, request.adapter_uid, grant.adapter_resident, now)
        cap = self._view.output_cap(flow.tenant_id, flow.qos_class)
        if cap is not None and cap < request.max_new_tokens // request.sequences:
            grant.max_output_tokens, grant.overload_level = cap, self._view.level_of(flow.tenant_id)
            self._counts[flow.qos_class].capped += 1

    def _leave(self, request: QueuedRequest) -> _Waiting | None:
        """Takes a request out of the book, if that is where it is."""
        book = self._flows.get(request.flow)
        waiting = book.queued.get(request.request_id) if book is not None else None
        if book is None or waiting is None or waiting.router_id != request.router_id:
            return None
        del book.queued[request.request_id]
        self._num_queued -= 1
        return waiting

    def _why_refused(self, flow: FlowKey, request_id: RequestId) -> tuple[str, float]:
        level = self._view.level_of(flow.tenant_id)
        return refusal_message(level, flow.qos_class), retry_after_s(level, request_id)

    # ---- ticks

    def _tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        self._is_used = False
        dt_s, self._ticked_at = min(now - self._ticked_at, MAX_STEP_S), now
        self._demand.weigh(now)
        looked_at = self._next_flows()
        cluster, own = self._measure(looked_at, now)
        if self._enabled:
            if not self._core.is_serving:
                cluster, own = {}, {}
            self._move(cluster, own, dt_s)
            view = self._make_view()
            self._core.set_precedence(None if view.is_quiet else self)
            if view != self._view:
                self._view = view
                commands.append(SendOverload(view))
            commands += self._shed(looked_at, now)
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._noisy = self._neighbours.find(self._waits(now), self._demand.tops, now)
        if self._num_queued or self._is_used or self._noisy or not self._cluster.is_idle or self._own:
            self._tick_at = now + TICK_S
        else:
            self._tick_at = None
        return commands

    def factor(self, flow: FlowKey) -> int:
        """See Precedence. What is more important does not wait for what is given up; that is for tenants within their
        share: who floods a class gets no more than its weight for it."""
        return PRECEDENCE[flow.qos_class] if self._goes_before(flow) else 1

    def goes_beyond(self, flow: FlowKey) -> bool:
        """See Precedence. Others wait in the queue, where their waiting is seen, and not in the workers, where it makes
        all wait."""
        return flow.qos_class is QosClass.INTERACTIVE and self._goes_before(flow)

    def _goes_before(self, flow: FlowKey) -> bool:
        """Nothing of the flow is given up, and its tenant is within its share."""
        tenant_id, qos_class = flow
        return (
            kept_part(self._view.level_of(tenant_id), ADMISSION[qos_class]) == 1.0
            and self._demand.tops(tenant_id)[_INDEX[qos_class]] <= WITHIN_SHARE
        )

    def _next_flows(self) -> list[FlowKey]:
        """The flows that this tick looks through. Those that have nothing left are forgotten on the way."""
        if not self._round:
            self._round = list(self._flows)
        some = self._round[-MAX_LOOKED_AT:]
        del self._round[-MAX_LOOKED_AT:]
        found: list[FlowKey] = []
        for flow in some:
            book = self._flows.get(flow)
            if book is None:
                continue
            if book.queued:
                found.append(flow)
                longest = self._flows.get(self._longest.get(flow.qos_class, flow))
                if longest is None or len(book.queued) >= len(longest.queued):
                    self._longest[flow.qos_class] = flow
            elif not book.count:
                del self._flows[flow]
        return found

    def _measure(self, looked_at: list[FlowKey], now: float) -> tuple[_Samples, dict[TenantId, _Samples]]:
        """What was waited since the last tick, as the cluster's matter and as that of tenants above their share: by
        those that were granted, and by the oldest of each flow that still waits. Then flows begin anew."""
        cluster: _Samples = {}
        own: dict[TenantId, _Samples] = {}
        stands_for = max(1.0, len(self._flows) / MAX_LOOKED_AT)
        for flow in looked_at:
            book = self._flows[flow]
            oldest = next(iter(book.queued.values()))
            if oldest.target_s is not None:
                book.add(now - oldest.since, oldest.target_s, stands_for)
        self._measure_ready(now)
        for flow in {**dict.fromkeys(looked_at), **self._granted}:
            book = self._flows[flow]
            if not book.count:
                continue
            tenant_id, qos_class = flow
            samples: _Samples | None = cluster
            if self._demand.tops(tenant_id)[_INDEX[qos_class]] > WITHIN_SHARE:
                if tenant_id not in self._own and book.warned and len(self._own) < MAX_LISTED:
                    self._own[tenant_id] = LevelController()
                if tenant_id in self._own:
                    samples = own.setdefault(tenant_id, {})
                elif len(self._own) < MAX_LISTED:
                    samples = None
            if samples is not None:
                known = samples.get(qos_class, NO_SAMPLE)
                samples[qos_class] = Sample(
                    known.count + book.count, known.warned + book.warned, known.late + book.late
                )
            book.count = book.warned = book.late = 0.0
            if not book.queued:
                del self._flows[flow]
        self._granted.clear()
        return cluster, own

    def _measure_ready(self, now: float) -> None:
        """Sequences that were granted beyond the slots and wait for one on their worker have not come out of the queue:
        it is only elsewhere. A flow that takes turns with others there waits for a few steps every now and then, so
        nothing less than the target counts."""
        number = sum(map(len, self._ready.values()))
        stride = max(1, number // MAX_LOOKED_AT)
        waiting = (item for flows in self._ready.values() for item in flows.items())
        for flow, since in islice(waiting, self._offset % stride, None, stride):
            target_s = self._class_target_s(flow.qos_class)
            if target_s is not None:
                self._flows.setdefault(flow, _FlowBook()).add(now - since, target_s, stride, 1.0)
                self._granted[flow] = None
        self._offset += 1

    def _waits(self, now: float) -> list[FlowWait]:
        """Of each class the flow with most that is queued, and a sample of all."""
        stride = max(1, len(self._flows) // MAX_WAITS)
        found: list[FlowWait] = []
        stand_for = dict.fromkeys(islice(self._flows, 0, None, stride), stride)
        for flow, flows in {**stand_for, **dict.fromkeys(self._longest.values(), 1)}.items():
            book = self._flows.get(flow)
            if book is not None and book.queued:
                oldest_s = now - next(iter(book.queued.values())).since
                found.append(FlowWait(flow, len(book.queued), oldest_s, flows))
        return found

    def _move(self, cluster: _Samples, own: dict[TenantId, _Samples], dt_s: float) -> None:
        free_part = self._core.free_part if not self._num_queued else 0.0
        self._cluster.step(cluster, dt_s, free_part=free_part)
        for tenant_id, controller in list(self._own.items()):
            controller.step(own.get(tenant_id, {}), dt_s, free_part=free_part)
            if controller.is_idle:
                del self._own[tenant_id]

    def _make_view(self) -> OverloadView:
        """Tenants with levels of their own are in it, then those furthest above their share, up to a bound."""
        if not self._cluster.level and not any(controller.level for controller in self._own.values()):
            return OverloadView()
        listed = dict.fromkeys(
            sorted(self._own, key=lambda t: (-self._own[t].level, -self._demand.tops(t)[-1], t))
        ) | dict.fromkeys(self._demand.furthest(MAX_LISTED))
        tenants = {
            tenant_id: self._tenant_view(tenant_id, self._own[tenant_id].level if tenant_id in self._own else 0)
            for tenant_id in islice(listed, MAX_LISTED)
        }
        limit = math.inf
        qos_class = class_of(self._cluster.level)
        if qos_class is not None:
            limit = self._demand.limit(qos_class, kept_part(self._cluster.level, rung_of(self._cluster.level)))
        return OverloadView(self._cluster.level, _rounded(limit), tenants)

    def _tenant_view(self, tenant_id: TenantId, level: int) -> TenantView:
        interactive, standard, batch = self._demand.tops(tenant_id)
        tops = _rounded(interactive), _rounded(standard), _rounded(batch)
        limit = math.inf
        qos_class = class_of(level)
        if qos_class is not None:
            index = STACK.index(qos_class)
            below = tops[index - 1] if index else 0.0
            limit = below + kept_part(level, rung_of(level)) * (tops[index] - below)
        return TenantView(tops, level, limit)

    def _shed(self, looked_at: list[FlowKey], now: float) -> list[Command]:
        """Takes out of the queue what the view excludes: of the tenants in it, and of the other flows that this tick
        looks through. The most at once is bounded, the rest is a later tick's."""
        if self._view.is_quiet:
            return []
        room = MAX_SHED_PER_TICK
        commands: list[Command] = []
        for qos_class in _SHED_ORDER:
            flows = [FlowKey(tenant_id, qos_class) for tenant_id in self._view.tenants]
            if self._view.place_limit(_NOBODY, qos_class) < 1.0:
                flows += [f for f in looked_at if f.qos_class is qos_class and f.tenant_id not in self._view.tenants]
            excluded: list[tuple[float, FlowKey, RequestId]] = []
            for flow in flows:
                book = self._flows.get(flow)
                if book is None or not book.queued:
                    continue
                limit = self._view.place_limit(flow.tenant_id, qos_class)
                excluded += [
                    (-self._view.height_of(flow.tenant_id, qos_class, request_id), flow, request_id)
                    for request_id in (book.from_place(limit, room) if limit < 1.0 else ())
                ]
            excluded.sort()
            for _, flow, request_id in excluded[room:]:
                self._flows[flow].queue(request_id, self._flows[flow].queued[request_id])
            shed = [(request_id, *self._why_refused(flow, request_id)) for _, flow, request_id in excluded[:room]]
            room -= len(shed)
            if shed:
                self._counts[qos_class].shed += len(shed)
                commands += self._seen(self._core.apply(Shed(tuple(shed)), now), now)
        return commands


def _rounded(shares: float) -> float:
    if math.isinf(shares):
        return shares
    return min(round(shares * _STEPS_PER_SHARE) / _STEPS_PER_SHARE, _MAX_SHARES)
