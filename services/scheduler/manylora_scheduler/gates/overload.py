"""Overload control at the scheduler's leader, between the quotas and the core (docs/decisions/0018). Pure.

Owns one term's level controllers, the book of waiting, the tenants' demand and the counts of what was given up. Each
TICK_S moves the levels and takes out of the queue what they exclude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from manylora_shared.composition import uids_of
from manylora_shared.errors import Code
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST
from manylora_shared.ids import DEFAULT_POOL, QosClass, RequestId, TenantId, WorkerId
from manylora_shared.tenancy.overload import (
    ADMISSION,
    NO_SAMPLE,
    STACK_INDEX,
    LevelController,
    OverloadView,
    Sample,
    TenantView,
    class_of,
    kept_part,
    retry_after_s,
    rung_of,
)

from manylora_scheduler.core.core import Core
from manylora_scheduler.core.events import (
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
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.core.timers import earlier
from manylora_scheduler.gates.demand import Demand
from manylora_scheduler.gates.neighbours import HURTING_KINDS, Neighbours, Noisy
from manylora_scheduler.gates.queue_delay import OverloadTargets, QueueDelays, Waiting
from manylora_scheduler.gates.signals import FULL, Seen

TICK_S = 0.1
LOOK_S = 1.0
MAX_STEP_S = 1.0  # a tick never counts for longer than this
WITHIN_SHARE = 1.25  # demand in shares up to which a tenant's waiting is the cluster's matter
# Tenants in a view, or with levels of their own. Where more are above their share, none of them is the cause.
MAX_LISTED = 256
MAX_SHED_PER_TICK = 100
# by what weights are multiplied while anything is given up
PRECEDENCE = {QosClass.INTERACTIVE: 64, QosClass.STANDARD: 16, QosClass.BATCH: 1}
_MAX_SHARES = 1024.0
_STEPS_PER_SHARE = 64  # demand is told in such parts, so that it does not change with every request
_NOBODY = TenantId("")  # in no view: stands for all that are not
_Samples = dict[QosClass, Sample]
_SHED_ORDER = (QosClass.BATCH, QosClass.STANDARD, QosClass.INTERACTIVE)


@dataclass(slots=True)
class ClassCounts:
    refused_by_routers: int = 0
    refused: int = 0
    shed: int = 0
    capped: int = 0

    def by_stage(self) -> dict[str, int]:
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
    # of tenants within their share, those that waited longer than the target; None: nobody waited
    late_parts: Mapping[QosClass, float | None]
    targets: OverloadTargets
    counts: Mapping[QosClass, ClassCounts]
    demand: Mapping[TenantId, float]  # in shares, of the view's tenants
    noisy: tuple[Noisy, ...]


class OverloadGate:
    """The core behind overload control: the same seam, `apply` and `next_wakeup`."""

    def __init__(
        self, core: Core, targets: OverloadTargets | None = None, *, enabled: bool = True, pool: str = DEFAULT_POOL
    ) -> None:
        """`enabled`: whether anything is given up; it is measured either way."""
        self.pool = pool
        self.core = core
        self._core_view = core.view
        self._targets = targets or OverloadTargets()
        self._enabled = enabled
        self._demand = Demand(self._core_view.weight_of)
        self._neighbours = Neighbours()
        self._book = QueueDelays(self._targets)
        self._cluster = LevelController()
        self._own: dict[TenantId, LevelController] = {}
        self._view = OverloadView()
        self._counts = {qos_class: ClassCounts() for qos_class in QosClass}
        self._noisy: tuple[Noisy, ...] = ()
        self._ticked_at = 0.0
        self._tick_at: float | None = None
        self._looked_at = 0.0
        self._is_used = False  # something was granted since the last tick

    @property
    def view(self) -> OverloadView:
        return self._view

    def apply(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        served: dict[FlowKey, int] = {}
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
                served = {flow: self._core_view.served_cost(flow) for flow in event.report.flows}
                self._book.note_ready(event.worker_id, event.report, now)
                if event.report.tenants or event.report.snapshot:
                    self._neighbours.memory(event.worker_id, event.report, now)
            case WorkerLeft():
                self._neighbours.worker_left(event.worker_id)
                self._book.worker_gone(event.worker_id)
            case WorkerDisconnected():
                self._book.worker_gone(event.worker_id)
            case PolicyChanged(policy=None):
                self._own.pop(event.tenant_id, None)
        commands += self._seen(self.core.apply(event, now), now)
        for flow, before in served.items():
            done = self._core_view.served_cost(flow) - before
            if done > 0:  # a record that was forgotten begins anew
                self._demand.was_done(flow, float(done), now)
        if isinstance(event, PolicyChanged):
            self._demand.reweigh(event.tenant_id, now)
        if isinstance(event, Enqueued) and not self._core_view.is_queued(event.request.request_id):
            self._leave(event.request, now)  # the core did not take it: its router's stream is another by now
        if isinstance(event, RouterConnected) and not self._view.is_quiet:
            commands.append(SendOverload(self._view, event.router_id, self.pool))
        if self._tick_at is not None and now >= self._tick_at:
            commands += self._tick(now)
        elif self._tick_at is None and (self._book.num_queued or self._is_used):
            self._ticked_at, self._tick_at = now, now + TICK_S
        return commands

    def next_wakeup(self) -> float | None:
        return earlier(self.core.next_wakeup(), self._tick_at)

    def state(self) -> OverloadState:
        demand = {tenant_id: self._demand.tops(tenant_id)[-1] for tenant_id in self._view.tenants}
        late = {qos_class: self._cluster.late_part(qos_class) for qos_class in QosClass}
        return OverloadState(self._view, late, self._targets, self._counts, demand, self._noisy)

    def seen(self, now: float) -> Seen:
        wanted, done = self._demand.rates(now)
        return Seen(
            workers=self._core_view.num_serving,
            dedicated=self._core_view.num_dedicated,
            wanted_tps=wanted / OUTPUT_TOKEN_COST,
            done_tps=done / OUTPUT_TOKEN_COST,
            queued=self._book.num_queued,
            queue_s=self._book.longest_s(now),
            slots_part=1.0 - self._core_view.free_part,
            kv_part=self._core_view.kv_part,
            adapter_loads_part=self._neighbours.loads_part(now),
        )

    def kv_blocks(self, worker_id: WorkerId) -> Mapping[TenantId, int]:
        return self._neighbours.kv_blocks(worker_id)

    def check_invariants(self) -> None:
        assert self._book.num_queued == sum(len(book.queued) for book in self._book.flows.values())
        assert self._book.num_queued == self.core.num_queued
        queued = [request_id for book in self._book.flows.values() for request_id in book.queued]
        assert all(self._core_view.is_queued(request_id) for request_id in queued)

    # ---- requests

    def _on_enqueued(self, event: Enqueued, now: float) -> SendRefusal | None:
        request, flow = event.request, event.request.flow
        if self._core_view.is_queued(request.request_id):
            return None
        cost = float(self._core_view.expected_cost(request))
        # One that is resumed, or known, was admitted and comes again.
        is_new = not (request.is_resumed or self._core_view.is_known(request.request_id))
        self._demand.came(flow, cost, now)
        if is_new and not self._view.admits(flow.tenant_id, flow.qos_class, request.request_id):
            self._demand.left(flow, cost, now, is_granted=False)
            self._counts[flow.qos_class].refused += 1
            message, hint_s = self._why_refused(flow, request.request_id)
            return SendRefusal(request, event.session, Code.RESOURCE_EXHAUSTED, message, hint_s)
        self._book.queue(request, cost, now)
        return None

    def _leave(self, request: QueuedRequest, now: float, *, is_granted: bool = False) -> Waiting | None:
        waiting = self._book.leave(request)
        if waiting is not None:
            self._demand.left(request.flow, waiting.cost, now, is_granted=is_granted)
        return waiting

    def _seen(self, commands: list[Command], now: float) -> list[Command]:
        # Grants get their caps.
        for command in commands:
            if isinstance(command, SendGrant):
                if not command.repeated:
                    self._on_granted(command, now)
            elif isinstance(command, SendRefusal | Dropped):
                self._leave(command.request, now)
        return commands

    def _on_granted(self, grant: SendGrant, now: float) -> None:
        request, flow = grant.request, grant.request.flow
        self._is_used = True
        waiting = self._leave(request, now, is_granted=True)
        if waiting is not None:
            self._book.granted(flow, waiting, now)
        if request.adapter_uid is not None:
            for uid in uids_of(request.adapter_uid):
                self._neighbours.granted(flow.tenant_id, uid, grant.adapter_resident, now)
        cap = self._view.output_cap(flow.tenant_id, flow.qos_class, request.request_id)
        if cap is not None and not request.is_resumed and cap < request.max_new_tokens // request.sequences:
            grant.max_output_tokens, grant.overload_level = cap, self._view.level_of(*flow)
            self._counts[flow.qos_class].capped += 1

    def _why_refused(self, flow: FlowKey, request_id: RequestId) -> tuple[str, float]:
        level = self._view.level_of(*flow)
        return self._view.why_refused(flow.tenant_id, flow.qos_class), retry_after_s(level, request_id)

    # ---- ticks

    def _tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        self._is_used = False
        dt_s, self._ticked_at = min(now - self._ticked_at, MAX_STEP_S), now
        self._demand.weigh(now)
        looked_at = self._book.next_flows()
        cluster, own = self._attribute(self._book.measure(looked_at, now))
        if self._enabled:
            if not self._core_view.is_serving:
                cluster, own = {}, {}
            else:
                self._press(cluster, own)
            self._move(cluster, own, dt_s)
            view = self._make_view()
            self.core.set_precedence(None if view.is_quiet else self)
            if view != self._view:
                self._view = view
                commands.append(SendOverload(view, pool=self.pool))
            commands += self._shed(looked_at, now)
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._noisy = self._neighbours.find(self._book.waits(now), self._demand.tops, now)
            self._noisy = tuple(self._with_level(noisy) for noisy in self._noisy)
        if self._book.num_queued or self._is_used or self._noisy or not self._cluster.is_idle or self._own:
            self._tick_at = now + TICK_S
        else:
            self._tick_at = None
        return commands

    def _with_level(self, noisy: Noisy) -> Noisy:
        own = self._own.get(noisy.tenant_id)
        if own is None or not own.level or noisy.kind not in HURTING_KINDS:
            return noisy
        return replace(noisy, evidence={**noisy.evidence, "own_level": float(own.level)})

    def factor(self, flow: FlowKey) -> int:
        # It is for tenants within their share: who floods a class gets no more than its weight for it.
        return PRECEDENCE[flow.qos_class] if self._goes_before(flow) else 1

    def goes_beyond(self, flow: FlowKey) -> bool:
        # Other flows wait in the queue, where their waiting is seen, and not in the workers, where it makes all wait.
        # Who is within its share would wait there for others' answers to end, and not for a turn.
        return self._goes_before(flow)

    def _goes_before(self, flow: FlowKey) -> bool:
        # Nothing of the flow is given up, and its tenant is within its share.
        tenant_id, qos_class = flow
        return (
            kept_part(self._view.level_of(tenant_id, qos_class), ADMISSION[qos_class]) == 1.0
            and self._demand.tops(tenant_id)[STACK_INDEX[qos_class]] <= WITHIN_SHARE
        )

    def _attribute(self, samples: list[tuple[FlowKey, Sample]]) -> tuple[_Samples, dict[TenantId, _Samples]]:
        """Whose matter the waiting is: the cluster's, or that of tenants above their shares."""
        cluster: _Samples = {}
        own: dict[TenantId, _Samples] = {}
        for (tenant_id, qos_class), sample in samples:
            those: _Samples | None = cluster
            if self._demand.tops(tenant_id)[STACK_INDEX[qos_class]] > WITHIN_SHARE:
                if tenant_id not in self._own and sample.warned and len(self._own) < MAX_LISTED:
                    self._own[tenant_id] = LevelController()
                if tenant_id in self._own:
                    those = own.setdefault(tenant_id, {})
                elif len(self._own) < MAX_LISTED:
                    those = None
            if those is not None:
                _add(those, qos_class, sample)
        return cluster, own

    def _press(self, cluster: _Samples, own: dict[TenantId, _Samples]) -> None:
        """Full KV memory, and who hurts others' memory, count as batch requests that wait too long: so no more than
        batch is given up for them, and of nobody what is within its share.
        """
        if any(cluster[c].count for c in (QosClass.INTERACTIVE, QosClass.STANDARD) if c in cluster):
            late = (self._core_view.kv_part - FULL) / (1.0 - FULL)
            if late > 0.0:
                _add(cluster, QosClass.BATCH, Sample(1.0, 1.0, min(late, 1.0)))
        for tenant_id in dict.fromkeys(noisy.tenant_id for noisy in self._noisy if noisy.kind in HURTING_KINDS):
            if self._demand.tops(tenant_id)[-1] <= WITHIN_SHARE:
                continue
            if tenant_id not in self._own and len(self._own) < MAX_LISTED:
                self._own[tenant_id] = LevelController()
            if tenant_id in self._own:
                _add(own.setdefault(tenant_id, {}), QosClass.BATCH, Sample(1.0, 1.0, 1.0))

    def _move(self, cluster: _Samples, own: dict[TenantId, _Samples], dt_s: float) -> None:
        free_part = self._core_view.free_part if not self._book.num_queued else 0.0
        self._cluster.step(cluster, dt_s, free_part=free_part)
        for tenant_id, controller in list(self._own.items()):
            controller.step(own.get(tenant_id, {}), dt_s, free_part=free_part)
            if controller.is_idle:
                del self._own[tenant_id]

    def _make_view(self) -> OverloadView:
        # Tenants with levels of their own come first, then those furthest above their share.
        if not self._cluster.level and not any(controller.level for controller in self._own.values()):
            return OverloadView()
        furthest = self._demand.furthest(MAX_LISTED + 1)
        is_crowded = len(furthest) > MAX_LISTED and self._demand.tops(furthest[-1])[-1] > 1.0
        listed = dict.fromkeys(
            sorted(self._own, key=lambda t: (-self._own[t].level, -self._demand.tops(t)[-1], t))
        ) | dict.fromkeys(furthest)
        tenants = {
            tenant_id: self._tenant_view(tenant_id, self._own[tenant_id].level if tenant_id in self._own else 0)
            for tenant_id in islice(listed, MAX_LISTED)
        }
        limit = math.inf
        qos_class = class_of(self._cluster.level)
        if qos_class is not None:
            limit = self._demand.limit(qos_class, kept_part(self._cluster.level, rung_of(self._cluster.level)))
        return OverloadView(self._cluster.level, _rounded(limit), tenants, is_crowded)

    def _tenant_view(self, tenant_id: TenantId, level: int) -> TenantView:
        interactive, standard, batch = self._demand.tops(tenant_id)
        tops = _rounded(interactive), _rounded(standard), _rounded(batch)
        limit = math.inf
        qos_class = class_of(level)
        if qos_class is not None:
            index = STACK_INDEX[qos_class]
            below = tops[index - 1] if index else 0.0
            limit = below + kept_part(level, rung_of(level)) * (tops[index] - below)
        return TenantView(tops, level, limit)

    def _shed(self, looked_at: list[FlowKey], now: float) -> list[Command]:
        """Takes out of the queue what the view excludes. The most at once is bounded; the rest is a later tick's."""
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
                book = self._book.flows.get(flow)
                if book is None or not book.queued:
                    continue
                limit = self._view.place_limit(flow.tenant_id, qos_class)
                excluded += [
                    (-self._view.height_of(flow.tenant_id, qos_class, request_id), flow, request_id)
                    for request_id in (book.from_place(limit, room) if limit < 1.0 else ())
                ]
            excluded.sort()
            for _, flow, request_id in excluded[room:]:
                self._book.flows[flow].queue(request_id, self._book.flows[flow].queued[request_id])
            shed = [(request_id, *self._why_refused(flow, request_id)) for _, flow, request_id in excluded[:room]]
            room -= len(shed)
            if shed:
                self._counts[qos_class].shed += len(shed)
                commands += self._seen(self.core.apply(Shed(tuple(shed)), now), now)
        return commands


def _add(samples: _Samples, qos_class: QosClass, sample: Sample) -> None:
    known = samples.get(qos_class, NO_SAMPLE)
    samples[qos_class] = Sample(known.count + sample.count, known.warned + sample.warned, known.late + sample.late)


def _rounded(shares: float) -> float:
    if math.isinf(shares):
        return shares
    return min(round(shares * _STEPS_PER_SHARE) / _STEPS_PER_SHARE, _MAX_SHARES)
