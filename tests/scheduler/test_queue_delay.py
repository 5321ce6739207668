"""How long requests wait: targets, the book of what is queued, and what is measured in it."""

from __future__ import annotations

from manylora_scheduler.gates.queue_delay import FlowDelays, OverloadTargets, QueueDelays, Waiting
from manylora_shared.ids import QosClass, RequestId, WorkerId

from tests.scheduler.helpers import ROUTER, flow, report, request


def delays() -> QueueDelays:
    return QueueDelays(OverloadTargets(interactive_s=0.2, standard_s=2.0))


def test_a_batch_request_may_wait_half_of_its_time_and_one_without_a_deadline_for_ever() -> None:
    targets = OverloadTargets()
    assert targets.of_request(request("r"), 0.0) == targets.standard_s
    batch = request("r", qos_class=QosClass.BATCH, deadline=50.0)
    assert targets.of_request(batch, 10.0) == 20.0
    assert targets.of_request(batch, 60.0) == 1e-3, "it is over: a target all the same"
    assert targets.of_request(request("r", qos_class=QosClass.BATCH), 0.0) is None


def test_only_the_router_that_asked_takes_its_request_out() -> None:
    book = delays()
    book.queue(request("r"), 5.0, now=1.0)
    assert book.leave(request("r", router="other")) is None
    assert book.num_queued == 1
    waiting = book.leave(request("r"))
    assert waiting is not None
    assert (waiting.since, waiting.cost, book.num_queued) == (1.0, 5.0, 0)
    assert book.leave(request("r")) is None


def test_granted_and_waiting_requests_are_measured_once() -> None:
    book = delays()
    for request_id, now in (("early", 0.0), ("late", 4.0), ("waits", 4.5)):
        book.queue(request(request_id), 1.0, now)
    for request_id in ("early", "late"):
        waiting = book.leave(request(request_id))
        assert waiting is not None
        book.granted(flow(), waiting, now=4.1)
    assert book.next_flows() == [flow()]
    ((measured, sample),) = book.measure([flow()], now=5.0)
    assert measured == flow()
    assert (sample.count, sample.late) == (3, 1), "the one that waited for 4.1 s of 2"
    assert [s.count for _, s in book.measure([flow()], now=5.0)] == [1], "the one that still waits"


def test_a_flow_that_has_nothing_left_is_forgotten() -> None:
    book = delays()
    book.queue(request("r"), 1.0, 0.0)
    book.leave(request("r"))
    assert book.next_flows() == []
    assert book.flows == {}


def test_sequences_that_wait_for_a_slot_on_a_worker_count_beyond_the_target() -> None:
    book, key = delays(), flow("acme", QosClass.STANDARD)
    worker = WorkerId("w0")
    book.note_ready(worker, report(loads={"acme": (1, 2, 0)}), now=0.0)
    ((measured, sample),) = book.measure([], now=1.5)
    assert (measured, sample.count, sample.warned, sample.late) == (key, 1, 0, 0)
    ((_, sample),) = book.measure([], now=2.5)
    assert (sample.warned, sample.late) == (1, 1)
    book.note_ready(worker, report(loads={"acme": (3, 0, 0)}), now=3.0)
    assert book.measure([], now=9.0) == []


def test_those_from_a_place_on_come_greatest_first_and_once() -> None:
    flows = FlowDelays()
    for name, place in (("a", 0.2), ("b", 0.9), ("c", 0.5), ("gone", 0.8)):
        flows.queue(RequestId(name), Waiting(ROUTER, 0.0, 1.0, place, None))
    del flows.queued[RequestId("gone")]
    assert flows.from_place(0.5, 1) == ["b"]
    assert flows.from_place(0.5, 9) == ["c"]
    assert flows.from_place(0.5, 9) == []


def test_waits_name_each_flows_oldest() -> None:
    book = delays()
    for request_id, now in (("a", 1.0), ("b", 3.0)):
        book.queue(request(request_id), 1.0, now)
    (wait,) = book.waits(now=5.0)
    assert (wait.flow, wait.queued, wait.oldest_s, wait.stands_for) == (flow(), 2, 4.0, 1)
