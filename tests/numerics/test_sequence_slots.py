"""Which row of the device's block tables belongs to which sequence: what is sent is what changed."""

from __future__ import annotations

import random

import pytest
import torch
from manylora_worker.kinds.api import Sampling, SequenceChunk

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.steps.sequence_slots import SequenceSlots, TableUpdates

BLOCK = 4


def chunk(sequence: int, position: int, table: list[int]) -> SequenceChunk:
    return SequenceChunk(
        sequence_id=sequence, token_ids=[1], start_position=position, block_table=table, adapter_uid=None,
        samples=True, sampling=Sampling(seed=1), choice=0, output_index=0, prompt_token_ids=[], output_token_ids=[],
    )  # fmt: skip


def sent(updates: TableUpdates) -> list[tuple[int, int, int]]:
    return list(zip(updates.rows, updates.entries, updates.blocks, strict=True))


def test_only_new_entries_are_sent() -> None:
    slots = SequenceSlots(2, 8)
    first, second, third = TableUpdates(), TableUpdates(), TableUpdates()
    row = slots.take(chunk(1, 3, [7, 8]), BLOCK, first)
    assert sent(first) == [(row, 0, 7), (row, 1, 8)]
    assert slots.take(chunk(1, 7, [7, 8]), BLOCK, second) == row
    assert sent(second) == []
    slots.take(chunk(1, 8, [7, 8, 9]), BLOCK, third)
    assert sent(third) == [(row, 2, 9)]


def test_the_block_that_a_step_writes_may_have_become_another() -> None:
    slots = SequenceSlots(2, 8)
    row = slots.take(chunk(1, 5, [7, 8]), BLOCK, TableUpdates())
    updates = TableUpdates()
    slots.take(chunk(1, 6, [7, 3]), BLOCK, updates)
    assert sent(updates) == [(row, 1, 3)]


def test_the_sequence_not_seen_for_longest_makes_room_and_comes_back_whole() -> None:
    slots = SequenceSlots(2, 8)
    rows = {sequence: slots.take(chunk(sequence, 0, [sequence]), BLOCK, TableUpdates()) for sequence in (1, 2)}
    slots.take(chunk(1, 1, [1]), BLOCK, TableUpdates())
    assert slots.take(chunk(3, 0, [3]), BLOCK, TableUpdates()) == rows[2]
    updates = TableUpdates()
    assert slots.take(chunk(2, 1, [2]), BLOCK, updates) == rows[1]
    assert sent(updates) == [(rows[1], 0, 2)]
    assert slots.padding_row not in rows.values()


def test_what_was_sent_is_the_table_of_every_sequence() -> None:
    rng = random.Random(2)
    slots, tables = SequenceSlots(3, 8), torch.zeros(4, 8, dtype=torch.int32)
    positions: dict[int, int] = {}
    blocks: dict[int, list[int]] = {}
    for _ in range(300):
        sequence = rng.randrange(5)
        position = positions.get(sequence, 0)
        if position == 32 or rng.random() < 0.05:  # it lost its blocks: another id, as with holdings
            positions[sequence], blocks[sequence], position = 0, [], 0
            sequence_id = sequence + 10 * rng.randrange(1, 1000)
            blocks[sequence] = [sequence_id]
        table = blocks.setdefault(sequence, [sequence])
        name, own = table[0], table[1:]
        while len(own) <= position // BLOCK:
            own.append(rng.randrange(100))
        table[1:] = own
        updates = TableUpdates()
        row = slots.take(chunk(name, position, own), BLOCK, updates)
        updates.apply(tables)
        assert tables[row, : len(own)].tolist() == own
        positions[sequence] = position + 1
