"""The semantics of models/torch/sampler.py without a wait for the host, so that a graph can hold them. DeviceSampler
owns every row's parameters, output index and penalty counts on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from manylora_shared.sampling import MAX_TOP_LOGPROBS
from torch import Tensor

from manylora_worker.kinds.api import Sampling
from manylora_worker.models.cuda.kernels.sampling_kernels import (
    FLOATS,
    INTS,
    adjust_kernel,
    best_kernel,
    bound_kernel,
    choose_kernel,
    finish_kernel,
    gather_kernel,
    histogram_kernel,
    race_kernel,
)

_MASK_64 = (1 << 64) - 1
_SEGMENT_TOKENS = 4096
_CANDIDATES = 16384
_CHUNK = 2048
_BINS = 512
_BINS_A_UNIT = 16
# 1/16 of a natural logarithm each, down to 32 below the best; the rest is in the last.


@dataclass(frozen=True)
class SamplingPlan:
    """A larger plan is right for the rows of a smaller one. `penalties`: or a bias, or a bar. `masks`: some rows'."""

    draws: bool = False
    cuts: bool = False
    penalties: bool = False
    masks: bool = False
    top_logprobs: int | None = None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], *, has_bars: bool = False, has_masks: bool = False) -> SamplingPlan:
        logprobs = [s.top_logprobs for s in samplings if s.top_logprobs is not None]
        return cls(
            draws=any(not s.is_greedy for s in samplings),
            cuts=any(not s.is_greedy and (s.top_k or s.top_p < 1 or s.min_p > 0) for s in samplings),
            penalties=has_bars or any(s.adjusts_logits for s in samplings),
            masks=has_masks,
            top_logprobs=max(logprobs) if logprobs else None,
        )

    @property
    def adjusts(self) -> bool:
        return self.penalties or self.masks

    def covers(self, other: SamplingPlan) -> bool:
        own_logprobs = -1 if self.top_logprobs is None else self.top_logprobs
        logprobs = -1 if other.top_logprobs is None else other.top_logprobs
        return (
            self.draws >= other.draws
            and self.cuts >= other.cuts
            and self.penalties >= other.penalties
            and self.masks >= other.masks
            and own_logprobs >= logprobs
        )


@dataclass(frozen=True)
class RowState:
    """`output_index`: of the next draw. `penalty_slot`: -1 where nothing adjusts the row's logits."""

    sampling: Sampling
    choice: int
    output_index: int
    penalty_slot: int = -1
    is_masked: bool = False


@dataclass(frozen=True)
class DeviceBars:
    """[bars] each. A bar that does not hold adds 0."""

    rows: Tensor
    token_ids: Tensor
    additions: Tensor


@dataclass(frozen=True)
class SampledRows:
    """Overwritten by the next `sample`. [rows] each, `top_*`: [rows, k], best first. A row is not sound, and its token
    0, where its largest logit is not a finite number, before penalties, bias and bars.
    """

    token_ids: Tensor
    sound: Tensor
    logprobs: Tensor | None = None
    top_values: Tensor | None = None
    top_ids: Tensor | None = None


class DeviceSampler:
    """penalty_slots: rows that may have penalties or a bias at once; each takes 8 bytes a token of the vocabulary.
    segment_tokens, candidates: tokens a program, and candidates a row; powers of two.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        *,
        penalty_slots: int = 0,
        segment_tokens: int = _SEGMENT_TOKENS,
        candidates: int = _CANDIDATES,
    ) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = device
        self.penalty_slots = penalty_slots
        self._segment = segment_tokens
        self._segments = triton.cdiv(vocab_size, segment_tokens)
        self._candidates = candidates
        self._floats = torch.zeros(len(FLOATS), max_rows, dtype=torch.float64, device=device)
        self._floats[FLOATS.index("top_p")] = 1.0
        self._floats[FLOATS.index("repetition_penalty")] = 1.0
        self._floats[FLOATS.index("log_min_p")] = float("-inf")
        self._ints = torch.zeros(len(INTS), max_rows, dtype=torch.int64, device=device)
        self._ints[INTS.index("penalty_slot")] = -1
        self._counts = torch.zeros(penalty_slots, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(penalty_slots, vocab_size, dtype=torch.float32, device=device)
        self._masks = torch.zeros(max_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._scratch = _Scratch(max_rows, vocab_size, self._segments, candidates, penalty_slots > 0, device)

    def write_rows(self, rows: Mapping[int, RowState]) -> None:
        """Queued on the current stream: not while a graph is being captured."""
        if not rows:
            return
        index = self._to_device(torch.tensor(list(rows), dtype=torch.int64))
        floats = [_floats_of(state.sampling) for state in rows.values()]
        ints = [_ints_of(state) for state in rows.values()]
        assert all(-1 <= state.penalty_slot < self.penalty_slots for state in rows.values())
        assert all((state.penalty_slot >= 0) == state.sampling.adjusts_logits for state in rows.values())
        self._floats.index_copy_(1, index, self._to_device(torch.tensor(floats, dtype=torch.float64).T.contiguous()))
        self._ints.index_copy_(1, index, self._to_device(torch.tensor(ints, dtype=torch.int64).T.contiguous()))

    def write_masks(self, masks: Mapping[int, bytes]) -> None:
        """By row: a bit for each token that may be drawn next. Queued on the current stream, as `write_rows`."""
        if not masks:
            return
        words = torch.empty(len(masks), self._masks.shape[1], dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for place, mask in zip(words.numpy(), masks.values(), strict=True):
            place[:] = np.frombuffer(mask, np.int32)
        index = self._to_device(torch.tensor(list(masks), dtype=torch.int64))
        self._masks.index_copy_(0, index, words.to(self.device, non_blocking=True))

    def write_penalty_slot(
        self, slot: int, sampling: Sampling, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """For a sequence that begins or resumes on this device; `sample` keeps it from then on."""
        counts, bias = self._counts[slot], self._bias[slot]
        counts.zero_()
        allowed = sampling.allowed_token_ids
        bias.fill_(float("-inf") if allowed else 0.0)
        if allowed:
            bias.index_fill_(0, self._to_device(torch.tensor(allowed, dtype=torch.int64)), 0.0)
        output = self._to_device(torch.tensor(list(output_token_ids), dtype=torch.int64))
        counts.index_put_((output,), torch.full_like(output, 2, dtype=torch.int32), accumulate=True)
        prompt = self._to_device(torch.tensor(sorted(set(prompt_token_ids)), dtype=torch.int64))
        counts.index_add_(0, prompt, torch.ones_like(prompt, dtype=torch.int32))
        if sampling.logit_bias:
            ids = self._to_device(torch.tensor(list(sampling.logit_bias), dtype=torch.int64))
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
            bias.index_add_(0, ids, self._to_device(values))

    def sample(self, logits: Tensor, plan: SamplingPlan, bars: DeviceBars | None = None) -> SampledRows:
        """logits: [rows, vocab], contiguous, not changed. `plan` covers the rows' own."""
        num_rows, vocab_size = logits.shape
        assert num_rows <= self.max_rows
        assert vocab_size == self.vocab_size
        assert logits.is_contiguous()
        scratch = self._scratch
        by_segment = (num_rows, self._segments)
        sizes = {"SEGMENTS": self._segments, "SEGMENT": self._segment}
        padded = triton.next_power_of_2(self._segments)
        scores = logits
        if plan.adjusts:
            assert scratch.scores is not None, "no penalty slots"
            scores = scratch.scores
            adjust_kernel[by_segment](
                logits, scores, self._floats, self._ints, self._counts, self._bias, scratch.raw_best_values,
                self._masks, vocab_size, self.max_rows, **sizes, num_warps=8,
            )  # fmt: skip
        if bars is not None:
            scores.view(-1).index_add_(0, bars.rows * vocab_size + bars.token_ids, bars.additions)
        best_kernel[by_segment](scores, scratch.best_values, scratch.best_ids, vocab_size, **sizes, num_warps=8)
        if plan.draws:
            race_kernel[by_segment](
                scores, self._floats, self._ints, scratch.best_values, scratch.race_values, scratch.race_ids,
                vocab_size, self.max_rows, **sizes, PADDED=padded, num_warps=8,
            )  # fmt: skip
        if plan.draws and plan.cuts:
            self._draw_with_cuts(scores, by_segment, sizes, padded)
        finish_kernel[(num_rows,)](
            self._floats, self._ints, self._counts, scratch.best_values, scratch.best_ids,
            scratch.raw_best_values, scratch.race_values, scratch.race_ids, scratch.chosen, scratch.token_ids,
            scratch.sound,
            vocab_size, self.max_rows, SEGMENTS=self._segments, PADDED=padded, DRAWS=plan.draws, CUTS=plan.cuts,
            ADJUSTS=plan.adjusts, PENALTIES=plan.penalties, num_warps=1,
        )  # fmt: skip
        token_ids, sound = scratch.token_ids[:num_rows], scratch.sound[:num_rows]
        if plan.top_logprobs is None:
            return SampledRows(token_ids, sound)
        return _with_logprobs(logits, token_ids, sound, plan.top_logprobs)

    def _draw_with_cuts(
        self, scores: Tensor, by_segment: tuple[int, int], sizes: Mapping[str, int], padded: int
    ) -> None:
        num_rows = by_segment[0]
        scratch = self._scratch
        histogram_kernel[by_segment](
            scores, self._floats, self._ints, scratch.best_values, scratch.histograms, scratch.masses,
            self.vocab_size, self.max_rows, **sizes, PADDED=padded, BINS=_BINS, BINS_A_UNIT=_BINS_A_UNIT, num_warps=8,
        )  # fmt: skip
        bound_kernel[(num_rows,)](
            self._floats, self._ints, scratch.histograms, scratch.masses, scratch.totals, scratch.bounds,
            scratch.offsets, self.vocab_size, self.max_rows, SEGMENTS=self._segments, PADDED=padded,
            BINS=_BINS, BINS_A_UNIT=_BINS_A_UNIT, CANDIDATES=self._candidates, num_warps=4,
        )  # fmt: skip
        gather_kernel[by_segment](
            scores, self._floats, self._ints, scratch.best_values, scratch.bounds, scratch.offsets,
            scratch.candidate_scores, scratch.candidate_ids,
            self.vocab_size, self.max_rows, **sizes, PADDED=padded, BINS=_BINS, BINS_A_UNIT=_BINS_A_UNIT,
            CANDIDATES=self._candidates, num_warps=8,
        )  # fmt: skip
        choose_kernel[(num_rows,)](
            scores, self._floats, self._ints, scratch.best_values, scratch.bounds, scratch.offsets, scratch.totals,
            scratch.candidate_scores, scratch.candidate_ids, scratch.chosen, self.vocab_size, self.max_rows,
            SEGMENTS=self._segments, PADDED=padded, BINS=_BINS, CANDIDATES=self._candidates, CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip

    def _to_device(self, values: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return values.pin_memory().to(self.device, non_blocking=True)
        return values


def _floats_of(sampling: Sampling) -> list[float]:
    # Rounded to float32 where the CPU's sampler rounds; top_p, presence and frequency count in float64 there.
    log_min_p = torch.tensor([sampling.min_p]).log_().item() if sampling.min_p else float("-inf")
    return [
        float(np.float32(sampling.temperature)),
        sampling.top_p,
        log_min_p,
        float(np.float32(sampling.repetition_penalty)),
        sampling.presence_penalty,
        sampling.frequency_penalty,
    ]


def _ints_of(state: RowState) -> list[int]:
    key_state = _splitmix64((state.sampling.seed & _MASK_64) ^ _splitmix64(state.choice))
    signed = key_state - (1 << 64) if key_state >> 63 else key_state
    return [state.sampling.top_k, signed, state.output_index, state.penalty_slot, int(state.is_masked)]


def _splitmix64(word: int) -> int:
    z = (word + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


class _Scratch:
    def __init__(
        self, max_rows: int, vocab_size: int, segments: int, candidates: int, adjusts: bool, device: torch.device
    ) -> None:
        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.scores = room(max_rows, vocab_size, dtype=torch.float32) if adjusts else None
        self.best_values = room(max_rows, segments, dtype=torch.float32)
        self.raw_best_values = room(max_rows, segments, dtype=torch.float32)  # before penalties
        self.best_ids = room(max_rows, segments, dtype=torch.int32)
        self.race_values = room(max_rows, segments, dtype=torch.float32)
        self.race_ids = room(max_rows, segments, dtype=torch.int32)
        self.histograms = room(max_rows, segments, _BINS, dtype=torch.int32)
        self.masses = room(max_rows, segments, dtype=torch.float64)
        self.totals = room(max_rows, dtype=torch.float64)
        self.bounds = room(max_rows, 2, dtype=torch.int32)
        self.offsets = room(max_rows, segments, dtype=torch.int32)
        self.candidate_scores = room(max_rows, candidates, dtype=torch.float32)
        self.candidate_ids = room(max_rows, candidates, dtype=torch.int32)
        self.chosen = room(max_rows, dtype=torch.int32)
        self.token_ids = room(max_rows, dtype=torch.int64)
        self.sound = room(max_rows, dtype=torch.bool)


def _with_logprobs(logits: Tensor, token_ids: Tensor, sound: Tensor, top: int) -> SampledRows:
    assert 0 <= top <= MAX_TOP_LOGPROBS
    distribution = torch.log_softmax(logits.float(), dim=-1)
    own = distribution.gather(1, token_ids[:, None])[:, 0]
    values, ids = distribution.topk(min(top, logits.shape[1]), dim=-1)
    return SampledRows(token_ids, sound, own, values, ids)
