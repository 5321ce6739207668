"""What is granted next, and where: the fair queue's order and placement's choice together. Pure; written by the core.

Owns the held worker, which workers a router could not reach lately, and which flows have held sequences where. A
request that nothing had room for `HOLD_AFTER_PASSES` times gets a worker held for it. A flow that is behind may be
granted beyond the free room: docs/decisions/0016.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.seam import Pick, Rank
from manylora_shared.ids import AdapterUid, QosClass, RouterId, TenantId, WorkerId

from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.flows import Precedence
from manylora_scheduler.core.placement import choose, choose_spare
from manylora_scheduler.core.reports import Owner
from manylora_scheduler.core.request import FlowKey, Need, QueuedRequest, Ticket, need_of, rank_of, to_us
from manylora_scheduler.core.worker_view import WorkerView

UNREACHED_PAUSE_S = (0.25, 0.5, 1.0, 2.0)  # for a router that could not reach a worker, by failures in a row
HOLD_AFTER_PASSES = 16
_MAX_LOOKED_AT = 4  # of an owner's requests, where its workers have no room for the first
_MAX_BEHIND = 8  # flows that are asked whether they are to be granted beyond the free room


@dataclass(slots=True)
class _Unreached:
    failures: int
    until: float


class OwnQueue:
    """Requests that wait and are an owner's, by their rank inside a flow. They wait in the fair queue, too."""

    __slots__ = ("_heap", "waiting", "workers")

    def __init__(self) -> None:
        self.workers: list[WorkerView] = []  # that are dedicated to the owner
        self.waiting: dict[Ticket, None] = {}
        self._heap: list[tuple[Rank, Ticket]] = []  # those that wait no more linger

    def add(self, ticket: Ticket) -> None:
        self.waiting[ticket] = None
        heapq.heappush(self._heap, (rank_of(ticket), ticket))
        if len(self._heap) > 2 * len(self.waiting) + _MAX_LOOKED_AT:
            self._heap = [entry for entry in self._heap if entry[1] in self.waiting]
            heapq.heapify(self._heap)

    def first(self) -> list[Ticket]:
        """Some of those that are next."""
        found: list[tuple[Rank, Ticket]] = []
        while self._heap and len(found) < _MAX_LOOKED_AT:
            entry = heapq.heappop(self._heap)
            if entry[1] in self.waiting:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [ticket for _, ticket in found]


@dataclass(frozen=True, slots=True)
class _Hold:
    ticket: Ticket
    worker_id: WorkerId
    need: Need


class Dispatch:
    def __init__(self, queue: FairQueue[FlowKey, Ticket], fleet: Fleet, *, goes_beyond: bool = True) -> None:
        self._goes_beyond = goes_beyond
        self.held: dict[FlowKey, dict[WorkerId, None]] = {}
        self.apart: dict[TenantId, int] = {}  # for reading: tenants by how many of their flows are in `held`
        self._held_on: dict[WorkerId, dict[FlowKey, None]] = {}
        self._queue = queue
        self._fleet = fleet
        self._hold: _Hold | None = None
        # The ticket that was first in order last time; how often another was granted before it.
        self._passed_over: tuple[Ticket | None, int] = (None, 0)
        # In a search beyond the free room: whether the asked one comes after the request that holds a worker.
        self._is_behind_hold = False
        # In a search beyond the free room: the least tag of a flow that has enough waiting on a worker.
        self._claims: dict[WorkerId, int] = {}
        self.unreached: dict[tuple[RouterId, WorkerId], _Unreached] = {}  # for reading
        self._now = 0.0
        self.precedence: Precedence | None = None
        self.owners: dict[Owner, OwnQueue] = {}  # for reading

    def set_owners(self, queued: Iterable[Ticket]) -> None:
        """After each change of who is dedicated to whom. queued: all that are."""
        before, self.owners = self.owners, {}
        for worker in self._fleet.workers:
            if worker.owner is not None:
                own = self.owners.get(worker.owner)
                if own is None:
                    own = self.owners[worker.owner] = before.get(worker.owner) or OwnQueue()
                    own.workers = []
                own.workers.append(worker)
        if not self.owners.keys() <= before.keys():
            for ticket in queued:
                self.await_own(ticket)

    def await_own(self, ticket: Ticket) -> None:
        own = self.owners.get(_owner_of(ticket))
        if own is not None and ticket not in own.waiting:
            own.add(ticket)

    def next_own(self, now: float) -> Pick[Ticket, WorkerView] | None:
        """What a dedicated worker has room for. It is out of the fair order, for nobody else could have that room; it
        is charged as any other.
        """
        self._now = now
        for own in self.owners.values():
            if not own.waiting:
                continue
            with_room = [worker for worker in own.workers if worker.serves_owner and worker.free_sequences > 0]
            if not with_room:
                continue
            for ticket in own.first():
                request = ticket.request
                allows = self._allows(request, heeds_hold=False)
                found = [worker for worker in with_room if worker.can_take(request) and allows(worker)]
                if found:
                    place = min(found, key=lambda worker: (worker.slotted_sequences, worker.worker_id))
                    return Pick(ticket, place, self._queue.virtual_time, None)
        return None

    def next_pick(self, now: float) -> Pick[Ticket, WorkerView] | None:
        """None where nothing more can be granted now."""
        fleet = self._fleet
        self._now = now
        if not self._queue.num_queued:
            return None
        if fleet.num_open:
            # The only open worker is asked itself, as `choose` would do: a busy cluster's usual case.
            only = fleet.only_open if self._hold is None and not self.unreached else None
            place = self._place if only is None else only.place_ticket
            pick = self._queue.select(place, to_us(now))
            if pick is not None:
                if pick.passed_over is not None:
                    self._count_pass(pick.passed_over)
                return pick
        if self._goes_beyond and fleet.num_spare:
            self._is_behind_hold = False
            self._claims = {}
            return self._queue.select_one_by_one(self._beyond, to_us(now), limit=_MAX_BEHIND)
        return None

    def _place(self, ticket: Ticket) -> WorkerView | None:
        request = ticket.request
        return choose(request, self._fleet, self._allows(request))

    def _beyond(self, flow: FlowKey, ticket: Ticket) -> WorkerView | None:
        """The worker that takes the flow's next request though nothing is free for it (docs/decisions/0016).

        There the flow is behind, has few sequences waiting, and its tenant has held ones for a quarter of the slots at
        most. It does not pass a flow that would come before it and only has enough waiting there.
        """
        if self.precedence is not None and not self.precedence.goes_beyond(flow):
            return None
        request = ticket.request
        self._is_behind_hold |= self._hold is not None and self._hold.ticket is ticket
        allows = self._allows(request, heeds_hold=self._is_behind_hold)

        def allowed(worker: WorkerView) -> bool:
            load, granted = worker.load_of(flow), worker.granted_to(flow)
            held = worker.held_by_tenant.get(flow.tenant_id, 0)
            if held > worker.sequence_slots // 4 or worker.spare_for(held) < request.sequences:
                return False
            count, waiting = load.unheld + granted, load.ready + granted
            claim = self._claims.get(worker.worker_id)
            if waiting or claim is not None:
                tag, share = self._queue.tag_of(flow), worker.share_of(flow, self._queue.weight_of)
                if count + request.sequences > share:
                    if claim is not None and claim < tag:
                        return False
                    if waiting and 4 * waiting >= share:
                        self._claims[worker.worker_id] = tag
                        return False
            return self._is_behind(flow, count, worker) and allows(worker)

        return choose_spare(request, self._fleet, allowed)

    def _is_behind(self, flow: FlowKey, count: int, worker: WorkerView) -> bool:
        """Whether another flow with a slot there has come as far and has no fewer sequences there for its weight.

        `count` is of the flow's sequences there.
        """
        queue, weight = self._queue, self._queue.weight_of(flow)

        def is_before(other: FlowKey) -> bool:
            has_fewer = worker.load_of(other).unheld * weight < count * queue.weight_of(other)
            return not has_fewer and queue.has_come_as_far(other, flow)

        front = worker.front(queue.tag_of)
        if front is None or (front != flow and not queue.has_come_as_far(front, flow)):
            return False
        return any(other != flow and is_before(other) for other in worker.slotted_flows())

    def _allows(self, request: QueuedRequest, *, heeds_hold: bool = True) -> Callable[[WorkerView], bool]:
        hold, unreached = self._hold if heeds_hold else None, self.unreached
        if hold is None and not unreached:
            return _allow_all

        def allowed(worker: WorkerView) -> bool:
            if hold is not None and hold.worker_id == worker.worker_id and hold.need != need_of(request):
                return False
            pause = unreached.get((request.router_id, worker.worker_id))
            return pause is None or pause.until <= self._now

        return allowed

    def _count_pass(self, first: Ticket) -> None:
        if self._hold is not None:
            return
        ticket, passes = self._passed_over
        self._passed_over = (first, passes + 1 if ticket is first else 1)
        if self._passed_over[1] < HOLD_AFTER_PASSES:
            return
        request = first.request
        allowed = self._allows(request)
        able = [w for w in self._fleet.workers if w.serving and allowed(w) and w.could_ever_run(request)]
        if able:

            def missing(worker: WorkerView) -> tuple[int, int, WorkerId]:
                return max(0, request.sequences - worker.free_sequences), -worker.free_blocks, worker.worker_id

            self._hold = _Hold(first, min(able, key=missing).worker_id, need_of(request))

    # ---- what others tell it

    def note_held(self, worker_id: WorkerId, flows: Iterable[FlowKey]) -> None:
        # All flows of a tenant with held sequences are placed by themselves, as their room depends on these
        # (`WorkerView.can_take`). A flow that has none left anywhere keeps no credit: it was held up by its own doing.
        before = self._held_on.pop(worker_id, {})
        now = dict.fromkeys(flows)
        if now:
            self._held_on[worker_id] = now
        for flow in now:
            if flow not in before:
                if flow not in self.held:
                    self.held[flow] = {}
                    self._count_apart(flow.tenant_id, 1)
                self.held[flow][worker_id] = None
        for flow in before:
            if flow not in now:
                del self.held[flow][worker_id]
                if not self.held[flow]:
                    del self.held[flow]
                    self._count_apart(flow.tenant_id, -1)
                    self._queue.forgo(flow)

    def _count_apart(self, tenant_id: TenantId, more: int) -> None:
        before = self.apart.get(tenant_id, 0)
        if before + more:
            self.apart[tenant_id] = before + more
        else:
            del self.apart[tenant_id]
        if not before or not before + more:
            for qos_class in QosClass:
                self._queue.set_apart(FlowKey(tenant_id, qos_class), is_apart=not before)

    def left_queue(self, ticket: Ticket) -> None:
        if self._hold is not None and self._hold.ticket is ticket:
            self._hold = None
        if self.owners:
            own = self.owners.get(_owner_of(ticket))
            if own is not None:
                own.waiting.pop(ticket, None)

    def check_hold(self) -> None:
        # A worker that takes no requests is not held.
        if self._hold is not None:
            worker = self._fleet.get(self._hold.worker_id)
            if worker is None or not worker.serving:
                self._hold = None

    def pause(self, router_id: RouterId, worker_id: WorkerId, now: float) -> float | None:
        """Until when the router is not sent there; None if that was known."""
        found = self.unreached.setdefault((router_id, worker_id), _Unreached(0, now))
        if found.until > now:
            return None
        found.until = now + UNREACHED_PAUSE_S[min(found.failures, len(UNREACHED_PAUSE_S) - 1)]
        found.failures += 1
        return found.until

    def reached(self, router_id: RouterId, worker_id: WorkerId) -> None:
        self.unreached.pop((router_id, worker_id), None)

    def forget_paused(
        self, *, router_id: RouterId | None = None, worker_id: WorkerId | None = None
    ) -> list[tuple[RouterId, WorkerId]]:
        """Whom a router or worker that is gone had paused."""
        gone = [key for key in self.unreached if key[0] == router_id or key[1] == worker_id]
        for key in gone:
            del self.unreached[key]
        return gone

    def check_invariants(self, queued: set[Ticket]) -> None:
        for owner, own in self.owners.items():
            assert own.waiting.keys() == {ticket for ticket in queued if _owner_of(ticket) == owner}
            assert {w.worker_id for w in own.workers} == {w.worker_id for w in self._fleet.workers if w.owner == owner}
        assert self.owners.keys() == {w.owner for w in self._fleet.workers if w.owner is not None}
        if self._hold is not None:
            assert self._hold.ticket in queued
            assert self._fleet.get(self._hold.worker_id) is not None
        assert {w.worker_id: dict.fromkeys(w.held_flows()) for w in self._fleet.workers if w.held_flows()} == (
            self._held_on
        )
        held = {(flow, worker_id) for worker_id, flows in self._held_on.items() for flow in flows}
        assert held == {(flow, worker_id) for flow, workers in self.held.items() for worker_id in workers}
        assert all(self.held.values())
        assert self.apart == Counter([flow.tenant_id for flow in self.held])


def _owner_of(ticket: Ticket) -> Owner:
    """Whose it is, if it is an owner's at all. A composition is nobody's."""
    request = ticket.request
    return Owner(AdapterUid(request.adapter_uid or ""), request.flow.tenant_id)


def _allow_all(worker: WorkerView) -> bool:
    return True
