"""LoRA on experts, tile by tile (see experts_route.py), where an expert has many pairs of the same adapter: prompts.

A tile's adapters take turns. Each multiplies the tile's rows of its own alone, so no adapter's numbers meet another's.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.experts_lora import ExpertRows, group_at, pair_arguments
from manylora_worker.models.cuda.kernels.experts_route import Groups, load_tile

_BLOCK_K = 128
_PROGRAMS = 4  # that share a tile's adapters
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _next_adapter(adapters, after):
    """The least of them above `after`, or _NONE."""
    return tl.min(tl.where(adapters > after, adapters, _NONE), 0)


@triton.jit
def _shrink_kernel(
    x_ptr, order_ptr, tiles_ptr, count_ptr, weights_ptr, table_ptr, row_adapters_ptr, low_rank_ptr, stride_x,
    stride_entry, stride_split, stride_pair, K: tl.constexpr, K_OF_SPLIT: tl.constexpr, TOP_K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr, SLOTS: tl.constexpr, MAX_RANK: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    turn = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tile >= tl.load(count_ptr):
        return
    expert, pairs, mask = load_tile(tiles_ptr + tile * 4, order_ptr, BLOCK_M)
    adapters = tl.load(row_adapters_ptr + pairs // TOP_K, mask=mask, other=0)
    x_rows = x_ptr + (pairs // PAIRS_A_ROW).to(tl.int64)[:, None] * stride_x
    out = low_rank_ptr + split * stride_split + pairs.to(tl.int64)[:, None] * stride_pair
    within = tl.arange(0, 16)
    adapter = _next_adapter(adapters, 0)
    while adapter < _NONE:
        entry = table_ptr + adapter.to(tl.int64) * stride_entry
        rank = tl.load(entry).to(tl.int32)
        if turn == 0 and rank > 0:
            own = (adapters == adapter)[:, None]
            at = group_at(entry, 3, tl.load(entry + 1).to(tl.int32), expert, rank * (SLOTS * K))
            a_ptr = weights_ptr + tl.multiple_of(at, 8)
            for chunk in range(0, tl.cdiv(rank, 16)):
                ranks = chunk * 16 + within
                first = tl.zeros((BLOCK_M, 16), tl.float32)
                second = tl.zeros((BLOCK_M, 16), tl.float32)
                for k in range(0, K_OF_SPLIT, BLOCK_K):
                    within_split = k + tl.arange(0, BLOCK_K)
                    ks = split * K_OF_SPLIT + within_split
                    k_mask = (within_split < K_OF_SPLIT) & (ks < K)
                    x = tl.load(x_rows + ks[None, :], mask=own & k_mask[None, :], other=0.0)
                    a_at = a_ptr + ranks[:, None] * K + ks[None, :]
                    a_mask = (ranks < rank)[:, None] & k_mask[None, :]
                    a = tl.load(a_at, mask=a_mask, other=0.0)
                    first = tl.dot(x, tl.trans(a), first, input_precision="ieee")
                    if SLOTS == 2:
                        a = tl.load(a_at + rank * K, mask=a_mask, other=0.0)
                        second = tl.dot(x, tl.trans(a), second, input_precision="ieee")
                s_mask = own & (ranks < rank)[None, :]
                tl.store(out + ranks[None, :], first, mask=s_mask)
                if SLOTS == 2:
                    tl.store(out + (MAX_RANK + ranks)[None, :], second, mask=s_mask)
        turn = tl.where(turn == 0, PROGRAMS, turn) - 1
        adapter = _next_adapter(adapters, adapter)


def shrink_tiles(x: Tensor, rows: ExpertRows, groups: Groups, *, pairs_a_row: int, pdl: bool) -> None:
    """As experts_lora.shrink."""
    splits = rows.low_rank.shape[0]
    k = x.shape[1]
    _shrink_kernel[(groups.tiles.shape[0], splits, _PROGRAMS)](
        x, groups.order, groups.tiles, groups.count, **pair_arguments(rows), stride_x=x.stride(0), K=k,
        K_OF_SPLIT=triton.cdiv(triton.cdiv(k, splits), 8) * 8, PAIRS_A_ROW=pairs_a_row, SLOTS=rows.slots,
        MAX_RANK=rows.max_rank, PROGRAMS=_PROGRAMS, BLOCK_M=groups.block_m,
        BLOCK_K=min(_BLOCK_K, triton.next_power_of_2(max(k, 16))), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _load_low_rank(at, mask, stride_split, SPLITS: tl.constexpr):
    s = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        s += tl.load(at + split * stride_split, mask=mask, other=0.0)
    return s


@triton.jit
def _add_slot(
    acc, adapters, pairs, expert, columns, column_mask, SLOT: tl.constexpr, weights_ptr, table_ptr, low_rank_ptr,
    stride_entry, stride_split, stride_pair, N: tl.constexpr, SLOTS: tl.constexpr, MAX_RANK: tl.constexpr,
    A_GROUPS: tl.constexpr, SPLITS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] (TRANSPOSED: the other way round) + s B of each pair's own adapter, of one slot."""
    within = tl.arange(0, 16)
    s_rows = low_rank_ptr + pairs.to(tl.int64) * stride_pair + SLOT * MAX_RANK
    adapter = _next_adapter(adapters, 0)
    while adapter < _NONE:
        entry = table_ptr + adapter.to(tl.int64) * stride_entry
        rank = tl.load(entry).to(tl.int32)
        own = adapters == adapter
        if rank > 0:
            per_group = tl.load(entry + 2).to(tl.int32)
            place = group_at(entry, 3 + A_GROUPS, per_group, expert, rank * (SLOTS * N))
            b_ptr = weights_ptr + tl.multiple_of(place, 8) + SLOT * rank * N
            for chunk in tl.range(0, tl.cdiv(rank, 16), num_stages=1):
                ranks = chunk * 16 + within
                is_rank = ranks < rank
                if TRANSPOSED:
                    s_mask = is_rank[:, None] & own[None, :]
                    s = _load_low_rank(s_rows[None, :] + ranks[:, None], s_mask, stride_split, SPLITS)
                    b_mask = column_mask[:, None] & is_rank[None, :]
                    b = tl.load(b_ptr + ranks[None, :] * N + columns[:, None], mask=b_mask, other=0.0)
                    part = tl.dot(b, s.to(b.dtype), input_precision="ieee")
                    acc = tl.where(own[None, :], acc + part, acc)
                else:
                    s_mask = own[:, None] & is_rank[None, :]
                    s = _load_low_rank(s_rows[:, None] + ranks[None, :], s_mask, stride_split, SPLITS)
                    b_mask = is_rank[:, None] & column_mask[None, :]
                    b = tl.load(b_ptr + ranks[:, None] * N + columns[None, :], mask=b_mask, other=0.0)
                    part = tl.dot(s.to(b.dtype), b, input_precision="ieee")
                    acc = tl.where(own[:, None], acc + part, acc)
        adapter = _next_adapter(adapters, adapter)
    return acc


@triton.jit
def add_by_tile(
    acc, second, expert, pairs, mask, columns, column_mask, weights_ptr, table_ptr, row_adapters_ptr, low_rank_ptr,
    stride_entry, stride_split, stride_pair, N: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr,
    MAX_RANK: tl.constexpr, A_GROUPS: tl.constexpr, SPLITS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile's sums of the first slot and, where there are two, the second, with LoRA."""
    adapters = tl.load(row_adapters_ptr + pairs // TOP_K, mask=mask, other=0)
    acc = _add_slot(
        acc, adapters, pairs, expert, columns, column_mask, 0, weights_ptr, table_ptr, low_rank_ptr, stride_entry,
        stride_split, stride_pair, N, SLOTS, MAX_RANK, A_GROUPS, SPLITS, TRANSPOSED,
    )  # fmt: skip
    if SLOTS == 2:
        second = _add_slot(
            second, adapters, pairs, expert, columns, column_mask, 1, weights_ptr, table_ptr, low_rank_ptr,
            stride_entry, stride_split, stride_pair, N, SLOTS, MAX_RANK, A_GROUPS, SPLITS, TRANSPOSED,
        )  # fmt: skip
    return acc, second


def tile_arguments(rows: ExpertRows | None, unused: Tensor) -> dict[str, Any]:
    """`unused` stands for tensors of no LoRA."""
    if rows is None:
        return {
            "weights_ptr": unused, "table_ptr": unused, "row_adapters_ptr": unused, "low_rank_ptr": unused,
            "stride_entry": 0, "stride_split": 0, "stride_pair": 0, "HAS_LORA": False, "TOP_K": 1, "MAX_RANK": 16,
            "A_GROUPS": 1, "SPLITS": 1,
        }  # fmt: skip
    return {
        **pair_arguments(rows), "HAS_LORA": True, "MAX_RANK": rows.max_rank, "A_GROUPS": rows.a_groups,
        "SPLITS": rows.low_rank.shape[0],
    }  # fmt: skip
