"""One worker as the scheduler sees it: room is its own word minus what was granted since."""

from __future__ import annotations

from manylora_scheduler.core.flows import Flows
from manylora_scheduler.core.reports import FlowTokens, Residency
from manylora_scheduler.core.request import FlowKey, Ticket
from manylora_scheduler.core.worker_view import Holders, WorkerView
from manylora_shared.ids import AdapterUid, QosClass, RequestId, WorkerId

from tests.scheduler.helpers import flow, report, request


def view_of(holders: Holders | None = None, **what: object) -> WorkerView:
    worker = WorkerView(WorkerId("w0"), "w0:1", "cpu", 4096, holders or Holders())
    worker.fold_capacity(report(snapshot=True, **what))  # type: ignore[arg-type]
    return worker


def granted(worker: WorkerView, request_id: str, **what: object) -> Ticket:
    wanted = request(request_id, **what)  # type: ignore[arg-type]
    ticket = Ticket(wanted, Flows().known[wanted.flow], 1, 0, 1, 0.0, 0.0)
    ticket.worker_id = worker.worker_id
    worker.grant(ticket)
    worker.check_invariants()
    return ticket


def test_a_grant_takes_slots_and_the_blocks_of_its_prompt_until_it_is_dropped() -> None:
    worker = view_of(slots=4, blocks=100, block_size=16)
    ticket = granted(worker, "r", prompt_tokens=32, sequences=2)
    assert ticket.blocks == 4, "33 tokens, and a block more for the second choice"
    assert (worker.free_sequences, worker.free_blocks) == (2, 96)
    worker.drop_grant(ticket)
    worker.check_invariants()
    assert (worker.free_sequences, worker.free_blocks) == (4, 100)


def test_a_reported_start_is_counted_by_the_worker_and_no_longer_here() -> None:
    worker = view_of(slots=4)
    ticket = granted(worker, "r")
    assert worker.start(RequestId("r")) is ticket
    worker.fold_capacity(report(slots=4, running=1, free=990))
    worker.check_invariants()
    assert (worker.used_sequences, worker.free_blocks) == (1, 990)
    assert worker.finish(RequestId("r")) is ticket
    assert worker.finish(RequestId("r")) is None


def test_it_takes_what_its_free_blocks_begin() -> None:
    worker = view_of(slots=4, blocks=100, free=4, block_size=16)
    assert worker.can_take(request("r", prompt_tokens=63))
    assert not worker.can_take(request("r", prompt_tokens=64)), "the first token needs a block more"
    assert worker.can_take(request("r", prompt_tokens=47, sequences=2))
    assert not worker.can_take(request("r", prompt_tokens=63, sequences=2))
    granted(worker, "other", prompt_tokens=15)
    assert worker.can_take(request("r", prompt_tokens=47))
    assert not worker.can_take(request("r", prompt_tokens=48)), "a block is the other's"


def test_it_takes_no_second_attempt_while_the_first_is_here() -> None:
    worker = view_of(slots=4)
    granted(worker, "r")
    assert not worker.can_take(request("r"))
    assert worker.can_take(request("other"))
    assert worker.start(RequestId("of an earlier leader")) is None
    assert not worker.can_take(request("of an earlier leader"))


def test_what_could_never_end_there_is_not_taken() -> None:
    worker = view_of(slots=4, blocks=10, block_size=16)
    assert worker.could_ever_run(request("r", prompt_tokens=100, max_new_tokens=61)), "the last token has no KV"
    assert not worker.could_ever_run(request("r", prompt_tokens=100, max_new_tokens=62))
    assert not worker.could_ever_run(request("r", sequences=5))


def test_the_slots_of_held_sequences_are_free_for_all_but_their_own_tenant() -> None:
    worker = view_of(slots=2, running=2, most=4, loads={"held": (0, 0, 2)})
    assert worker.can_take(request("r", tenant="other", sequences=2))
    for qos_class in QosClass:
        assert not worker.can_take(request("r", tenant="held", qos_class=qos_class))


def test_half_of_the_places_beyond_the_slots_stay_for_tenants_with_nothing_held() -> None:
    """Tenants that wait for their adapters together took every place, and a quiet one waited for a load to end."""
    worker = view_of(slots=4, running=6, most=8, loads={"a": (0, 0, 3), "b": (0, 0, 3)})
    assert not worker.can_take(request("r", tenant="a"))
    assert not worker.can_take(request("r", tenant="b"))
    assert worker.can_take(request("r", tenant="quiet", sequences=2))
    worker.check_invariants()


def test_a_flows_share_of_the_slots_is_among_those_that_are_there() -> None:
    worker = view_of(slots=12, running=3, loads={"a": (2, 1, 0), "b": (0, 0, 3)})
    weights = {flow("a"): 1, flow("b"): 1, flow("c"): 2}
    assert worker.share_of(flow("c"), weights.__getitem__) == 8, "b's are all held: it has no part"
    granted(worker, "r", tenant="b")
    assert worker.share_of(flow("c"), weights.__getitem__) == 6
    assert worker.granted_to(flow("b")) == 1


def test_an_adapter_arrives_from_its_grant_on_and_is_known_among_its_holders() -> None:
    holders = Holders()
    worker, uid = view_of(holders), AdapterUid("u")
    assert worker.residency(uid) is Residency.ABSENT
    ticket = granted(worker, "r", adapter="u")
    assert worker.residency(uid) is Residency.ARRIVING
    assert list(holders.of(uid)) == [worker]
    again = granted(worker, "s", adapter="u")
    worker.drop_grant(ticket)
    assert list(holders.of(uid)) == [worker], "another request of it is there"
    worker.drop_grant(again)
    assert list(holders.of(uid)) == []
    worker.fold_capacity(report(adapters={"u": Residency.HOST}))
    assert worker.residency(uid) is Residency.HOST
    assert list(holders.of(uid)) == [worker]
    worker.fold_capacity(report(adapters={"u": Residency.ABSENT}))
    worker.check_invariants()
    assert list(holders.of(uid)) == []


def test_output_counters_tell_what_grew_and_a_fall_is_another_process() -> None:
    worker = WorkerView(WorkerId("w0"), "w0:1", "cpu", 4096, Holders())

    def told(output_tokens: int) -> list[tuple[FlowKey, int]]:
        said = report(snapshot=not worker.has_reported, flows={flow(): FlowTokens(5, output_tokens)})
        grown = worker.fold_outputs(said)
        worker.fold_capacity(said)
        return grown

    assert told(10) == [], "the first report says nothing of what grew"
    assert told(25) == [(flow(), 15)]
    assert told(3) == [(flow(), 3)]
