"""For whose prompt a decode quantum ends early, and whose."""

from __future__ import annotations

from manylora_worker.kinds.sequence import Sequence, SequenceStatus
from manylora_worker.planning.quantum_cuts import QuantumCuts
from manylora_worker.planning.slots import Scheduled, Slots, Unit

from tests.worker.pure.rooms import A, B, Rooms


def start(rooms: Rooms, slots: Slots, sequence: Sequence, *, tokens_left: int, ends_at: int = 9, cost: int = 5) -> Unit:
    item = sequence.item
    pick = rooms.queue.select(lambda i: i if i == item else None)
    assert pick is not None
    rooms.queue.start(pick, 32)
    unit = Unit(sequence, pick.item, Scheduled(sequence, 1, samples=True), tokens_left, ends_at)
    unit.cost = cost
    slots.take(unit)
    return unit


def test_who_has_more_than_its_share_makes_way_with_its_shortest_quantum() -> None:
    rooms, slots = Rooms(num_blocks=40), Slots(4, 16)
    cuts = QuantumCuts(slots, rooms.queue, rooms.shares)
    hog = [start(rooms, slots, rooms.parked(A), tokens_left=left) for left in (9, 3, 7, 12)]
    newcomer = rooms.waiting(B)
    assert cuts.prompts() == {newcomer.item}
    assert newcomer.item is not None
    assert cuts.unit_for(newcomer.item) is hog[1]


def test_neither_chunks_nor_quanta_that_have_done_nothing_are_cut() -> None:
    rooms, slots = Rooms(num_blocks=40), Slots(2, 16)
    cuts = QuantumCuts(slots, rooms.queue, rooms.shares)
    start(rooms, slots, rooms.parked(A), tokens_left=1, ends_at=0)
    start(rooms, slots, rooms.parked(A), tokens_left=1, cost=0)
    newcomer = rooms.waiting(B)
    assert newcomer.item is not None
    assert cuts.unit_for(newcomer.item) is None


def test_nothing_is_cut_for_a_decode_or_for_who_has_its_share() -> None:
    rooms, slots = Rooms(num_blocks=40), Slots(2, 16)
    cuts = QuantumCuts(slots, rooms.queue, rooms.shares)
    start(rooms, slots, rooms.parked(A), tokens_left=5)
    start(rooms, slots, rooms.parked(B), tokens_left=5)
    more, decoding = rooms.waiting(B), rooms.parked(A)
    decoding.move_to(SequenceStatus.DECODE)
    assert cuts.prompts() == set()
    assert more.item is not None
    assert cuts.unit_for(more.item) is None
