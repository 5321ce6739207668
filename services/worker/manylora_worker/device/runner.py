"""ModelRunner for a CUDA device: steps replay CUDA graphs, but for large ones with prompts, which run kernel by kernel.

DeviceModelRunner owns the arena (KV blocks and adapter blocks in one tensor), the block tables and the last token of
every sequence on the device, and the captured graphs. The host uploads a step's metadata in one copy; a row whose
token the host does not know yet (PENDING_TOKEN) takes what its sequence drew last, on the device.

Blocks are cleared, copied and written in stream order, so a block that a later step takes over is never touched by an
earlier one. Copies of blocks to the host and back go beside that, on a stream of their own (engine/host_kv.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from manylora_shared.ids import AdapterUid
from torch import Tensor

from manylora_worker.adapters.source import HostAdapter
from manylora_worker.device.adapter_arena import AdapterArena
from manylora_worker.device.decoder import MAX_SPLITS, Decoder, DeviceStep, LoraStep, buffer_bytes
from manylora_worker.device.decoder_weights import DecoderWeights
from manylora_worker.device.graph_shapes import (
    BUCKETS,
    GREEDY,
    MIXED_ROWS,
    NO_LORA,
    SAMPLING_PLANS,
    DecodeShape,
    MixedShape,
    bucket_of,
    decode_shape,
    decode_shapes,
    mixed_shape,
    mixed_shapes,
    room_for_prefill_tiles,
)
from manylora_worker.device.pending_step import PendingStep
from manylora_worker.device.sequence_slots import SequenceSlots, TableUpdates
from manylora_worker.device.step_tables import StepTables, to_device
from manylora_worker.engine.api import Sampled, SequenceChunk, StepBatch
from manylora_worker.engine.host_kv import TensorHostKv
from manylora_worker.engine.kv_cache import KvCache
from manylora_worker.kernels.attention import PREFILL_TILE_FIELDS, PagedLayout, prefill_block_m
from manylora_worker.kernels.lora import TILE_FIELDS, TILE_ROWS
from manylora_worker.kernels.sampling import (
    DeviceSampler,
    RowState,
    SampledRows,
    SamplingPlan,
    needs_penalty_slot,
)
from manylora_worker.loader import LoadedModel


@dataclass(frozen=True)
class DeviceLimits:
    max_rows: int
    """Of one step."""
    max_sequences: int
    """Rows that sample in one step."""
    adapter_slots: int
    max_rank: int


def activation_bytes(loaded: LoadedModel, weights: DecoderWeights, limits: DeviceLimits) -> int:
    """What a DeviceModelRunner takes on the device beside weights and arena, graphs included."""
    rows, vocab_size = limits.max_sequences, loaded.spec.vocab_size
    decoder = buffer_bytes(
        weights, loaded.dtype, max_rank=limits.max_rank, max_rows=limits.max_rows, max_decode_rows=rows
    )
    # Scores, penalties, a bias and, while logprobs are taken, two distributions: float32 of the vocabulary each.
    sampler = rows * vocab_size * 4 * 5
    graphs = sum(1 for _ in decode_shapes(rows)) + sum(1 for _ in mixed_shapes(limits.max_rows, rows))
    return decoder + sampler + graphs * len(weights.layers) * _GRAPH_BYTES_A_LAYER + _WORKSPACE_BYTES


_GRAPH_BYTES_A_LAYER = 400_000
"""Measured: 337 graphs of 32 layers take 3.4 GiB."""
_WORKSPACE_BYTES = 1 << 30
"""Kernels, and cuBLAS' workspaces."""


def _fill_tiles(tiles: np.ndarray, runs: Sequence[Sequence[int]]) -> int:
    """Cuts runs of rows (end, adapter slot) into tiles; entries behind the last are marked unused. Returns how many,
    which the first entry says too."""
    count = first = 0
    for end, adapter in runs:
        for at in range(first, end, TILE_ROWS):
            tiles[count] = (at, min(TILE_ROWS, end - at), adapter, 0)
            count += 1
        first = end
    tiles[count:, 1] = 0
    tiles[0, 3] = count
    return count


@dataclass(frozen=True)
class _Plan:
    step: DeviceStep
    row_of: dict[int, int]
    """Sequence id -> the row of its last token."""
    is_decode: bool
    """Every row decodes: the step can be a graph."""
    lora_tiles: int
    """NO_LORA where no row has an adapter."""


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    drawn: SampledRows
    """What each replay writes."""


class DeviceModelRunner:
    """See api.AheadRunner and api.SwapRunner.

    Args:
        cache: its blocks from `num_kv_blocks` on hold adapters.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        weights: DecoderWeights,
        cache: KvCache,
        limits: DeviceLimits,
        *,
        num_kv_blocks: int,
        num_host_blocks: int = 0,
    ) -> None:
        self._loaded = loaded
        self._cache = cache
        self._limits = limits
        self._num_kv_blocks = num_kv_blocks
        self.host_kv = TensorHostKv(cache.by_block, num_host_blocks)
        self._capture = loaded.device.type == "cuda"  # the interpreter of the tests has no graphs
        geometry = cache.geometry
        bs, row = cache.block_size, geometry.row_elements
        self._layout = PagedLayout(
            block_size=bs,
            stride_block=2 * geometry.num_layers * bs * row,
            stride_token=row,
            stride_kv=bs * row,
            stride_head=geometry.head_dim,
        )
        self._adapters = AdapterArena(
            cache.flat,
            self._layout.stride_block,
            range(num_kv_blocks, cache.num_blocks),
            num_slots=limits.adapter_slots,
            num_sites=len(loaded.sites),
            max_rank=limits.max_rank,
            clear=cache.clear_blocks if cache.marks_free else None,
        )
        pdl = loaded.device.type == "cuda" and torch.cuda.get_device_capability(loaded.device) >= (9, 0)
        self._decoder = Decoder(
            weights,
            arena=cache.flat,
            layout=self._layout,
            layer_offsets=[2 * i * bs * row for i in range(geometry.num_layers)],
            sites=self._adapters.sites,
            lora_chunks=self._adapters.chunks,
            max_rows=limits.max_rows,
            max_decode_rows=limits.max_sequences,
            pdl=pdl,
        )
        self._prefill_rows = prefill_block_m(weights.layers[0].attention)
        device = loaded.device
        max_blocks = -(-loaded.spec.max_context_tokens // bs)
        self._slots = SequenceSlots(2 * limits.max_sequences, max_blocks)
        num_table_rows = self._slots.padding_row + 1
        self._tables = torch.zeros(num_table_rows, max_blocks, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(num_table_rows, dtype=torch.int32, device=device)
        self._decode_tables = StepTables(_fields(limits.max_sequences, limits.max_sequences, 0), device)
        self._mixed_tables = StepTables(_fields(limits.max_rows, limits.max_sequences, limits.max_rows), device)
        self._recordings: dict[DecodeShape, _Recorded] = {}
        self._mixed_graphs: dict[MixedShape, torch.cuda.CUDAGraph] = {}
        self._row_owners: dict[int, tuple[int, int]] = {}
        """By the sampler's row: the sequence whose parameters it has, and the output index that it draws next."""
        self._pool = None
        self._sampler = DeviceSampler(
            limits.max_sequences, loaded.spec.vocab_size, device, penalty_slots=limits.max_sequences
        )
        self._penalty_slots = _PenaltySlots(self._sampler)

    @property
    def num_blocks(self) -> int:
        return self._num_kv_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def vocab_size(self) -> int:
        return self._loaded.spec.vocab_size

    @property
    def max_context_tokens(self) -> int:
        return self._loaded.spec.max_context_tokens

    def execute(self, batch: StepBatch) -> Sequence[Sampled]:
        """See api.ModelRunner.execute."""
        return self.submit(batch).result()

    def submit(self, batch: StepBatch) -> PendingStep:
        """See api.AheadRunner.submit."""
        with torch.inference_mode():
            self._use_device()
            self._prepare_blocks(batch)
            if not batch.chunks:
                return PendingStep([], [], None)
            sampled = [chunk for chunk in batch.chunks if chunk.samples]
            plan = self._plan(batch.chunks)
            rows = [plan.row_of[chunk.sequence_id] for chunk in sampled]
            needed = SamplingPlan.of([chunk.sampling for chunk in sampled])
            if not sampled:
                self._run_logits(plan, rows)
                return PendingStep([], [], None)
            if plan.is_decode and self._capture and not needed.penalties:
                return PendingStep(sampled, rows, self._replay(plan, sampled, rows, needed))
            logits = self._run_logits(plan, rows)
            drawn = self._draw(logits, sampled, needed)
            self._keep_tokens(plan, rows, drawn.token_ids)
            return PendingStep(sampled, range(len(sampled)), drawn)

    def warm_up(self) -> int:
        """Compiles what steps may need and captures every graph, so that none waits for that. Returns how many."""
        with torch.inference_mode():
            self._use_device()
            for shape in decode_shapes(self._limits.max_sequences) if self._capture else ():
                self._decode_graph(shape)
            self._warm_up_prefill()
            self._warm_up_penalties()
        return len(self._recordings) + len(self._mixed_graphs)

    def _warm_up_prefill(self) -> None:
        """The graphs, and of what runs without one the kernels: they are compiled for ranges of rows, and apart for
        multiples of 16."""
        most, most_decodes = self._limits.max_rows, self._limits.max_sequences
        for shape in mixed_shapes(most, most_decodes) if self._capture else ():
            self._mixed_graph(shape)
        powers = [1 << exponent for exponent in range(1, most.bit_length() + 1)]
        sizes = {min(most, size) for power in powers for size in (power, power + 1)}
        decodes = [bucket for bucket in BUCKETS if bucket <= min(most - 2, most_decodes)]
        with self._mixed_tables.blanked({"table_rows": self._slots.padding_row}):
            for lora_tiles in (NO_LORA, 16, 17):
                for rows in sorted(size for size in sizes if size > max(MIXED_ROWS)):
                    self._run_blank(rows, 0, lora_tiles)
                for decode_rows in decodes if most > max(MIXED_ROWS) else ():
                    self._run_blank(most, decode_rows, lora_tiles)
            if self._tables.is_cuda:
                torch.cuda.synchronize()

    def _run_blank(self, rows: int, decode_rows: int, lora_tiles: int) -> None:
        step = self._device_step(self._mixed_tables, rows, decode_rows, lora_tiles, 1)
        logit_rows = torch.zeros(1, dtype=torch.long, device=self._tables.device)
        self._decoder.forward(replace(step, token_ids=self._token_ids(step), logit_rows=logit_rows))

    def _warm_up_penalties(self) -> None:
        logits = self._decoder.logits_buffer[:1]
        for variant in (plan for plan in SAMPLING_PLANS if plan.top_logprobs is None):
            self._sampler.sample(logits, replace(variant, penalties=True))
        self._row_owners.clear()

    def logits(self, batch: StepBatch) -> Tensor:
        """The pass without the draw: [chunks that sample, vocab], float32, in the batch's order. For tests."""
        with torch.inference_mode():
            self._use_device()
            self._prepare_blocks(batch)
            plan = self._plan(batch.chunks)
            return self._run_logits(plan, [plan.row_of[c.sequence_id] for c in batch.chunks if c.samples]).float()

    def holds_adapter(self, uid: AdapterUid) -> bool:
        return self._adapters.holds(uid)

    def adapter_bytes(self, adapter: HostAdapter) -> int:
        """See backend.AdapterTarget."""
        return self._adapters.size_bytes(adapter)

    def reserve_adapter(self, adapter: HostAdapter) -> None:
        """See backend.AdapterTarget."""
        self._adapters.reserve(adapter)

    def fill_adapter(self, adapter: HostAdapter) -> None:
        """See backend.AdapterTarget."""
        self._use_device()
        self._adapters.fill(adapter)

    def drop_adapter(self, uid: AdapterUid) -> None:
        """See backend.AdapterTarget."""
        self._adapters.drop(uid)

    def graph_of(self, batch: StepBatch) -> torch.cuda.CUDAGraph:
        """The graph that serves a batch of decoding, greedy rows, captured if it is not there yet. For benches."""
        with torch.inference_mode():
            return self._recorded(self._plan(batch.chunks), GREEDY).graph

    def _run_logits(self, plan: _Plan, rows: Sequence[int]) -> Tensor:
        """[len(rows), vocab]"""
        logit_rows = to_device(rows, torch.long, self._tables.device)
        if plan.is_decode and self._capture:
            self._recorded(plan, GREEDY).graph.replay()
            self._row_owners.clear()
            return self._decoder.logits_buffer[logit_rows]
        step, limits = plan.step, self._limits
        shape = mixed_shape(
            step.rows, step.decode_rows, step.num_prefill_tiles, plan.lora_tiles, limits.max_rows, limits.max_sequences
        )
        if shape is None or not self._capture:
            self._decoder.run_layers(replace(plan.step, token_ids=self._token_ids(plan.step)))
        else:
            self._mixed_graph(shape).replay()
        return self._decoder.head(replace(plan.step, logit_rows=logit_rows))

    def _replay(
        self, plan: _Plan, sampled: Sequence[SequenceChunk], rows: Sequence[int], needed: SamplingPlan
    ) -> SampledRows:
        """The captured step; its tokens are kept for the next by the graph itself."""
        recorded = self._recorded(plan, needed)
        if needed == GREEDY:
            self._row_owners.clear()
        else:
            self._write_rows(sampled, rows)
        recorded.graph.replay()
        return recorded.drawn

    def _draw(self, logits: Tensor, sampled: Sequence[SequenceChunk], needed: SamplingPlan) -> SampledRows:
        """Row i for the chunk i; not in a graph, where rows of padding would count for whose penalties they had."""
        if needed.draws or needed.penalties:
            self._write_rows(sampled, range(len(sampled)))
        else:
            self._row_owners.clear()
        return self._sampler.sample(logits, needed)

    def _write_rows(self, sampled: Sequence[SequenceChunk], rows: Sequence[int]) -> None:
        """Tells the sampler of the rows that changed hands; those that go on it advances by itself."""
        slots = self._penalty_slots.of(sampled)
        changed = {
            row: RowState(chunk.sampling, chunk.choice, chunk.output_index, slots.get(chunk.sequence_id, -1))
            for chunk, row in zip(sampled, rows, strict=True)
            if self._row_owners.get(row) != (chunk.sequence_id, chunk.output_index)
        }
        self._sampler.write_rows(changed)
        self._row_owners = {
            row: (chunk.sequence_id, chunk.output_index + 1) for chunk, row in zip(sampled, rows, strict=True)
        }

    def _keep_tokens(self, plan: _Plan, rows: Sequence[int], tokens: Tensor) -> None:
        """For the next step, which may not have them from the host."""
        index = to_device(rows, torch.long, self._tables.device)
        self._last_tokens.index_copy_(0, plan.step.table_rows[index].long(), tokens.int())

    def _token_ids(self, step: DeviceStep) -> Tensor:
        """The step's tokens, those of the step before filled in."""
        given = step.token_ids[: step.rows]
        last = self._last_tokens.index_select(0, step.table_rows[: step.rows])
        return torch.where(given < 0, last, given)

    def _recorded(self, plan: _Plan, needed: SamplingPlan) -> _Recorded:
        return self._decode_graph(decode_shape(plan.step.rows, plan.lora_tiles, needed, self._limits.max_sequences))

    def _decode_graph(self, shape: DecodeShape) -> _Recorded:
        if shape not in self._recordings:
            self._recordings[shape] = self._record(shape)
        return self._recordings[shape]

    def _mixed_graph(self, shape: MixedShape) -> torch.cuda.CUDAGraph:
        if shape not in self._mixed_graphs:
            self._mixed_graphs[shape] = self._record_mixed(shape)
        return self._mixed_graphs[shape]

    def _record(self, shape: DecodeShape) -> _Recorded:
        """Captures a step of decoding rows: pass, draw, and the tokens to where the next step finds them."""
        bucket, lora_tiles, variant = shape
        step = self._device_step(self._decode_tables, bucket, bucket, lora_tiles, 0)

        def run() -> SampledRows:
            logits = self._decoder.forward(replace(step, token_ids=self._token_ids(step)))
            drawn = self._sampler.sample(logits, variant)
            # Rows of padding write to a table row of their own, that no sequence has.
            self._last_tokens.index_copy_(0, step.table_rows[:bucket].long(), drawn.token_ids.int())
            return drawn

        graph, drawn = self._graph_of(self._decode_tables, run)
        self._row_owners.clear()
        return _Recorded(graph, drawn)

    def _record_mixed(self, shape: MixedShape) -> torch.cuda.CUDAGraph:
        """Captures the layers of a step with prompts. Rows behind those that decode may be taken for such, which comes
        to the same: their keys and values are written by then."""
        tiles = room_for_prefill_tiles(shape.rows)
        step = self._device_step(self._mixed_tables, shape.rows, shape.decode_rows, shape.lora_tiles, tiles)

        def run() -> None:
            self._decoder.run_layers(replace(step, token_ids=self._token_ids(step)))

        graph, _ = self._graph_of(self._mixed_tables, run)
        return graph

    def _graph_of(self, tables: StepTables, run: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        # The first run must not touch what steps in flight draw: it has rows of padding alone.
        with tables.blanked({"table_rows": self._slots.padding_row}):
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run()  # compiles the kernels, and lets cuBLAS make its workspaces
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: the loader's thread may allocate and copy meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                result = run()
            self._pool = graph.pool()
        return graph, result

    def _device_step(
        self, tables: StepTables, rows: int, decode_rows: int, lora_tiles: int, num_prefill_tiles: int
    ) -> DeviceStep:
        lora_step = None
        if lora_tiles != NO_LORA:
            tiles = tables.on_device("lora_tiles").view(-1, TILE_FIELDS)
            lora_step = LoraStep(tiles, lora_tiles, tables.on_device("row_adapters"))
        return DeviceStep(
            rows=rows,
            num_rows=tables.on_device("num_rows"),
            token_ids=tables.on_device("token_ids"),
            positions=tables.on_device("positions"),
            tables=self._tables,
            table_rows=tables.on_device("table_rows"),
            decode_rows=decode_rows,
            splits=self.splits_for(bucket_of(max(1, decode_rows), self._limits.max_sequences)),
            prefill_tiles=tables.on_device("prefill_tiles").view(-1, PREFILL_TILE_FIELDS)
            if num_prefill_tiles
            else None,
            num_prefill_tiles=num_prefill_tiles,
            lora=lora_step,
        )

    def _plan(self, chunks: Sequence[SequenceChunk]) -> _Plan:
        """Packs and uploads the step's metadata. Decoding rows come first, each kind in order of adapters."""
        slot_of = {c.adapter_uid: self._adapters.slot_of(c.adapter_uid) for c in chunks if c.adapter_uid is not None}
        adapter_slots = [0 if c.adapter_uid is None else slot_of[c.adapter_uid] for c in chunks]
        order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].token_ids) > 1, adapter_slots[i]))
        num_decodes = sum(len(c.token_ids) == 1 for c in chunks)
        is_decode = num_decodes == len(chunks)
        tables = self._decode_tables if is_decode else self._mixed_tables
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
            slot = self._slots.take(chunk, self.block_size, updates)
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
        host["table_rows"][row:] = self._slots.padding_row
        lora_tiles = _fill_tiles(host["lora_tiles"].reshape(-1, TILE_FIELDS), runs) if slot_of else NO_LORA
        tables.upload()
        updates.apply(self._tables)
        step = self._device_step(tables, row, num_decodes, lora_tiles, num_prefill_tiles)
        return _Plan(step, row_of, is_decode, lora_tiles)

    def splits_for(self, rows: int) -> int:
        """Programs that share a row's context, so that about two programs stand on each of some 132 processors."""
        return max(1, min(MAX_SPLITS, 264 // max(1, rows * self._cache.geometry.num_kv_heads)))

    def _use_device(self) -> None:
        """Streams, graphs and Triton go to the thread's current device: it has to be ours."""
        if self._tables.is_cuda:
            torch.cuda.set_device(self._tables.device)

    def _prepare_blocks(self, batch: StepBatch) -> None:
        device = self._loaded.device
        if batch.clear_blocks:
            self._cache.clear_blocks(to_device(batch.clear_blocks, torch.long, device))
        if batch.copy_blocks:
            sources, targets = to_device(batch.copy_blocks, torch.long, device).unbind(1)
            self._cache.copy_blocks(sources, targets)


class _PenaltySlots:
    """Which sequences have their tokens counted in the sampler, for penalties; the one drawn for longest ago goes.

    A sequence whose last token is pending drew in the step before, so its slot is still its own.
    """

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self._slots: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """By sequence: the slot, and the output index that it draws next."""

    def of(self, sampled: Sequence[SequenceChunk]) -> dict[int, int]:
        """The slots of those of a step's sequences that need one, filled."""
        wanted = [chunk for chunk in sampled if needs_penalty_slot(chunk.sampling)]
        found: dict[int, int] = {}
        for chunk in wanted:
            slot, next_index = self._slots.pop(chunk.sequence_id, (-1, -1))
            if slot >= 0:
                self._slots[chunk.sequence_id] = (slot, chunk.output_index + 1)
                if next_index == chunk.output_index:
                    found[chunk.sequence_id] = slot
        for chunk in wanted:
            if chunk.sequence_id in found:
                continue
            assert chunk.output_index == len(chunk.output_token_ids), "its tokens are not known"
            if chunk.sequence_id in self._slots:
                slot, _ = self._slots[chunk.sequence_id]
            elif len(self._slots) < self._sampler.penalty_slots:
                slot = len(self._slots)
            else:
                _, (slot, _) = self._slots.popitem(last=False)
            self._slots[chunk.sequence_id] = (slot, chunk.output_index + 1)
            self._sampler.write_penalty_slot(slot, chunk.sampling, chunk.prompt_token_ids, chunk.output_token_ids)
            found[chunk.sequence_id] = slot
        return found


def _fields(rows: int, tiles: int, prefill_rows: int) -> dict[str, int]:
    return {
        "num_rows": 16,
        "token_ids": rows,
        "positions": rows,
        "table_rows": rows,
        "row_adapters": rows,
        "lora_tiles": TILE_FIELDS * rows,
        "prefill_tiles": PREFILL_TILE_FIELDS * prefill_rows,
    }
