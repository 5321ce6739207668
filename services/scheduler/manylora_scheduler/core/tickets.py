"""Every request that is queued or granted, by the names under which it is asked for. Pure; written by the core alone.

A ticket enters queued, may become granted (`leave_queue`), and goes (`forget`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from manylora_shared.ids import RequestId, RouterId, TenantId

from manylora_scheduler.core.flows import KnownFlow
from manylora_scheduler.core.request import CLOSING, QUEUED, RUNNING, FlowKey, QueuedRequest, Ticket


class Tickets:
    def __init__(self) -> None:
        self._num_live = 0
        self.wanted: dict[RequestId, Ticket] = {}  # queued, or granted and not ended by their routers; for reading
        self.queued_by_tenant: dict[TenantId, int] = {}  # for reading
        self._returned: dict[RequestId, Ticket] = {}  # the last attempts of requests whose grants came back unused
        self._next_order = 0

    def __len__(self) -> int:
        return self._num_live

    @property
    def num_returned(self) -> int:
        return len(self._returned)

    def queued(self) -> list[Ticket]:
        """O(tickets)."""
        return [ticket for ticket in self.wanted.values() if ticket.phase is QUEUED]

    def queued_of(self, router_id: RouterId) -> list[Ticket]:
        # This is O(tickets): a router's stream seldom ends.
        return [t for t in self.wanted.values() if t.phase is QUEUED and t.request.router_id == router_id]

    def oldest_by_flow(self) -> Mapping[FlowKey, float]:
        oldest: dict[FlowKey, float] = {}
        for ticket in self.wanted.values():
            if ticket.phase is QUEUED:
                flow = ticket.request.flow
                oldest[flow] = min(oldest.get(flow, ticket.enqueued_at), ticket.enqueued_at)
        return oldest

    def enqueue(self, request: QueuedRequest, known: KnownFlow, session: int, now: float) -> Ticket:
        before = self._returned.pop(request.request_id, None) if self._returned else None
        if before is None:
            ticket = Ticket(request, known, session, self._next_order, 1, now, now)
        else:
            ticket = Ticket(request, known, session, before.order, before.attempt + 1, now, before.waits_since)
        self._next_order += 1
        self._num_live += 1
        self.wanted[request.request_id] = ticket
        tenant_id, _ = request.flow
        self.queued_by_tenant[tenant_id] = self.queued_by_tenant.get(tenant_id, 0) + 1
        return ticket

    def leave_queue(self, ticket: Ticket) -> None:
        tenant_id, _ = ticket.request.flow
        left = self.queued_by_tenant[tenant_id] - 1
        if left:
            self.queued_by_tenant[tenant_id] = left
        else:
            del self.queued_by_tenant[tenant_id]

    def release(self, ticket: Ticket) -> None:
        """The router is done with it; the worker may not be."""
        if ticket.is_wanted:
            ticket.is_wanted = False
            del self.wanted[ticket.request.request_id]

    def forget(self, ticket: Ticket) -> None:
        self._num_live -= 1
        if ticket.is_wanted:
            self.release(ticket)

    def keep_place(self, ticket: Ticket) -> None:
        # Its request may come again until `lose_place`.
        self._returned[ticket.request.request_id] = ticket

    def has_place(self, request_id: RequestId) -> bool:
        return request_id in self._returned

    def lose_place(self, request_id: RequestId) -> None:
        self._returned.pop(request_id, None)

    def check_invariants(self, routers: Iterable[RouterId], granted: Set[Ticket]) -> set[Ticket]:
        """Returns the queued ones. `granted` is as the workers have them."""
        queued = {ticket for ticket in self.wanted.values() if ticket.phase is QUEUED}
        assert len(queued) == sum(self.queued_by_tenant.values())
        assert len(queued) + len(granted) == self._num_live
        assert {ticket.request.router_id for ticket in queued} <= set(routers)
        assert all(ticket in queued or ticket in granted for ticket in self.wanted.values())
        assert set(self.wanted.values()) == queued | {ticket for ticket in granted if ticket.is_wanted}
        for ticket in granted:
            assert ticket.is_wanted or ticket.phase in (CLOSING, RUNNING)
        return queued
