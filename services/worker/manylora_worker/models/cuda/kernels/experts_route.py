"""Where each row of a mixture of experts goes, and the rows of each expert: two kernels, nothing of it on the host.

A *pair* is a row and one of its experts: pair p is of row p // top_k. Products run over pairs in order of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.gemm import load_product
from manylora_worker.models.cuda.kernels.lora import LoraRows, expand, expand_arguments
from manylora_worker.models.layers.mixture import LEAST_SUM, Routing

TILE_FIELDS = 4
_PAIRS_AT_ONCE = 1024
_LEAST_SUM = tl.constexpr(LEAST_SUM)
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Groups:
    """Of pairs by expert. order: int32 [pairs]. tiles: int32 [tiles, TILE_FIELDS]: first place in `order`, pairs,
    expert. count: int32 [1], of tiles.
    """

    order: Tensor
    tiles: Tensor
    count: Tensor
    block_m: int  # pairs of a tile at most

    @property
    def is_wide(self) -> bool:
        """Many pairs an expert: the product itself is the work, not to read the weights."""
        return self.block_m > 32


@triton.jit
def load_tile(tile_ptr, order_ptr, BLOCK_M: tl.constexpr):
    """Its expert, and its pairs with the mask of those that are there, [BLOCK_M]."""
    first = tl.load(tile_ptr)
    offsets = tl.arange(0, BLOCK_M)
    mask = offsets < tl.load(tile_ptr + 1)
    pairs = tl.load(order_ptr + first + offsets, mask=mask, other=0)
    return tl.load(tile_ptr + 2).to(tl.int64), pairs, mask


@triton.jit
def _route_kernel(
    product_ptr, experts_ptr, shares_ptr, order_ptr, tiles_ptr, count_ptr, num_rows_ptr, row_adapters_ptr,
    low_rank_ptr, weights_ptr, sites_ptr, bias_ptr, scales_ptr,
    stride_part, stride_low_rank, stride_split, stride_site, E: tl.constexpr, BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, NORMALIZES: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
    HAS_LORA: tl.constexpr, CHUNKS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, IS_ALONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_E)
    mask = columns < E
    ks = tl.arange(0, BLOCK_K)
    out = row * TOP_K + ks
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row >= tl.load(num_rows_ptr):
        tl.store(experts_ptr + out, tl.full((BLOCK_K,), E, tl.int32), mask=ks < TOP_K)
        if IS_ALONE:
            tl.store(count_ptr, 0)
        return
    logits = load_product(product_ptr + row.to(tl.int64) * E + columns, stride_part, mask, PARTS)
    if HAS_LORA:
        site = sites_ptr + tl.load(row_adapters_ptr + row).to(tl.int64) * stride_site
        rows = row + tl.arange(0, 1)
        both = expand(
            logits[None, :], low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, 0, rows, rows >= 0,
            columns, mask, E, 1, CHUNKS, SPLIT_K, BLOCK_S, COLUMNS,
        )  # fmt: skip
        logits = tl.sum(both, 0)
    # Rounded as transformers rounds them: which of two near experts a row goes to hangs on it.
    logits = tl.where(mask, logits.to(DTYPE).to(tl.float32), float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = scores
    if BIASED:
        ranked += tl.load(bias_ptr + columns, mask=mask, other=0.0)
    ranked = tl.where(mask, ranked, float("-inf"))
    experts = tl.zeros((BLOCK_K,), tl.int32)
    shares = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        at = tl.minimum(tl.argmax(ranked, 0), E - 1)  # of scores that are no numbers, too
        experts = tl.where(ks == k, at, experts)
        shares = tl.where(ks == k, tl.sum(tl.where(columns == at, scores, 0.0), 0), shares)
        ranked = tl.where(columns == at, float("-inf"), ranked)
    if NORMALIZES:
        shares = shares / (tl.sum(shares, 0) + _LEAST_SUM)
    if SCALED:
        shares *= tl.load(scales_ptr + experts)
    tl.store(experts_ptr + out, experts, mask=ks < TOP_K)
    tl.store(shares_ptr + out, shares, mask=ks < TOP_K)
    if IS_ALONE:  # each pair is a tile
        tl.store(count_ptr, TOP_K)
        tl.store(order_ptr + ks, ks, mask=ks < TOP_K)
        tl.store(tiles_ptr + ks * 4, ks, mask=ks < TOP_K)
        tl.store(tiles_ptr + ks * 4 + 1, tl.full((BLOCK_K,), 1, tl.int32), mask=ks < TOP_K)
        tl.store(tiles_ptr + ks * 4 + 2, experts, mask=ks < TOP_K)


def route(
    product: Tensor,
    experts: Tensor,
    shares: Tensor,
    groups: Groups,
    routing: Routing,
    *,
    num_experts: int,
    num_rows: Tensor,
    lora: LoraRows | None,
    dtype: torch.dtype,
    pdl: bool,
) -> None:
    """Args:
    product: [parts, rows, experts], the router's, from gemm.linear.
    experts: int32 [rows * top_k], written; `num_experts` where there is no row.
    shares: float32 [rows * top_k], written.
    groups: written where there is one row; else by `group`.
    lora: of the router.
    dtype: that logits are rounded to.
    """
    rows, top_k = product.shape[1], routing.top_k
    _route_kernel[(rows,)](
        product, experts, shares, groups.order, groups.tiles, groups.count, num_rows,
        **expand_arguments(lora, num_rows), bias_ptr=routing.choice_bias, scales_ptr=routing.scales,
        stride_part=product.stride(0),
        E=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k),
        NORMALIZES=routing.normalizes, PARTS=product.shape[0], DTYPE=_TRITON_DTYPES[dtype],
        SIGMOID=routing.is_sigmoid, BIASED=routing.choice_bias is not None, SCALED=routing.scales is not None,
        IS_ALONE=rows == 1, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def most_tiles(pairs: int, num_experts: int, block_m: int) -> int:
    return min(pairs, num_experts) + pairs // block_m


@triton.jit
def _group_kernel(
    experts_ptr, order_ptr, tiles_ptr, count_ptr, num_pairs, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert's pairs, in their order. Every program counts all: it needs no word of another."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)  # one more than experts at least, for pairs that are not there
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        pairs = start + tl.arange(0, BLOCK_P)
        chosen = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=E)
        counts += tl.histogram(chosen, BLOCK_E)
    before = bins < expert
    first = tl.sum(tl.where(before, counts, 0), 0)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    tile = tl.sum(tl.where(before, (counts + BLOCK_M - 1) // BLOCK_M, 0), 0)
    num_tiles = (own + BLOCK_M - 1) // BLOCK_M
    if expert == E - 1:
        tl.store(count_ptr, tile + num_tiles)
    for i in range(0, num_tiles):
        at = tiles_ptr + (tile + i) * 4
        tl.store(at, first + i * BLOCK_M)
        tl.store(at + 1, tl.minimum(own - i * BLOCK_M, BLOCK_M))
        tl.store(at + 2, expert)
    if own > 0:
        for start in range(0, num_pairs, BLOCK_P):
            pairs = start + tl.arange(0, BLOCK_P)
            chosen = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=E)
            is_own = chosen == expert
            place = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(order_ptr + place, pairs, mask=is_own)
            first += tl.sum(is_own.to(tl.int32), 0)


def group(experts: Tensor, groups: Groups, *, num_experts: int, pdl: bool) -> None:
    """experts: int32 [pairs], from `route`. groups: written."""
    pairs = experts.shape[0]
    _group_kernel[(num_experts,)](
        experts, groups.order, groups.tiles, groups.count, pairs, E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        BLOCK_P=min(_PAIRS_AT_ONCE, triton.next_power_of_2(max(pairs, 16))), BLOCK_M=groups.block_m, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
