"""The scheduler's one writer for a term: events in, commands out. Pure; `now` comes with each event and never falls.

Owns every queued request and live grant, the fair queue, the fleet, and all timers. It promises:

1. A worker never has more sequences than it takes; only flows that are behind get slots or blocks that are not free.
2. Every enqueued request gets exactly one grant or refusal, unless it is withdrawn or its router goes.
3. No room that is not held stays empty while the first request of a flow could use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, cast

from manylora_shared.composition import uids_of
from manylora_shared.errors import Code
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from manylora_shared.fairness.fair_queue import ArrivalQueue, FairQueue
from manylora_shared.fairness.seam import Pick
from manylora_shared.ids import AdapterUid, QosClass, RequestId, RouterId, TenantId, WorkerId

from manylora_scheduler.core.core_view import CoreView
from manylora_scheduler.core.dispatch import Dispatch
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
    Shed,
    Tick,
    Withdrawn,
    WorkerDedicated,
    WorkerDisconnected,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.flows import AGING_PER_S, Flows, Precedence
from manylora_scheduler.core.placement import in_order
from manylora_scheduler.core.reports import Owner, ToldOwner, WorkerReport
from manylora_scheduler.core.request import (
    CLOSING,
    GRANTED,
    QUEUED,
    RUNNING,
    FlowKey,
    QueuedRequest,
    Ticket,
    need_of,
    rank_of,
    to_us,
    urgent_us_of,
)
from manylora_scheduler.core.succession import ClockSnapshot, Succession
from manylora_scheduler.core.tickets import Tickets
from manylora_scheduler.core.timers import Moments, Timers, earlier
from manylora_scheduler.core.worker_view import WorkerView

GRANT_TIMEOUT_S = 10.0  # then a grant that neither the worker nor the router mentioned is dropped
CLOSING_GRACE_S = 0.2  # a grant that its router has ended keeps its room so long: the worker's report may be late
PREFETCHES_PER_WORKER = 4
PREFETCH_TIMEOUT_S = 10.0
PREFETCH_WORKERS = 8  # workers that may be asked, in the adapter's own order
MAX_RETRY_AFTER_S = 30.0
MAX_DEPARTED = 1024

Order = Literal["fair", "arrival"]  # arrival: first come, first served over all tenants, for comparison


@dataclass(frozen=True)
class CoreLimits:
    max_queued: int = 100_000
    max_queued_per_tenant: int = 20_000
    worker_wait_s: float = 30.0  # how long a request may wait while no worker could run it


class Core:
    def __init__(
        self, limits: CoreLimits | None = None, predecessor: ClockSnapshot | None = None, order: Order = "fair"
    ) -> None:
        self._limits = limits or CoreLimits()
        self._order = order
        kind: type[FairQueue[FlowKey, Ticket]] = FairQueue if order == "fair" else ArrivalQueue
        self._queue = kind(aging_per_s=AGING_PER_S)
        self._fleet = Fleet()
        self._tickets = Tickets()
        self._flows = Flows()
        self._dispatch = Dispatch(self._queue, self._fleet, goes_beyond=order == "fair")
        self.view = CoreView(self._queue, self._fleet, self._tickets, self._flows)
        # What is adopted runs in the queue by its request's id; it is never queued, and never picked.
        self._succession = Succession(cast("FairQueue[FlowKey, Ticket | RequestId]", self._queue), predecessor)
        self._is_restoring = self._queue.is_restoring
        self._moments: Moments[Ticket] = Moments()  # one a ticket that waits for something (`_on_moment`)
        self._timers: Timers[tuple[str, *tuple[object, ...]]] = Timers()
        self._routers: dict[RouterId, int] = {}
        # Addresses of workers that left: one that only lost its lease comes back with its counters.
        self._departed: dict[WorkerId, str] = {}
        self._unserved_since: float | None = 0.0
        self._now = 0.0
        self._out: list[Command] = []

    # ---- the seam

    def apply(self, event: Event, now: float) -> list[Command]:
        """Applies the event and all timers that are due at `now`. Returns what is to be sent, in order."""
        assert now >= self._now
        self._now = now
        if self._is_restoring:
            for at in self._succession.begin(now):
                self._timers.set(("resume", at), at)
        if now >= self._moments.not_before or now >= self._timers.not_before:
            self._run_timers()
        if isinstance(event, Enqueued):  # these three make up a request's life, and asking costs less than matching
            self._on_enqueued(event)
        elif isinstance(event, GrantClosed):
            self._on_grant_closed(event)
        elif isinstance(event, WorkerReported):
            self._on_report(event)
        else:
            self._on_other(event)
        if self._is_restoring:
            self._is_restoring = self._succession.try_resume(now, all_reported=self._fleet.all_connected)
        if self._dispatch.owners and not self._is_restoring:
            while (own := self._dispatch.next_own(now)) is not None:
                self._grant(own)
        while self._fleet.has_room and not self._is_restoring and (pick := self._dispatch.next_pick(now)) is not None:
            self._grant(pick)
        commands = self._out
        if commands:
            self._out = []
            return commands
        return []

    def _on_other(self, event: Event) -> None:
        match event:
            case Withdrawn():
                self._on_withdrawn(event)
            case RouterConnected():
                self._drop_queued_of(event.router_id)
                self._routers[event.router_id] = event.session
            case RouterDisconnected():
                if self._routers.get(event.router_id) == event.session:
                    self._on_router_gone(event.router_id)
            case WorkerJoined():
                self._on_worker_joined(event)
            case WorkerDedicated():
                if (worker := self._fleet.get(event.worker_id)) is not None:
                    worker.told_owner = worker.told_owner._replace(problem="")
                    if event.owner is not None:
                        worker.merge_problem = ""
                    self._dedicate(worker, event.owner)
                    self._out.append(SendDedicate(worker.worker_id, event.owner))
            case WorkerLeft():
                self._on_worker_left(event.worker_id)
            case WorkerDisconnected():
                if (worker := self._fleet.get(event.worker_id)) is not None:
                    worker.disconnect()
                    if self._fleet.update(worker):
                        self._note_serving()
            case PolicyChanged():
                self._on_policy(event)
            case Shed():
                self._on_shed(event)
            case Tick():
                pass

    def next_wakeup(self) -> float | None:
        """When Tick is to be applied at the latest."""
        return earlier(self._moments.next_at(), self._timers.next_at())

    @property
    def is_restoring(self) -> bool:
        return self._is_restoring

    def clock_snapshot(self) -> ClockSnapshot:
        return self._succession.snapshot()

    # ---- events of routers

    def _on_enqueued(self, event: Enqueued) -> None:
        request = event.request
        if self._routers.get(request.router_id) != event.session:
            return
        before = self._tickets.wanted.get(request.request_id)
        if before is not None and not self._comes_anew(before, event):
            return
        refusal = self._refusal_of(request)
        if refusal is not None:
            self._out.append(SendRefusal(request, event.session, *refusal))
            return
        flow, deadline, now = request.flow, request.deadline, self._now
        flows = self._flows
        known = flows.known[flow]
        ticket = self._tickets.enqueue(request, known, event.session, now)
        self._queue.push(
            ticket,
            flow,
            share=known.policy_share if flows.precedence is None else flows.share(flow),
            need=need_of(request),
            rank=rank_of(ticket),
            since_us=to_us(now),
            urgent_us=urgent_us_of(ticket),
        )
        if self._dispatch.owners:
            self._dispatch.await_own(ticket)
        if flow.tenant_id in self._dispatch.apart:
            self._queue.set_apart(flow, is_apart=True)
        wait_s = self._limits.worker_wait_s
        if deadline is not None and deadline < now + wait_s:
            self._moments.set(ticket, deadline)
        else:
            self._moments.set_after(ticket, now, wait_s)
        if request.adapter_uid is not None and not self._fleet.num_open:
            for uid in uids_of(request.adapter_uid):
                self._prefetch(uid, flow.tenant_id)

    def _comes_anew(self, known: Ticket, event: Enqueued) -> bool:
        # Where the answer is no, the request's router is answered here.
        request = event.request
        if known.request.router_id != request.router_id:
            message = f"request id {request.request_id} is in use by another router"
            self._out.append(SendRefusal(request, event.session, Code.ALREADY_EXISTS, message))
        elif known.phase is QUEUED:
            pass  # its answer is to come
        elif known.session != event.session:
            self._repeat_grant(known, event.session)
        else:
            # It was granted on this very stream, so its router has let go of that grant.
            self._return_grant(known)
            return True
        return False

    def _refusal_of(self, request: QueuedRequest) -> tuple[Code, str, float | None] | None:
        if request.deadline is not None and request.deadline <= self._now:
            return Code.DEADLINE_EXCEEDED, "the deadline passed before the request was queued", None
        full = self._what_is_full(request.flow.tenant_id) if not request.is_resumed else ""
        if full:
            return Code.RESOURCE_EXHAUSTED, full, self._retry_after(request.flow)
        fleet = self._fleet
        if not fleet.could_ever_run(request) and fleet.any_serving and fleet.all_connected:
            return Code.FAILED_PRECONDITION, _too_large(request), None
        return None

    def _what_is_full(self, tenant_id: TenantId) -> str:
        tenant_queued = self._tickets.queued_by_tenant.get(tenant_id, 0)
        if tenant_queued >= self._limits.max_queued_per_tenant:
            return f"{tenant_queued} requests of this tenant are queued already"
        if self._queue.num_queued >= self._limits.max_queued:
            return f"{self._queue.num_queued} requests are queued already"
        return ""

    def _retry_after(self, flow: FlowKey) -> float:
        # It is about as long as the flow's last granted request had waited.
        return min(MAX_RETRY_AFTER_S, max(1.0, self._flows.last_wait_s(flow)))

    def _repeat_grant(self, ticket: Ticket, session: int) -> None:
        ticket.session = session
        if ticket.phase is GRANTED:  # its router hears of it only now
            self._moments.set_after(ticket, self._now, GRANT_TIMEOUT_S)
        self._send_grant(ticket, self._worker_of(ticket), repeated=True)

    def _on_withdrawn(self, event: Withdrawn) -> None:
        ticket = self._tickets.wanted.get(event.request_id)
        if ticket is not None and ticket.phase is QUEUED and ticket.session == event.session:
            self._unqueue(ticket)
            self._out.append(Dropped(ticket.request))

    def _on_shed(self, event: Shed) -> None:
        for request_id, message, retry_after_s in event.requests:
            ticket = self._tickets.wanted.get(request_id)
            if ticket is not None and ticket.phase is QUEUED:
                self._refuse(ticket, Code.RESOURCE_EXHAUSTED, message, retry_after_s)

    def _on_grant_closed(self, event: GrantClosed) -> None:
        if self._routers.get(event.router_id) != event.session:
            return
        if event.reached_worker:
            if self._dispatch.unreached:
                self._dispatch.reached(event.router_id, event.worker_id)
        elif event.is_unavailable and self._fleet.get(event.worker_id) is not None:
            until = self._dispatch.pause(event.router_id, event.worker_id, self._now)
            if until is not None:
                self._timers.set(("paused", event.router_id, event.worker_id), until)
        ticket = self._tickets.wanted.get(event.request_id)
        if ticket is None or ticket.phase is QUEUED or ticket.worker_id != event.worker_id:
            return
        if not event.reached_worker:
            self._return_grant(ticket)
            return
        self._tickets.release(ticket)
        if ticket.phase is GRANTED:
            ticket.phase = CLOSING
            self._moments.set_after(ticket, self._now, CLOSING_GRACE_S)

    def _return_grant(self, ticket: Ticket) -> None:
        # The request may come again, and then keeps its place.
        self._tickets.release(ticket)
        self._tickets.keep_place(ticket)
        self._timers.set_after(("returned", ticket.request.request_id), self._now, GRANT_TIMEOUT_S)
        if ticket.phase is GRANTED:
            self._drop_grant(ticket)

    def _on_router_gone(self, router_id: RouterId) -> None:
        del self._routers[router_id]
        self._drop_queued_of(router_id)
        for key in self._dispatch.forget_paused(router_id=router_id):
            self._timers.cancel(("paused", *key))

    def _drop_queued_of(self, router_id: RouterId) -> None:
        for ticket in self._tickets.queued_of(router_id):
            self._unqueue(ticket)
            self._out.append(Dropped(ticket.request))

    def _unqueue(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        self._moments.cancel(ticket)
        self._tickets.leave_queue(ticket)
        self._dispatch.left_queue(ticket)
        self._tickets.forget(ticket)

    # ---- events of workers

    def _on_worker_joined(self, event: WorkerJoined) -> None:
        known = self._fleet.get(event.worker_id)
        if known is not None:
            if known.address == event.address:
                return
            self._on_worker_left(event.worker_id)
        if self._departed.pop(event.worker_id, event.address) != event.address:
            self._queue.forget_source(event.worker_id)
        self._fleet.join(
            event.worker_id, event.address, event.device, event.max_context_tokens, can_merge=event.can_merge
        )

    def _on_worker_left(self, worker_id: WorkerId) -> None:
        worker = self._fleet.leave(worker_id)
        if worker is None:
            return
        for ticket in worker.tickets():
            self._end_ticket(ticket)
        for request_id in worker.running:
            self._succession.end(request_id, worker_id)
        self._dispatch.note_held(worker_id, ())
        self._departed[worker_id] = worker.address
        if len(self._departed) > MAX_DEPARTED:
            gone = next(iter(self._departed))
            del self._departed[gone]
            self._queue.forget_source(gone)
        for key in self._dispatch.forget_paused(worker_id=worker_id):
            self._timers.cancel(("paused", *key))
        self._note_serving()
        if worker.owner is not None:
            self._dispatch.set_owners(self._tickets.queued())

    def _dedicate(self, worker: WorkerView, owner: Owner | None) -> None:
        if worker.owner != owner:
            worker.owner = owner
            self._dispatch.set_owners(self._tickets.queued())
        if self._fleet.update(worker):
            self._note_serving()

    def _on_told_owner(self, worker: WorkerView, told: ToldOwner, *, is_first: bool) -> None:
        # What an earlier leader decided is taken over; an order that a broken stream lost is given again.
        worker.told_owner = told
        worker.merge_problem = told.problem or worker.merge_problem
        if is_first and told.owner != worker.owner and worker.owner is not None:
            self._out.append(SendDedicate(worker.worker_id, worker.owner))
        elif is_first:
            self._dedicate(worker, told.owner)

    def _on_report(self, event: WorkerReported) -> None:
        worker, report = self._fleet.get(event.worker_id), event.report
        if worker is None or not (worker.connected or report.snapshot):
            return
        for request_id, _, _ in report.started:
            ticket = worker.start(request_id)
            if ticket is None:
                self._succession.adopt(request_id, worker.worker_id, self._flows)
            elif ticket.phase is not RUNNING:
                ticket.phase = RUNNING
                self._moments.cancel(ticket)
        if report.flows or report.snapshot:
            self._settle(worker, report)
        ended: Iterable[RequestId] = report.finished
        if report.snapshot:
            alive = {started.request_id for started in report.started}
            ended = [request_id for request_id in worker.running if request_id not in alive]
        for request_id in ended:
            self._on_ended(worker, request_id)
        if report.owner is not None:
            self._on_told_owner(worker, report.owner, is_first=report.snapshot)
        had_held = worker.held_sequences
        worker.fold_capacity(report, with_loads=self._order == "fair")
        if had_held or worker.held_sequences:
            self._dispatch.note_held(worker.worker_id, worker.held_flows())
        if self._fleet.update(worker):
            self._note_serving()

    def _on_ended(self, worker: WorkerView, request_id: RequestId) -> None:
        ticket = worker.finish(request_id)
        if ticket is None:
            self._succession.end(request_id, worker.worker_id)
        else:
            self._flows.known_of(ticket).count_finished()
            self._end_ticket(ticket)

    def _settle(self, worker: WorkerView, report: WorkerReport) -> None:
        flows, totals = self._flows, {}
        for flow, output_tokens in worker.fold_outputs(report):
            flows.known[flow].count_tokens(output_tokens)
        for flow, (prompt_tokens, output_tokens) in report.flows.items():  # mostly one: not worth a comprehension
            totals[flow] = PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
        if worker.has_reported or self._succession.first_report(worker.worker_id, totals):
            for flow, cost in self._queue.count(worker.worker_id, totals, flows.share, are_all=report.snapshot):
                flows.known[flow].served_cost += cost

    def _end_ticket(self, ticket: Ticket) -> None:
        # Its grant is no longer with its worker.
        self._queue.settle(ticket)
        if ticket.due_in is not None:
            self._moments.cancel(ticket)
        self._tickets.forget(ticket)

    def _drop_grant(self, ticket: Ticket) -> None:
        worker = self._worker_of(ticket)
        worker.drop_grant(ticket)
        self._fleet.update(worker)
        self._end_ticket(ticket)

    def _worker_of(self, ticket: Ticket) -> WorkerView:
        assert ticket.worker_id is not None
        worker = self._fleet.get(ticket.worker_id)
        assert worker is not None, "grants do not outlive their worker"
        return worker

    # ---- policy

    def _on_policy(self, event: PolicyChanged) -> None:
        self._flows.set_policy(event.tenant_id, event.policy)
        for qos_class in QosClass:
            flow = FlowKey(event.tenant_id, qos_class)
            self._queue.set_share(flow, self._flows.share(flow))

    # ---- timers

    def _run_timers(self) -> None:
        while (ticket := self._moments.pop_due(self._now)) is not None:
            self._on_moment(ticket)
        while (key := self._timers.pop_due(self._now)) is not None:
            match key:
                case ("returned", request_id):
                    self._tickets.lose_place(RequestId(str(request_id)))
                case ("prefetch", worker_id, uid):
                    if (worker := self._fleet.get(WorkerId(str(worker_id)))) is not None:
                        worker.forget_prefetch(AdapterUid(str(uid)))
                case ("paused", _, _) | ("resume", _):
                    pass  # time to dispatch again

    def _on_moment(self, ticket: Ticket) -> None:
        deadline = ticket.request.deadline
        if ticket.phase is not QUEUED:
            self._drop_grant(ticket)
        elif deadline is not None and deadline <= self._now:
            message = "the deadline passed while the request was queued"
            self._refuse(ticket, Code.DEADLINE_EXCEEDED, message)
        else:
            self._on_unserved(ticket)

    def _on_unserved(self, ticket: Ticket) -> None:
        wait_s = self._limits.worker_wait_s
        ask_at = self._now + wait_s
        if not self._fleet.could_ever_run(ticket.request):
            if self._fleet.any_serving:
                self._refuse(ticket, Code.FAILED_PRECONDITION, _too_large(ticket.request))
                return
            ask_at = max(ticket.enqueued_at, self._unserved_since or 0.0) + wait_s
            if ask_at <= self._now:
                self._refuse(ticket, Code.UNAVAILABLE, "no worker is serving", retry_after_s=1.0)
                return
        deadline = ticket.request.deadline
        self._moments.set(ticket, min(ask_at, math.inf if deadline is None else deadline))

    def _refuse(self, ticket: Ticket, code: Code, message: str, retry_after_s: float | None = None) -> None:
        self._unqueue(ticket)
        self._out.append(SendRefusal(ticket.request, ticket.session, code, message, retry_after_s))

    def _note_serving(self) -> None:
        if self._fleet.any_serving:
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = self._now
        self._dispatch.check_hold()

    # ---- grants

    def _grant(self, pick: Pick[Ticket, WorkerView]) -> None:
        ticket, worker, _, _ = pick
        now, known = self._now, self._flows.known_of(ticket)
        known.last_wait_s = now - ticket.enqueued_at
        self._queue.dispatch(pick, known.reservation(ticket.request))
        self._tickets.leave_queue(ticket)
        self._dispatch.left_queue(ticket)
        ticket.phase = GRANTED
        ticket.worker_id = worker.worker_id
        ticket.granted_at = now
        self._moments.set_after(ticket, now, GRANT_TIMEOUT_S)
        self._send_grant(ticket, worker, repeated=False)
        worker.grant(ticket)
        self._fleet.update(worker)

    def _send_grant(self, ticket: Ticket, worker: WorkerView, *, repeated: bool) -> None:
        key = ticket.request.adapter_uid
        self._out.append(
            SendGrant(
                ticket.request,
                ticket.session,
                worker.worker_id,
                worker.address,
                ticket.granted_at - ticket.enqueued_at,
                ticket.attempt,
                adapter_resident=key is None or all(uid in worker.adapters for uid in uids_of(key)),
                repeated=repeated,
            )
        )

    def _prefetch(self, uid: AdapterUid, tenant_id: TenantId) -> None:
        # Nothing is asked for if a worker has the adapter, or is about to.
        for worker in self._fleet.holders.of(uid):  # mostly the first one is
            if worker.serving:
                return
        near = islice(in_order(uid, self._fleet, lambda worker: worker.serving), PREFETCH_WORKERS)
        idle = next((w for w in near if w.num_prefetches < PREFETCHES_PER_WORKER), None)
        if idle is not None:
            idle.send_prefetch(uid)
            self._timers.set_after(("prefetch", idle.worker_id, uid), self._now, PREFETCH_TIMEOUT_S)
            self._out.append(SendPrefetch(idle.worker_id, uid, tenant_id))

    # ---- the rest of the seam

    def set_precedence(self, precedence: Precedence | None) -> None:
        """None: weights are as the policies say."""
        self._flows.precedence = self._dispatch.precedence = precedence

    @property
    def num_queued(self) -> int:
        return self._queue.num_queued

    @property
    def num_granted(self) -> int:
        # Running ones count, and an earlier leader's.
        return self._queue.num_running

    @property
    def workers(self) -> list[WorkerView]:
        """The result is for reading, until the next event."""
        return list(self._fleet.workers)

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        self._fleet.check_invariants()
        granted = {ticket for worker in self._fleet.workers for ticket in worker.tickets()}
        queued = self._tickets.check_invariants(self._routers, granted)
        self._dispatch.check_invariants(queued)
        assert len(queued) == self._queue.num_queued
        assert len(granted) + len(self._succession.adopted) == self._queue.num_running
        others = {(r, w.worker_id) for w in self._fleet.workers for r, ticket in w.running.items() if ticket is None}
        assert self._succession.adopted <= others
        assert all(worker.num_prefetches <= PREFETCHES_PER_WORKER for worker in self._fleet.workers)
        for ticket in queued | granted:
            assert (ticket.due_in is not None) == (ticket.phase is not RUNNING)


def _too_large(request: QueuedRequest) -> str:
    return (
        f"no worker is large enough for {request.sequences} sequences of {request.prompt_tokens} prompt tokens "
        f"and up to {request.max_new_tokens // request.sequences} more each"
    )
