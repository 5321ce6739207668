"""Drawing tokens on the device: engine/sampler.py's semantics without a wait for the host, so that a graph can hold it.

DeviceSampler owns every row's parameters, output index and penalty counts as device tensors of fixed shapes; the host
writes them when a row changes hands (`write_rows`), and each `sample` advances the output index and the counts itself.
It knows nothing of sequences, blocks or the model. One stream at a time.

A row is cut into segments, one program each. In order, by what the plan asks for:

| kernel | programs | does |
|---|---|---|
| `_adjust_kernel` | row x segment | penalties and bias into a scratch of scores (penalties) |
| `_best_kernel` | row x segment | the likeliest token: all that greedy rows need |
| `_race_kernel` | row x segment | the exponential race over the vocabulary, for rows without cuts (draws) |
| `_histogram_kernel` | row x segment | how many tokens lie how far below the best; their mass (cuts) |
| `_bound_kernel` | row | a score below which no token can pass the cuts (cuts) |
| `_gather_kernel` | row x segment | the tokens above it, in the order of their ids (cuts) |
| `_choose_kernel` | row | the exact thresholds by bisection over those, then the race over what is left (cuts) |
| `_finish_kernel` | row | the token; advances the row |

A row with more candidates than there is room for (a nearly flat distribution) is searched whole by its one program:
right, but slow (about a millisecond for 128,256 tokens).

Equality with engine/sampler.py on the same float32 logits. Keys, hash, uniform numbers, (score - best) / temperature
and the top-k cut are the same bits. A cut by top-p is the same set unless a partial sum of the float64 masses lies
within rounding of the limit: sums here have another order, but masses are float32 values of at most 1, so sums of those
above 2^-12 are exact in both, ties included. exp and log1p are our own, within an ulp or two of torch's (Triton's are
not): the race's winner differs where two tokens are within that of each other, once in some 10^6 draws.

exp and log are those of Cephes (S. Moshier, expf.c and logf.c); the correction for log1p is W. Kahan's, as in fdlibm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.engine.api import Sampling

_MASK_64 = (1 << 64) - 1
MAX_TOP_LOGPROBS = 20
_SEGMENT_TOKENS = 4096
_CANDIDATES = 16384
"""Room for candidates, a row; 8 bytes each."""
_CHUNK = 2048
_BINS = 512
_BINS_A_UNIT = 16
"""The histogram's bins: 1/16 of a natural logarithm each, down to 32 below the best; the rest is in the last."""


@dataclass(frozen=True)
class SamplingPlan:
    """What a set of rows needs: which variant of the step to run. A larger plan is right for the rows of a smaller one.

    Attributes:
        draws: some row has a temperature.
        cuts: some of those has top-k, top-p or min-p.
        penalties: some row has a penalty or a bias.
        top_logprobs: None: no logprobs; k: the sampled token's and the k likeliest.
    """

    draws: bool = False
    cuts: bool = False
    penalties: bool = False
    top_logprobs: int | None = None

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> SamplingPlan:
        """The least plan for the rows."""
        logprobs = [s.top_logprobs for s in samplings if s.top_logprobs is not None]
        return cls(
            draws=any(not s.is_greedy for s in samplings),
            cuts=any(not s.is_greedy and (s.top_k or s.top_p < 1 or s.min_p > 0) for s in samplings),
            penalties=any(needs_penalty_slot(s) for s in samplings),
            top_logprobs=max(logprobs) if logprobs else None,
        )

    def covers(self, other: SamplingPlan) -> bool:
        """Whether a graph captured with this plan can run rows that need `other`."""
        own_logprobs = -1 if self.top_logprobs is None else self.top_logprobs
        logprobs = -1 if other.top_logprobs is None else other.top_logprobs
        return (
            self.draws >= other.draws
            and self.cuts >= other.cuts
            and self.penalties >= other.penalties
            and own_logprobs >= logprobs
        )


def needs_penalty_slot(sampling: Sampling) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
    )


@dataclass(frozen=True)
class RowState:
    """What the host tells of one row.

    Attributes:
        output_index: of the next token to be drawn (0 = first after the prompt).
        penalty_slot: the row's place in the tables, -1 where needs_penalty_slot is false.
    """

    sampling: Sampling
    choice: int
    output_index: int
    penalty_slot: int = -1


@dataclass(frozen=True)
class SampledRows:
    """Device tensors that the next `sample` with as many rows overwrites.

    Attributes:
        token_ids: [rows] int64; 0 where a row is not sound.
        sound: [rows] bool; False where the largest score is not a finite number.
        logprobs: [rows] float32 of the sampled tokens, or None.
        top_values, top_ids: [rows, k], best first, or None.
    """

    token_ids: Tensor
    sound: Tensor
    logprobs: Tensor | None = None
    top_values: Tensor | None = None
    top_ids: Tensor | None = None


class DeviceSampler:
    """Samples `rows` rows of logits, of which row i has the parameters last written to row i.

    Args:
        max_rows: rows of the largest batch.
        penalty_slots: rows that may have penalties or a bias at once; each takes 8 bytes a token of the vocabulary.
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
        self._floats = torch.zeros(len(_FLOATS), max_rows, dtype=torch.float64, device=device)
        self._floats[_FLOATS.index("top_p")] = 1.0
        self._floats[_FLOATS.index("repetition_penalty")] = 1.0
        self._floats[_FLOATS.index("log_min_p")] = float("-inf")
        self._ints = torch.zeros(len(_INTS), max_rows, dtype=torch.int64, device=device)
        self._ints[_INTS.index("penalty_slot")] = -1
        self._counts = torch.zeros(penalty_slots, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(penalty_slots, vocab_size, dtype=torch.float32, device=device)
        self._scratch = _Scratch(max_rows, vocab_size, self._segments, candidates, penalty_slots > 0, device)

    def write_rows(self, rows: Mapping[int, RowState]) -> None:
        """Sets rows' parameters, by row. Queued on the current stream: not while a graph is being captured."""
        if not rows:
            return
        index = self._to_device(torch.tensor(list(rows), dtype=torch.int64))
        floats = [_floats_of(state.sampling) for state in rows.values()]
        ints = [_ints_of(state) for state in rows.values()]
        assert all(-1 <= state.penalty_slot < self.penalty_slots for state in rows.values())
        assert all((state.penalty_slot >= 0) == needs_penalty_slot(state.sampling) for state in rows.values())
        self._floats.index_copy_(1, index, self._to_device(torch.tensor(floats, dtype=torch.float64).T.contiguous()))
        self._ints.index_copy_(1, index, self._to_device(torch.tensor(ints, dtype=torch.int64).T.contiguous()))

    def write_penalty_slot(
        self, slot: int, sampling: Sampling, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """Fills a slot for a sequence that begins or resumes on this device; from then on `sample` keeps it."""
        counts, bias = self._counts[slot], self._bias[slot]
        counts.zero_()
        bias.zero_()
        output = self._to_device(torch.tensor(list(output_token_ids), dtype=torch.int64))
        counts.index_put_((output,), torch.full_like(output, 2, dtype=torch.int32), accumulate=True)
        prompt = self._to_device(torch.tensor(sorted(set(prompt_token_ids)), dtype=torch.int64))
        counts.index_add_(0, prompt, torch.ones_like(prompt, dtype=torch.int32))
        if sampling.logit_bias:
            ids = self._to_device(torch.tensor(list(sampling.logit_bias), dtype=torch.int64))
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
            bias.index_copy_(0, ids, self._to_device(values))

    def sample(self, logits: Tensor, plan: SamplingPlan) -> SampledRows:
        """Draws a token for each row and advances the rows.

        Args:
            logits: [rows, vocab], any float type, contiguous; not changed.
            plan: must cover the rows' own.
        """
        num_rows, vocab_size = logits.shape
        assert num_rows <= self.max_rows
        assert vocab_size == self.vocab_size
        assert logits.is_contiguous()
        scratch = self._scratch
        by_segment = (num_rows, self._segments)
        sizes = {"SEGMENTS": self._segments, "SEGMENT": self._segment}
        padded = triton.next_power_of_2(self._segments)
        scores = logits
        if plan.penalties:
            assert scratch.scores is not None, "no penalty slots"
            scores = scratch.scores
            _adjust_kernel[by_segment](
                logits, scores, self._floats, self._ints, self._counts, self._bias, vocab_size, self.max_rows,
                SEGMENT=self._segment, num_warps=8,
            )  # fmt: skip
        _best_kernel[by_segment](scores, scratch.best_values, scratch.best_ids, vocab_size, **sizes, num_warps=8)
        if plan.draws:
            _race_kernel[by_segment](
                scores, self._floats, self._ints, scratch.best_values, scratch.race_values, scratch.race_ids,
                vocab_size, self.max_rows, **sizes, PADDED=padded, num_warps=8,
            )  # fmt: skip
        if plan.draws and plan.cuts:
            self._draw_with_cuts(scores, by_segment, sizes, padded)
        _finish_kernel[(num_rows,)](
            self._floats, self._ints, self._counts, scratch.best_values, scratch.best_ids,
            scratch.race_values, scratch.race_ids, scratch.chosen, scratch.token_ids, scratch.sound,
            vocab_size, self.max_rows, SEGMENTS=self._segments, PADDED=padded, DRAWS=plan.draws, CUTS=plan.cuts,
            PENALTIES=plan.penalties, num_warps=1,
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
        _histogram_kernel[by_segment](
            scores, self._floats, self._ints, scratch.best_values, scratch.histograms, scratch.masses,
            self.vocab_size, self.max_rows, **sizes, PADDED=padded, BINS=_BINS, BINS_A_UNIT=_BINS_A_UNIT, num_warps=8,
        )  # fmt: skip
        _bound_kernel[(num_rows,)](
            self._floats, self._ints, scratch.histograms, scratch.masses, scratch.totals, scratch.bounds,
            scratch.offsets, self.vocab_size, self.max_rows, SEGMENTS=self._segments, PADDED=padded,
            BINS=_BINS, BINS_A_UNIT=_BINS_A_UNIT, CANDIDATES=self._candidates, num_warps=4,
        )  # fmt: skip
        _gather_kernel[by_segment](
            scores, self._floats, self._ints, scratch.best_values, scratch.bounds, scratch.offsets,
            scratch.candidate_scores, scratch.candidate_ids,
            self.vocab_size, self.max_rows, **sizes, PADDED=padded, BINS=_BINS, BINS_A_UNIT=_BINS_A_UNIT,
            CANDIDATES=self._candidates, num_warps=8,
        )  # fmt: skip
        _choose_kernel[(num_rows,)](
            scores, self._floats, self._ints, scratch.best_values, scratch.bounds, scratch.offsets, scratch.totals,
            scratch.candidate_scores, scratch.candidate_ids, scratch.chosen, self.vocab_size, self.max_rows,
            SEGMENTS=self._segments, PADDED=padded, BINS=_BINS, CANDIDATES=self._candidates, CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip

    def _to_device(self, values: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return values.pin_memory().to(self.device, non_blocking=True)
        return values


_FLOATS = (
    "temperature",
    "top_p",
    "log_min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTS = ("top_k", "key_state", "output_index", "penalty_slot")
_TEMPERATURE, _TOP_P, _LOG_MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_REPETITION, _PRESENCE, _FREQUENCY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_TOP_K, _KEY_STATE, _OUTPUT_INDEX, _PENALTY_SLOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


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
    return [state.sampling.top_k, signed, state.output_index, state.penalty_slot]


def _splitmix64(word: int) -> int:
    z = (word + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


class _Scratch:
    """Room for what one step's kernels hand to the next."""

    def __init__(
        self, max_rows: int, vocab_size: int, segments: int, candidates: int, adjusts: bool, device: torch.device
    ) -> None:
        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.scores = room(max_rows, vocab_size, dtype=torch.float32) if adjusts else None
        self.best_values = room(max_rows, segments, dtype=torch.float32)
        self.best_ids = room(max_rows, segments, dtype=torch.int32)
        self.race_values = room(max_rows, segments, dtype=torch.float32)
        self.race_ids = room(max_rows, segments, dtype=torch.int32)
        self.histograms = room(max_rows, segments, _BINS, dtype=torch.int32)
        self.masses = room(max_rows, segments, dtype=torch.float64)
        self.totals = room(max_rows, dtype=torch.float64)
        self.bounds = room(max_rows, 2, dtype=torch.int32)
        """The last bin whose tokens are candidates, and how many candidates there are."""
        self.offsets = room(max_rows, segments, dtype=torch.int32)
        self.candidate_scores = room(max_rows, candidates, dtype=torch.float32)
        self.candidate_ids = room(max_rows, candidates, dtype=torch.int32)
        self.chosen = room(max_rows, dtype=torch.int32)
        self.token_ids = room(max_rows, dtype=torch.int64)
        self.sound = room(max_rows, dtype=torch.bool)


def _with_logprobs(logits: Tensor, token_ids: Tensor, sound: Tensor, top: int) -> SampledRows:
    """The model's own distribution: before penalties, temperature and cuts."""
    assert 0 <= top <= MAX_TOP_LOGPROBS
    distribution = torch.log_softmax(logits.float(), dim=-1)
    own = distribution.gather(1, token_ids[:, None])[:, 0]
    values, ids = distribution.topk(min(top, logits.shape[1]), dim=-1)
    return SampledRows(token_ids, sound, own, values, ids)


# ---- arithmetic


@triton.jit
def _exp(x):
    """e^x for x <= 0, within an ulp; 0 below -87.3. Cephes' expf."""
    clamped = tl.maximum(x, -87.3)
    n = tl.floor(clamped * 1.44269504088896341 + 0.5)
    r = clamped - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = p * (r * r) + r + 1.0
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.3, 0.0, y * scale)


@triton.jit
def _minus_log1p_of_minus(u):
    """-log(1 - u) for 0 < u < 1, within an ulp or two of the result however small u is."""
    w = 1.0 - u
    lost = (1.0 - w) - u  # what the subtraction rounded away: 1 - u = w + lost
    bits = w.to(tl.int32, bitcast=True)
    # w = 2^exponent * m with sqrt(1/2) <= m < sqrt(2)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    f = m - 1.0
    z = f * f
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    e = exponent.to(tl.float32)
    y = f * z * p + e * -2.12194440e-4 - 0.5 * z
    log = f + y + e * 0.693359375
    return -(log + lost / w)


@triton.jit
def _mix64(z):
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(ints_ptr, row, max_rows, token):
    """Exponential noise of the row's next draw, by token id."""
    state = tl.load(ints_ptr + _KEY_STATE * max_rows + row + tl.arange(0, 1)).to(tl.uint64, bitcast=True)
    index = tl.load(ints_ptr + _OUTPUT_INDEX * max_rows + row + tl.arange(0, 1)).to(tl.uint64, bitcast=True)
    key = _mix64(state ^ _mix64(index))
    high = (key >> 32).to(tl.uint32)
    low = (key & 0xFFFFFFFF).to(tl.uint32) | 1
    bits = _mix32((_mix32((token + 1).to(tl.uint32)) ^ high) * low) & 0x7FFFFFFF
    uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    return _minus_log1p_of_minus(tl.minimum(uniform, 0.999999940395355224609375))


@triton.jit
def _best_of_row(values_ptr, row, SEGMENTS: tl.constexpr, PADDED: tl.constexpr):
    """The row's largest score, NaN where there is one."""
    segment = tl.arange(0, PADDED)
    values = tl.load(values_ptr + row * SEGMENTS + segment, mask=segment < SEGMENTS, other=float("-inf"))
    broken = tl.sum((values != values).to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(values == values, values, float("-inf")), axis=0)
    return tl.where(broken, float("nan"), best)


@triton.jit
def _has_cuts(floats_ptr, ints_ptr, row, vocab_size, max_rows):
    top_k = tl.load(ints_ptr + _TOP_K * max_rows + row)
    top_p = tl.load(floats_ptr + _TOP_P * max_rows + row)
    log_min_p = tl.load(floats_ptr + _LOG_MIN_P * max_rows + row)
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (log_min_p > float("-inf"))


@triton.jit
def _shifted(scores, best, temperature):
    """(score - best) / temperature, the division rounded as IEEE has it. At most 0."""
    return tl.div_rn(scores - best, tl.zeros_like(scores) + temperature)


# ---- over segments


@triton.jit
def _adjust_kernel(
    logits_ptr, scores_ptr, floats_ptr, ints_ptr, counts_ptr, bias_ptr, vocab_size, max_rows, SEGMENT: tl.constexpr
):  # fmt: skip
    """Scores: logits after repetition, presence and frequency penalties and bias, in this order."""
    row = tl.program_id(0)
    token = tl.program_id(1) * SEGMENT + tl.arange(0, SEGMENT)
    kept = token < vocab_size
    at = row.to(tl.int64) * vocab_size + token
    scores = tl.load(logits_ptr + at, mask=kept, other=0.0).to(tl.float32)
    slot = tl.load(ints_ptr + _PENALTY_SLOT * max_rows + row)
    if slot >= 0:
        counts = tl.load(counts_ptr + slot * vocab_size + token, mask=kept, other=0)
        repetition = tl.load(floats_ptr + _REPETITION * max_rows + row).to(tl.float32)
        presence = tl.load(floats_ptr + _PRESENCE * max_rows + row)
        frequency = tl.load(floats_ptr + _FREQUENCY * max_rows + row)
        divided = tl.div_rn(scores, tl.zeros_like(scores) + repetition)
        scores = tl.where(counts > 0, tl.where(scores < 0, scores * repetition, divided), scores)
        outputs = counts >> 1
        addition = (-presence - frequency * outputs.to(tl.float64)).to(tl.float32)
        scores = tl.where(outputs > 0, scores + addition, scores)
        scores += tl.load(bias_ptr + slot * vocab_size + token, mask=kept, other=0.0)
    tl.store(scores_ptr + at, scores, mask=kept)


@triton.jit
def _best_kernel(scores_ptr, values_ptr, ids_ptr, vocab_size, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr):
    """A segment's largest score (NaN if there is one) and the first token that has it."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    at = row.to(tl.int64) * vocab_size + token
    scores = tl.load(scores_ptr + at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    sound = scores == scores
    broken = tl.sum((~sound).to(tl.int32), axis=0) > 0
    best, place = tl.max(tl.where(sound, scores, float("-inf")), axis=0, return_indices=True)
    tl.store(values_ptr + row * SEGMENTS + segment, tl.where(broken, float("nan"), best))
    tl.store(ids_ptr + row * SEGMENTS + segment, segment * SEGMENT + place)


@triton.jit
def _race_kernel(
    scores_ptr, floats_ptr, ints_ptr, best_ptr, values_ptr, ids_ptr, vocab_size, max_rows,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """A segment's winner among all its tokens, for rows without cuts."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    temperature = tl.load(floats_ptr + _TEMPERATURE * max_rows + row).to(tl.float32)
    best = _best_of_row(best_ptr, row, SEGMENTS, PADDED)
    cuts = _has_cuts(floats_ptr, ints_ptr, row, vocab_size, max_rows)
    if (temperature > 0) & (tl.abs(best) < float("inf")) & ~cuts:
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        at = row.to(tl.int64) * vocab_size + token
        scores = tl.load(scores_ptr + at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        weights = _exp(_shifted(scores, best, temperature))
        ratios = tl.where(token < vocab_size, weights / _noise(ints_ptr, row, max_rows, token), -1.0)
        value, place = tl.max(ratios, axis=0, return_indices=True)
        tl.store(values_ptr + row * SEGMENTS + segment, value)
        tl.store(ids_ptr + row * SEGMENTS + segment, segment * SEGMENT + place)


@triton.jit
def _bins(shifted, BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr):
    """The bin of each score; monotone, so a whole bin lies above the next."""
    return tl.minimum(-shifted * BINS_A_UNIT, BINS - 1).to(tl.int32)


@triton.jit
def _histogram_kernel(
    scores_ptr, floats_ptr, ints_ptr, best_ptr, histograms_ptr, masses_ptr, vocab_size, max_rows,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr,
):  # fmt: skip
    """A segment's tokens by bin, and the sum of their e^shifted. What is past the vocabulary counts in the last bin."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    temperature = tl.load(floats_ptr + _TEMPERATURE * max_rows + row).to(tl.float32)
    best = _best_of_row(best_ptr, row, SEGMENTS, PADDED)
    cuts = _has_cuts(floats_ptr, ints_ptr, row, vocab_size, max_rows)
    if (temperature > 0) & (tl.abs(best) < float("inf")) & cuts:
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        at = row.to(tl.int64) * vocab_size + token
        scores = tl.load(scores_ptr + at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        shifted = _shifted(scores, best, temperature)
        counts = tl.histogram(_bins(shifted, BINS, BINS_A_UNIT), BINS)
        tl.store(histograms_ptr + (row.to(tl.int64) * SEGMENTS + segment) * BINS + tl.arange(0, BINS), counts)
        tl.store(masses_ptr + row * SEGMENTS + segment, tl.sum(_exp(shifted).to(tl.float64), axis=0))


@triton.jit
def _bound_kernel(
    floats_ptr, ints_ptr, histograms_ptr, masses_ptr, totals_ptr, bounds_ptr, offsets_ptr, vocab_size, max_rows,
    SEGMENTS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The last bin that the cuts can reach into; how many tokens there are down to it; where each segment puts its own.

    top-k: the bin of the k-th. top-p without top-k: the first bin with which the least possible mass of all bins so far
    reaches the limit. min-p alone: its own bin. The last bin means the whole row.
    """
    row = tl.program_id(0)
    bin = tl.arange(0, BINS)
    segment = tl.arange(0, PADDED)
    in_row = segment < SEGMENTS
    counts = tl.zeros((BINS,), tl.int32)
    for i in range(SEGMENTS):
        counts += tl.load(histograms_ptr + (row.to(tl.int64) * SEGMENTS + i) * BINS + bin)
    masses = tl.load(masses_ptr + row * SEGMENTS + segment, mask=in_row, other=0.0)
    total = tl.sum(masses, axis=0)
    top_k = tl.load(ints_ptr + _TOP_K * max_rows + row)
    top_p = tl.load(floats_ptr + _TOP_P * max_rows + row)
    log_min_p = tl.load(floats_ptr + _LOG_MIN_P * max_rows + row).to(tl.float32)
    last = BINS - 1
    if (top_k > 0) & (top_k < vocab_size):
        reached = tl.cumsum(counts, axis=0) >= top_k
        last = tl.min(tl.where(reached, bin, BINS - 1), axis=0)
    elif top_p < 1:
        # e^-(bin + 1) / 16, less than any mass in the bin; the rest is slack for rounding.
        least = _exp((bin + 1).to(tl.float32) / -BINS_A_UNIT) * 0.9999
        reached = tl.cumsum(counts.to(tl.float64) * least.to(tl.float64), axis=0) >= top_p * total
        last = tl.min(tl.where(reached, bin, BINS - 1), axis=0)
    else:
        last = _bins(log_min_p, BINS, BINS_A_UNIT)
    wanted = (bin <= last).to(tl.int32)
    offset = 0
    for i in range(SEGMENTS):
        tl.store(offsets_ptr + row * SEGMENTS + i, offset)
        own = tl.load(histograms_ptr + (row.to(tl.int64) * SEGMENTS + i) * BINS + bin)
        offset += tl.sum(own * wanted, axis=0)
    if (last == BINS - 1) | (offset > CANDIDATES):
        tl.store(bounds_ptr + row * 2, -1)
    else:
        tl.store(bounds_ptr + row * 2, last)
    tl.store(bounds_ptr + row * 2 + 1, offset)
    tl.store(totals_ptr + row, total)


@triton.jit
def _gather_kernel(
    scores_ptr, floats_ptr, ints_ptr, best_ptr, bounds_ptr, offsets_ptr, candidate_scores_ptr, candidate_ids_ptr,
    vocab_size, max_rows, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, PADDED: tl.constexpr,
    BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """A segment's candidates, at its own offset in the row's list: the list is in the order of the ids."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    temperature = tl.load(floats_ptr + _TEMPERATURE * max_rows + row).to(tl.float32)
    last = tl.load(bounds_ptr + row * 2)
    best = _best_of_row(best_ptr, row, SEGMENTS, PADDED)
    cuts = _has_cuts(floats_ptr, ints_ptr, row, vocab_size, max_rows)
    if (temperature > 0) & (last >= 0) & (tl.abs(best) < float("inf")) & cuts:
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        at = row.to(tl.int64) * vocab_size + token
        scores = tl.load(scores_ptr + at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        wanted = _bins(_shifted(scores, best, temperature), BINS, BINS_A_UNIT) <= last
        place = tl.load(offsets_ptr + row * SEGMENTS + segment) + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        to = row.to(tl.int64) * CANDIDATES + place
        tl.store(candidate_scores_ptr + to, scores, mask=wanted)
        tl.store(candidate_ids_ptr + to, token, mask=wanted)


# ---- over rows


@triton.jit
def _chunk_of(
    first, whole, scores_ptr, candidate_scores_ptr, candidate_ids_ptr, row, count, vocab_size, best, temperature,
    CANDIDATES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(shifted scores, their keys, token ids) of a chunk of candidates, or of the whole row.

    A key is the bits of -shifted: an integer that grows as the score falls. Past the end it is the largest integer.
    """
    place = first + tl.arange(0, CHUNK)
    kept = place < count
    if whole:
        at = row.to(tl.int64) * vocab_size + place
        scores = tl.load(scores_ptr + at, mask=kept, other=float("-inf")).to(tl.float32)
        ids = place
    else:
        at = row.to(tl.int64) * CANDIDATES + place
        scores = tl.load(candidate_scores_ptr + at, mask=kept, other=float("-inf"))
        ids = tl.load(candidate_ids_ptr + at, mask=kept, other=0)
    shifted = _shifted(scores, best, temperature)
    keys = tl.abs(shifted).to(tl.int32, bitcast=True)
    return shifted, tl.where(kept, keys, 0x7FFFFFFF), ids


@triton.jit
def _choose_kernel(
    scores_ptr, floats_ptr, ints_ptr, best_ptr, bounds_ptr, offsets_ptr, totals_ptr,
    candidate_scores_ptr, candidate_ids_ptr, chosen_ptr, vocab_size, max_rows,
    SEGMENTS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The row's token: thresholds among the candidates by bisection over keys, then the race over what passes them."""
    row = tl.program_id(0)
    temperature = tl.load(floats_ptr + _TEMPERATURE * max_rows + row).to(tl.float32)
    best = _best_of_row(best_ptr, row, SEGMENTS, PADDED)
    cuts = _has_cuts(floats_ptr, ints_ptr, row, vocab_size, max_rows)
    if (temperature > 0) & (tl.abs(best) < float("inf")) & cuts:
        top_k = tl.load(ints_ptr + _TOP_K * max_rows + row)
        top_p = tl.load(floats_ptr + _TOP_P * max_rows + row)
        log_min_p = tl.load(floats_ptr + _LOG_MIN_P * max_rows + row).to(tl.float32)
        total = tl.load(totals_ptr + row)
        whole = tl.load(bounds_ptr + row * 2) < 0
        count = tl.where(whole, vocab_size, tl.load(bounds_ptr + row * 2 + 1))

        last_key = tl.full((), 0x7F800000, tl.int32)
        if (top_k > 0) & (top_k < vocab_size):
            # The least key that at least k tokens have or stay below.
            low = tl.full((), 0, tl.int32)
            while low < last_key:
                middle = low + (last_key - low) // 2
                found = tl.full((), 0, tl.int32)
                for first in range(0, count, CHUNK):
                    shifted, keys, ids = _chunk_of(
                        first, whole, scores_ptr, candidate_scores_ptr, candidate_ids_ptr, row, count, vocab_size,
                        best, temperature, CANDIDATES, CHUNK,
                    )  # fmt: skip
                    found += tl.sum((keys <= middle).to(tl.int32), axis=0)
                if found >= top_k:
                    last_key = middle
                else:
                    low = middle + 1
            if top_p < 1:
                total = tl.full((), 0.0, tl.float64)
                for first in range(0, count, CHUNK):
                    shifted, keys, ids = _chunk_of(
                        first, whole, scores_ptr, candidate_scores_ptr, candidate_ids_ptr, row, count, vocab_size,
                        best, temperature, CANDIDATES, CHUNK,
                    )  # fmt: skip
                    total += tl.sum(tl.where(keys <= last_key, _exp(shifted), 0.0).to(tl.float64), axis=0)
        if top_p < 1:
            # The largest key with less than the limit before it; 0, the best token's, in any case.
            limit = top_p * total
            low = tl.full((), 0, tl.int32)
            while low < last_key:
                middle = low + (last_key - low + 1) // 2
                before = tl.full((), 0.0, tl.float64)
                for first in range(0, count, CHUNK):
                    shifted, keys, ids = _chunk_of(
                        first, whole, scores_ptr, candidate_scores_ptr, candidate_ids_ptr, row, count, vocab_size,
                        best, temperature, CANDIDATES, CHUNK,
                    )  # fmt: skip
                    before += tl.sum(tl.where(keys < middle, _exp(shifted), 0.0).to(tl.float64), axis=0)
                if before < limit:
                    low = middle
                else:
                    last_key = middle - 1

        winner = tl.full((), -1.0, tl.float32)
        chosen = tl.full((), 0, tl.int32)
        for first in range(0, count, CHUNK):
            shifted, keys, ids = _chunk_of(
                first, whole, scores_ptr, candidate_scores_ptr, candidate_ids_ptr, row, count, vocab_size,
                best, temperature, CANDIDATES, CHUNK,
            )  # fmt: skip
            passes = (keys <= last_key) & (shifted >= log_min_p)
            ratios = tl.where(passes, _exp(shifted) / _noise(ints_ptr, row, max_rows, ids), -1.0)
            ratio = tl.max(ratios, axis=0)
            if ratio > winner:
                winner = ratio
                # The list is in the order of the ids, so the first is the least.
                chosen = tl.min(tl.where(ratios == ratio, ids, 0x7FFFFFFF), axis=0)
        tl.store(chosen_ptr + row, chosen)


@triton.jit
def _finish_kernel(
    floats_ptr, ints_ptr, counts_ptr, best_ptr, best_ids_ptr, race_ptr, race_ids_ptr, chosen_ptr, token_ids_ptr,
    sound_ptr, vocab_size, max_rows, SEGMENTS: tl.constexpr, PADDED: tl.constexpr,
    DRAWS: tl.constexpr, CUTS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The row's token and whether it is sound; the row's output index and counts are advanced."""
    row = tl.program_id(0)
    segment = tl.arange(0, PADDED)
    in_row = segment < SEGMENTS
    best = _best_of_row(best_ptr, row, SEGMENTS, PADDED)
    sound = tl.abs(best) < float("inf")
    values = tl.load(best_ptr + row * SEGMENTS + segment, mask=in_row, other=float("-inf"))
    ids = tl.load(best_ids_ptr + row * SEGMENTS + segment, mask=in_row, other=0x7FFFFFFF)
    token = tl.min(tl.where(in_row & (values == best), ids, 0x7FFFFFFF), axis=0)
    if DRAWS:
        temperature = tl.load(floats_ptr + _TEMPERATURE * max_rows + row)
        if temperature > 0:
            cuts = False
            if CUTS:
                cuts = _has_cuts(floats_ptr, ints_ptr, row, vocab_size, max_rows)
            if cuts:
                token = tl.load(chosen_ptr + row)
            else:
                ratios = tl.load(race_ptr + row * SEGMENTS + segment, mask=in_row, other=-1.0)
                ids = tl.load(race_ids_ptr + row * SEGMENTS + segment, mask=in_row, other=0x7FFFFFFF)
                token = tl.min(tl.where(ratios == tl.max(ratios, axis=0), ids, 0x7FFFFFFF), axis=0)
    token = tl.where(sound, token, 0)
    tl.store(token_ids_ptr + row, token.to(tl.int64))
    tl.store(sound_ptr + row, sound)
    at = ints_ptr + _OUTPUT_INDEX * max_rows + row
    tl.store(at, tl.load(at) + 1)
    if PENALTIES:
        slot = tl.load(ints_ptr + _PENALTY_SLOT * max_rows + row)
        if slot >= 0:
            place = counts_ptr + slot * vocab_size + token
            tl.store(place, tl.load(place) + 2)
