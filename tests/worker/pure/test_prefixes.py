"""What a sequence finds in the prefix cache, and leaves there."""

from __future__ import annotations

from manylora_worker.kinds.sequence import Sequence

from tests.worker.pure.rooms import B, Rooms, compute


def computed(rooms: Rooms, prompt: int) -> Sequence:
    sequence = rooms.parked(prompt=prompt)
    compute(sequence, prompt)
    return sequence


def test_full_blocks_are_published_and_found_by_the_same_prompt() -> None:
    rooms = Rooms(has_cache=True)
    first = computed(rooms, 11)
    rooms.prefixes.publish(first, 0, 11)
    assert rooms.prefixes.find(rooms.waiting(prompt=11)) == first.block_table[:2], "the third block is not full"
    assert rooms.prefixes.find(rooms.waiting(tenant=B, prompt=11)) == []


def test_the_last_token_is_computed_even_where_its_block_is_cached() -> None:
    rooms = Rooms(has_cache=True)
    first = computed(rooms, 8)
    rooms.prefixes.publish(first, 0, 8)
    assert rooms.prefixes.find(rooms.waiting(prompt=8)) == first.block_table[:1]
    assert rooms.prefixes.find(rooms.waiting(prompt=9)) == first.block_table[:2]


def test_only_what_a_step_has_filled_is_published() -> None:
    rooms = Rooms(has_cache=True)
    first = computed(rooms, 12)
    rooms.prefixes.publish(first, 4, 11)
    assert rooms.prefixes.find(rooms.waiting(prompt=13)) == [], "the first block was not"
    rooms.prefixes.publish(first, 0, 4)
    assert rooms.prefixes.find(rooms.waiting(prompt=13)) == first.block_table[:2]


def test_what_is_withdrawn_is_not_found() -> None:
    rooms = Rooms(has_cache=True)
    first = computed(rooms, 8)
    rooms.prefixes.publish(first, 0, 8)
    rooms.prefixes.withdraw(first)
    assert rooms.prefixes.find(rooms.waiting(prompt=9)) == []


def test_without_keys_there_is_no_cache() -> None:
    rooms = Rooms()
    first = computed(rooms, 8)
    rooms.prefixes.publish(first, 0, 8)
    assert rooms.prefixes.find(rooms.waiting(prompt=9)) == []
