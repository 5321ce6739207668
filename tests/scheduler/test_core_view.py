"""What others may ask of the core: the answers follow what the core was told, event by event."""

from __future__ import annotations

from manylora_scheduler.core.core import Core
from manylora_scheduler.core.events import GrantClosed, Tick, WorkerDisconnected
from manylora_scheduler.core.succession import MAX_WAIT_S
from manylora_shared.ids import QosClass, RequestId, WorkerId
from manylora_shared.tenancy.policy import DEFAULT_WEIGHTS

from tests.scheduler.helpers import ROUTER, Desk, grants, request, started


def test_flows_are_shown_with_what_waits_runs_and_was_served() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    desk.enqueue("a", tenant="one")
    desk.enqueue("b", tenant="one")
    desk.now = 3.0
    desk.enqueue("c", tenant="two", qos_class=QosClass.BATCH)
    views = {(v.flow.tenant_id, v.flow.qos_class): v for v in desk.core.view.flow_views(desk.now + 1.0)}
    one, two = views["one", QosClass.STANDARD], views["two", QosClass.BATCH]
    assert (one.queued, one.running, one.oldest_wait_s) == (1, 1, 4.0)
    assert (two.queued, two.running, two.oldest_wait_s) == (1, 0, 1.0)
    assert one.weight == DEFAULT_WEIGHTS[QosClass.STANDARD]
    assert two.weight == DEFAULT_WEIGHTS[QosClass.BATCH]


def test_debt_is_what_a_flow_has_had_before_its_turn() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    desk.enqueue("a", tenant="one", prompt_tokens=7, max_new_tokens=5)
    desk.enqueue("b", tenant="two")
    views = {v.flow.tenant_id: v for v in desk.core.view.flow_views(desk.now)}
    assert views["one"].debt_cost in (7 + 2 * 5 - 1, 7 + 2 * 5), "its reservation, rounded down by a token at most"
    assert views["two"].debt_cost == 0


def test_the_free_part_is_of_the_slots_of_workers_that_take_requests() -> None:
    desk = Desk()
    assert desk.core.view.free_part == 0.0
    desk.worker("w0", slots=4)
    desk.worker("w1", slots=4, running=1)
    assert desk.core.view.free_part == 7 / 8
    desk.enqueue("a", sequences=3)
    assert desk.core.view.free_part == 4 / 8
    desk.report("w0", slots=4, running=3, started=[started("a", sequences=3)], draining=True)
    assert desk.core.view.free_part == 3 / 4, "a worker that drains has no room"


def test_requests_are_served_while_a_worker_takes_them_and_the_clock_is_there() -> None:
    desk = Desk()
    assert not desk.core.view.is_serving
    desk.worker("w0")
    assert desk.core.view.is_serving
    saved = desk.core.clock_snapshot()
    desk.apply(WorkerDisconnected(WorkerId("w0")))
    assert not desk.core.view.is_serving

    desk.core = Core(predecessor=saved)
    desk.worker("w0")
    assert not desk.core.view.is_serving, "it waits for what the routers have to say"
    desk.after(MAX_WAIT_S, Tick())
    assert desk.core.view.is_serving


def test_a_request_is_known_until_its_place_is_lost() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    a, b = RequestId("a"), RequestId("b")
    assert not desk.core.view.is_known(a)
    assert grants(desk.enqueue("a")) == [("a", "w0")]
    assert grants(desk.enqueue("b")) == []
    view = desk.core.view
    assert (view.is_queued(a), view.is_known(a), view.is_queued(b), view.is_known(b)) == (False, True, True, True)
    desk.apply(GrantClosed(1, ROUTER, a, WorkerId("w0"), reached_worker=False))
    assert (view.is_queued(a), view.is_known(a)) == (False, True), "it may come again"
    desk.after(10.0, Tick())
    assert not view.is_known(a)


def test_a_requests_expected_cost_is_of_the_whole_request() -> None:
    desk = Desk()
    assert desk.core.view.expected_cost(request("a", prompt_tokens=7, max_new_tokens=50)) == 7 + 2 * 50
