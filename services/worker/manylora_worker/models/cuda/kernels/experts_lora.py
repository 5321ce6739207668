"""LoRA on experts, pair by pair (see experts_route.py): each has its row's adapter and its own expert's matrices; and
what joins the experts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.gate import activated_times
from manylora_worker.models.decoder.weights import ExpertActivation

_K_OF_SPLIT = 1024
_FEW_PAIRS = 4096  # up to so many, a shrink's inner dimension is split

# An adapter's matrices for the experts of a layer are of one rank, so an expert's place is worked out: a *group* is so
# many experts as a block of the arena holds. An expert has A [slots * rank, in] and B [slots, rank, out].
#
#     table  int64 [adapter slots, fields], of one site: rank (0: the adapter does not change it), experts of a group of
#            A and of B, offsets of A's groups (A_GROUPS of them at most), offsets of B's
RANK_FIELD, A_EXPERTS_FIELD, B_EXPERTS_FIELD, FIRST_GROUP_FIELD = range(4)


@dataclass(frozen=True)
class ExpertRows:
    """Of a step's pairs at one site."""

    weights: Tensor  # the arena, flat
    table: Tensor
    a_groups: int
    row_adapters: Tensor  # int32 [rows]
    experts: Tensor  # int32 [pairs]
    low_rank: Tensor  # float32 [splits, pairs, slots * max rank]
    max_rank: int  # in whole chunks of 16
    num_experts: int
    top_k: int
    slots: int


def low_rank_splits(in_features: int, pairs: int) -> int:
    return triton.cdiv(in_features, _K_OF_SPLIT) if pairs <= _FEW_PAIRS else 1


@triton.jit
def group_at(entry, field, per_group, expert, size):
    return tl.load(entry + field + expert // per_group) + (expert % per_group).to(tl.int64) * size


@triton.jit
def _shrink_kernel(
    x_ptr, weights_ptr, table_ptr, row_adapters_ptr, experts_ptr, low_rank_ptr, stride_x, stride_entry, stride_split,
    stride_pair, E: tl.constexpr, TOP_K: tl.constexpr, PAIRS_A_ROW: tl.constexpr, SLOTS: tl.constexpr,
    MAX_RANK: tl.constexpr, K: tl.constexpr, K_OF_SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    split = tl.program_id(2)
    pair = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair)
    is_there = expert < E
    adapter = tl.load(row_adapters_ptr + pair // TOP_K, mask=is_there, other=0)
    entry = table_ptr + adapter.to(tl.int64) * stride_entry
    rank = tl.load(entry).to(tl.int32)
    if rank == 0 or not is_there:
        return
    per_group = tl.load(entry + 1).to(tl.int32)
    at = group_at(entry, 3, per_group, expert, rank * (SLOTS * K))
    a_ptr = weights_ptr + tl.multiple_of(at + slot * rank * K, 8)
    x_row = x_ptr + (pair // PAIRS_A_ROW).to(tl.int64) * stride_x
    within = tl.arange(0, 16)
    out = low_rank_ptr + split * stride_split + pair.to(tl.int64) * stride_pair + slot * MAX_RANK
    for chunk in range(0, tl.cdiv(rank, 16)):
        ranks = chunk * 16 + within
        s = tl.zeros((16,), tl.float32)
        for k in tl.static_range(0, K_OF_SPLIT, BLOCK_K):
            within_split = k + tl.arange(0, BLOCK_K)
            ks = split * K_OF_SPLIT + within_split
            k_mask = (within_split < K_OF_SPLIT) & (ks < K)
            x = tl.load(x_row + ks, mask=k_mask, other=0.0).to(tl.float32)
            a_mask = (ranks < rank)[:, None] & k_mask[None, :]
            a = tl.load(a_ptr + ranks[:, None] * K + ks[None, :], mask=a_mask, other=0.0)
            s += tl.sum(a.to(tl.float32) * x[None, :], 1)
        tl.store(out + ranks, s, mask=ranks < rank)


def shrink(x: Tensor, rows: ExpertRows, *, pairs_a_row: int, pdl: bool) -> None:
    """low_rank[split, pair] = x[pair // pairs_a_row] A^T of its adapter and expert; where there is none it stays."""
    splits, pairs, _ = rows.low_rank.shape
    k = x.shape[1]
    k_of_split = triton.cdiv(triton.cdiv(k, splits), 8) * 8
    block_k = min(_K_OF_SPLIT, triton.next_power_of_2(k_of_split))
    _shrink_kernel[(pairs, rows.slots, splits)](
        x, rows.weights, rows.table, rows.row_adapters, rows.experts, rows.low_rank, x.stride(0),
        rows.table.stride(0), rows.low_rank.stride(0), rows.low_rank.stride(1), E=rows.num_experts, TOP_K=rows.top_k,
        PAIRS_A_ROW=pairs_a_row, SLOTS=rows.slots, MAX_RANK=rows.max_rank, K=k, K_OF_SPLIT=k_of_split,
        BLOCK_K=block_k, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _add_low_rank(
    acc, low_rank_ptr, stride_split, b_ptr, chunk, rank, columns, column_mask, N: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N] + s[chunk] @ B[chunk, columns]."""
    ranks = chunk * 16 + tl.arange(0, 16)
    mask = ranks < rank
    s = tl.load(low_rank_ptr + ranks, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        s += tl.load(low_rank_ptr + split * stride_split + ranks, mask=mask, other=0.0)
    b = tl.load(b_ptr + ranks[:, None] * N + columns[None, :], mask=mask[:, None] & column_mask[None, :], other=0.0)
    return acc + tl.sum(s.to(b.dtype).to(tl.float32)[:, None] * b.to(tl.float32), 0)


@triton.jit
def _gate_kernel(
    gate_up_ptr, out_ptr, weights_ptr, table_ptr, row_adapters_ptr, experts_ptr, low_rank_ptr, stride_in, stride_entry,
    stride_split, stride_pair, E: tl.constexpr, TOP_K: tl.constexpr, MAX_RANK: tl.constexpr, A_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair)
    if expert >= E:
        return
    at = gate_up_ptr + pair.to(tl.int64) * stride_in + columns
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=mask, other=0.0).to(tl.float32)
    entry = table_ptr + tl.load(row_adapters_ptr + pair // TOP_K).to(tl.int64) * stride_entry
    rank = tl.load(entry).to(tl.int32)
    if rank > 0:
        per_group = tl.load(entry + 2).to(tl.int32)
        place = group_at(entry, 3 + A_GROUPS, per_group, expert, rank * (2 * N))
        b_ptr = weights_ptr + tl.multiple_of(place, 8)
        s = low_rank_ptr + pair.to(tl.int64) * stride_pair
        for chunk in range(0, tl.cdiv(rank, 16)):
            gate = _add_low_rank(gate, s, stride_split, b_ptr, chunk, rank, columns, mask, N, SPLITS)
            up = _add_low_rank(up, s + MAX_RANK, stride_split, b_ptr + rank * N, chunk, rank, columns, mask, N, SPLITS)
    tl.store(out_ptr + pair.to(tl.int64) * N + columns, activated_times(gate, up, ACTIVATION), mask=mask)


def gate(gate_up: Tensor, out: Tensor, rows: ExpertRows, *, activation: ExpertActivation, pdl: bool) -> None:
    """out [pairs, width] = activation(gate) * up of gate_up [pairs, 2 * width], with LoRA; clamped_swiglu is both."""
    pairs, width = out.shape
    block_n = min(256, triton.next_power_of_2(width))
    _gate_kernel[(pairs, triton.cdiv(width, block_n))](
        gate_up, out, **_arguments(rows), stride_in=gate_up.stride(0), N=width, BLOCK_N=block_n,
        MAX_RANK=rows.max_rank, ACTIVATION=activation, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _expand_kernel(
    out_ptr, weights_ptr, table_ptr, row_adapters_ptr, experts_ptr, low_rank_ptr, stride_out, stride_entry,
    stride_split, stride_pair, E: tl.constexpr, TOP_K: tl.constexpr, A_GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair)
    is_there = expert < E
    adapter = tl.load(row_adapters_ptr + pair // TOP_K, mask=is_there, other=0)
    entry = table_ptr + adapter.to(tl.int64) * stride_entry
    rank = tl.load(entry).to(tl.int32)
    if rank == 0 or not is_there:
        return
    per_group = tl.load(entry + 2).to(tl.int32)
    place = group_at(entry, 3 + A_GROUPS, per_group, expert, rank * N)
    b_ptr = weights_ptr + tl.multiple_of(place, 8)
    s = low_rank_ptr + pair.to(tl.int64) * stride_pair
    at = out_ptr + pair.to(tl.int64) * stride_out + columns
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for chunk in range(0, tl.cdiv(rank, 16)):
        total = _add_low_rank(total, s, stride_split, b_ptr, chunk, rank, columns, mask, N, SPLITS)
    tl.store(at, total, mask=mask)


def expand(out: Tensor, rows: ExpertRows, *, pdl: bool) -> None:
    """out [pairs, columns] += s B."""
    pairs, columns = out.shape
    block_n = min(512, triton.next_power_of_2(columns))
    _expand_kernel[(pairs, triton.cdiv(columns, block_n))](
        out, **_arguments(rows), stride_out=out.stride(0), N=columns, BLOCK_N=block_n, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


def _arguments(rows: ExpertRows) -> dict[str, Any]:
    return {
        **pair_arguments(rows), "experts_ptr": rows.experts, "E": rows.num_experts, "A_GROUPS": rows.a_groups,
        "SPLITS": rows.low_rank.shape[0],
    }  # fmt: skip


def pair_arguments(rows: ExpertRows) -> dict[str, Any]:
    """By which kernels find a pair's adapter, and its low-rank values."""
    return {
        "weights_ptr": rows.weights, "table_ptr": rows.table, "row_adapters_ptr": rows.row_adapters,
        "low_rank_ptr": rows.low_rank, "stride_entry": rows.table.stride(0), "stride_split": rows.low_rank.stride(0),
        "stride_pair": rows.low_rank.stride(1), "TOP_K": rows.top_k,
    }  # fmt: skip


@triton.jit
def _join_kernel(
    outputs_ptr, shares_ptr, out_ptr, num_rows_ptr, stride_pair, TOP_K: tl.constexpr, N: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row >= tl.load(num_rows_ptr):
        return
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        share = tl.load(shares_ptr + pair)
        total += share * tl.load(
            outputs_ptr + pair.to(tl.int64) * stride_pair + columns, mask=mask, other=0.0
        ).to(tl.float32)  # fmt: skip
    tl.store(out_ptr + row.to(tl.int64) * N + columns, total, mask=mask)


def join(outputs: Tensor, shares: Tensor, out: Tensor, *, num_rows: Tensor, top_k: int, pdl: bool) -> None:
    """out[row] = the sum of outputs [pairs, columns] of its pairs by their shares."""
    rows, columns = out.shape
    block_n = min(512, triton.next_power_of_2(columns))
    _join_kernel[(rows, triton.cdiv(columns, block_n))](
        outputs, shares, out, num_rows, outputs.stride(0), TOP_K=top_k, N=columns, BLOCK_N=block_n, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
