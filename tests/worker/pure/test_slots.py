"""Who has a slot, and when it is free again."""

from __future__ import annotations

import pytest
from manylora_shared.ids import QosClass
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.planning.slots import Scheduled, Slots, Unit

from tests.worker.pure.rooms import A, B, group_of, request_of


def unit_of(sequence: Sequence, *, ends_at: int = 0, tokens_left: int = 16) -> Unit:
    return Unit(sequence, 1, Scheduled(sequence, 1, samples=True), tokens_left, ends_at)


def sequence_of(arrival: int, tenant: str = A) -> Sequence:
    return group_of(request_of(f"r{arrival}", tenant=A if tenant == A else B), arrival).sequences[0]


def test_units_stand_oldest_first_and_are_counted_by_flow() -> None:
    slots = Slots(3, 16)
    young, old, other = sequence_of(9), sequence_of(2), sequence_of(5, B)
    for sequence in (young, old, other):
        slots.take(unit_of(sequence))
        slots.check_invariants()
    assert [unit.sequence for unit in slots.units] == [old, other, young]
    assert slots.by_flow == {(A, QosClass.STANDARD): 2, (B, QosClass.STANDARD): 1}
    assert slots.num_free == 0
    with pytest.raises(AssertionError):
        slots.take(unit_of(sequence_of(10)))


def test_leaving_frees_the_slot_once() -> None:
    slots = Slots(2, 16)
    sequence = sequence_of(1)
    unit = unit_of(sequence, ends_at=7)
    slots.take(unit)
    assert slots.leave(sequence_of(1)) is None, "another of the same age"
    before = slots.version
    assert slots.leave(sequence) is unit
    assert slots.leave(sequence) is None
    slots.check_invariants()
    assert (slots.num_free, dict(slots.by_flow)) == (2, {})
    assert slots.version > before


def test_units_that_are_through_are_taken_out_together() -> None:
    slots = Slots(3, 16)
    done, going, chunk = unit_of(sequence_of(1), ends_at=4), unit_of(sequence_of(2), ends_at=4), unit_of(sequence_of(3))
    for unit in (done, going, chunk):
        slots.take(unit)
    done.tokens_left = chunk.tokens_left = 0
    assert slots.take_ended() == [done, chunk]
    slots.check_invariants()
    assert list(slots.units) == [going]


def test_a_quantum_that_has_cost_more_than_it_had_is_through() -> None:
    slots = Slots(2, 16)
    unit = unit_of(sequence_of(1), ends_at=4)
    slots.take(unit)
    unit.tokens_left = -1
    assert slots.take_ended() == [unit]
    slots.check_invariants()
    assert not len(slots)


def test_quanta_that_begin_together_end_apart() -> None:
    slots = Slots(4, 16)
    ends = []
    for arrival in range(4):
        num_tokens = slots.spread(0, 16)
        ends.append(num_tokens)
        slots.take(unit_of(sequence_of(arrival), ends_at=num_tokens))
    assert ends == [16, 12, 8, 4]


def test_a_quantum_that_has_nowhere_to_end_is_not_cut() -> None:
    slots = Slots(8, 8)
    for arrival in range(3):
        slots.take(unit_of(sequence_of(arrival), ends_at=arrival + 1))
    assert slots.spread(0, 3) == 3
    assert slots.spread(0, 5) == 5
