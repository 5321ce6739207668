"""From a step's chunks to the metadata that the kernels read: rows, block tables, tiles.

Owns the device's block tables and two packing buffers, of steps that decode alone and of all others. Their tensors keep
their addresses, so that graphs read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from manylora_worker.kinds.api import SequenceChunk
from manylora_worker.models.cuda.adapter_arena import AdapterArena
from manylora_worker.models.cuda.forward.decoder import MAX_SPLITS
from manylora_worker.models.cuda.forward.delta_pass import StateStep
from manylora_worker.models.cuda.forward.device_step import DeviceStep, LoraStep
from manylora_worker.models.cuda.kernels.attention import PREFILL_TILE_FIELDS
from manylora_worker.models.cuda.kernels.delta_net import SEQUENCE_FIELDS
from manylora_worker.models.cuda.kernels.lora import TILE_FIELDS, TILE_ROWS
from manylora_worker.models.cuda.steps.graph_shapes import NO_LORA, bucket_of, room_for_prefill_tiles
from manylora_worker.models.cuda.steps.sequence_slots import SequenceSlots, TableUpdates
from manylora_worker.models.cuda.steps.step_tables import StepTables


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
    max_blocks: of one sequence's tokens. state_blocks: before them in its table.
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
        state_blocks: int = 0,
    ) -> None:
        self._adapters = adapters
        self._max_sequences = max_sequences
        self._block_size = block_size
        self._prefill_rows = prefill_rows
        self._num_kv_heads = num_kv_heads
        self._state_blocks = state_blocks
        self._slots = SequenceSlots(2 * max_sequences, state_blocks + max_blocks, state_blocks)
        self.tables = torch.zeros(self.padding_row + 1, state_blocks + max_blocks, dtype=torch.int32, device=device)
        has_states = state_blocks > 0
        self.decode_tables = StepTables(_fields(max_sequences, 0, has_states=has_states), device)
        tiles = max(max_rows, room_for_prefill_tiles(max_rows))  # a graph reads all that it has room for
        self.mixed_tables = StepTables(_fields(max_rows, tiles, has_states=has_states), device)

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
        sequences: list[tuple[int, int, int, int]] = []
        singles: list[tuple[int, int, int, int]] = []  # of the rows that decode: token, position, table row, adapter
        for i in order:
            chunk, adapter = chunks[i], adapter_slots[i]
            start, count = chunk.start_position, len(chunk.token_ids)
            assert count > 0
            assert not (self._state_blocks and chunk.num_guesses), "a state cannot be taken back"
            slot = self._slots.take(chunk, self._block_size, updates)
            sequences.append((row, count, start, slot))
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
        if self._state_blocks:
            _fill_sequences(host["sequences"].reshape(-1, SEQUENCE_FIELDS), host["offsets"], sequences)
        prefill_tiles[num_prefill_tiles:, 1] = 0
        host["num_rows"][0] = row
        host["table_rows"][row:] = self.padding_row
        lora_tiles = _fill_tiles(host["lora_tiles"].reshape(-1, TILE_FIELDS), runs) if slot_of else NO_LORA
        tables.upload()
        updates.apply(self.tables)
        columns = any(map(self._adapters.scales, slot_of.values()))
        step = self.device_step(tables, row, num_decodes, lora_tiles, num_prefill_tiles, columns=columns)
        if step.states is not None:
            step = replace(step, states=replace(step.states, num_sequences=len(sequences)))
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
            tables=self.tables[:, self._state_blocks :],
            table_rows=tables.on_device("table_rows"),
            decode_rows=decode_rows,
            splits=self._splits_for(bucket_of(max(1, decode_rows), self._max_sequences)),
            prefill_tiles=tables.on_device("prefill_tiles").view(-1, PREFILL_TILE_FIELDS)
            if num_prefill_tiles
            else None,
            num_prefill_tiles=num_prefill_tiles,
            lora=lora_step,
            states=self._states(tables, decode_rows + num_prefill_tiles) if self._state_blocks else None,
        )

    def _states(self, tables: StepTables, most_sequences: int) -> StateStep:
        """most_sequences: a chunk of a prompt has a tile at least."""
        sequences = tables.on_device("sequences").view(-1, SEQUENCE_FIELDS)
        num_sequences = min(most_sequences, len(sequences))
        return StateStep(self.tables, tables.on_device("offsets"), sequences, num_sequences)

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


def _fill_sequences(entries: np.ndarray, offsets: np.ndarray, sequences: Sequence[tuple[int, int, int, int]]) -> None:
    entries[: len(sequences)] = sequences
    entries[len(sequences) :, 1] = 0
    for row, count, _, _ in sequences:
        offsets[row : row + count] = np.arange(count)


def _fields(rows: int, prefill_tiles: int, *, has_states: bool) -> dict[str, int]:
    of_states = {"offsets": rows, "sequences": SEQUENCE_FIELDS * rows}
    return {
        **(of_states if has_states else {}),
        "num_rows": 16,
        "token_ids": rows,
        "positions": rows,
        "table_rows": rows,
        "row_adapters": rows,
        "lora_tiles": TILE_FIELDS * (rows + rows // TILE_ROWS + 1),
        "prefill_tiles": PREFILL_TILE_FIELDS * prefill_tiles,
    }
