"""From a step's chunks to the metadata that the kernels read: rows, block tables, tiles.

Owns the device's block tables and two packing buffers, of steps that decode alone and of all others. Their tensors keep
their addresses, so that graphs read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora_worker.kinds.api import SequenceChunk
from manylora_worker.models.cuda.adapter_arena import AdapterArena
from manylora_worker.models.cuda.decoder import MAX_SPLITS, DeviceStep, LoraStep
from manylora_worker.models.cuda.graph_shapes import NO_LORA, bucket_of
from manylora_worker.models.cuda.kernels.attention import PREFILL_TILE_FIELDS
from manylora_worker.models.cuda.kernels.lora import TILE_FIELDS, TILE_ROWS
from manylora_worker.models.cuda.sequence_slots import SequenceSlots, TableUpdates
from manylora_worker.models.cuda.step_tables import StepTables


@dataclass(frozen=True)
class PackedStep:
    step: DeviceStep
    row_of: dict[int, int]  # sequence id -> the row of its last token
    is_decode: bool  # every row decodes: the step can be a graph
    lora_tiles: int  # NO_LORA where no row has an adapter
    columns: bool  # whether a row's adapter has gains and shifts


class StepPacker:
    """Args:
    max_rows, max_sequences: of one step; the latter decode.
    max_blocks: of one sequence.
    prefill_rows: of a prompt's tile (attention.attend_prefill), at most.
    """

    def __init__(
        self,
        adapters: AdapterArena,
        device: torch.device,
        *,
        max_rows: int,
        max_sequences: int,
        block_size: int,
        max_blocks: int,
        prefill_rows: int,
        num_kv_heads: int,
    ) -> None:
        self._adapters = adapters
        self._max_sequences = max_sequences
        self._block_size = block_size
        self._prefill_rows = prefill_rows
        self._num_kv_heads = num_kv_heads
        self._slots = SequenceSlots(2 * max_sequences, max_blocks)
        self.tables = torch.zeros(self.padding_row + 1, max_blocks, dtype=torch.int32, device=device)
        self.decode_tables = StepTables(_fields(max_sequences, 0), device)
        self.mixed_tables = StepTables(_fields(max_rows, max_rows), device)

    @property
    def padding_row(self) -> int:
        return self._slots.padding_row

    def pack(self, chunks: Sequence[SequenceChunk]) -> PackedStep:
        """Decoding rows come first, each kind in order of adapters."""
        slot_of = {c.adapter_uid: self._adapters.slot_of(c.adapter_uid) for c in chunks if c.adapter_uid is not None}
        adapter_slots = [0 if c.adapter_uid is None else slot_of[c.adapter_uid] for c in chunks]
        order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].token_ids) > 1, adapter_slots[i]))
        num_decodes = sum(len(c.token_ids) == 1 for c in chunks)
        is_decode = num_decodes == len(chunks)
        tables = self.decode_tables if is_decode else self.mixed_tables
        host = tables.begin()
        prefill_tiles = host["prefill_tiles"].reshape(-1, PREFILL_TILE_FIELDS)
        updates = TableUpdates()
        row = num_prefill_tiles = 0
        row_of: dict[int, int] = {}
        runs: list[list[int]] = []
        singles: list[tuple[int, int, int, int]] = []  # of the rows that decode: token, position, table row, adapter
        for i in order:
            chunk, adapter = chunks[i], adapter_slots[i]
            start, count = chunk.start_position, len(chunk.token_ids)
            assert count > 0
            slot = self._slots.take(chunk, self._block_size, updates)
            if count == 1:
                singles.append((chunk.token_ids[0], start, slot, adapter))
            else:
                end = row + count
                host["token_ids"][row:end] = chunk.token_ids
                host["positions"][row:end] = np.arange(start, start + count)
                host["table_rows"][row:end] = slot
                host["row_adapters"][row:end] = adapter
                for first in range(0, count, self._prefill_rows):
                    size = min(self._prefill_rows, count - first)
                    prefill_tiles[num_prefill_tiles] = (row + first, size, start + first, slot)
                    num_prefill_tiles += 1
            row += count
            row_of[chunk.sequence_id] = row - 1
            if runs and runs[-1][1] == adapter:
                runs[-1][0] = row
            else:
                runs.append([row, adapter])
        if singles:
            packed = np.array(singles, dtype=np.int32)
            for column, name in enumerate(("token_ids", "positions", "table_rows", "row_adapters")):
                host[name][:num_decodes] = packed[:, column]
        prefill_tiles[num_prefill_tiles:, 1] = 0
        host["num_rows"][0] = row
        host["table_rows"][row:] = self.padding_row
        lora_tiles = _fill_tiles(host["lora_tiles"].reshape(-1, TILE_FIELDS), runs) if slot_of else NO_LORA
        tables.upload()
        updates.apply(self.tables)
        columns = any(map(self._adapters.scales, slot_of.values()))
        step = self.device_step(tables, row, num_decodes, lora_tiles, num_prefill_tiles, columns=columns)
        return PackedStep(step, row_of, is_decode, lora_tiles, columns)

    def device_step(
        self,
        tables: StepTables,
        rows: int,
        decode_rows: int,
        lora_tiles: int,
        num_prefill_tiles: int,
        *,
        columns: bool = False,
    ) -> DeviceStep:
        """A step of these sizes, whatever `tables` hold when it is run."""
        lora_step = None
        if lora_tiles != NO_LORA:
            tiles = tables.on_device("lora_tiles").view(-1, TILE_FIELDS)
            lora_step = LoraStep(tiles, lora_tiles, tables.on_device("row_adapters"), columns)
        return DeviceStep(
            rows=rows,
            num_rows=tables.on_device("num_rows"),
            token_ids=tables.on_device("token_ids"),
            positions=tables.on_device("positions"),
            tables=self.tables,
            table_rows=tables.on_device("table_rows"),
            decode_rows=decode_rows,
            splits=self._splits_for(bucket_of(max(1, decode_rows), self._max_sequences)),
            prefill_tiles=tables.on_device("prefill_tiles").view(-1, PREFILL_TILE_FIELDS)
            if num_prefill_tiles
            else None,
            num_prefill_tiles=num_prefill_tiles,
            lora=lora_step,
        )

    def _splits_for(self, rows: int) -> int:
        """Programs that share a row's context: about two stand on each of some 132 processors."""
        return max(1, min(MAX_SPLITS, 264 // max(1, rows * self._num_kv_heads)))


def _fill_tiles(tiles: np.ndarray, runs: Sequence[Sequence[int]]) -> int:
    # Cuts runs of rows (end, adapter slot) into tiles and marks entries behind the last unused. The first entry
    # says how many there are, too.
    count = first = 0
    for end, adapter in runs:
        for at in range(first, end, TILE_ROWS):
            tiles[count] = (at, min(TILE_ROWS, end - at), adapter, 0)
            count += 1
        first = end
    tiles[count:, 1] = 0
    tiles[0, 3] = count
    return count


def _fields(rows: int, prefill_rows: int) -> dict[str, int]:
    return {
        "num_rows": 16,
        "token_ids": rows,
        "positions": rows,
        "table_rows": rows,
        "row_adapters": rows,
        "lora_tiles": TILE_FIELDS * rows,
        "prefill_tiles": PREFILL_TILE_FIELDS * prefill_rows,
    }
