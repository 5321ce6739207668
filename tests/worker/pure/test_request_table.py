"""The requests in the engine, and what keeps each of them."""

from __future__ import annotations

from manylora_shared.ids import RequestId
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.engine.request_table import RequestTable
from manylora_worker.kinds.api import FinishReason
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.kinds.sequence import SequenceGroup, SequenceStatus

from tests.worker.pure.rooms import A, request_of


def added(table: RequestTable, name: str = "r", n: int = 1) -> SequenceGroup:
    group = table.add(request_of(name, n=n), CacheScope(A, is_group=False), 8, now=1.0)
    table.check_invariants()
    return group


def end_of(group: SequenceGroup) -> RequestEnd:
    return RequestEnd.of(group, FinishReason.STOP, "", 2.0)


def test_choices_are_found_by_ids_that_no_other_request_has() -> None:
    table = RequestTable()
    first, second = added(table, "a", n=3), added(table, "b", n=3)
    ids = [sequence.sequence_id for group in (first, second) for sequence in group.sequences]
    assert len(set(ids)) == 6
    assert table.sequence(ids[4]) is second.sequences[1]
    assert (table.ids, table.num_unfinished, len(table)) == (["a", "b"], 6, 2)
    assert first.sequences[0].order < second.sequences[0].order


def test_a_finished_choice_lingers_while_a_step_has_its_blocks() -> None:
    table = RequestTable()
    group = added(table, n=2)
    first, second = group.sequences
    first.num_steps_in_flight = 1
    for sequence, lingers in ((first, True), (second, False)):
        sequence.move_to(SequenceStatus.FINISHED)
        assert table.finished(sequence) is lingers
    assert not table.all_finished(group, end_of(group))
    assert list(table.closing) == [RequestId("r")]
    assert table.linger_no_more() == []
    first.num_steps_in_flight = 0
    assert table.linger_no_more() == [first]
    end = table.let_go(first)
    assert end is not None
    assert end.request_id == "r"
    assert (list(table.closing), list(table.lingering), table.num_unfinished) == ([], [], 0)


def test_the_end_is_told_with_the_last_that_lingers() -> None:
    table = RequestTable()
    group = added(table, n=2)
    for sequence in group.sequences:
        sequence.num_steps_in_flight = 1
        sequence.move_to(SequenceStatus.FINISHED)
        table.finished(sequence)
    table.all_finished(group, end_of(group))
    first, second = group.sequences
    assert table.let_go(second) is None
    assert table.let_go(first) is not None


def test_who_pauses_or_loads_is_counted_until_it_goes() -> None:
    table = RequestTable()
    group, other = added(table, "a"), added(table, "b")
    table.set_paused(group, is_paused=True)
    table.load_begun(group)
    version = table.loading_version
    table.load_over(other)
    assert table.loading_version == version, "it did not load"
    assert (table.num_active, list(table.loading)) == (1, [group])
    (sequence,) = group.sequences
    sequence.move_to(SequenceStatus.FINISHED)
    table.finished(sequence)
    table.remove(group)
    table.check_invariants()
    assert (table.num_active, list(table.loading), "a" in table) == (1, [], False)
    assert table.loading_version > version
