"""Attention over the paged cache in Triton: chunks of prompts, and rows that decode where attention_decode.py does not
run.

Sources: online softmax, FlashAttention (Dao et al., 2022); a context split over programs and merged by log-sum-exp,
Flash-Decoding (2023). The last program of a row merges its splits, so a decode is one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.decoder.weights import AttentionShape

PREFILL_TILE_FIELDS = 4


# A program reads through its sequence's block table up to its row's position.
#     tables   int32 [sequences, blocks]    physical block of every logical block
#     cache    the arena from the layer's first element on; token t of a sequence stands at
#              table[t // block_size] * stride_block + (t % block_size) * stride_token (+ stride_kv: its values)
# Codes of FP8 become q's type in registers, which is exact; their keys' scale enters with `scale`, their values' at the
# end.
@dataclass(frozen=True)
class PagedLayout:
    """Strides count elements."""

    block_size: int
    stride_block: int
    stride_token: int
    stride_kv: int
    stride_head: int


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        # tanh(z) = 1 - 2 / (exp(2 z) + 1)
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * (scores / SOFTCAP)) + 1.0))
    return scores * 1.4426950408889634


@triton.jit
def _addresses(
    cache_ptr, table_ptr, tokens, token_mask, kv_head, dims, stride_block, stride_token, stride_head,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=token_mask, other=0).to(tl.int64)
    at = blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token + kv_head * stride_head
    return cache_ptr + at[:, None] + dims[None, :]


@triton.jit
def _attend_tile(q, k, v, token_mask, largest, total, acc, scale, SOFTCAP: tl.constexpr):
    """One tile into the running softmax. Rows that have seen nothing yet stay at -inf, not NaN."""
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    scores = tl.where(token_mask[None, :], _scores(q, k, scale, SOFTCAP), float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(largest - base)
    total = total * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_largest, total, acc


@triton.jit
def _decode_kernel(
    q_ptr, cache_ptr, tables_ptr, table_rows_ptr, positions_ptr, num_rows_ptr, out_ptr, partial_ptr, stats_ptr,
    counters_ptr, sinks_ptr, scale, value_scale, stride_table, stride_block, stride_token, stride_kv, stride_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    is_there = row < tl.load(num_rows_ptr)
    old = tl.where(is_there, tl.load(positions_ptr + row), 0)  # positions before the row's own
    table_ptr = tables_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * stride_table
    first = 0
    if WINDOW > 0:
        first = tl.maximum(old + 1 - WINDOW, 0)
    first_tile = first // BLOCK_N
    num_tiles = tl.maximum(tl.cdiv(old, BLOCK_N) - first_tile, 1)
    share = tl.cdiv(num_tiles, SPLITS)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, first_tile + num_tiles)
    splits = tl.cdiv(num_tiles, share)
    has_work = is_there & (split < splits)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM
    if EARLY:
        # Keys and values of earlier steps do not depend on the kernel before: the first tile is under way when it ends.
        tokens = begin * BLOCK_N + tl.arange(0, BLOCK_N)
        token_mask = (tokens >= first) & (tokens < old) & has_work
        k_at = _addresses(
            cache_ptr, table_ptr, tokens, token_mask, kv_head, dims, stride_block, stride_token, stride_head, BLOCK_SIZE
        )
        k = tl.load(k_at, mask=token_mask[:, None] & dim_mask[None, :], other=0.0)
        v = tl.load(k_at + stride_kv, mask=token_mask[:, None] & dim_mask[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if not has_work:
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    groups = tl.arange(0, BLOCK_G)
    group_mask = groups < GROUP
    heads = kv_head * GROUP + groups
    both = group_mask[:, None] & dim_mask[None, :]
    at = (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=both, other=0.0)
    largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    if split == 0:  # the row's own token, which the kernel before has just written
        block = tl.load(table_ptr + old // BLOCK_SIZE).to(tl.int64)
        own = cache_ptr + block * stride_block + (old % BLOCK_SIZE) * stride_token + kv_head * stride_head + dims
        own_k = tl.load(own, mask=dim_mask, other=0.0).to(tl.float32)
        own_v = tl.load(own + stride_kv, mask=dim_mask, other=0.0).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * own_k[None, :], 1) * scale
        if SOFTCAP > 0:
            score = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * (score / SOFTCAP)) + 1.0))
        largest = score * 1.4426950408889634
        total += 1.0
        acc += own_v[None, :]
        if SINKS:
            sink = tl.load(sinks_ptr + heads, mask=group_mask, other=0.0) * 1.4426950408889634
            base = tl.maximum(largest, sink)
            weight = tl.exp2(largest - base)
            total = weight + tl.exp2(sink - base)
            acc *= weight[:, None]
            largest = base
    next_tile = begin
    if EARLY:
        largest, total, acc = _attend_tile(q, k, v, token_mask, largest, total, acc, scale, SOFTCAP)
        next_tile = begin + 1
    for tile in range(next_tile, end):
        tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        token_mask = (tokens >= first) & (tokens < old)
        k_at = _addresses(
            cache_ptr, table_ptr, tokens, token_mask, kv_head, dims, stride_block, stride_token, stride_head, BLOCK_SIZE
        )
        mask = token_mask[:, None] & dim_mask[None, :]
        k = tl.load(k_at, mask=mask, other=0.0)
        v = tl.load(k_at + stride_kv, mask=mask, other=0.0)
        largest, total, acc = _attend_tile(q, k, v, token_mask, largest, total, acc, scale, SOFTCAP)
    if SPLITS == 1:
        tl.store(out_ptr + at, acc * value_scale / total[:, None], mask=both)
    else:
        # [row, head, split]: sums and weighted values of this split, relative to its own largest score
        slot = (row * NUM_HEADS + heads) * SPLITS + split
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + dims[None, :], acc, mask=both)
        tl.store(stats_ptr + slot * 2, largest, mask=group_mask)
        tl.store(stats_ptr + slot * 2 + 1, total, mask=group_mask)
        tl.debug_barrier()
        counter = counters_ptr + row * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
            merged = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
            mass = tl.zeros((BLOCK_G,), tl.float32)
            for other in range(0, splits):
                slot = (row * NUM_HEADS + heads) * SPLITS + other
                # volatile: written by other programs of this launch, so not from the L1
                its_largest = tl.load(stats_ptr + slot * 2, mask=group_mask, other=0.0, volatile=True)
                its_total = tl.load(stats_ptr + slot * 2 + 1, mask=group_mask, other=1.0, volatile=True)
                its_acc = tl.load(
                    partial_ptr + slot[:, None] * HEAD_DIM + dims[None, :], mask=both, other=0.0, volatile=True
                )
                new_best = tl.maximum(best, its_largest)
                mine = tl.exp2(best - new_best)
                its = tl.exp2(its_largest - new_best)
                merged = merged * mine[:, None] + its_acc * its[:, None]
                mass = mass * mine + its_total * its
                best = new_best
            tl.store(out_ptr + at, merged * value_scale / mass[:, None], mask=both)
            tl.store(counter, 0)


class DecodeScratch:
    """What split decodes leave for their merge. The counters are zero between launches."""

    def __init__(self, max_rows: int, shape: AttentionShape, max_splits: int, device: torch.device) -> None:
        heads = shape.num_heads
        self.partial = torch.empty(max_rows * heads * max_splits * shape.head_dim, device=device)
        self.stats = torch.empty(max_rows * heads * max_splits * 2, device=device)
        self.counters = torch.zeros(max_rows * shape.num_kv_heads, dtype=torch.int32, device=device)


def attend_decode(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    *,
    tables: Tensor,
    table_rows: Tensor,
    positions: Tensor,
    num_rows: Tensor,
    shape: AttentionShape,
    layout: PagedLayout,
    scratch: DecodeScratch,
    splits: int,
    pdl: bool,
    sinks: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """One new token a row; its keys and values are in the cache already.

    Args:
        q, out: [rows, heads * head_dim].
        table_rows: int32 [rows]: the row's sequence in `tables`.
        positions: int32 [rows]: of the row's token.
        num_rows: int32 scalar; rows behind it are left alone.
        splits: programs that share one row's context, where it is long enough.
        sinks: float32 [heads], where the shape has them.
        scales: powers of two, of a cache in FP8: its codes times these are keys, and values.
    """
    rows = table_rows.shape[0]
    group = shape.num_heads // shape.num_kv_heads
    block_d = triton.next_power_of_2(shape.head_dim)
    # Many programs hide each other's waits, and small tiles leave room for more of them; few must each begin early.
    is_many = rows * shape.num_kv_heads >= 1024
    block_n = 32 if is_many or block_d > 128 else 64
    num_warps = 1 if is_many else 4
    if block_d > 256:  # one warp, or so many tokens of a tile, would have to leave registers
        block_n, num_warps = 16 if is_many else 32, 4
    _decode_kernel[(rows, shape.num_kv_heads, splits)](
        q, cache, tables, table_rows, positions, num_rows, out, scratch.partial, scratch.stats, scratch.counters,
        sinks, shape.scale * scales[0], scales[1], tables.stride(0), layout.stride_block, layout.stride_token,
        layout.stride_kv, layout.stride_head, NUM_HEADS=shape.num_heads, NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim, BLOCK_D=block_d, BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_N=block_n,
        BLOCK_SIZE=layout.block_size, WINDOW=shape.window or 0, SOFTCAP=shape.softcap or 0.0, SINKS=shape.has_sinks,
        SPLITS=splits, EARLY=not is_many, PDL=pdl, num_warps=num_warps, num_stages=2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _prefill_kernel(
    q_ptr, cache_ptr, tables_ptr, tiles_ptr, out_ptr, sinks_ptr, scale, value_scale, stride_table, stride_block,
    stride_token, stride_kv, stride_head, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows, one of a tile's SHARES."""
    head = tl.program_id(0)
    tile = tl.program_id(1) // SHARES
    before = tl.program_id(1) % SHARES * BLOCK_M
    first_row = tl.load(tiles_ptr + tile * 4) + before
    count = tl.minimum(tl.load(tiles_ptr + tile * 4 + 1) - before, BLOCK_M)
    start = tl.load(tiles_ptr + tile * 4 + 2) + before
    if count <= 0:
        return
    table_ptr = tables_ptr + tl.load(tiles_ptr + tile * 4 + 3).to(tl.int64) * stride_table
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    offsets = tl.arange(0, BLOCK_M)
    rows = first_row + offsets
    positions = start + offsets
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM
    both = (offsets < count)[:, None] & dim_mask[None, :]
    at = rows[:, None].to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=both, other=0.0)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if SINKS:
        largest = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head) * 1.4426950408889634
        total += 1.0
    context = start + count
    first = 0
    if WINDOW > 0:
        first = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole_end = first  # every tile is masked
    else:
        whole_end = (start + 1) // BLOCK_N * BLOCK_N
    for n in range(first, whole_end, BLOCK_N):
        tokens = n + tl.arange(0, BLOCK_N)
        k_at = _addresses(
            cache_ptr, table_ptr, tokens, tokens < context, kv_head, dims, stride_block, stride_token, stride_head,
            BLOCK_SIZE,
        )  # fmt: skip
        if BLOCK_D == HEAD_DIM:
            k = tl.load(k_at)
            v = tl.load(k_at + stride_kv)
        else:
            k = tl.load(k_at, mask=dim_mask[None, :], other=0.0)
            v = tl.load(k_at + stride_kv, mask=dim_mask[None, :], other=0.0)
        scores = _scores(q, k.to(q.dtype), scale, SOFTCAP)
        v = v.to(q.dtype)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        largest = new_largest
    for n in range(whole_end, context, BLOCK_N):
        tokens = n + tl.arange(0, BLOCK_N)
        token_mask = tokens < context
        k_at = _addresses(
            cache_ptr, table_ptr, tokens, token_mask, kv_head, dims, stride_block, stride_token, stride_head, BLOCK_SIZE
        )
        mask = token_mask[:, None] & dim_mask[None, :]
        k = tl.load(k_at, mask=mask, other=0.0)
        v = tl.load(k_at + stride_kv, mask=mask, other=0.0)
        visible = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, _scores(q, k.to(q.dtype), scale, SOFTCAP), float("-inf"))
        v = v.to(q.dtype)
        # A row may see nothing of a tile, so that its largest is still -inf: it must not become NaN.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(largest - base)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        largest = new_largest
    # Rows behind the tile's last may have seen nothing; they are not stored.
    tl.store(out_ptr + at, acc * value_scale / tl.where(total == 0, 1.0, total)[:, None], mask=both)


def prefill_block_m(shape: AttentionShape) -> int:
    """Rows of a prompt that one program attends. Wider heads leave a program fewer registers a row."""
    return 128 if shape.head_dim <= 128 else 64 if shape.head_dim <= 256 else 32


def attend_prefill(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    *,
    tables: Tensor,
    tiles: Tensor,
    num_tiles: int,
    tile_rows: int,
    shape: AttentionShape,
    layout: PagedLayout,
    sinks: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Chunks of prompts, causal; their keys and values are in the cache already.

    Args:
        q, out: [rows, heads * head_dim].
        tiles: int32 [>= num_tiles, PREFILL_TILE_FIELDS]: first row, rows (at most `tile_rows`; 0: unused), the first
            row's position, its sequence in `tables`.
        sinks, scales: as `attend_decode`'s.
    """
    block_d = triton.next_power_of_2(shape.head_dim)
    wide = q.dtype.itemsize == 4
    block_m = min(tile_rows, prefill_block_m(shape))
    shares = triton.cdiv(tile_rows, block_m)
    _prefill_kernel[(shape.num_heads, num_tiles * shares)](
        q, cache, tables, tiles, out, sinks, shape.scale * scales[0], scales[1], tables.stride(0), layout.stride_block,
        layout.stride_token, layout.stride_kv, layout.stride_head, NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, BLOCK_D=block_d, BLOCK_M=block_m,
        BLOCK_N=32 if wide or block_d > 256 else 64, BLOCK_SIZE=layout.block_size, WINDOW=shape.window or 0,
        SOFTCAP=shape.softcap or 0.0, SINKS=shape.has_sinks, SHARES=shares,
        num_warps=8 if block_m == 128 or block_d > 256 else 4,
        num_stages=1 if wide else 2,
    )  # fmt: skip
