"""The kernels that DeviceSampler launches, in this order, and the columns of the row tables that they read."""

from __future__ import annotations

import triton
import triton.language as tl

from manylora_worker.models.cuda.kernels.sampling_maths import exp, minus_log1p_of_minus, mix32, mix64

FLOATS = (
    "temperature",
    "top_p",
    "log_min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTS = ("top_k", "key_state", "output_index", "penalty_slot", "is_masked")
_TEMPERATURE, _TOP_P, _LOG_MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_REPETITION, _PRESENCE, _FREQUENCY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_TOP_K, _KEY_STATE, _OUTPUT_INDEX, _PENALTY_SLOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_IS_MASKED = tl.constexpr(4)


# A row is cut into segments, one program each; bound, choose and finish have one a row. A row with more candidates than
# there is room for (a nearly flat distribution) is searched whole by its one program: about a millisecond for 128,256
# tokens. Equality with models/torch/sampler.py on the same float32 logits: keys, hash, (score - best) / temperature and
# the top-k cut are the same bits; the cut of top-p is, unless a sum lies within rounding of it; exp and log1p are
# within two ulps, so the race's winner differs once in some 10^6 draws.
@triton.jit
def _noise(ints_ptr, row, max_rows, token):
    state = tl.load(ints_ptr + _KEY_STATE * max_rows + row + tl.arange(0, 1)).to(tl.uint64, bitcast=True)
    index = tl.load(ints_ptr + _OUTPUT_INDEX * max_rows + row + tl.arange(0, 1)).to(tl.uint64, bitcast=True)
    key = mix64(state ^ mix64(index))
    high = (key >> 32).to(tl.uint32)
    low = (key & 0xFFFFFFFF).to(tl.uint32) | 1
    bits = mix32((mix32((token + 1).to(tl.uint32)) ^ high) * low) & 0x7FFFFFFF
    uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    return minus_log1p_of_minus(tl.minimum(uniform, 0.999999940395355224609375))


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
def adjust_kernel(
    logits_ptr, scores_ptr, floats_ptr, ints_ptr, counts_ptr, bias_ptr, raw_best_ptr, masks_ptr, vocab_size,
    max_rows, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Repetition, presence and frequency penalties, bias and mask, in this order; and a segment's largest logit before,
    which tells whether the model's own are sound."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    kept = token < vocab_size
    at = row.to(tl.int64) * vocab_size + token
    scores = tl.load(logits_ptr + at, mask=kept, other=float("-inf")).to(tl.float32)
    broken = tl.sum((scores != scores).to(tl.int32), axis=0) > 0
    raw_best = tl.max(tl.where(scores == scores, scores, float("-inf")), axis=0)
    tl.store(raw_best_ptr + row * SEGMENTS + segment, tl.where(broken, float("nan"), raw_best))
    slot = tl.load(ints_ptr + _PENALTY_SLOT * max_rows + row)
    if slot >= 0:
        counts = tl.load(counts_ptr + slot * vocab_size + token, mask=kept, other=0)
        repetition = tl.load(floats_ptr + _REPETITION * max_rows + row).to(tl.float32)
        presence = tl.load(floats_ptr + _PRESENCE * max_rows + row)
        frequency = tl.load(floats_ptr + _FREQUENCY * max_rows + row)
        # a large logit, divided, is not to become infinite
        divided = tl.minimum(tl.div_rn(scores, tl.zeros_like(scores) + repetition), 3.4028234663852886e38)
        scores = tl.where(counts > 0, tl.where(scores < 0, scores * repetition, divided), scores)
        outputs = counts >> 1
        addition = (-presence - frequency * outputs.to(tl.float64)).to(tl.float32)
        scores = tl.where(outputs > 0, scores + addition, scores)
        scores += tl.load(bias_ptr + slot * vocab_size + token, mask=kept, other=0.0)
    if tl.load(ints_ptr + _IS_MASKED * max_rows + row) > 0:
        words = tl.load(masks_ptr + row * ((vocab_size + 31) // 32) + token // 32, mask=kept, other=0)
        scores = tl.where(((words >> (token % 32)) & 1) == 1, scores, float("-inf"))
    tl.store(scores_ptr + at, scores, mask=kept)


@triton.jit
def best_kernel(scores_ptr, values_ptr, ids_ptr, vocab_size, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr):
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
def race_kernel(
    scores_ptr, floats_ptr, ints_ptr, best_ptr, values_ptr, ids_ptr, vocab_size, max_rows,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """For rows without cuts."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    temperature = tl.load(floats_ptr + _TEMPERATURE * max_rows + row).to(tl.float32)
    best = _best_of_row(best_ptr, row, SEGMENTS, PADDED)
    cuts = _has_cuts(floats_ptr, ints_ptr, row, vocab_size, max_rows)
    if (temperature > 0) & (tl.abs(best) < float("inf")) & ~cuts:
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        at = row.to(tl.int64) * vocab_size + token
        scores = tl.load(scores_ptr + at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        weights = exp(_shifted(scores, best, temperature))
        ratios = tl.where(token < vocab_size, weights / _noise(ints_ptr, row, max_rows, token), -1.0)
        value, place = tl.max(ratios, axis=0, return_indices=True)
        tl.store(values_ptr + row * SEGMENTS + segment, value)
        tl.store(ids_ptr + row * SEGMENTS + segment, segment * SEGMENT + place)


@triton.jit
def _bins(shifted, BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr):
    """Monotone, so a whole bin lies above the next."""
    return tl.minimum(-shifted * BINS_A_UNIT, BINS - 1).to(tl.int32)


@triton.jit
def histogram_kernel(
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
        tl.store(masses_ptr + row * SEGMENTS + segment, tl.sum(exp(shifted).to(tl.float64), axis=0))


@triton.jit
def bound_kernel(
    floats_ptr, ints_ptr, histograms_ptr, masses_ptr, totals_ptr, bounds_ptr, offsets_ptr, vocab_size, max_rows,
    SEGMENTS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The last bin that the cuts can reach into; the tokens down to it; where each segment puts its own."""
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
    # top-k: the bin of the k-th. top-p without top-k: the first bin with which the least possible mass of all bins so
    # far reaches the limit. min-p alone: its own bin. The last bin means the whole row.
    last = BINS - 1
    if (top_k > 0) & (top_k < vocab_size):
        reached = tl.cumsum(counts, axis=0) >= top_k
        last = tl.min(tl.where(reached, bin, BINS - 1), axis=0)
    elif top_p < 1:
        # e^-(bin + 1) / 16, less than any mass in the bin; the rest is slack for rounding.
        least = exp((bin + 1).to(tl.float32) / -BINS_A_UNIT) * 0.9999
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
def gather_kernel(
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
    """(shifted scores, their keys, token ids) of a chunk of candidates, or of the whole row. A key is the bits of
    -shifted: an integer that grows as the score falls. Past the end it is the largest integer.
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
def choose_kernel(
    scores_ptr, floats_ptr, ints_ptr, best_ptr, bounds_ptr, offsets_ptr, totals_ptr,
    candidate_scores_ptr, candidate_ids_ptr, chosen_ptr, vocab_size, max_rows,
    SEGMENTS: tl.constexpr, PADDED: tl.constexpr, BINS: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Thresholds among the candidates by bisection over keys, then the race over what passes them."""
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
                    total += tl.sum(tl.where(keys <= last_key, exp(shifted), 0.0).to(tl.float64), axis=0)
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
                    before += tl.sum(tl.where(keys < middle, exp(shifted), 0.0).to(tl.float64), axis=0)
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
            ratios = tl.where(passes, exp(shifted) / _noise(ints_ptr, row, max_rows, ids), -1.0)
            ratio = tl.max(ratios, axis=0)
            if ratio > winner:
                winner = ratio
                # The list is in the order of the ids, so the first is the least.
                chosen = tl.min(tl.where(ratios == ratio, ids, 0x7FFFFFFF), axis=0)
        tl.store(chosen_ptr + row, chosen)


@triton.jit
def finish_kernel(
    floats_ptr, ints_ptr, counts_ptr, best_ptr, best_ids_ptr, raw_best_ptr, race_ptr, race_ids_ptr, chosen_ptr,
    token_ids_ptr, sound_ptr, vocab_size, max_rows, SEGMENTS: tl.constexpr, PADDED: tl.constexpr,
    DRAWS: tl.constexpr, CUTS: tl.constexpr, ADJUSTS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    segment = tl.arange(0, PADDED)
    in_row = segment < SEGMENTS
    best = _best_of_row(best_ptr, row, SEGMENTS, PADDED)
    has_scores = tl.abs(best) < float("inf")
    sound = has_scores
    if ADJUSTS:
        sound = tl.abs(_best_of_row(raw_best_ptr, row, SEGMENTS, PADDED)) < float("inf")
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
    token = tl.where(sound & has_scores, token, 0)
    tl.store(token_ids_ptr + row, token.to(tl.int64))
    tl.store(sound_ptr + row, sound)
    at = ints_ptr + _OUTPUT_INDEX * max_rows + row
    tl.store(at, tl.load(at) + 1)
    if PENALTIES:
        slot = tl.load(ints_ptr + _PENALTY_SLOT * max_rows + row)
        if slot >= 0:
            place = counts_ptr + slot * vocab_size + token
            tl.store(place, tl.load(place) + 2)
