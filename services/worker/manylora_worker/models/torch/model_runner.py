"""One forward pass: from a StepBatch to the tokens that it samples.

TorchModelRunner owns the KV tensor, the adapters on the device and the step's LoRA choice, on the engine's one thread.
The loader's thread touches `adapters` by single dict operations alone: it publishes a finished DeviceAdapter, and an
event tells the engine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from manylora_shared.ids import AdapterUid
from torch import Tensor

from manylora_worker.kinds.api import DraftModel, Sampled, StepBatch
from manylora_worker.models.columns import BaseColumns
from manylora_worker.models.decoder.weights import DecoderWeights
from manylora_worker.models.drafts.drafter import Drafter
from manylora_worker.models.layers.attention import STEP_KEYWORD
from manylora_worker.models.layers.host_kv import TensorHostKv
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.lora_linear import LoraPlanner
from manylora_worker.models.layers.mixture import ExpertLora
from manylora_worker.models.layers.prompt_scores import answers, score
from manylora_worker.models.layers.token_rows import StepTokens
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.merged_weights import MergedWeights
from manylora_worker.models.torch.decoder import HeadLora, ScaledRows, TorchDecoder
from manylora_worker.models.torch.inputs import StepInputs, build_inputs, entered_blocks
from manylora_worker.models.torch.sampler import sample
from manylora_worker.weights.layout import HostAdapter
from manylora_worker.weights.sites import DeviceAdapter

_SCORED_ROWS = 64  # whose logits there are at a time
_Head = Callable[[Tensor], Tensor]


class TorchModelRunner:
    """See api.SwapRunner, RecurrentRunner and MergingRunner. weights: None: the model runs as transformers wrote it."""

    def __init__(
        self,
        loaded: LoadedModel,
        weights: DecoderWeights | None,
        cache: KvCache,
        planner: LoraPlanner,
        *,
        num_host_blocks: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self._loaded = loaded
        self._drafter = drafter
        self._decoder = None if weights is None else TorchDecoder(weights)
        self._cache = cache
        self.host_kv = TensorHostKv(cache.by_block, num_host_blocks)
        self._planner = planner
        self._columns = BaseColumns(loaded)
        self._merged = MergedWeights(loaded)
        self._thread_id: int | None = None
        self.adapters: dict[AdapterUid, DeviceAdapter] = {}

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

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
        with torch.inference_mode():
            self._prepare_thread()
            self._prepare_blocks(batch)
            if not batch.chunks:
                return []
            if self._drafter is not None:
                batch = self._drafter.guessed(batch)
            self._zero_entered(batch)
            inputs = build_inputs(batch, self._cache, self.adapters, self._loaded.device)
            with self._passed(inputs) as head:
                drawn = sample(head(inputs.logit_rows), inputs.sampled) if inputs.sampled else []
                if self._cache.cuts is not None:
                    self._cache.cuts.after_step()
                return answers(batch.chunks, drawn, inputs.scored, self._scores(inputs, head))

    def logits(self, batch: StepBatch) -> Tensor:
        """[chunks that sample, vocab], float32, in the batch's order. For tests."""
        with torch.inference_mode():
            self._prepare_thread()
            self._prepare_blocks(batch)
            self._zero_entered(batch)
            inputs = build_inputs(batch, self._cache, self.adapters, self._loaded.device)
            with self._passed(inputs) as head:
                return head(inputs.logit_rows).float()

    def adapter_bytes(self, adapter: HostAdapter) -> int:
        vectors = sum(vector.placed.columns for vector in adapter.extras.vectors)
        return adapter.size_bytes + 2 * vectors * self._loaded.dtype.itemsize

    def reserve_adapter(self, adapter: HostAdapter) -> None:
        """The allocator finds room when the weights come."""

    def fill_adapter(self, adapter: HostAdapter) -> None:
        device = self._loaded.device
        if device.type != "cuda":
            if self._cache.marks_free:  # the host tier's memory is not to be marked with the device's
                adapter = replace(adapter, buffer=adapter.buffer.clone())
            self.adapters[adapter.uid] = self.placed(adapter)
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            on_device = self.placed(adapter)
        stream.synchronize()
        self.adapters[adapter.uid] = on_device

    def placed(self, adapter: HostAdapter) -> DeviceAdapter:
        """With what it makes of layers' outputs."""
        placed = adapter.on(self._loaded.device)
        return replace(placed, columns=self._columns.of(adapter)) if adapter.extras.vectors else placed

    def drop_adapter(self, uid: AdapterUid) -> None:
        adapter = self.adapters.pop(uid, None)
        self._planner.forget(uid)
        if adapter is not None and self._cache.marks_free:
            for weights in adapter.weights():
                weights.fill_(math.nan)

    def close(self) -> None:
        if self._cache.cuts is not None:
            self._cache.cuts.tell_rest()

    @property
    def merge_problem(self) -> str:
        return self._merged.problem

    def merge_some(self, uid: AdapterUid) -> bool:
        self._prepare_thread()
        return self._merged.merge_some(lambda: self.adapters[uid])

    def restore_some(self) -> bool:
        return self._merged.restore_some()

    @contextmanager
    def _passed(self, inputs: StepInputs) -> Iterator[_Head]:
        """What gives rows their logits."""
        loaded = self._loaded
        loaded.switch.batch = self._planner.plan(inputs.segments, inputs.num_rows, loaded.device)
        loaded.switch.experts = ExpertLora(inputs.segments) or None
        try:
            if self._decoder is not None:
                scaled = self._scaled_rows(self._decoder, inputs)
                tokens = StepTokens(inputs.segments) or None
                residual = self._decoder.layers(inputs.token_ids, inputs.positions, inputs.attention, scaled, tokens)
                adapted = [each for each in (HeadLora(len(loaded.sites), inputs.segments), tokens) if each]
                yield partial(self._decoder.head, residual, adapted=adapted)
            else:
                yield self._passed_by_transformers(inputs)
        finally:
            loaded.switch.batch = loaded.switch.experts = None

    def _scaled_rows(self, decoder: TorchDecoder, inputs: StepInputs) -> ScaledRows | None:
        scaled = [(segment, segment.adapter.rope) for segment in inputs.segments if segment.adapter.rope is not None]
        if not scaled:
            return None
        rows = [row for segment, _ in scaled for row in range(segment.first_row, segment.last_row)]
        counts = torch.tensor([segment.last_row - segment.first_row for segment, _ in scaled])
        found = [decoder.scaled(rope) for _, rope in scaled]
        device = self._loaded.device
        return ScaledRows(
            torch.tensor(rows, device=device),
            torch.stack([frequencies for frequencies, _ in found]).repeat_interleave(counts.to(device), 0),
            torch.tensor([factor for _, factor in found]).repeat_interleave(counts)[:, None].to(device),
        )

    def _scores(self, inputs: StepInputs, head: _Head) -> Sequence[Tensor]:
        scored = inputs.scored
        if scored is None:
            return ()
        device = self._loaded.device
        rows, targets = torch.tensor(scored.rows, device=device), torch.tensor(scored.targets, device=device)
        return score(head, rows, targets, scored.top, _SCORED_ROWS)

    def _passed_by_transformers(self, inputs: StepInputs) -> _Head:
        loaded = self._loaded
        keep = inputs.logit_rows
        if inputs.scored is not None:
            keep = torch.cat((keep, torch.tensor(inputs.scored.rows, device=loaded.device)))
        # Where no row is wanted, the head still runs for one: models take "no rows" for "all rows".
        keep = keep if len(keep) else keep.new_zeros(1)
        extra = {"logits_to_keep": keep} if loaded.keeps_logits else {}
        output = loaded.model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **extra,
            **{STEP_KEYWORD: inputs.attention},
        )
        logits: Tensor = output.logits[0]
        if not loaded.keeps_logits:
            return partial(logits.index_select, 0)
        places = keep.new_zeros(inputs.num_rows).index_copy_(0, keep, torch.arange(len(keep), device=loaded.device))
        return lambda rows: logits.index_select(0, places[rows])

    def _prepare_thread(self) -> None:
        if self._thread_id != threading.get_ident():
            self._thread_id = threading.get_ident()
            torch.set_num_threads(self._loaded.num_threads)  # counted per calling thread

    def _prepare_blocks(self, batch: StepBatch) -> None:
        device = self._loaded.device
        if batch.clear_blocks:
            self._cache.clear_blocks(torch.tensor(batch.clear_blocks, device=device))
        if batch.copy_blocks:
            sources, targets = torch.tensor(batch.copy_blocks, device=device).unbind(1)
            self._cache.copy_blocks(sources, targets)

    def _zero_entered(self, batch: StepBatch) -> None:
        """batch: with all guesses, which enter blocks too."""
        stale = entered_blocks(batch.chunks, self._cache.block_size, self._cache.state_blocks)
        if stale:
            self._cache.zero_blocks(torch.tensor(stale, device=self._loaded.device))
