"""Which row of the device's block tables belongs to which sequence, and which entries have to be sent."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from manylora_worker.kinds.api import SequenceChunk
from manylora_worker.models.cuda.steps.step_tables import to_device


class TableUpdates:
    """[table row, entry] = block."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.entries: list[int] = []
        self.blocks: list[int] = []

    def apply(self, tables: Tensor) -> None:
        if self.rows:
            packed = to_device([self.rows, self.entries, self.blocks], torch.int64, tables.device)
            tables.index_put_((packed[0], packed[1]), packed[2].int())


class SequenceSlots:
    # Sequences not seen for longest make room. While one keeps its row, the entries before the one that its step
    # writes do not change, so only that one and those behind it are compared.

    def __init__(self, num_slots: int, max_blocks: int, state_blocks: int = 0) -> None:
        self._state_blocks = state_blocks  # a table's first ones, before those of tokens
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._mirror = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self._known = [0] * num_slots
        self.padding_row = num_slots  # no sequence has it

    def take(self, chunk: SequenceChunk, block_size: int, updates: TableUpdates) -> int:
        row = self._rows.pop(chunk.sequence_id, None)
        if row is None:
            if not self._free:
                _, freed = self._rows.popitem(last=False)
                self._free.append(freed)
            row = self._free.pop()
            self._known[row] = 0
        self._rows[chunk.sequence_id] = row
        table, mirror = chunk.block_table, self._mirror[row]
        first = min(self._known[row], self._state_blocks + chunk.start_position // block_size)
        for entry in range(first, len(table)):
            block = table[entry]
            if entry >= self._known[row] or mirror[entry] != block:
                mirror[entry] = block
                updates.rows.append(row)
                updates.entries.append(entry)
                updates.blocks.append(block)
        self._known[row] = len(table)
        return row
