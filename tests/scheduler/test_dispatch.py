"""Grants beyond a worker's free room: to whom, how many, and what held sequences leave to others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from manylora_scheduler.core.core import Order
from manylora_scheduler.core.dispatch import _Hold
from manylora_scheduler.core.events import PolicyChanged, SendGrant, WorkerLeft
from manylora_scheduler.core.reports import FlowTokens, Residency
from manylora_scheduler.core.request import FlowKey, Phase, need_of
from manylora_shared.ids import QosClass, RequestId, TenantId, WorkerId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy

from tests.scheduler.helpers import Desk, flow, grants, started

SLOTS, MOST = 2, 5
W0 = WorkerId("w0")
Loads = Mapping[str, tuple[int, int, int]]


def full(order: Order = "fair", *, most: int = MOST, **what: object) -> Desk:
    """One worker whose two slots are taken by long answers of a hog, which has more of them waiting."""
    desk = Desk(order=order)
    desk.worker(slots=SLOTS, most=most, **what)
    for i in range(SLOTS + 2):
        desk.enqueue(f"h{i}", tenant="hog", max_new_tokens=1000)
    tell(desk, ["h0", "h1"], {"hog": (2, 0, 0)}, most=most)
    return desk


def tell(
    desk: Desk,
    ids: list[str],
    loads: Loads,
    *,
    tenant: str = "hog",
    most: int = MOST,
    slots: int = SLOTS,
    **what: object,
) -> list[str]:
    """The worker reports that these requests of a tenant have begun. Returns what is granted then."""
    running = sum(map(sum, loads.values()))
    begun = [started(request_id, tenant) for request_id in ids]
    commands = desk.report(slots=slots, most=most, running=running, started=begun, loads=loads, **what)
    return [request_id for request_id, _ in grants(commands)]


def test_who_is_behind_gets_into_a_full_worker_at_once() -> None:
    desk = full()
    (grant,) = desk.enqueue("v0", tenant="victim")
    assert isinstance(grant, SendGrant)
    assert (grant.worker_id, grant.queue_s) == ("w0", 0.0)
    assert desk.core.workers[0].used_sequences == SLOTS + 1
    assert desk.core.workers[0].free_sequences == 0


class OnlyInteractive:
    def factor(self, flow: FlowKey) -> int:
        return 1

    def goes_beyond(self, flow: FlowKey) -> bool:
        return flow.qos_class is QosClass.INTERACTIVE


def test_under_overload_others_wait_in_the_queue() -> None:
    desk = full()
    desk.core.set_precedence(OnlyInteractive())
    assert desk.enqueue("v0", tenant="victim") == []
    assert grants(desk.enqueue("v1", tenant="victim", qos_class=QosClass.INTERACTIVE)) == [("v1", "w0")]
    desk.core.set_precedence(None)
    assert grants(desk.report(slots=SLOTS, most=MOST, running=2)) == [("v0", "w0")]


def test_the_hog_itself_gets_no_more_than_the_slots() -> None:
    desk = full()
    assert desk.core.num_queued == 2
    assert desk.enqueue("h9", tenant="hog") == []


def test_nothing_more_while_something_of_the_flow_waits_there() -> None:
    """What is granted and not reported waits; what has no slot waits; once it has one, the next may come."""
    desk = full()
    desk.enqueue("v0", tenant="victim")
    assert desk.enqueue("v1", tenant="victim") == []
    assert tell(desk, ["v0"], {"hog": (2, 0, 0), "victim": (0, 1, 0)}, tenant="victim") == []
    assert tell(desk, [], {"hog": (1, 1, 0), "victim": (1, 0, 0)}) == ["v1"]


def test_up_to_its_share_of_the_slots_a_flow_does_not_wait_for_what_it_has_on_its_way() -> None:
    """Of eight slots, all a hog's, four are the newcomer's: so many of its requests come together, and no fifth."""
    desk = Desk()
    desk.worker(slots=8, most=16)
    for i in range(10):
        desk.enqueue(f"h{i}", tenant="hog", max_new_tokens=1000)
    tell(desk, [f"h{i}" for i in range(8)], {"hog": (8, 0, 0)}, most=16, slots=8)
    for i in range(4):
        assert grants(desk.enqueue(f"v{i}", tenant="victim")) == [(f"v{i}", "w0")]
    assert desk.enqueue("v4", tenant="victim") == []
    two = {"hog": (8, 0, 0), "victim": (0, 2, 0)}
    assert tell(desk, ["v0", "v1"], two, tenant="victim", most=16, slots=8) == [], "two wait, two are on their way"


def test_a_flow_of_a_greater_weight_has_a_greater_share() -> None:
    desk = Desk()
    heavy = TenantPolicy(TenantId("victim"), {qos_class: ClassPolicy(3) for qos_class in QosClass})
    light = TenantPolicy(TenantId("hog"), {qos_class: ClassPolicy(1) for qos_class in QosClass})
    for policy in (heavy, light):
        desk.apply(PolicyChanged(policy.tenant_id, policy))
    desk.worker(slots=4, most=12)
    for i in range(6):
        desk.enqueue(f"h{i}", tenant="hog", max_new_tokens=1000)
    tell(desk, [f"h{i}" for i in range(4)], {"hog": (4, 0, 0)}, most=12, slots=4)
    assert [bool(desk.enqueue(f"v{i}", tenant="victim")) for i in range(4)] == [True, True, True, False]


def heavy_and_light() -> Desk:
    """Sixteen slots, twelve of a flow of weight 3 and four of one of weight 1, which has a fifth sequence waiting."""
    desk = Desk()
    for tenant, weight in (("heavy", 3), ("light", 1), ("late", 1)):
        classes = {qos_class: ClassPolicy(weight) for qos_class in QosClass}
        desk.apply(PolicyChanged(TenantId(tenant), TenantPolicy(TenantId(tenant), classes)))
    desk.worker(slots=16, most=32)
    for tenant, count in (("light", 4), ("heavy", 12)):
        for i in range(count):
            desk.enqueue(f"{tenant}{i}", tenant=tenant, max_new_tokens=100)
    tell(desk, [f"light{i}" for i in range(4)], {"light": (4, 0, 0)}, tenant="light", most=32, slots=16)
    loads = {"heavy": (12, 0, 0), "light": (4, 0, 0)}
    counted = {flow("light"): FlowTokens(0, 140)}
    tell(desk, [f"heavy{i}" for i in range(12)], loads, tenant="heavy", most=32, slots=16, flows=counted)
    assert grants(desk.enqueue("light4", tenant="light", max_new_tokens=100)) == [("light4", "w0")]
    loads = {"heavy": (12, 0, 0), "light": (4, 1, 0)}
    assert tell(desk, ["light4"], loads, tenant="light", most=32, slots=16) == []
    return desk


def test_a_quarter_of_its_share_of_the_slots_waits_on_the_worker() -> None:
    """Several slots come free in one step, and until the scheduler hears of it the worker has nothing else."""
    desk = heavy_and_light()
    assert [bool(desk.enqueue(f"more{i}", tenant="heavy")) for i in range(4)] == [True, True, True, False]


def test_who_is_ahead_passes_nobody_who_waits_there_and_has_more_in_the_queue() -> None:
    """Light flows would else have a slot whenever more come free at once than the heavy one has sequences waiting."""
    desk = heavy_and_light()
    for i in range(4):
        desk.enqueue(f"more{i}", tenant="heavy", prompt_tokens=1, max_new_tokens=1)
    queue = desk.core._queue
    assert queue.queued_in(flow("heavy")) == 1
    # One of the light flow's has ended, and the fifth has its slot: nothing of it waits.
    loads = {"heavy": (12, 3, 0), "light": (4, 0, 0)}
    begun = [f"more{i}" for i in range(3)]
    assert tell(desk, begun, loads, tenant="heavy", most=32, slots=16, finished=["light0"]) == []
    assert queue.tag_of(flow("heavy")) < queue.tag_of(flow("light"))
    assert queue.has_come_as_far(flow("heavy"), flow("light")), "or it would not be granted anyway"
    assert desk.enqueue("light5", tenant="light") == []
    assert grants(desk.enqueue("late", tenant="late")) == [("late", "w0")], "who is not ahead does not wait for it"
    ended = [f"heavy{i}" for i in range(3)]
    loads = {"heavy": (12, 0, 0), "light": (4, 0, 0)}
    assert tell(desk, [], loads, most=32, slots=16, finished=ended) == ["more3"]


def test_who_is_within_its_share_waits_for_nobody_whatever_it_has_reserved() -> None:
    """A long prompt is reserved in whole, though most of it may turn out to be cached."""
    desk = heavy_and_light()
    for i in range(4):
        desk.enqueue(f"more{i}", tenant="heavy", prompt_tokens=1, max_new_tokens=1)
    assert desk.enqueue("late0", tenant="late", prompt_tokens=500)
    loads = {"heavy": (12, 3, 0), "light": (3, 2, 0), "late": (1, 0, 0)}
    assert tell(desk, ["more0", "more1", "more2", "late0"], loads, most=32, slots=16) == []
    queue = desk.core._queue
    assert queue.queued_in(flow("heavy")) == 1
    assert queue.tag_of(flow("late")) > queue.tag_of(flow("heavy"))
    assert [bool(desk.enqueue(f"late{i}", tenant="late")) for i in (1, 2, 3)] == [True, True, False]


def test_the_worker_says_how_many_it_takes() -> None:
    desk = full(most=3)
    assert grants(desk.enqueue("a", tenant="a")) == [("a", "w0")]
    assert desk.enqueue("b", tenant="b") == []
    tell(desk, ["a"], {"hog": (1, 1, 0), "a": (1, 0, 0)}, tenant="a", most=3)
    assert desk.core.num_queued == 3
    counted = {flow("hog"): FlowTokens(20, 2000)}
    assert tell(desk, [], {"hog": (1, 0, 0), "a": (1, 0, 0)}, most=3, finished=["h0"], flows=counted) == ["b"]


def test_a_worker_that_announces_nothing_takes_no_more_than_its_slots() -> None:
    desk = full(most=0)
    assert desk.enqueue("v0", tenant="victim") == []


def test_a_steady_newcomer_never_waits_until_all_is_done_that_a_hog_was_granted() -> None:
    """The hog's long answers go on; the other asks for one short answer after the other, far less than its share."""
    desk = Desk()
    desk.worker(slots=4, most=8)
    for i in range(20):
        desk.enqueue(f"h{i}", tenant="hog", prompt_tokens=8, max_new_tokens=2000)
    tell(desk, [f"h{i}" for i in range(4)], {"hog": (4, 0, 0)}, most=8, slots=4)
    hogs, victims = 0, 0
    for i in range(100):
        assert grants(desk.enqueue(f"v{i}", tenant="victim", prompt_tokens=32, max_new_tokens=16)) == [(f"v{i}", "w0")]
        hogs, victims = hogs + 6 * 16, victims + 16
        told = {flow("hog"): FlowTokens(32, hogs), flow("victim"): FlowTokens(32 * (i + 1), victims)}
        tell(desk, [f"v{i}"], {"hog": (3, 1, 0), "victim": (1, 0, 0)}, tenant="victim", most=8, slots=4)
        tell(desk, [], {"hog": (4, 0, 0)}, most=8, slots=4, finished=[f"v{i}"], flows=told)


def test_more_choices_than_there_are_places_left_wait() -> None:
    desk = full(most=3)
    assert desk.enqueue("wide", tenant="victim", sequences=2) == []
    assert grants(desk.enqueue("narrow", tenant="other")) == [("narrow", "w0")]


def test_in_order_of_arrival_nobody_gets_in() -> None:
    desk = full("arrival")
    assert desk.enqueue("v0", tenant="victim") == []


def test_who_is_behind_by_anything_at_all_waits_on_the_worker_and_not_in_the_queue() -> None:
    """Of two equal flows the one whose answer has the slot is ahead by what that reserved: at the end of its quantum
    the other is there, and not still on its way."""
    desk = Desk()
    desk.worker(slots=1, most=4)
    desk.enqueue("a", tenant="a", prompt_tokens=4, max_new_tokens=2)
    tell(desk, ["a"], {"a": (1, 0, 0)}, tenant="a", most=4, slots=1)
    assert desk.core._queue.tag_of(flow("a")) > 0
    assert grants(desk.enqueue("b", tenant="b", prompt_tokens=4, max_new_tokens=2)) == [("b", "w0")]


@pytest.mark.parametrize(
    ("loads", "hogs_weight", "is_granted"),
    [
        ({"hog": (2, 0, 0), "other": (1, 0, 0)}, 1, False),
        ({"hog": (2, 0, 0), "other": (2, 0, 0)}, 1, True),
        ({"hog": (2, 0, 0), "other": (1, 1, 0)}, 1, True),
        ({"hog": (2, 0, 0), "other": (1, 0, 0)}, 4, True),
        ({"hog": (2, 0, 0), "other": (1, 0, 0), "third": (3, 0, 0)}, 1, True),
    ],
)
def test_who_has_most_sequences_there_for_its_weight_gets_in_beside_nobody_with_fewer(
    loads: Loads, hogs_weight: int, is_granted: bool
) -> None:
    """The hog is behind by its tag, for the other's answer is reserved in whole."""
    desk = Desk()
    slots = sum(slotted for slotted, _, _ in loads.values())
    classes = {qos_class: ClassPolicy(hogs_weight) for qos_class in QosClass}
    desk.apply(PolicyChanged(TenantId("hog"), TenantPolicy(TenantId("hog"), classes)))
    ones = {qos_class: ClassPolicy(1) for qos_class in QosClass}
    for tenant in ("other", "third"):
        desk.apply(PolicyChanged(TenantId(tenant), TenantPolicy(TenantId(tenant), ones)))
    desk.worker(slots=slots, most=2 * slots)
    begun = []
    for tenant, (slotted, _, _) in loads.items():
        for i in range(slotted):  # what is ready came beyond the slots, and needs no ticket here
            desk.enqueue(f"{tenant}{i}", tenant=tenant, prompt_tokens=10 if tenant == "hog" else 3000, max_new_tokens=1)
            begun.append(started(f"{tenant}{i}", tenant))
    running = sum(map(sum, loads.values()))
    desk.report(slots=slots, most=2 * slots, running=running, started=begun, loads=loads)
    assert desk.core._queue.has_come_as_far(flow("other"), flow("hog"))
    assert bool(grants(desk.enqueue("more", tenant="hog"))) is is_granted


def test_a_flood_whose_requests_are_old_gets_no_free_slot_before_who_is_behind() -> None:
    """Its age would make up for all that it was served, were it counted from when its first request came."""
    desk = Desk()
    desk.worker(slots=1)
    for i in range(100):
        desk.enqueue(f"h{i}", tenant="hog", prompt_tokens=8, max_new_tokens=16, qos_class=QosClass.INTERACTIVE)
    desk.now += 30.0
    interactive = FlowKey(TenantId("hog"), QosClass.INTERACTIVE)

    def ends(i: int) -> list[tuple[str, str]]:
        counted = {interactive: FlowTokens(8 * (i + 1), 16 * (i + 1))}
        begun = [started(f"h{i}", "hog")]
        return grants(desk.report(slots=1, running=0, started=begun, finished=[f"h{i}"], flows=counted))

    for i in range(20):
        assert ends(i) == [(f"h{i + 1}", "w0")]
    assert desk.enqueue("v", tenant="victim", qos_class=QosClass.INTERACTIVE) == []
    assert ends(20) == [("v", "w0")]


def test_equal_flows_take_turns_as_far_as_there_are_places() -> None:
    desk = full()
    for tenant in "abcdef":
        desk.enqueue(tenant, tenant=tenant, max_new_tokens=1000)
    assert desk.core.workers[0].used_sequences == MOST
    # Nobody of them is ahead of the others: of what waits still, each has its turn when a place is free.
    assert desk.core.num_queued == 2 + 6 - (MOST - SLOTS)


def test_the_first_in_order_is_asked_first_and_who_waits_there_already_is_passed_over() -> None:
    desk = full()
    desk.enqueue("a0", tenant="a")
    tell(desk, ["a0"], {"hog": (2, 0, 0), "a": (0, 1, 0)}, tenant="a")
    assert desk.enqueue("a1", tenant="a") == [], "it has something ready there"
    assert grants(desk.enqueue("b0", tenant="b")) == [("b0", "w0")], "equal need, another flow"


def test_kv_that_is_taken_does_not_shut_out_who_is_behind() -> None:
    """The worker makes room by its own rules; one request of a flow waits there for it, and not more."""
    desk = full(blocks=100, free=1)
    assert grants(desk.enqueue("v0", tenant="victim", prompt_tokens=100)) == [("v0", "w0")]
    assert desk.enqueue("v1", tenant="victim", prompt_tokens=100) == []


def test_a_worker_with_blocks_and_with_the_adapter_is_preferred() -> None:
    desk = Desk()
    for name in ("w0", "w1", "w2"):
        desk.worker(name, slots=1, most=4, blocks=100)
    on = {}
    for i in range(3):
        ((request_id, name),) = grants(desk.enqueue(f"h{i}", tenant="hog", max_new_tokens=100))
        on[name] = request_id
    for name, free in (("w0", 0), ("w1", 50), ("w2", 60)):
        desk.report(
            name,
            slots=1,
            most=4,
            running=1,
            blocks=100,
            free=free,
            adapters={"u": Residency.DEVICE} if name != "w2" else {},
            started=[started(on[name], "hog")],
            loads={"hog": (1, 0, 0)},
        )
    assert grants(desk.enqueue("v0", tenant="v", adapter="u")) == [("v0", "w1")]
    assert grants(desk.enqueue("x0", tenant="x")) == [("x0", "w2")]


def test_a_worker_that_is_held_for_a_wide_request_takes_who_is_before_that_and_nobody_behind() -> None:
    desk = Desk()
    desk.worker(slots=2, most=3)
    desk.enqueue("h0", tenant="hog", max_new_tokens=1000)
    desk.enqueue("h1", tenant="hog", max_new_tokens=1000)
    tell(desk, ["h0", "h1"], {"hog": (2, 0, 0)}, most=3)
    desk.enqueue("pair", tenant="pair", sequences=2, max_new_tokens=1000, prompt_tokens=100)
    ticket = desk.core._tickets.wanted.get(RequestId("pair"))
    assert ticket is not None
    assert ticket.phase is Phase.QUEUED, "one place is too few for it"
    desk.core._dispatch._hold = _Hold(ticket, W0, need_of(ticket.request))
    # `late` comes at the clock, where `pair` stands too and has been for longer.
    assert desk.enqueue("late", tenant="late") == []
    assert grants(desk.enqueue("sooner", tenant="sooner", qos_class=QosClass.INTERACTIVE)) == [("sooner", "w0")]


# ---- held sequences


def test_a_slot_of_a_held_sequence_is_free_for_others_and_not_for_its_own_flow() -> None:
    desk = full(most=0)
    assert desk.enqueue("v0", tenant="victim") == []
    assert tell(desk, [], {"hog": (1, 0, 1)}, most=0) == []  # the places are taken: it announced none beyond its slots
    desk = full()
    desk.enqueue("wait", tenant="victim")
    granted = tell(desk, [], {"hog": (0, 0, 2)})
    assert granted == [], "both of the hog's count as its own use"
    assert grants(desk.enqueue("b", tenant="b")) == [("b", "w0")]
    assert desk.core.workers[0].free_sequences == 0
    assert desk.enqueue("c", tenant="c") == [], "nobody with a slot is ahead of it"


def test_held_flows_are_placed_by_themselves() -> None:
    """Two requests of equal need: that the hog's fits nowhere says nothing of the other's."""
    desk = full()
    tell(desk, [], {"hog": (0, 0, 2)})
    assert flow("hog") in desk.core._dispatch.held
    assert desk.core._dispatch.apart == {TenantId("hog"): 1}
    assert grants(desk.enqueue("b", tenant="b", max_new_tokens=1000)) == [("b", "w0")]
    # And of one that comes while its flow is held already.
    desk.enqueue("h7", tenant="hog")
    assert grants(desk.enqueue("c", tenant="c")) == [("c", "w0")]


def test_a_tenants_other_classes_are_placed_by_themselves_too() -> None:
    """What its standard requests hold counts to its interactive ones, and says nothing of another tenant's."""
    desk = full()
    tell(desk, [], {"hog": (0, 0, 2)})
    assert desk.enqueue("hi", tenant="hog", qos_class=QosClass.INTERACTIVE) == []
    assert grants(desk.enqueue("vi", tenant="victim", qos_class=QosClass.INTERACTIVE)) == [("vi", "w0")]


def test_what_was_held_gets_no_credit_for_that_time() -> None:
    desk = full()
    tell(desk, [], {"hog": (0, 0, 2)})
    queue = desk.core._queue
    for i in range(40):  # another works on meanwhile
        desk.enqueue(f"b{i}", tenant="b", prompt_tokens=500, max_new_tokens=10)
        tell(desk, [f"b{i}"], {"hog": (0, 0, 2), "b": (1, 0, 0)}, tenant="b")
        desk.report(slots=SLOTS, most=MOST, running=2, finished=[f"b{i}"], loads={"hog": (0, 0, 2), "b": (0, 0, 0)})
    assert queue.tag_of(flow("hog")) <= queue.virtual_time or queue.reserved_by(flow("hog")) > 0
    tell(desk, [], {"hog": (2, 0, 0)})
    assert flow("hog") not in desk.core._dispatch.held
    assert queue.tag_of(flow("hog")) >= queue.virtual_time


def test_a_worker_that_goes_takes_its_held_sequences_along() -> None:
    desk = full()
    tell(desk, [], {"hog": (0, 0, 2)})
    desk.apply(WorkerLeft(WorkerId("w0")))
    assert flow("hog") not in desk.core._dispatch.held
