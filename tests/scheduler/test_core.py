"""The scheduler's core, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manylora_scheduler.core.core import (
    CLOSING_GRACE_S,
    GRANT_TIMEOUT_S,
    PREFETCHES_PER_WORKER,
    CoreLimits,
)
from manylora_scheduler.core.dispatch import HOLD_AFTER_PASSES
from manylora_scheduler.core.events import (
    Dropped,
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
)
from manylora_scheduler.core.reports import FlowTokens, Residency
from manylora_shared.errors import Code
from manylora_shared.fairness.costs import PROMPT_TOKEN_COST
from manylora_shared.ids import QosClass, RequestId, TenantId, WorkerId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy

from tests.scheduler.helpers import ROUTER, Desk, flow, grants, request, started

ACME = TenantId("acme")
W0 = WorkerId("w0")


def closed(
    request_id: str, *, reached: bool, worker: str = "w0", session: int = 1, is_unavailable: bool | None = None
) -> GrantClosed:
    """is_unavailable: None: unless it was reached."""
    is_unavailable = not reached if is_unavailable is None else is_unavailable
    return GrantClosed(session, ROUTER, RequestId(request_id), WorkerId(worker), reached, is_unavailable)


def refusal(commands: list[object]) -> SendRefusal:
    (found,) = commands
    assert isinstance(found, SendRefusal)
    return found


def test_a_request_is_granted_where_room_is() -> None:
    desk = Desk()
    desk.worker(slots=2)
    (grant,) = desk.enqueue("a")
    assert isinstance(grant, SendGrant)
    assert (grant.worker_id, grant.worker_address, grant.queue_s, grant.attempt) == ("w0", "w0:1", 0.0, 1)
    assert grants(desk.enqueue("b")) == [("b", "w0")]
    assert desk.enqueue("c") == []
    assert desk.core.num_queued == 1


def test_room_that_appears_is_given_in_the_same_event() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.enqueue("b")
    desk.report(slots=1, running=1, started=[started("a")])
    desk.now = 5.0
    (grant,) = desk.report(slots=1, finished=["a"])
    assert isinstance(grant, SendGrant)
    assert (grant.request.request_id, grant.queue_s) == ("b", 5.0)


def test_a_grant_counts_against_room_once_before_and_after_its_report() -> None:
    desk = Desk()
    desk.worker(slots=2)
    desk.enqueue("a")
    assert desk.core.workers[0].free_sequences == 1
    desk.report(slots=2, running=1, started=[started("a")])
    assert desk.core.workers[0].free_sequences == 1
    desk.report(slots=2, running=0, finished=["a"])
    assert desk.core.workers[0].free_sequences == 2
    assert desk.core.num_granted == 0


def test_prompt_blocks_count_as_room() -> None:
    desk = Desk()
    desk.worker(slots=8, blocks=10, block_size=16)
    assert grants(desk.enqueue("a", prompt_tokens=100)) == [("a", "w0")]
    assert desk.enqueue("b", prompt_tokens=100) == []
    assert grants(desk.enqueue("c", tenant="other", prompt_tokens=20)) == [("c", "w0")]


def test_a_request_larger_than_any_worker_is_refused_at_once() -> None:
    desk = Desk()
    desk.worker(slots=2, blocks=10)
    found = refusal(desk.enqueue("a", sequences=3))
    assert (found.code, found.retry_after_s) == (Code.FAILED_PRECONDITION, None)
    assert "3 sequences" in found.message
    assert refusal(desk.enqueue("b", prompt_tokens=160)).code is Code.FAILED_PRECONDITION
    assert refusal(desk.enqueue("c", prompt_tokens=100, max_new_tokens=62)).code is Code.FAILED_PRECONDITION
    assert (
        refusal(desk.enqueue("d", prompt_tokens=100, max_new_tokens=124, sequences=2)).code is Code.FAILED_PRECONDITION
    )
    assert grants(desk.enqueue("e", prompt_tokens=159, max_new_tokens=1)) == [("e", "w0")]
    desk.report(slots=2, blocks=10, finished=["e"])
    assert grants(desk.enqueue("f", prompt_tokens=100, max_new_tokens=122, sequences=2)) == [("f", "w0")]


def test_a_small_worker_is_passed_over_for_what_it_could_not_end() -> None:
    desk = Desk()
    desk.worker("w0", slots=8, blocks=4)
    desk.worker("w1", slots=8, blocks=100, running=6)
    assert grants(desk.enqueue("a", prompt_tokens=20, max_new_tokens=100)) == [("a", "w1")]
    assert grants(desk.enqueue("b", prompt_tokens=20, max_new_tokens=40)) == [("b", "w0")]


def test_without_workers_requests_wait_and_are_then_refused() -> None:
    desk = Desk(CoreLimits(worker_wait_s=30.0))
    assert desk.enqueue("a") == []
    assert desk.core.next_wakeup() == 30.0
    assert desk.after(29.9, Tick()) == []
    found = refusal(desk.after(0.1, Tick()))
    assert (found.code, found.message) == (Code.UNAVAILABLE, "no worker is serving")
    assert found.retry_after_s is not None
    assert desk.core.num_queued == 0


def test_the_wait_for_a_worker_counts_from_the_loss_of_the_last() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.enqueue("b")
    desk.after(100.0, WorkerLeft(W0))
    assert desk.after(29.0, Tick()) == []
    assert refusal(desk.after(31.0, Tick())).code is Code.UNAVAILABLE


def test_a_busy_fleet_is_waited_for_without_end() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.report(slots=1, running=1, started=[started("a")])
    desk.enqueue("b")
    for _ in range(20):
        assert desk.after(30.0, Tick()) == []
    assert grants(desk.report(slots=1, finished=["a"])) == [("b", "w0")]


def test_deadlines_end_requests_in_the_queue() -> None:
    desk = Desk()
    desk.enqueue("a", deadline=2.0)
    assert desk.core.next_wakeup() == 2.0
    assert refusal(desk.after(2.0, Tick())).code is Code.DEADLINE_EXCEEDED
    assert refusal(desk.enqueue("late", deadline=1.0)).code is Code.DEADLINE_EXCEEDED
    # Room that comes in the moment of the deadline comes too late.
    desk.enqueue("b", deadline=3.0)
    desk.now = 3.0
    first, *rest = desk.worker()
    assert isinstance(first, SendRefusal)
    assert rest == []


def test_queue_caps() -> None:
    desk = Desk(CoreLimits(max_queued=3, max_queued_per_tenant=2))
    desk.enqueue("a1")
    desk.enqueue("a2")
    found = refusal(desk.enqueue("a3"))
    assert found.code is Code.RESOURCE_EXHAUSTED
    assert found.retry_after_s is not None
    assert desk.enqueue("b1", tenant="other") == []
    assert refusal(desk.enqueue("c1", tenant="third")).code is Code.RESOURCE_EXHAUSTED
    desk.apply(Withdrawn(1, RequestId("a1")))
    assert desk.enqueue("c1", tenant="third") == []


def test_a_withdrawn_request_is_never_granted() -> None:
    desk = Desk()
    desk.enqueue("a")
    assert desk.apply(Withdrawn(1, RequestId("a"))) == [Dropped(request("a"))]
    assert desk.worker() == []
    assert desk.apply(Withdrawn(1, RequestId("a"))) == []
    desk.enqueue("b")
    assert desk.apply(Withdrawn(1, RequestId("b"))) == [], "granted already: the router gives the grant back"
    assert desk.core.num_granted == 1


def test_a_request_enqueued_twice_is_queued_once() -> None:
    desk = Desk()
    desk.enqueue("a")
    assert desk.enqueue("a") == []
    assert desk.core.num_queued == 1
    desk.apply(RouterConnected(ROUTER, 2))
    assert desk.core.num_queued == 0
    assert desk.enqueue("a", session=2) == []
    assert desk.enqueue("a", session=1) == [], "from a stream that is no more"
    assert desk.core.num_queued == 1
    assert grants(desk.worker()) == [("a", "w0")]


def test_a_lost_grant_is_repeated() -> None:
    desk = Desk()
    desk.worker()
    (first,) = desk.enqueue("a")
    desk.apply(RouterDisconnected(ROUTER, 1))
    assert desk.core.num_granted == 1
    desk.apply(RouterConnected(ROUTER, 2))
    assert isinstance(first, SendGrant)
    assert desk.enqueue("a", session=2) == [replace(first, session=2, repeated=True)]
    desk.report(running=1, started=[started("a")])
    desk.apply(RouterConnected(ROUTER, 3))
    assert desk.enqueue("a", session=3) == [replace(first, session=3, repeated=True)]
    desk.report(finished=["a"])
    assert desk.core.num_granted == 0


def test_a_request_id_of_another_router_is_refused() -> None:
    desk = Desk()
    desk.enqueue("a")
    desk.apply(RouterConnected("other", 2))
    assert refusal(desk.enqueue("a", session=2, router="other")).code is Code.ALREADY_EXISTS
    assert desk.core.num_queued == 1


def test_a_lost_router_takes_its_queue_along_and_leaves_its_grants() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.enqueue("b")
    assert desk.apply(RouterDisconnected(ROUTER, 1)) == [Dropped(request("b"))]
    assert (desk.core.num_queued, desk.core.num_granted) == (0, 1)
    desk.report(slots=1, running=1, started=[started("a")])
    desk.after(100.0, Tick())
    assert desk.core.num_granted == 1, "it runs, as far as the worker says"
    desk.report(slots=1, finished=["a"])
    assert desk.core.num_granted == 0


def test_the_end_of_an_old_stream_does_not_end_the_new_one() -> None:
    desk = Desk()
    desk.apply(RouterConnected(ROUTER, 2))
    desk.enqueue("a", session=2)
    assert desk.apply(RouterDisconnected(ROUTER, 1)) == []
    assert desk.core.num_queued == 1


def test_a_grant_that_nobody_mentions_is_dropped() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.enqueue("b")
    assert desk.after(GRANT_TIMEOUT_S - 0.1, Tick()) == []
    assert grants(desk.after(0.1, Tick())) == [("b", "w0")]


def test_a_repeated_grant_is_kept_as_long_as_a_new_one() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.enqueue("b")
    desk.apply(RouterDisconnected(ROUTER, 1))
    desk.after(GRANT_TIMEOUT_S - 0.1, RouterConnected(ROUTER, 2))
    assert grants(desk.enqueue("a", session=2)) == [("a", "w0")]
    assert desk.enqueue("b", session=2) == []
    assert desk.after(GRANT_TIMEOUT_S - 0.1, Tick()) == [], "its router has not held it for long"
    assert grants(desk.after(0.1, Tick())) == [("b", "w0")]


def test_an_unused_grant_frees_its_room_and_the_request_keeps_its_place() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    desk.enqueue("a")
    desk.enqueue("b")
    assert desk.apply(closed("a", reached=False)) == [], "w0 gets nothing from this router for a moment"
    assert desk.enqueue("a") == []
    assert grants(desk.after(0.25, Tick())) == [("a", "w0")]
    assert desk.core.num_queued == 1


def test_a_grant_that_nobody_wants_any_more_says_nothing_of_its_worker() -> None:
    """Its caller left, or its tenant's own bound is passed: whoever comes next is not to wait for that."""
    desk = Desk()
    desk.worker("w0", slots=1)
    desk.enqueue("a")
    desk.enqueue("b", tenant="other")
    assert grants(desk.apply(closed("a", reached=False, is_unavailable=False))) == [("b", "w0")]


def test_after_an_unreached_worker_another_one_is_tried() -> None:
    desk = Desk()
    desk.worker("w0", slots=4)
    assert grants(desk.enqueue("a")) == [("a", "w0")]
    desk.worker("w1", slots=1)
    desk.apply(closed("a", reached=False))
    (grant,) = desk.enqueue("a")
    assert isinstance(grant, SendGrant)
    assert (grant.worker_id, grant.attempt) == ("w1", 2)
    desk.apply(RouterConnected("other", 7))
    assert grants(desk.enqueue("b", session=7, router="other")) == [("b", "w0")], "the other router may reach it"


def test_an_enqueue_on_the_stream_of_its_grant_gives_the_grant_back() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    desk.enqueue("a")
    desk.worker("w1", slots=1)
    assert grants(desk.enqueue("a")) in ([("a", "w1")], [("a", "w0")])
    assert desk.core.num_granted == 1
    desk.apply(closed("a", reached=False, worker="w0"))
    desk.core.check_invariants()


def test_repeated_failures_pause_a_worker_longer() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    pauses = []
    desk.enqueue("a")
    for _ in range(5):
        begin = desk.now
        assert desk.apply(closed("a", reached=False)) == []
        assert desk.enqueue("a") == []
        while not grants(desk.apply(Tick())):
            wakeup = desk.core.next_wakeup()
            assert wakeup is not None
            desk.now = wakeup
        pauses.append(desk.now - begin)
    assert pauses == pytest.approx([0.25, 0.5, 1.0, 2.0, 2.0])
    desk.apply(closed("a", reached=True))
    desk.report(slots=1, finished=["a"])
    desk.enqueue("b")
    desk.apply(closed("b", reached=False))
    assert desk.enqueue("b") == []
    assert grants(desk.after(0.25, Tick())) == [("b", "w0")]


def test_a_grant_ended_by_its_router_keeps_its_room_until_the_worker_had_time_to_report_it() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.enqueue("b")
    assert desk.apply(closed("a", reached=True)) == []
    assert desk.after(CLOSING_GRACE_S / 2, Tick()) == []
    desk.report(slots=1, running=1, started=[started("a")])
    assert desk.after(1.0, Tick()) == []
    assert grants(desk.report(slots=1, finished=["a"])) == [("b", "w0")]
    desk.enqueue("c")
    assert desk.apply(closed("b", reached=True)) == []
    assert grants(desk.after(CLOSING_GRACE_S, Tick())) == [("c", "w0")], "the worker never mentioned b"


def test_a_request_that_started_and_finished_between_two_reports() -> None:
    desk = Desk()
    desk.worker(slots=1)
    desk.enqueue("a")
    desk.report(slots=1, started=[started("a")], finished=["a"])
    assert desk.core.num_granted == 0
    desk.enqueue("b")
    desk.report(slots=1, finished=["b"])
    assert desk.core.num_granted == 0


def test_a_lost_worker_ends_its_grants() -> None:
    desk = Desk()
    desk.worker("w0", slots=2)
    desk.enqueue("a")
    desk.enqueue("b")
    desk.report("w0", slots=2, running=1, started=[started("a")])
    desk.apply(WorkerLeft(W0))
    assert desk.core.num_granted == 0
    assert desk.enqueue("a") == [], "as new"
    assert grants(desk.worker("w1")) == [("a", "w1")]


def test_a_worker_without_its_control_stream_gets_nothing_new() -> None:
    desk = Desk()
    desk.worker("w0", slots=2)
    desk.enqueue("a")
    desk.enqueue("b")
    desk.report("w0", slots=2, running=2, started=[started("a"), started("b")])
    desk.apply(WorkerDisconnected(W0))
    assert desk.enqueue("c") == []
    assert desk.report("w0", slots=2, finished=["a"]) == [], "a late report of the old stream"
    # The snapshot says what still runs; a is not in it.
    assert grants(desk.report("w0", snapshot=True, slots=2, running=1, started=[started("b")])) == [("c", "w0")]
    assert desk.core.num_granted == 2


def test_what_an_earlier_leader_granted_counts_as_used_room() -> None:
    desk = Desk()
    desk.worker("w0", slots=2, running=2, started=[started("x"), started("y")])
    assert desk.enqueue("a") == []
    assert grants(desk.report("w0", slots=2, running=1, finished=["x"])) == [("a", "w0")]


def test_a_worker_that_moved_is_a_new_one() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    desk.enqueue("a")
    desk.apply(WorkerJoined(W0, "elsewhere:2", "cpu", 4096))
    assert desk.core.num_granted == 0
    assert desk.enqueue("b") == []
    (grant,) = desk.report("w0", snapshot=True, slots=1)
    assert isinstance(grant, SendGrant)
    assert grant.worker_address == "elsewhere:2"
    desk.apply(WorkerJoined(W0, "elsewhere:2", "cpu", 4096))
    assert desk.core.num_granted == 1


def test_a_draining_worker_gets_nothing() -> None:
    desk = Desk()
    desk.worker("w0", slots=4, draining=True)
    assert desk.enqueue("a") == []
    assert grants(desk.worker("w1")) == [("a", "w1")]


def test_flows_share_by_weight() -> None:
    desk = Desk()
    for tenant, weight in (("light", 1), ("heavy", 3)):
        classes = {qos_class: ClassPolicy(weight) for qos_class in QosClass}
        desk.apply(PolicyChanged(TenantId(tenant), TenantPolicy(TenantId(tenant), classes)))
    for i in range(80):
        desk.enqueue(f"light{i}", tenant="light")
        desk.enqueue(f"heavy{i}", tenant="heavy")
    order = [r for r, _ in grants(desk.worker(slots=40))]
    assert 28 <= sum(r.startswith("heavy") for r in order) <= 32


def test_one_request_does_not_wait_behind_a_flood() -> None:
    desk = Desk()
    desk.worker(slots=1)
    for i in range(50):
        desk.enqueue(f"flood{i}", tenant="flood")
    desk.enqueue("single", tenant="quiet")
    desk.report(slots=1, running=1, started=[started("flood0", "flood")])
    tokens = {flow("flood"): FlowTokens(10, 10)}
    assert grants(desk.report(slots=1, finished=["flood0"], flows=tokens)) == [("single", "w0")]


def test_long_generations_are_charged_while_they_run() -> None:
    desk = Desk()
    desk.worker(slots=2)
    desk.enqueue("long", tenant="long", max_new_tokens=10)
    desk.enqueue("other", tenant="other", max_new_tokens=10)
    running = [started("long", "long"), started("other", "other")]
    desk.report(slots=2, running=2, started=running)
    desk.enqueue("long2", tenant="long")
    desk.enqueue("other2", tenant="other")
    # Both have reserved as much; then long's counters run far ahead.
    tokens = {flow("long"): FlowTokens(10, 500), flow("other"): FlowTokens(10, 10)}
    desk.report(slots=2, running=2, flows=tokens)
    served = {view.flow.tenant_id: view.served_cost for view in desk.core.view.flow_views(desk.now)}
    assert served == {"long": 1010, "other": 30}
    assert grants(desk.report(slots=2, running=1, finished=["long"], flows=tokens)) == [("other2", "w0")]


def test_counters_are_cumulative_and_of_a_known_worker() -> None:
    desk = Desk()
    key = flow("acme")
    desk.worker("w0", slots=1, flows={key: FlowTokens(1_000, 1_000)})
    desk.enqueue("a")
    desk.report("w0", slots=1, running=1, started=[started("a")], flows={key: FlowTokens(1_010, 1_005)})
    desk.report("w0", slots=1, running=1, flows={key: FlowTokens(1_010, 1_005)})
    assert desk.core.view.flow_views(desk.now)[0].served_cost == 20
    # Over a reconnect nothing is lost or counted twice.
    desk.apply(WorkerDisconnected(W0))
    tokens = {key: FlowTokens(1_010, 1_010)}
    desk.report("w0", snapshot=True, slots=1, running=1, started=[started("a")], flows=tokens)
    assert desk.core.view.flow_views(desk.now)[0].served_cost == 30
    # A new process counts from zero.
    desk.report("w0", snapshot=True, slots=1, running=1, started=[started("a")], flows={key: FlowTokens(3, 1)})
    assert desk.core.view.flow_views(desk.now)[0].served_cost == 35


def test_a_worker_that_restarts_while_nobody_leads_is_charged_for_its_own_work_alone() -> None:
    """Found by the simulation: what a restarted worker reported was taken for its predecessor's, as far as it went, and
    charged once more when another flow's counters fell back."""
    old, acme, bolt = Desk(), flow("acme"), flow("bolt")
    old.worker("w0", slots=1)
    old.report("w0", slots=1, flows={acme: FlowTokens(100, 0), bolt: FlowTokens(100, 0)})
    new = Desk(predecessor=old.core.clock_snapshot())
    new.worker("w0", slots=1, flows={acme: FlowTokens(120, 0)})
    new.report("w0", slots=1, flows={bolt: FlowTokens(10, 0)})
    new.report("w0", slots=1, flows={acme: FlowTokens(121, 0)})
    assert new.core._flows.served_cost(acme) == 121
    assert new.core._flows.served_cost(bolt) == 10


def test_a_worker_that_restarts_idle_while_nobody_leads_is_charged_for_all_that_it_does() -> None:
    old, acme = Desk(), flow("acme")
    old.worker("w0", slots=1)
    old.report("w0", slots=1, flows={acme: FlowTokens(100, 0)})
    new = Desk(predecessor=old.core.clock_snapshot())
    new.worker("w0", slots=1)
    new.report("w0", slots=1, flows={acme: FlowTokens(120, 0)})
    assert new.core._flows.served_cost(acme) == 120


def test_an_answer_whose_worker_is_lost_comes_before_all_of_its_flow() -> None:
    desk = Desk(CoreLimits(max_queued=2))
    desk.worker(slots=1)
    desk.worker("w1", slots=1)
    assert grants(desk.enqueue("lost")) == [("lost", "w0")]
    assert grants(desk.enqueue("other")) == [("other", "w1")]
    desk.report(slots=1, running=1, started=[started("lost")])
    desk.report("w1", slots=1, running=1, started=[started("other")])
    desk.enqueue("first", priority=100)
    desk.enqueue("second", priority=100)
    assert isinstance(desk.enqueue("third")[0], SendRefusal), "the queue is full"
    desk.apply(GrantClosed(1, ROUTER, RequestId("lost"), WorkerId("w0"), reached_worker=False, is_unavailable=True))
    assert desk.enqueue("lost", is_resumed=True) == [], "it waits in a full queue, too"
    desk.apply(WorkerLeft(WorkerId("w0")))
    assert grants(desk.report("w1", slots=1, finished=["other"])) == [("lost", "w1")]


def test_what_was_charged_before_a_loss_costs_nothing_again() -> None:
    desk = Desk()
    costs = [
        desk.core.view.expected_cost(request("r", prompt_tokens=1000, is_resumed=is_resumed))
        for is_resumed in (False, True)
    ]
    assert costs[0] - costs[1] == 1000 * PROMPT_TOKEN_COST


def test_priority_is_inside_a_flow_only() -> None:
    desk = Desk()
    desk.enqueue("other", tenant="other")
    desk.enqueue("low")
    desk.enqueue("high", priority=100)
    assert [r for r, _ in grants(desk.worker(slots=2))] == ["other", "high"]


def test_a_first_request_that_fits_nowhere_blocks_only_its_own_flow() -> None:
    desk = Desk()
    desk.worker(slots=2)
    desk.enqueue("a", tenant="x")
    desk.enqueue("wide", tenant="wide", sequences=2)
    desk.enqueue("behind", tenant="wide")
    assert grants(desk.enqueue("b", tenant="x")) == [("b", "w0")]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    desk = Desk()
    desk.worker(slots=2)
    running = ["s0"]
    desk.enqueue("s0", tenant="small")
    desk.enqueue("wide", tenant="wide", sequences=2)
    for i in range(1, 100):
        running += [r for r, _ in grants(desk.enqueue(f"s{i}", tenant="small"))]
    assert running == ["s0", "s1"]
    passes = 0
    while "wide" not in running:
        passes += 1
        done = running.pop(0)
        now = {"running": len(running), "started": [started(r, "small") for r in running]}
        running += [r for r, _ in grants(desk.report(slots=2, finished=[done], **now))]
    assert passes <= HOLD_AFTER_PASSES + 3
    assert running == ["wide"]
    assert grants(desk.report(slots=2, running=2, started=[started("wide", "wide", 2)])) == []
    assert len(grants(desk.report(slots=2, running=0, finished=["wide"]))) == 2


def test_a_held_worker_goes_to_whoever_of_that_need_is_first() -> None:
    """Another wide request comes before the one that the worker is held for. Neither may wait for the other."""
    desk = Desk()
    classes = {qos_class: ClassPolicy(20) for qos_class in QosClass}
    desk.apply(PolicyChanged(TenantId("small"), TenantPolicy(TenantId("small"), classes)))
    desk.worker("w0", slots=2)
    desk.worker("w1", slots=1)
    running: dict[str, list[str]] = {"w0": [], "w1": []}
    for i in range(3):
        ((request_id, where),) = grants(desk.enqueue(f"s{i}", tenant="small"))
        running[where].append(request_id)
    desk.enqueue("wide", tenant="wide", sequences=2)
    for i in range(3, 200):
        desk.enqueue(f"s{i}", tenant="small")

    done = {"w0": 0, "w1": 0}

    def finish(worker: str) -> None:
        ended = running[worker].pop(0)
        done[worker] += 10
        commands = desk.report(
            worker,
            slots=2 if worker == "w0" else 1,
            running=len(running[worker]),
            started=[started(request_id, "small") for request_id in running[worker]],
            finished=[ended],
            flows={flow("small"): FlowTokens(done[worker], done[worker])},
        )
        for request_id, where in grants(commands):
            running[where].append(request_id)

    for _ in range(HOLD_AFTER_PASSES + 2):
        finish("w1")
    desk.enqueue("wider", tenant="urgent", qos_class=QosClass.INTERACTIVE, sequences=2)
    finish("w1")
    finish("w0")
    assert len(running["w0"]) == 1, "held"
    finish("w0")
    assert running["w0"] == ["wider"]
    finish("w0")
    assert running["w0"] == ["wide"]


def test_adapters_of_waiting_requests_are_prefetched_within_bounds() -> None:
    desk = Desk()
    desk.worker("w0", slots=1)
    desk.enqueue("a", adapter="uid-a")
    assert desk.enqueue("b", adapter="uid-a") == [], "it is arriving with a"
    sent = [c for i in range(10) for c in desk.enqueue(f"c{i}", adapter=f"uid-{i}")]
    assert sent == [SendPrefetch(W0, f"uid-{i}", ACME) for i in range(PREFETCHES_PER_WORKER)]
    assert desk.enqueue("again", adapter="uid-0") == []
    desk.report("w0", slots=1, running=1, started=[started("a")], adapters={"uid-0": Residency.HOST})
    assert desk.enqueue("d", adapter="uid-9") == [SendPrefetch(W0, "uid-9", ACME)]
    desk.now += 10.0
    sent = desk.enqueue("e", adapter="uid-8")
    assert sent == [SendPrefetch(W0, "uid-8", ACME)], "unanswered prefetches are forgotten"
    assert desk.enqueue("f", adapter="uid-0") == [], "reports name what changed, and uid-0 did not"
    desk.report("w0", slots=1, running=1, adapters={"uid-0": Residency.ABSENT})
    assert desk.enqueue("g", adapter="uid-0") == [SendPrefetch(W0, "uid-0", ACME)]


def test_estimates_follow_what_requests_really_use() -> None:
    desk = Desk()
    desk.worker(slots=1)
    produced = 0
    expected = []
    for i in range(40):
        desk.enqueue(f"r{i}", prompt_tokens=10, max_new_tokens=1_000)
        expected.append(desk.core.view.expected_cost(request("another", prompt_tokens=10, max_new_tokens=1_000)))
        desk.report(slots=1, running=1, started=[started(f"r{i}")])
        produced += 20
        desk.report(slots=1, finished=[f"r{i}"], flows={flow(): FlowTokens(10 * (i + 1), produced)})
    assert expected[0] == 10 + 2 * 1_000
    assert expected[-1] == 10 + 2 * 20


def test_a_grant_reserves_the_first_chunk_and_a_quantum_of_each_sequence() -> None:
    desk = Desk()
    desk.worker(slots=8)
    reserved = []
    for i, (prompt_tokens, max_new_tokens, sequences) in enumerate([(10, 4, 1), (10, 500, 1), (2_000, 500, 3)]):
        desk.enqueue(
            f"r{i}", tenant=f"t{i}", prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, sequences=sequences
        )
        reserved.append(desk.core._queue.reserved_by(flow(f"t{i}")))
    assert reserved == [10 + 2 * 4, 10 + 2 * 16, 512 + 2 * 3 * 16]


def test_in_order_of_arrival_nothing_but_arrival_counts() -> None:
    desk = Desk(order="arrival")
    heavy = TenantId("heavy")
    desk.apply(PolicyChanged(heavy, TenantPolicy(heavy, {c: ClassPolicy(1000) for c in QosClass})))
    desk.worker(slots=1)
    desk.enqueue("running")
    desk.enqueue("a")
    desk.enqueue("b", priority=100)
    desk.enqueue("c", tenant="heavy", deadline=5.0)
    desk.enqueue("d", tenant="third", qos_class=QosClass.INTERACTIVE)
    desk.enqueue("e")
    assert desk.core.num_queued == 5
    granted, running = [], "running"
    for _ in range(5):
        desk.report(slots=1, running=1, started=[started(running)])
        ((running, _worker),) = grants(desk.report(slots=1, finished=[running]))
        granted.append(running)
    assert granted == ["a", "b", "c", "d", "e"]


def test_in_order_of_arrival_a_request_that_fits_nowhere_lets_others_pass() -> None:
    desk = Desk(order="arrival")
    desk.worker(slots=2)
    desk.enqueue("first")
    desk.enqueue("second")
    desk.report(slots=2, running=2, started=[started("first"), started("second")])
    assert desk.enqueue("two slots", sequences=2) == []
    assert desk.enqueue("one slot", tenant="other") == []
    assert grants(desk.report(slots=2, running=1, finished=["first"])) == [("one slot", "w0")]
