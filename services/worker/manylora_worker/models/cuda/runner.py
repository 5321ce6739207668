"""ModelRunner for a CUDA device: steps replay CUDA graphs; large ones with prompts run kernel by kernel.

DeviceModelRunner owns the arena (KV and adapter blocks in one tensor), every sequence's last token on the device, and
the graphs. A row whose token the host does not know yet (PENDING_TOKEN) takes what its sequence drew last. Blocks are
cleared, copied and written in stream order, so an earlier step never touches a block that a later one takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from manylora_shared.ids import AdapterUid
from manylora_shared.process.heap import collector_paused
from torch import Tensor

from manylora_worker.kinds.api import DraftModel, Sampled, SequenceChunk, StepBatch, draws_of
from manylora_worker.models.columns import BaseColumns
from manylora_worker.models.cuda.adapter_arena import AdapterArena, arena_chunks
from manylora_worker.models.cuda.expert_tables import ExpertFields
from manylora_worker.models.cuda.forward.decoder import Decoder
from manylora_worker.models.cuda.forward.device_step import DeviceStep
from manylora_worker.models.cuda.forward.pass_sizes import buffer_bytes
from manylora_worker.models.cuda.kernels.attention import PagedLayout
from manylora_worker.models.cuda.kernels.delta_net import StateLayout
from manylora_worker.models.cuda.kernels.sampling import DeviceBars, DeviceSampler, SampledRows, SamplingPlan
from manylora_worker.models.cuda.steps.graph_shapes import (
    BUCKETS,
    GREEDY,
    MASKED,
    MIXED_ROWS,
    NO_LORA,
    SAMPLING_PLANS,
    DecodeShape,
    MixedShape,
    bucket_of,
    decode_shape,
    decode_shapes,
    draw_shapes,
    has_graph,
    mixed_shape,
    mixed_shapes,
    room_for_prefill_tiles,
)
from manylora_worker.models.cuda.steps.pending_step import Draws, PendingStep
from manylora_worker.models.cuda.steps.sampler_rows import SamplerRows, bars_on_device
from manylora_worker.models.cuda.steps.step_packing import PackedStep, StepPacker
from manylora_worker.models.cuda.steps.step_tables import StepTables, to_device
from manylora_worker.models.decoder.weights import DecoderLayer, DecoderWeights, DenseMlp, RecurrentMixer
from manylora_worker.models.drafts.drafter import Drafter
from manylora_worker.models.layers.host_kv import TensorHostKv
from manylora_worker.models.layers.kv_cache import KvCache, LayerKv
from manylora_worker.models.layers.prompt_scores import ScoredRows, Scores, score
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.merged_weights import MergedWeights
from manylora_worker.weights.layout import HostAdapter


@dataclass(frozen=True)
class DeviceLimits:
    max_rows: int  # of one step
    max_sequences: int  # rows that sample in one step
    adapter_slots: int
    max_rank: int


def activation_bytes(loaded: LoadedModel, weights: DecoderWeights, limits: DeviceLimits, block_size: int) -> int:
    """What a DeviceModelRunner takes on the device beside weights and arena, graphs included."""
    rows, vocab_size = limits.max_sequences, loaded.spec.vocab_size
    block_elements = loaded.spec.kv.token_bytes(loaded.dtype) * block_size // loaded.dtype.itemsize
    chunks = arena_chunks(loaded.sites, block_elements, limits.max_rank)
    decoder = buffer_bytes(weights, loaded.dtype, lora_chunks=chunks, max_rows=limits.max_rows, max_decode_rows=rows)
    # Scores, penalties, a bias and, while logprobs are taken, two distributions: float32 of the vocabulary each.
    sampler = rows * vocab_size * 4 * 5
    graphs = sum(1 for _ in decode_shapes(rows)) + sum(1 for _ in mixed_shapes(limits.max_rows, rows))
    layers = sum(map(_kernels_share, weights.layers))
    return decoder + sampler + int(graphs * layers * _GRAPH_BYTES_A_LAYER) + _WORKSPACE_BYTES


_GRAPH_BYTES_A_LAYER = 400_000  # measured: 337 graphs of 32 layers take 3.4 GiB
_WORKSPACE_BYTES = 1 << 30  # kernels, and cuBLAS' workspaces


def _kernels_share(layer: DecoderLayer) -> float:
    """Of a dense layer's kernels, which are eight: a layer of experts has about twice as many, and more beside a shared
    one; an input of its own takes four; a delta net has four between its products, where attention has two.
    """
    beside = (0.0 if layer.input is None else 0.5) + (0.25 if isinstance(layer.mixer, RecurrentMixer) else 0.0)
    if isinstance(layer.mlp, DenseMlp):
        return 1.0 + beside
    return (2.0 if layer.mlp.shared is None else 3.0) + beside


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    drawn: SampledRows | None  # what each replay writes


@dataclass(frozen=True)
class _Sampling:
    """What a step draws. chunks, rows: one for each draw."""

    chunks: Sequence[SequenceChunk]
    rows: Sequence[int]
    plan: SamplingPlan

    @classmethod
    def of(cls, sampled: Sequence[SequenceChunk], row_of: Mapping[int, int]) -> _Sampling:
        rows = [row_of[each.sequence_id] - i for each in sampled for i in range(each.num_guesses, -1, -1)]
        chunks = [draw for chunk in sampled for draw in draws_of(chunk)]
        plan = SamplingPlan.of(
            [chunk.sampling for chunk in chunks],
            has_bars=any(chunk.bars for chunk in chunks),
            has_masks=any(chunk.mask_follows or chunk.mask is not None for chunk in chunks),
        )
        return cls(chunks, rows, plan)

    def with_masks(self, masks: Mapping[int, bytes]) -> _Sampling:
        chunks = [replace(c, mask=masks.get(c.sequence_id)) if c.mask_follows else c for c in self.chunks]
        return replace(self, chunks=chunks)


def _adapter_arena(
    loaded: LoadedModel,
    weights: DecoderWeights,
    cache: KvCache,
    limits: DeviceLimits,
    num_kv_blocks: int,
) -> AdapterArena:
    block_elements = len(cache.flat) // cache.num_blocks
    return AdapterArena(
        cache.flat,
        block_elements,
        range(num_kv_blocks, cache.num_blocks),
        num_slots=limits.adapter_slots,
        num_composed=2 * limits.max_sequences,
        num_sites=sum(1 for site in loaded.sites if not site.experts),
        chunks=arena_chunks(loaded.sites, block_elements, limits.max_rank),
        num_angles=weights.ropes[0][0].shape[1],
        scaled=weights.scaled,
        columns=BaseColumns(loaded).flat,
        clear=cache.clear_blocks if cache.marks_free else None,
        experts=ExpertFields.of(loaded.sites, block_elements, limits.max_rank),
    )


def _state_layout(cache: KvCache) -> StateLayout | None:
    state = cache.geometry.state
    if state is None:
        return None
    blocks = cache.flat.view(torch.float32)
    return StateLayout(blocks, blocks.numel() // cache.num_blocks, state.layer_elements)


def _layout(cache: KvCache, place: LayerKv) -> PagedLayout:
    # A layer's rows of a block are one stretch: here all of its keys come first, whatever parts it has.
    width = place.num_kv_heads * place.head_dim
    return PagedLayout(
        block_size=cache.block_size,
        stride_block=cache.block_elements,
        stride_token=width,
        stride_kv=cache.block_size * width,
        stride_head=place.head_dim,
    )


class DeviceModelRunner:
    """See api.AheadRunner, SwapRunner, RecurrentRunner and MergingRunner. cache: its blocks from `num_kv_blocks` on are
    those of adapters.
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
        drafter: Drafter | None = None,
    ) -> None:
        self._loaded, self._cache, self._limits = loaded, cache, limits
        self._num_kv_blocks = num_kv_blocks
        self._drafter = drafter
        self.host_kv = TensorHostKv(cache.by_block, num_host_blocks)
        self._capture = loaded.device.type == "cuda"  # the interpreter of the tests has no graphs
        places = cache.geometry.places
        self._adapters = _adapter_arena(loaded, weights, cache, limits, num_kv_blocks)
        pdl = loaded.device.type == "cuda" and torch.cuda.get_device_capability(loaded.device) >= (9, 0)
        self._decoder = Decoder(
            weights,
            arena=cache.flat,
            kv=cache.kept,
            layouts=[_layout(cache, place) for place in places],
            layer_offsets=[
                cache.first_element + 2 * place.first * cache.block_size * cache.geometry.row_elements
                for place in places
            ],
            scales=cache.geometry.scales,
            cuts=None if cache.cuts is None else cache.cuts.count,
            sites=self._adapters.sites,
            ropes=self._adapters.ropes,
            lora_chunks=self._adapters.chunks,
            max_rows=limits.max_rows,
            max_decode_rows=limits.max_sequences,
            pdl=pdl,
            experts=self._adapters.expert_adapters,
            states=_state_layout(cache),
        )
        self._packer = StepPacker(
            self._adapters,
            loaded.device,
            max_rows=limits.max_rows,
            max_sequences=limits.max_sequences,
            block_size=cache.block_size,
            max_blocks=-(-loaded.spec.longest // cache.block_size),
            prefill_rows=self._decoder.prefill_rows,
            num_kv_heads=min(place.num_kv_heads for place in places),
            state_blocks=cache.state_blocks,
        )
        self._device = self._packer.tables.device
        # by row of the block tables: what its sequence drew last
        self._last_tokens = torch.zeros(self._packer.padding_row + 1, dtype=torch.int32, device=self._device)
        self._recordings: dict[DecodeShape, _Recorded] = {}
        self._draw_graphs: dict[int, _Recorded] = {}  # by rows
        self._mixed_graphs: dict[MixedShape, torch.cuda.CUDAGraph] = {}
        self._pool = None
        self._sampler = DeviceSampler(
            limits.max_sequences, loaded.spec.vocab_size, loaded.device, penalty_slots=limits.max_sequences
        )
        self._sampler_rows = SamplerRows(self._sampler)
        self._merged = MergedWeights(loaded)

    @property
    def num_blocks(self) -> int:
        return self._num_kv_blocks

    @property
    def adapter_blocks(self) -> range:
        return range(self._num_kv_blocks, self._cache.num_blocks)

    @property
    def block_bytes(self) -> int:
        return self._adapters.block_bytes

    def give_to_adapters(self, blocks: Sequence[int]) -> None:
        self._adapters.give(blocks)

    def take_from_adapters(self, count: int) -> Sequence[int]:
        return self._adapters.take(count)

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def state_blocks(self) -> int:
        return self._cache.state_blocks

    @property
    def draft_model(self) -> DraftModel | None:
        return None if self._drafter is None else self._drafter.model

    @property
    def vocab_size(self) -> int:
        return self._loaded.spec.vocab_size

    @property
    def max_context_tokens(self) -> int:
        return self._loaded.spec.max_context_tokens

    def execute(self, batch: StepBatch) -> Sequence[Sampled]:
        return self.submit(batch).result()

    def submit(self, batch: StepBatch) -> PendingStep:
        with torch.inference_mode():
            self._use_device()
            self._prepare_blocks(batch)
            if not batch.chunks:
                return PendingStep([], Draws(), self._device)
            if self._cache.cuts is not None:
                self._cache.cuts.after_step()
            if self._drafter is not None:
                batch = self._drafter.guessed(batch)
            plan = self._packer.pack(batch.chunks)
            sampling = _Sampling.of([chunk for chunk in batch.chunks if chunk.samples], plan.row_of)
            is_graph = plan.is_decode and self._capture and bool(sampling.chunks)
            if is_graph and has_graph(sampling.plan) and not plan.columns:
                return PendingStep(batch.chunks, Draws(sampling.rows, self._replay(plan, sampling)), self._device)
            bars = self._bars(plan, sampling) if sampling.plan.penalties else None
            self._run_layers(plan)
            logits = None if is_graph and MASKED.covers(sampling.plan) else self._logits(plan, sampling.rows)

            def draw(masks: Mapping[int, bytes]) -> Draws:
                with torch.inference_mode():
                    self._use_device()
                    rows, drawn = self._draw(plan, sampling.with_masks(masks), logits, bars)
                    return Draws(rows, drawn, self._score(plan, batch.chunks))

            has_all = not any(chunk.mask_follows for chunk in batch.chunks)
            return PendingStep(batch.chunks, draw({}) if has_all else draw, self._device)

    def warm_up(self) -> int:
        """Compiles what steps may need and captures every graph. Returns how many."""
        with torch.inference_mode():
            self._use_device()
            for shape in decode_shapes(self._limits.max_sequences) if self._capture else ():
                self._decode_graph(shape)
            for rows in draw_shapes(self._limits.max_sequences) if self._capture else ():
                self._draw_graph(rows)
            self._warm_up_prefill()
            self._warm_up_penalties()
        return len(self._recordings) + len(self._draw_graphs) + len(self._mixed_graphs)

    def _warm_up_prefill(self) -> None:
        # Kernels that run without a graph are compiled for ranges of rows, and apart for multiples of 16.
        most, most_decodes = self._limits.max_rows, self._limits.max_sequences
        for shape in mixed_shapes(most, most_decodes) if self._capture else ():
            self._mixed_graph(shape)
        powers = [1 << exponent for exponent in range(1, most.bit_length() + 1)]
        sizes = {min(most, size) for power in powers for size in (power, power + 1)}
        decodes = [bucket for bucket in BUCKETS if bucket <= min(most - 2, most_decodes)]
        with self._packer.mixed_tables.blanked({"table_rows": self._packer.padding_row}):
            for lora_tiles, columns in ((NO_LORA, False), (16, False), (17, False), (16, True), (17, True)):
                for rows in sorted(size for size in sizes if size > max(MIXED_ROWS)):
                    self._run_blank(rows, 0, lora_tiles, columns=columns)
                for decode_rows in decodes if most > max(MIXED_ROWS) else ():
                    self._run_blank(most, decode_rows, lora_tiles, columns=columns)
            if self._device.type == "cuda":
                torch.cuda.synchronize()

    def _run_blank(self, rows: int, decode_rows: int, lora_tiles: int, *, columns: bool) -> None:
        step = self._packer.device_step(self._packer.mixed_tables, rows, decode_rows, lora_tiles, 1, columns=columns)
        logit_rows = torch.zeros(1, dtype=torch.long, device=self._device)
        self._decoder.forward(replace(step, token_ids=self._token_ids(step), logit_rows=logit_rows))

    def _warm_up_penalties(self) -> None:
        logits = self._decoder.logits_buffer[:1]
        for variant in (plan for plan in SAMPLING_PLANS if plan.top_logprobs is None):
            self._sampler.sample(logits, replace(variant, penalties=True))
        self._sampler_rows.clear()

    def logits(self, batch: StepBatch) -> Tensor:
        """[chunks that sample, vocab], float32, in the batch's order. For tests."""
        with torch.inference_mode():
            self._use_device()
            self._prepare_blocks(batch)
            plan = self._packer.pack(batch.chunks)
            self._run_layers(plan)
            found = self._logits(plan, [plan.row_of[c.sequence_id] for c in batch.chunks if c.samples])
            return found.to(torch.float32, copy=True)  # the next pass overwrites what it found

    def holds_adapter(self, uid: AdapterUid) -> bool:
        return self._adapters.holds(uid)

    def adapter_bytes(self, adapter: HostAdapter) -> int:
        return self._adapters.size_bytes(adapter)

    def reserve_adapter(self, adapter: HostAdapter) -> None:
        self._adapters.reserve(adapter)

    def fill_adapter(self, adapter: HostAdapter) -> None:
        self._use_device()
        self._adapters.fill(adapter)

    def drop_adapter(self, uid: AdapterUid) -> None:
        self._adapters.drop(uid)

    def close(self) -> None:
        if self._cache.cuts is not None:
            self._cache.cuts.tell_rest()

    @property
    def merge_problem(self) -> str:
        return self._merged.problem

    def merge_some(self, uid: AdapterUid) -> bool:
        self._use_device()
        is_over = self._merged.merge_some(lambda: self._adapters.read(uid))
        self._wait_written()
        return is_over

    def restore_some(self) -> bool:
        self._use_device()
        is_over = self._merged.restore_some()
        self._wait_written()
        return is_over

    def _wait_written(self) -> None:
        # Kernels read their first weights before the kernel ahead of them has ended.
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def forget_graphs(self) -> None:
        self._recordings.clear()
        self._draw_graphs.clear()
        self._mixed_graphs.clear()

    def graph_of(self, batch: StepBatch) -> torch.cuda.CUDAGraph:
        """For a batch of decoding, greedy rows. For benches."""
        with torch.inference_mode():
            return self._recorded(self._packer.pack(batch.chunks), GREEDY).graph

    def _score(self, plan: PackedStep, chunks: Sequence[SequenceChunk]) -> tuple[ScoredRows, Scores] | None:
        """Outside of graphs, and behind the draw: the head's buffer has the draw's logits until then."""
        scored = ScoredRows.of(chunks, lambda i: plan.row_of[chunks[i].sequence_id])
        if scored is None:
            return None
        rows = to_device(scored.rows, torch.long, self._device)
        targets = to_device(scored.targets, torch.long, self._device)

        def head(some: Tensor) -> Tensor:
            return self._decoder.head(replace(plan.step, logit_rows=some))

        return scored, score(head, rows, targets, scored.top, self._limits.max_sequences)

    def _run_layers(self, plan: PackedStep) -> None:
        if plan.is_decode and self._capture:
            self._recorded(plan, None).graph.replay()
            return
        step, limits = plan.step, self._limits
        shape = mixed_shape(
            step.rows,
            step.decode_rows,
            step.num_prefill_tiles,
            plan.lora_tiles,
            limits.max_rows,
            limits.max_sequences,
            columns=plan.columns,
        )
        if shape is None or not self._capture:
            self._decoder.run_layers(replace(step, token_ids=self._token_ids(step)))
        else:
            self._mixed_graph(shape).replay()

    def _logits(self, plan: PackedStep, rows: Sequence[int]) -> Tensor:
        """[len(rows), vocab], of the step whose layers ran last."""
        logit_rows = to_device(rows, torch.long, self._device)
        if plan.is_decode and self._capture:
            return self._decoder.logits_buffer[logit_rows]
        return self._decoder.head(replace(plan.step, logit_rows=logit_rows))

    def _replay(self, plan: PackedStep, sampling: _Sampling) -> SampledRows | None:
        recorded = self._recorded(plan, sampling.plan)
        if sampling.plan == GREEDY:
            self._sampler_rows.clear()
        else:
            self._sampler_rows.write(sampling.chunks, sampling.rows)
        recorded.graph.replay()
        return recorded.drawn

    def _draw(
        self, plan: PackedStep, sampling: _Sampling, logits: Tensor | None, bars: DeviceBars | None
    ) -> tuple[Sequence[int], SampledRows | None]:
        """logits: of each draw; None: the graph of layers has left them. Returns each draw's row in what is drawn."""
        if not sampling.chunks:
            return (), None
        if logits is None:
            recorded = self._draw_graph(bucket_of(plan.step.rows, self._limits.max_sequences))
            self._sampler_rows.write(sampling.chunks, sampling.rows)
            recorded.graph.replay()
            return sampling.rows, recorded.drawn
        # Row i for chunk i. Not in a graph, where rows of padding would count for whose penalties they had.
        rows = range(len(sampling.rows))
        if sampling.plan.draws or sampling.plan.adjusts:
            self._sampler_rows.write(sampling.chunks, rows)
        else:
            self._sampler_rows.clear()
        drawn = self._sampler.sample(logits, sampling.plan, bars)
        self._keep_tokens(plan, sampling.rows, drawn.token_ids)
        return rows, drawn

    def _bars(self, plan: PackedStep, sampling: _Sampling) -> DeviceBars | None:
        table_rows = plan.step.table_rows[to_device(sampling.rows, torch.long, self._device)]
        return bars_on_device([chunk.bars for chunk in sampling.chunks], self._last_tokens[table_rows.long()])

    def _keep_tokens(self, plan: PackedStep, rows: Sequence[int], tokens: Tensor) -> None:
        index = to_device(rows, torch.long, self._device)
        self._last_tokens.index_copy_(0, plan.step.table_rows[index].long(), tokens.int())

    def _token_ids(self, step: DeviceStep) -> Tensor:
        given = step.token_ids[: step.rows]
        last = self._last_tokens.index_select(0, step.table_rows[: step.rows])
        return torch.where(given < 0, last, given)

    def _recorded(self, plan: PackedStep, needed: SamplingPlan | None) -> _Recorded:
        most = self._limits.max_sequences
        return self._decode_graph(decode_shape(plan.step.rows, plan.lora_tiles, needed, most, columns=plan.columns))

    def _decode_graph(self, shape: DecodeShape) -> _Recorded:
        if shape not in self._recordings:
            self._recordings[shape] = self._record(shape)
        return self._recordings[shape]

    def _draw_graph(self, rows: int) -> _Recorded:
        if rows not in self._draw_graphs:
            step = self._packer.device_step(self._packer.decode_tables, rows, rows, NO_LORA, 0)
            logits = self._decoder.logits_buffer[:rows]
            graph, drawn = self._graph_of(
                self._packer.decode_tables, lambda: self._sample_rows(logits, step.table_rows, MASKED)
            )
            self._sampler_rows.clear()
            self._draw_graphs[rows] = _Recorded(graph, drawn)
        return self._draw_graphs[rows]

    def _mixed_graph(self, shape: MixedShape) -> torch.cuda.CUDAGraph:
        if shape not in self._mixed_graphs:
            self._mixed_graphs[shape] = self._record_mixed(shape)
        return self._mixed_graphs[shape]

    def _record(self, shape: DecodeShape) -> _Recorded:
        bucket, lora_tiles, variant, columns = shape
        tables = self._packer.decode_tables
        step = self._packer.device_step(tables, bucket, bucket, lora_tiles, 0, columns=columns)

        def run() -> SampledRows | None:
            logits = self._decoder.forward(replace(step, token_ids=self._token_ids(step)))
            return None if variant is None else self._sample_rows(logits, step.table_rows, variant)

        graph, drawn = self._graph_of(tables, run)
        self._sampler_rows.clear()
        return _Recorded(graph, drawn)

    def _sample_rows(self, logits: Tensor, table_rows: Tensor, variant: SamplingPlan) -> SampledRows:
        drawn = self._sampler.sample(logits, variant)
        # Rows of padding write to a table row of their own, that no sequence has.
        self._last_tokens.index_copy_(0, table_rows[: len(logits)].long(), drawn.token_ids.int())
        return drawn

    def _record_mixed(self, shape: MixedShape) -> torch.cuda.CUDAGraph:
        """The layers only. Rows of prompts may pass as decoding ones: their keys and values are written by then."""
        tiles = room_for_prefill_tiles(shape.rows)
        step = self._packer.device_step(
            self._packer.mixed_tables,
            shape.rows,
            shape.decode_rows,
            shape.lora_tiles,
            tiles,
            columns=shape.columns,
        )

        def run() -> None:
            self._decoder.run_layers(replace(step, token_ids=self._token_ids(step)))

        graph, _ = self._graph_of(self._packer.mixed_tables, run)
        return graph

    def _graph_of(self, tables: StepTables, run: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        # The first run must not touch what steps in flight draw: it has rows of padding alone.
        with tables.blanked({"table_rows": self._packer.padding_row}):
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run()  # compiles the kernels, and lets cuBLAS make its workspaces
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: the loader's thread may allocate and copy meanwhile. The collector may not run: it may find
            # another engine's graphs, and to free them while a stream captures spoils the capture.
            with (
                collector_paused(),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                result = run()
            self._pool = graph.pool()
        return graph, result

    def _use_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # streams, graphs and Triton go to the thread's current device

    def _prepare_blocks(self, batch: StepBatch) -> None:
        device = self._loaded.device
        if batch.clear_blocks:
            self._cache.clear_blocks(to_device(batch.clear_blocks, torch.long, device))
        if batch.copy_blocks:
            sources, targets = to_device(batch.copy_blocks, torch.long, device).unbind(1)
            self._cache.copy_blocks(sources, targets)
