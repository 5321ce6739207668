"""Products of rows with the weights of their experts: a tile is of one expert, and only experts with rows are read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.experts_route import Groups, most_tiles
from manylora_worker.models.decoder_weights import ExpertActivation
from manylora_worker.models.layers.mixture import CLAMP_ALPHA, CLAMP_LIMIT

_BLOCK_K = 128
_ALPHA, _LIMIT = tl.constexpr(CLAMP_ALPHA), tl.constexpr(CLAMP_LIMIT)
_FEW_PAIRS = 256  # up to so many, programs with fewer columns: there are more of them


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    elif ACTIVATION == "gelu_tanh":
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    return activated


@triton.jit
def activate_times(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)  # what is no number stays so
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        gated = (up + 1.0) * gate / (1.0 + tl.exp(gate * -_ALPHA))
    else:
        gated = activate(gate, ACTIVATION) * up
    return gated


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, count_ptr, stride_out, N: tl.constexpr, K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr, HALVES: tl.constexpr, BIAS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N columns of the one or two halves of an expert's weight, [HALVES * N, K]."""
    tile = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tile >= tl.load(count_ptr):
        return
    first = tl.load(tiles_ptr + tile * 4)
    pairs_there = tl.load(tiles_ptr + tile * 4 + 1)
    expert = tl.load(tiles_ptr + tile * 4 + 2).to(tl.int64)
    offsets = tl.arange(0, BLOCK_M)
    mask = offsets < pairs_there
    pairs = tl.load(order_ptr + first + offsets, mask=mask, other=0)
    x_rows = x_ptr + (pairs // PAIRS_A_ROW).to(tl.int64)[None, :] * K
    w_rows = w_ptr + (expert * (HALVES * N) + columns.to(tl.int64))[:, None] * K
    # The weight's rows stand on the matrix unit's long side: an expert's rows of x are few.
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        ks = k + tl.arange(0, BLOCK_K)
        k_mask = ks < K
        x = tl.load(x_rows + ks[:, None], mask=mask[None, :] & k_mask[:, None], other=0.0)
        w_mask = column_mask[:, None] & k_mask[None, :]
        w = tl.load(w_rows + ks[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if HALVES == 2:
            w = tl.load(w_rows + N * K + ks[None, :], mask=w_mask, other=0.0)
            second = tl.dot(w, x, second, input_precision="ieee")
    if BIAS:
        bias = bias_ptr + expert * (HALVES * N) + columns
        acc += tl.load(bias, mask=column_mask, other=0.0).to(tl.float32)[:, None]
        if HALVES == 2:
            second += tl.load(bias + N, mask=column_mask, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + pairs.to(tl.int64)[None, :] * stride_out + columns[:, None]
    out_mask = mask[None, :] & column_mask[:, None]
    if GATES:
        acc = activate_times(acc, second, ACTIVATION)
    tl.store(at, acc, mask=out_mask)
    if HALVES == 2 and not GATES:
        tl.store(at + N, second, mask=out_mask)


def tile_pairs(pairs: int, num_experts: int) -> int:
    """Of a tile at most: by how many an expert has in the mean."""
    mean = pairs / num_experts
    return 16 if mean <= 16 else 32 if mean <= 32 else 64


def grouped_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    groups: Groups,
    *,
    pairs_a_row: int,
    bias: Tensor | None = None,
    gates: ExpertActivation | None = None,
    halves: int = 1,
    pdl: bool,
) -> None:
    """out[pair] = x[pair // pairs_a_row] @ weight[its expert]^T + bias[its expert].

    Args:
        weight: [experts, halves * columns, in].
        bias: [experts, halves * columns].
        gates: with two halves: out [pairs, columns] is activation(first) * second, of which clamped_swiglu is
            both; None: out has both halves.
    """
    num_experts, rows, k = weight.shape
    n, pairs = rows // halves, out.shape[0]
    is_wide = groups.block_m > 32  # many rows an expert: the product itself is the work
    block_n, block_k, stages, warps = (128 // halves, 64, 3, 8) if is_wide else (64, _BLOCK_K, 4, 4)
    if halves == 2 and pairs <= _FEW_PAIRS:
        block_n = 32
    block_n, block_k = min(block_n, triton.next_power_of_2(n)), min(block_k, triton.next_power_of_2(k))
    grid = (triton.cdiv(n, block_n), most_tiles(pairs, num_experts, groups.block_m))
    _product_kernel[grid](
        x, weight, bias, out, groups.order, groups.tiles, groups.count, out.stride(0), N=n, K=k,
        PAIRS_A_ROW=pairs_a_row, HALVES=halves, BIAS=bias is not None, GATES=gates is not None,
        ACTIVATION=gates or "silu", BLOCK_M=groups.block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
