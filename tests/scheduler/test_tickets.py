"""Requests by the names under which they are asked for, from the queue until they are forgotten."""

from __future__ import annotations

from manylora_scheduler.core.flows import Flows
from manylora_scheduler.core.request import CLOSING, GRANTED, QUEUED, Ticket
from manylora_scheduler.core.tickets import Tickets
from manylora_shared.ids import RequestId, RouterId, TenantId

from tests.scheduler.helpers import ROUTER, flow, request


def enqueue(tickets: Tickets, request_id: str, now: float = 0.0, **what: str) -> Ticket:
    wanted = request(request_id, **what)  # type: ignore[arg-type]
    return tickets.enqueue(wanted, Flows().known[wanted.flow], 1, now)


def test_queues_are_counted_by_tenant_and_found_by_router() -> None:
    tickets = Tickets()
    mine = enqueue(tickets, "a")
    enqueue(tickets, "b", tenant="other", router="second")
    assert tickets.queued_by_tenant == {TenantId("acme"): 1, TenantId("other"): 1}
    assert tickets.queued_of(ROUTER) == [mine]
    assert tickets.check_invariants([ROUTER, RouterId("second")], set()) == set(tickets.wanted.values())
    tickets.leave_queue(mine)
    mine.phase = GRANTED
    assert tickets.queued_of(ROUTER) == []
    assert tickets.queued_by_tenant == {TenantId("other"): 1}


def test_a_request_that_comes_again_keeps_its_place_and_its_age() -> None:
    tickets = Tickets()
    first = enqueue(tickets, "a", now=1.0)
    tickets.leave_queue(first)
    tickets.forget(first)
    tickets.keep_place(first)
    later = enqueue(tickets, "b", now=2.0)
    assert tickets.has_place(RequestId("a"))
    again = enqueue(tickets, "a", now=5.0)
    assert (again.order, again.attempt, again.waits_since) == (first.order, 2, 1.0)
    assert again.order < later.order
    assert again.enqueued_at == 5.0, "its urgency counts from this attempt"
    assert not tickets.has_place(RequestId("a"))


def test_a_place_that_is_lost_is_lost() -> None:
    tickets = Tickets()
    first = enqueue(tickets, "a")
    tickets.leave_queue(first)
    tickets.forget(first)
    tickets.keep_place(first)
    assert tickets.num_returned == 1
    tickets.lose_place(RequestId("a"))
    tickets.lose_place(RequestId("a"))
    again = enqueue(tickets, "a", now=9.0)
    assert (again.order > first.order, again.attempt, again.waits_since) == (True, 1, 9.0)


def test_one_that_its_router_let_go_lives_until_it_is_forgotten() -> None:
    tickets = Tickets()
    ticket = enqueue(tickets, "a")
    tickets.leave_queue(ticket)
    ticket.phase = CLOSING
    tickets.release(ticket)
    tickets.release(ticket)
    assert (len(tickets), dict(tickets.wanted)) == (1, {})
    assert tickets.check_invariants([], {ticket}) == set()
    tickets.forget(ticket)
    assert len(tickets) == 0


def test_the_oldest_of_each_flow_is_of_what_is_queued() -> None:
    tickets = Tickets()
    granted = enqueue(tickets, "a", now=1.0)
    for request_id, now in (("b", 4.0), ("c", 3.0)):
        enqueue(tickets, request_id, now)
    tickets.leave_queue(granted)
    granted.phase = GRANTED
    assert tickets.oldest_by_flow() == {flow(): 3.0}
    assert all(t.phase is QUEUED for t in tickets.queued_of(ROUTER))
