"""The scheduler's one writer: events in, commands out. Pure; `now` comes with each event and never falls.

Owns every queued request and live grant, the fair queue, the fleet, and all timers. The shell turns streams, reports
and store changes into events, sends the commands, and calls with Tick when `next_wakeup` says. A core lives for one
term of leadership: what the next one must know comes back from the workers' snapshots and the routers' enqueues.

What it promises:

* never more sequences or prompt blocks on a worker than it said it has room for (as of its last report);
* every enqueued request gets exactly one answer (a grant or a refusal), unless it is withdrawn or its router goes;
  a repeated enqueue of a request that is queued changes nothing, of one that holds a live grant repeats that grant;
* room never stays empty while a queued request could use it, but for requests behind another in their own flow and for
  room that is held: a request that was passed over `HOLD_AFTER_PASSES` times because nothing had room for it gets one
  worker reserved until it fits, so that large requests do not starve;
* what a request costs is reserved at its grant (prompt + 2 * expected output) and settled from the workers' counters.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora_shared.errors import Code
from manylora_shared.fair_queue import FairQueue
from manylora_shared.ids import AdapterUid, QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.policy import DEFAULT_WEIGHTS, TenantPolicy

from manylora_scheduler.events import (
    Command,
    Dropped,
    Enqueued,
    Event,
    GrantClosed,
    PolicyChanged,
    RouterConnected,
    RouterDisconnected,
    SendGrant,
    SendPrefetch,
    SendRefusal,
    Tick,
    Withdrawn,
    WorkerDisconnected,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.fleet import Fleet, WorkerView
from manylora_scheduler.placement import Placement
from manylora_scheduler.request import (
    OUTPUT_TOKEN_COST,
    PROMPT_TOKEN_COST,
    FlowKey,
    OutputEstimate,
    Phase,
    QueuedRequest,
    Ticket,
)
from manylora_scheduler.timers import Timers

GRANT_TIMEOUT_S = 10.0
"""A grant that neither the worker nor the router mentions for so long is dropped."""
CLOSING_GRACE_S = 0.2
"""How long a grant that its router has ended keeps its room while the worker has not reported it: that may be late."""
UNREACHED_PAUSE_S = (0.25, 0.5, 1.0, 2.0)
"""How long a worker gets nothing from a router that could not reach it, by failures in a row."""
HOLD_AFTER_PASSES = 16
PREFETCHES_PER_WORKER = 4
"""Prefetches that a worker may have been sent and not have answered."""
PREFETCH_TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 30.0
_MAX_KNOWN_FLOWS = 262_144
"""Flows of which the served cost and the output estimate are remembered; beyond, the oldest are forgotten."""


@dataclass(frozen=True)
class CoreLimits:
    max_queued: int = 100_000
    max_queued_per_tenant: int = 20_000
    worker_wait_s: float = 30.0
    """How long a request may wait while no worker could run it, before it is refused."""


# ---- status


@dataclass(frozen=True, slots=True)
class FlowView:
    flow: FlowKey
    queued: int
    running: int
    oldest_wait_s: float
    served_cost: int


@dataclass(slots=True)
class _KnownFlow:
    estimate: OutputEstimate
    served_cost: int = 0
    last_wait_s: float = 0.0
    """Time in the queue of the request that was granted last."""


@dataclass(slots=True)
class _Unreached:
    """A worker that a router could not reach."""

    failures: int
    until: float


class Core:
    def __init__(self, limits: CoreLimits | None = None) -> None:
        self._limits = limits or CoreLimits()
        self._queue: FairQueue[FlowKey, int] = FairQueue()
        self._fleet = Fleet()
        self._placement = Placement()
        self._timers: Timers[tuple[str, *tuple[object, ...]]] = Timers()
        self._tickets: dict[int, Ticket] = {}
        """Every live ticket, by number."""
        self._wanted: dict[RequestId, Ticket] = {}
        """The ticket that stands for a request: queued, or granted and not ended by its router."""
        self._routers: dict[RouterId, int] = {}
        """Connected routers and their session."""
        self._by_router: dict[RouterId, dict[int, Ticket]] = {}
        """Queued tickets."""
        self._queued_by_tenant: dict[TenantId, int] = {}
        self._policies: dict[TenantId, TenantPolicy] = {}
        self._known: dict[FlowKey, _KnownFlow] = {}
        self._returned: dict[RequestId, Ticket] = {}
        """The last attempt of requests whose grant came back unused; for GRANT_TIMEOUT_S."""
        self._unreached: dict[tuple[RouterId, WorkerId], _Unreached] = {}
        self._hold: tuple[int, WorkerId] | None = None
        self._passed_over: tuple[int, int] = (-1, 0)
        """The ticket at the front of the queue, and how often another was granted before it."""
        self._unserved_since: float | None = 0.0
        self._now = 0.0
        self._next_number = 0
        self._choice: WorkerView | None = None
        self._out: list[Command] = []

    # ---- the seam

    def apply(self, event: Event, now: float) -> list[Command]:
        """Takes one event in, with all timers that are due at `now`, and returns what is to be sent, in order."""
        assert now >= self._now
        self._now = now
        self._run_timers()
        match event:
            case Enqueued():
                self._on_enqueued(event)
            case WorkerReported():
                self._on_report(event)
            case GrantClosed():
                self._on_grant_closed(event)
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
            case WorkerLeft():
                self._on_worker_left(event.worker_id)
            case WorkerDisconnected():
                if (worker := self._fleet.get(event.worker_id)) is not None:
                    worker.connected = False
                    worker.prefetches.clear()
            case PolicyChanged():
                self._on_policy(event)
            case Tick():
                pass
        self._note_serving()
        self._dispatch()
        commands, self._out = self._out, []
        return commands

    def next_wakeup(self) -> float | None:
        """When Tick is to be applied at the latest, if no other event comes before."""
        return self._timers.next_at()

    # ---- events of routers

    def _on_enqueued(self, event: Enqueued) -> None:
        request = event.request
        if self._routers.get(request.router_id) != event.session:
            return
        known = self._wanted.get(request.request_id)
        if known is not None and known.request.router_id != request.router_id:
            message = f"request id {request.request_id} is in use by another router"
            self._out.append(SendRefusal(request, event.session, Code.ALREADY_EXISTS, message))
            return
        if known is not None and known.phase is not Phase.QUEUED:
            if known.session != event.session:
                self._repeat_grant(known, event.session)
                return
            # It was granted on this very stream, so its router has let go of that grant.
            self._return_grant(known)
        elif known is not None:
            return
        refusal = self._refusal_of(request)
        if refusal is not None:
            self._out.append(SendRefusal(request, event.session, *refusal))
            return
        before = self._returned.pop(request.request_id, None)
        number = self._next_number
        self._next_number += 1
        ticket = Ticket(
            number=number,
            request=request,
            session=event.session,
            order=before.order if before is not None else number,
            attempt=before.attempt + 1 if before is not None else 1,
            enqueued_at=self._now,
        )
        self._tickets[number] = ticket
        self._wanted[request.request_id] = ticket
        self._by_router.setdefault(request.router_id, {})[number] = ticket
        tenant_id = request.flow.tenant_id
        self._queued_by_tenant[tenant_id] = self._queued_by_tenant.get(tenant_id, 0) + 1
        self._queue.push(
            number,
            request.flow,
            weight=self._weight(request.flow),
            need=(request.sequences, _rounded(request.prompt_tokens), request.router_id),
            order=ticket.order,
            priority=request.priority,
        )
        if request.deadline is not None:
            self._timers.set(("deadline", number), request.deadline)
        self._timers.set(("unserved", number), self._now + self._limits.worker_wait_s)
        if request.adapter_uid is not None and not self._fleet.any_free_slot():
            self._prefetch(request.adapter_uid)

    def _refusal_of(self, request: QueuedRequest) -> tuple[Code, str, float | None] | None:
        if request.deadline is not None and request.deadline <= self._now:
            return Code.DEADLINE_EXCEEDED, "the deadline passed before the request was queued", None
        tenant_queued = self._queued_by_tenant.get(request.flow.tenant_id, 0)
        if tenant_queued >= self._limits.max_queued_per_tenant:
            message = f"{tenant_queued} requests of this tenant are queued already"
            return Code.RESOURCE_EXHAUSTED, message, self._retry_after(request.flow)
        if self._queue.num_queued >= self._limits.max_queued:
            message = f"{self._queue.num_queued} requests are queued already"
            return Code.RESOURCE_EXHAUSTED, message, self._retry_after(request.flow)
        if self._fleet.any_serving() and self._fleet.all_connected() and not self._fleet.could_ever_run(request):
            return Code.FAILED_PRECONDITION, _too_large(request), None
        return None

    def _retry_after(self, flow: FlowKey) -> float:
        """About as long as the flow's last granted request had waited."""
        known = self._known.get(flow)
        return min(MAX_RETRY_AFTER_S, max(1.0, known.last_wait_s if known is not None else 0.0))

    def _repeat_grant(self, ticket: Ticket, session: int) -> None:
        assert ticket.worker_id is not None
        worker = self._fleet.get(ticket.worker_id)
        assert worker is not None, "grants do not outlive their worker"
        ticket.session = session
        self._send_grant(ticket, worker, repeated=True)

    def _on_withdrawn(self, event: Withdrawn) -> None:
        ticket = self._wanted.get(event.request_id)
        if ticket is not None and ticket.phase is Phase.QUEUED and ticket.session == event.session:
            self._unqueue(ticket)
            self._out.append(Dropped(ticket.request))

    def _on_grant_closed(self, event: GrantClosed) -> None:
        if self._routers.get(event.router_id) != event.session:
            return
        if event.reached_worker:
            self._unreached.pop((event.router_id, event.worker_id), None)
        else:
            self._pause(event.router_id, event.worker_id)
        ticket = self._wanted.get(event.request_id)
        if ticket is None or ticket.phase is Phase.QUEUED or ticket.worker_id != event.worker_id:
            return
        if not event.reached_worker:
            self._return_grant(ticket)
            return
        del self._wanted[event.request_id]
        if ticket.phase is Phase.GRANTED:
            ticket.phase = Phase.CLOSING
            self._timers.set(("grant", ticket.number), self._now + CLOSING_GRACE_S)

    def _return_grant(self, ticket: Ticket) -> None:
        """A router did not reach the worker with a grant; the request may come again, and then keeps its place."""
        request_id = ticket.request.request_id
        del self._wanted[request_id]
        self._returned[request_id] = ticket
        self._timers.set(("returned", request_id), self._now + GRANT_TIMEOUT_S)
        if ticket.phase is Phase.GRANTED:
            self._drop_grant(ticket)

    def _pause(self, router_id: RouterId, worker_id: WorkerId) -> None:
        if self._fleet.get(worker_id) is None:
            return
        found = self._unreached.setdefault((router_id, worker_id), _Unreached(0, self._now))
        if found.until <= self._now:
            found.until = self._now + UNREACHED_PAUSE_S[min(found.failures, len(UNREACHED_PAUSE_S) - 1)]
            found.failures += 1
            self._timers.set(("paused", router_id, worker_id), found.until)

    def _on_router_gone(self, router_id: RouterId) -> None:
        del self._routers[router_id]
        self._drop_queued_of(router_id)
        for key in [key for key in self._unreached if key[0] == router_id]:
            del self._unreached[key]
            self._timers.cancel(("paused", *key))

    def _drop_queued_of(self, router_id: RouterId) -> None:
        for ticket in list(self._by_router.get(router_id, {}).values()):
            self._unqueue(ticket)
            self._out.append(Dropped(ticket.request))

    def _unqueue(self, ticket: Ticket) -> None:
        """Forgets a queued ticket."""
        self._queue.remove(ticket.number)
        self._leave_queue(ticket)
        del self._tickets[ticket.number]
        del self._wanted[ticket.request.request_id]

    def _leave_queue(self, ticket: Ticket) -> None:
        router_id, tenant_id = ticket.request.router_id, ticket.request.flow.tenant_id
        del self._by_router[router_id][ticket.number]
        if not self._by_router[router_id]:
            del self._by_router[router_id]
        self._queued_by_tenant[tenant_id] -= 1
        if not self._queued_by_tenant[tenant_id]:
            del self._queued_by_tenant[tenant_id]
        self._timers.cancel(("deadline", ticket.number))
        self._timers.cancel(("unserved", ticket.number))
        if self._hold is not None and self._hold[0] == ticket.number:
            self._hold = None

    # ---- events of workers

    def _on_worker_joined(self, event: WorkerJoined) -> None:
        known = self._fleet.get(event.worker_id)
        if known is not None:
            if known.address == event.address:
                return
            self._on_worker_left(event.worker_id)
        self._fleet.join(event.worker_id, event.address, event.device, event.max_context_tokens)

    def _on_worker_left(self, worker_id: WorkerId) -> None:
        worker = self._fleet.leave(worker_id)
        if worker is None:
            return
        for ticket in worker.tickets():
            self._end_ticket(ticket)
        for key in [key for key in self._unreached if key[1] == worker_id]:
            del self._unreached[key]
            self._timers.cancel(("paused", *key))

    def _on_report(self, event: WorkerReported) -> None:
        worker, report = self._fleet.get(event.worker_id), event.report
        if worker is None or not (worker.connected or report.snapshot):
            return
        for flow, prompt_tokens, output_tokens in worker.fold_counters(report, known=worker.has_reported):
            known = self._known_flow(flow)
            known.estimate.count_tokens(output_tokens)
            cost = PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
            known.served_cost += cost
            self._queue.charge(flow, cost, weight=self._weight(flow))
        for started in report.started:
            ticket = worker.start(started)
            if ticket is not None and ticket.phase is not Phase.RUNNING:
                ticket.phase = Phase.RUNNING
                self._timers.cancel(("grant", ticket.number))
        if report.snapshot:
            alive = {started.request_id for started in report.started}
            ended = tuple(request_id for request_id in worker.running if request_id not in alive)
        else:
            ended = report.finished
        for request_id in ended:
            ticket = worker.finish(request_id)
            if ticket is not None:
                self._known_flow(ticket.request.flow).estimate.count_finished()
                self._end_ticket(ticket)
        worker.fold_capacity(report)

    def _end_ticket(self, ticket: Ticket) -> None:
        """A granted ticket whose grant is no longer with its worker."""
        self._queue.close(ticket.number)
        self._timers.cancel(("grant", ticket.number))
        del self._tickets[ticket.number]
        if self._wanted.get(ticket.request.request_id) is ticket:
            del self._wanted[ticket.request.request_id]

    def _drop_grant(self, ticket: Ticket) -> None:
        """Takes a grant that was not reported back from its worker."""
        assert ticket.worker_id is not None
        worker = self._fleet.get(ticket.worker_id)
        assert worker is not None, "grants do not outlive their worker"
        worker.drop_grant(ticket)
        self._end_ticket(ticket)

    # ---- policy

    def _on_policy(self, event: PolicyChanged) -> None:
        if event.policy is None:
            self._policies.pop(event.tenant_id, None)
        else:
            self._policies[event.tenant_id] = event.policy
        for qos_class in QosClass:
            flow = FlowKey(event.tenant_id, qos_class)
            self._queue.set_weight(flow, self._weight(flow))

    def _weight(self, flow: FlowKey) -> int:
        policy = self._policies.get(flow.tenant_id)
        return policy.weight(flow.qos_class) if policy is not None else DEFAULT_WEIGHTS[flow.qos_class]

    def _known_flow(self, flow: FlowKey) -> _KnownFlow:
        known = self._known.get(flow)
        if known is None:
            if len(self._known) >= _MAX_KNOWN_FLOWS:
                del self._known[next(iter(self._known))]
            known = self._known[flow] = _KnownFlow(OutputEstimate())
        return known

    # ---- timers

    def _run_timers(self) -> None:
        while (key := self._timers.pop_due(self._now)) is not None:
            match key:
                case ("deadline", int(number)):
                    self._refuse(number, Code.DEADLINE_EXCEEDED, "the deadline passed while the request was queued")
                case ("unserved", int(number)):
                    self._on_unserved(number)
                case ("grant", int(number)):
                    self._drop_grant(self._tickets[number])
                case ("returned", request_id):
                    self._returned.pop(RequestId(str(request_id)), None)
                case ("prefetch", worker_id, uid):
                    if (worker := self._fleet.get(WorkerId(str(worker_id)))) is not None:
                        worker.prefetches.pop(AdapterUid(str(uid)), None)
                case ("paused", _, _):
                    pass  # time to dispatch again

    def _on_unserved(self, number: int) -> None:
        """A request has waited for long: is it for want of a worker that could run it at all?"""
        ticket = self._tickets[number]
        wait_s = self._limits.worker_wait_s
        if self._fleet.could_ever_run(ticket.request):
            self._timers.set(("unserved", number), self._now + wait_s)
        elif self._fleet.any_serving():
            self._refuse(number, Code.FAILED_PRECONDITION, _too_large(ticket.request))
        else:
            since = max(ticket.enqueued_at, self._unserved_since or 0.0)
            if self._now < since + wait_s:
                self._timers.set(("unserved", number), since + wait_s)
            else:
                self._refuse(number, Code.UNAVAILABLE, "no worker is serving", retry_after_s=1.0)

    def _refuse(self, number: int, code: Code, message: str, retry_after_s: float | None = None) -> None:
        ticket = self._tickets[number]
        self._unqueue(ticket)
        self._out.append(SendRefusal(ticket.request, ticket.session, code, message, retry_after_s))

    def _note_serving(self) -> None:
        if self._fleet.any_serving():
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = self._now
        if self._hold is not None and not any(w.serving for w in self._fleet.workers if w.worker_id == self._hold[1]):
            self._hold = None

    # ---- dispatch

    def _dispatch(self) -> None:
        """Grants all that can be granted now."""
        while self._queue.num_queued and self._fleet.any_free_slot():
            number = self._queue.select(self._fits)
            if number is None:
                break
            ticket, worker = self._tickets[number], self._choice
            assert worker is not None
            self._count_pass(number)
            self._grant(ticket, worker)
        self._choice = None

    def _fits(self, number: int) -> bool:
        """Whether a queued request can be placed now. Of those that fit, `_choice` has the last one's worker: the fair
        queue asks for a later item only where it would be chosen before the earlier."""
        chosen = self._placement.choose(self._tickets[number].request, self._usable(number))
        if chosen is None:
            return False
        self._choice = chosen
        return True

    def _usable(self, number: int) -> list[WorkerView]:
        """Workers that a ticket may go to, were there room."""
        request = self._tickets[number].request
        usable = []
        for worker in self._fleet.workers:
            if not worker.serving or request.request_id in worker.granted or request.request_id in worker.running:
                continue
            if self._hold is not None and self._hold[1] == worker.worker_id and self._hold[0] != number:
                continue
            if self._unreached:
                pause = self._unreached.get((request.router_id, worker.worker_id))
                if pause is not None and pause.until > self._now:
                    continue
            usable.append(worker)
        return usable

    def _grant(self, ticket: Ticket, worker: WorkerView) -> None:
        request = ticket.request
        known = self._known_flow(request.flow)
        known.last_wait_s = self._now - ticket.enqueued_at
        expected = known.estimate.expect(request.max_new_tokens)
        self._queue.dispatch(ticket.number, PROMPT_TOKEN_COST * request.prompt_tokens + OUTPUT_TOKEN_COST * expected)
        self._leave_queue(ticket)
        ticket.phase = Phase.GRANTED
        ticket.worker_id = worker.worker_id
        ticket.granted_at = self._now
        self._timers.set(("grant", ticket.number), self._now + GRANT_TIMEOUT_S)
        self._send_grant(ticket, worker, repeated=False)
        worker.grant(ticket)

    def _send_grant(self, ticket: Ticket, worker: WorkerView, *, repeated: bool) -> None:
        uid = ticket.request.adapter_uid
        self._out.append(
            SendGrant(
                request=ticket.request,
                session=ticket.session,
                worker_id=worker.worker_id,
                worker_address=worker.address,
                queue_s=ticket.granted_at - ticket.enqueued_at,
                attempt=ticket.attempt,
                adapter_resident=uid is None or uid in worker.adapters,
                repeated=repeated,
            )
        )

    def _count_pass(self, number: int) -> None:
        """Another ticket than the one at the front is granted. Holds a worker for the front once that was too often."""
        if self._hold is not None:
            return
        front = self._queue.front()
        assert front is not None
        if front == number:
            return
        ticket, passes = self._passed_over
        self._passed_over = (front, passes + 1 if ticket == front else 1)
        if self._passed_over[1] >= HOLD_AFTER_PASSES:
            request = self._tickets[front].request
            able = [w for w in self._usable(front) if w.could_ever_run(request)]
            if able:

                def missing(worker: WorkerView) -> tuple[int, int, WorkerId]:
                    return max(0, request.sequences - worker.free_sequences), -worker.free_blocks, worker.worker_id

                self._hold = (front, min(able, key=missing).worker_id)

    # ---- prefetch

    def _prefetch(self, uid: AdapterUid) -> None:
        """Has a worker load the adapter of a request that must wait, unless one has it or is about to."""
        serving = [w for w in self._fleet.workers if w.serving]
        if not serving or any(w.residency(uid) for w in serving):
            return
        able = [w for w in serving if len(w.prefetches) < PREFETCHES_PER_WORKER]
        if able:
            worker = self._placement.home(uid, able)
            worker.prefetches[uid] = None
            self._timers.set(("prefetch", worker.worker_id, uid), self._now + PREFETCH_TIMEOUT_S)
            self._out.append(SendPrefetch(worker.worker_id, uid))

    # ---- status

    @property
    def num_queued(self) -> int:
        return self._queue.num_queued

    @property
    def num_granted(self) -> int:
        """Live grants, running ones included."""
        return self._queue.num_running

    @property
    def workers(self) -> list[WorkerView]:
        """For reading, until the next event."""
        return list(self._fleet.workers)

    def flow_views(self) -> list[FlowView]:
        """Flows with queued or running work, in the order in which they came."""
        oldest: dict[FlowKey, float] = {}
        for tickets in self._by_router.values():
            for ticket in tickets.values():
                flow = ticket.request.flow
                oldest[flow] = min(oldest.get(flow, ticket.enqueued_at), ticket.enqueued_at)
        return [
            FlowView(
                flow=flow,
                queued=self._queue.queued_in(flow),
                running=self._queue.running_in(flow),
                oldest_wait_s=self._now - oldest.get(flow, self._now),
                served_cost=self._known[flow].served_cost if flow in self._known else 0,
            )
            for flow in self._queue.flows()
        ]

    def check_invariants(self) -> None:
        """Every book against the others; for tests and idle moments."""
        self._queue.check_invariants()
        queued = {n: t for n, t in self._tickets.items() if t.phase is Phase.QUEUED}
        granted = {n: t for n, t in self._tickets.items() if t.phase is not Phase.QUEUED}
        assert len(queued) == self._queue.num_queued
        assert len(granted) == self._queue.num_running
        assert queued == {n: t for tickets in self._by_router.values() for n, t in tickets.items()}
        assert len(queued) == sum(self._queued_by_tenant.values())
        assert all(self._by_router.values())
        assert all(t.request.router_id in self._routers for t in queued.values())
        on_workers = {t.number: t for worker in self._fleet.workers for t in worker.tickets()}
        assert on_workers == granted
        for worker in self._fleet.workers:
            worker.check_invariants()
            assert len(worker.prefetches) <= PREFETCHES_PER_WORKER
        for ticket in self._tickets.values():
            wanted = self._wanted.get(ticket.request.request_id) is ticket
            assert wanted or ticket.phase in (Phase.CLOSING, Phase.RUNNING)
            assert (("grant", ticket.number) in self._timers) == (ticket.phase in (Phase.GRANTED, Phase.CLOSING))
        assert all(self._tickets.get(t.number) is t for t in self._wanted.values())
        if self._hold is not None:
            assert self._hold[0] in queued
            assert self._fleet.get(self._hold[1]) is not None


def _rounded(tokens: int) -> int:
    """Up to three significant bits more than the leading one, so that there are few distinct needs."""
    step = 1 << max(0, tokens.bit_length() - 4)
    return -(-tokens // step) * step


def _too_large(request: QueuedRequest) -> str:
    return (
        f"no worker is large enough for {request.sequences} sequences of {request.prompt_tokens} prompt tokens "
        f"and up to {request.max_new_tokens // request.sequences} more each"
    )
