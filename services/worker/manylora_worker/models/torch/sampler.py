"""Drawing tokens: a pure function of (logits, history, seed, choice, output index), the device's reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from manylora_worker.kinds.api import ANY_TOKEN, NOT_FINITE, Logprobs, Sampled, Sampling, SequenceChunk

_MASK_64 = (1 << 64) - 1
_FIRST_NUCLEUS_WIDTH = 256
_NUCLEUS_GROWTH = 8
_LARGEST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1: keeps every E finite


# A row's token depends on that row alone; tokens with equal scores pass a cut together. Order: penalties, bias and
# bars, temperature, top-k, top-p, min-p, draw. Logprobs are taken before all of it.
def sample(logits: Tensor, chunks: Sequence[SequenceChunk]) -> list[Sampled]:
    """logits: [rows, vocab], not changed. A row whose largest logit is not a finite number has `error` set."""
    raw = logits.float()
    scores = _penalized(raw, chunks)
    best_scores, tokens = scores.max(dim=-1)
    drawn = [i for i, chunk in enumerate(chunks) if not chunk.sampling.is_greedy]
    if drawn:
        rows = torch.tensor(drawn, device=raw.device)
        drawn_tokens = _draw(scores[rows], best_scores[rows, None], [chunks[i] for i in drawn])
        tokens = tokens.index_copy(0, rows, drawn_tokens)
    # The model's own, before what the caller adds. max() hands a NaN on: one value a row tells whether it is sound.
    sound = torch.isfinite(best_scores if scores is raw else raw.max(dim=-1).values).tolist()
    token_ids: list[int] = tokens.tolist()
    logprobs = _logprobs(raw, tokens, chunks)
    return [
        Sampled(chunk.sequence_id, token_ids[i], logprobs.get(i))
        if sound[i]
        else Sampled(chunk.sequence_id, 0, error=NOT_FINITE)
        for i, chunk in enumerate(chunks)
    ]


def _logprobs(raw: Tensor, tokens: Tensor, chunks: Sequence[SequenceChunk]) -> dict[int, Logprobs]:
    wanted = {i: k for i, chunk in enumerate(chunks) if (k := chunk.sampling.top_logprobs) is not None}
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=raw.device)
    distribution = torch.log_softmax(raw[rows], dim=-1)
    own = distribution.gather(1, tokens[rows, None])[:, 0].tolist()
    top_values, top_ids = distribution.topk(min(max(wanted.values()), raw.shape[1]), dim=-1)
    tops = zip(top_ids.tolist(), top_values.tolist(), strict=True)
    return {
        i: Logprobs(logprob, tuple(zip(ids[:k], values[:k], strict=True)))
        for (i, k), logprob, (ids, values) in zip(wanted.items(), own, tops, strict=True)
    }


def _penalized(raw: Tensor, chunks: Sequence[SequenceChunk]) -> Tensor:
    if not any(chunk.sampling.adjusts_logits or chunk.bars or chunk.mask is not None for chunk in chunks):
        return raw
    scores = raw.clone()
    _apply_repetition_penalty(scores, chunks)
    _keep_allowed(scores, chunks)
    rows: list[int] = []
    token_ids: list[int] = []
    additions: list[float] = []
    for i, chunk in enumerate(chunks):
        sampling = chunk.sampling
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token_id, count in Counter(chunk.output_token_ids).items():
                rows.append(i)
                token_ids.append(token_id)
                additions.append(-sampling.presence_penalty - sampling.frequency_penalty * count)
        for token_id, bias in sampling.logit_bias.items():
            rows.append(i)
            token_ids.append(token_id)
            additions.append(bias)
        for token_id, before in chunk.bars:
            assert before == ANY_TOKEN, "what is pending is not known here"
            rows.append(i)
            token_ids.append(token_id)
            additions.append(float("-inf"))
    if rows:
        where = (torch.tensor(rows, device=raw.device), torch.tensor(token_ids, device=raw.device))
        scores.index_put_(where, torch.tensor(additions, device=raw.device), accumulate=True)
    _apply_masks(scores, chunks)
    return scores


def _keep_allowed(scores: Tensor, chunks: Sequence[SequenceChunk]) -> None:
    for row, chunk in zip(scores, chunks, strict=True):
        if chunk.sampling.allowed_token_ids:
            allowed = torch.tensor(chunk.sampling.allowed_token_ids, device=scores.device)
            kept = row[allowed]
            row.fill_(float("-inf"))
            row[allowed] = kept


def _apply_masks(scores: Tensor, chunks: Sequence[SequenceChunk]) -> None:
    masks = {i: chunk.mask for i, chunk in enumerate(chunks) if chunk.mask is not None}
    if masks:
        bits = np.stack([np.frombuffer(mask, np.uint8) for mask in masks.values()])
        allowed = np.unpackbits(bits, axis=1, count=scores.shape[1], bitorder="little").view(np.bool_)
        rows = torch.tensor(list(masks), device=scores.device)
        barred = torch.from_numpy(~allowed).to(scores.device)
        scores.index_copy_(0, rows, scores[rows].masked_fill_(barred, float("-inf")))


def _apply_repetition_penalty(scores: Tensor, chunks: Sequence[SequenceChunk]) -> None:
    # in place, for tokens in prompt or output
    rows: list[int] = []
    token_ids: list[int] = []
    penalties: list[float] = []
    for i, chunk in enumerate(chunks):
        penalty = chunk.sampling.repetition_penalty
        if penalty != 1.0:
            seen = {*chunk.prompt_token_ids, *chunk.output_token_ids}
            rows += [i] * len(seen)
            token_ids += seen
            penalties += [penalty] * len(seen)
    if rows:
        where = (torch.tensor(rows, device=scores.device), torch.tensor(token_ids, device=scores.device))
        penalty_of = torch.tensor(penalties, device=scores.device)
        old = scores[where]
        most = torch.finfo(scores.dtype).max  # a large logit, divided, is not to become infinite
        new = torch.where(old < 0, old * penalty_of, (old / penalty_of).clamp_(max=most))
        scores.index_put_(where, new)


def _draw(scores: Tensor, best_scores: Tensor, chunks: Sequence[SequenceChunk]) -> Tensor:
    """[rows] token ids. scores: [rows, vocab]; best_scores: [rows, 1], their maxima."""
    samplings = [chunk.sampling for chunk in chunks]
    # Shifted first: the best is 0 and nothing overflows, however small the temperature.
    shifted = (scores - best_scores).div_(_column((s.temperature for s in samplings), scores))
    thresholds = _thresholds(shifted, samplings)
    weights = shifted.exp()
    if thresholds is not None:
        weights.masked_fill_(shifted < thresholds, 0.0)
    keys = [_row_key(chunk.sampling.seed, chunk.choice, chunk.output_index) for chunk in chunks]
    # An exponential race (Gumbel-max with one logarithm less): the largest p_i / E_i wins, E_i exponential with mean 1.
    return weights.div_(_exponential_noise(keys, scores.shape[1], scores.device)).argmax(dim=-1)


def _thresholds(shifted: Tensor, samplings: Sequence[Sampling]) -> Tensor | None:
    # [rows, 1]: the smallest score that passes; None where no row has a cut
    vocab_size = shifted.shape[1]
    thresholds: Tensor | None = None
    if any(s.min_p > 0 for s in samplings):
        thresholds = _column((s.min_p for s in samplings), shifted).log_()
    if any(0 < s.top_k < vocab_size for s in samplings):
        ranks = [min(s.top_k, vocab_size) if s.top_k else 0 for s in samplings]
        likeliest = shifted.topk(max(ranks), dim=-1).values
        cut = likeliest.gather(1, torch.tensor(ranks, device=shifted.device)[:, None].sub(1).clamp_(min=0))
        cut.masked_fill_(torch.tensor([r == 0 for r in ranks], device=shifted.device)[:, None], float("-inf"))
        top_k_kept = shifted.masked_fill(shifted < cut, float("-inf"))
        thresholds = cut if thresholds is None else torch.maximum(thresholds, cut)
    else:
        top_k_kept = shifted
    if any(s.top_p < 1 for s in samplings):
        rows = [i for i, s in enumerate(samplings) if s.top_p < 1]
        index = torch.tensor(rows, device=shifted.device)
        cut = torch.full((len(samplings), 1), float("-inf"), device=shifted.device)
        cut[index] = _nucleus_thresholds(top_k_kept[index], [samplings[i].top_p for i in rows])
        thresholds = cut if thresholds is None else torch.maximum(thresholds, cut)
    return thresholds


def _nucleus_thresholds(shifted: Tensor, top_ps: Sequence[float]) -> Tensor:
    # [rows, 1]: the score of the last token of each row's nucleus: those with less than top_p before them
    # The likeliest few first, wider while some nucleus fills them: a full sort is rarely needed. Sums are in float64:
    # the width does not change the cut.
    vocab_size = shifted.shape[1]
    limits = torch.tensor(top_ps, dtype=torch.float64, device=shifted.device)[:, None]
    limits = limits * shifted.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    width = min(_FIRST_NUCLEUS_WIDTH, vocab_size)
    while True:
        likeliest = shifted.topk(width, dim=-1).values
        masses = likeliest.exp().double()
        before = masses.cumsum(dim=-1) - masses
        sizes = (before < limits).sum(dim=-1, keepdim=True)
        if width == vocab_size or bool((sizes < width).all()):
            return likeliest.gather(1, (sizes - 1).clamp_(min=0))  # a row of NaN has no nucleus
        width = min(width * _NUCLEUS_GROWTH, vocab_size)


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=like.dtype, device=like.device)[:, None]


def _row_key(seed: int, choice: int, output_index: int) -> tuple[int, int]:
    """Two 32-bit keys of one draw (splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    state = seed & _MASK_64
    for word in (choice, output_index):
        state = _splitmix64(state ^ _splitmix64(word))
    return state >> 32, state & 0xFFFFFFFF


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _exponential_noise(keys: Sequence[tuple[int, int]], vocab_size: int, device: torch.device) -> Tensor:
    """[rows, vocab], positive and finite: a hash of (row key, token id), the same bits on every device."""
    token_hash = _mix32(torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device))
    key_words = torch.tensor([[_signed32(high), _signed32(low | 1)] for high, low in keys], dtype=torch.int32)
    key_words = key_words.to(device)
    bits = _mix32((token_hash ^ key_words[:, :1]).mul_(key_words[:, 1:]))
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def _mix32(x: Tensor) -> Tensor:
    """In place: xorshift-multiply finalizer (C. Wellons, "Prospecting for hash functions", 2018)."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # `>>` copies the sign: the mask makes the shift logical
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed32(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
