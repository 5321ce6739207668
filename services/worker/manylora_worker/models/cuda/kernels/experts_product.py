"""Products of rows with the weights of their experts: a tile is of one expert, and only experts with rows are read."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.experts_lora import ExpertRows
from manylora_worker.models.cuda.kernels.experts_lora_tiles import add_by_tile, tile_arguments
from manylora_worker.models.cuda.kernels.experts_route import Groups, load_tile, most_tiles
from manylora_worker.models.cuda.kernels.gate import activated_times
from manylora_worker.models.cuda.kernels.nf4 import int32_tensor
from manylora_worker.models.cuda.kernels.nf4_format import CODEBOOK
from manylora_worker.models.cuda.kernels.nf4_lookup import (
    PAIR_BITS,
    byte_values,
    bytes_asm,
    integers_from_128,
    register_words,
)
from manylora_worker.models.decoder.weights import ExpertActivation
from manylora_worker.models.quantized.int4 import MIDDLE
from manylora_worker.models.quantized.stacks import QuantizedStack

_BLOCK_K = 128
_NF4_ASM = tl.constexpr(bytes_asm(PAIR_BITS))
_OF_MIDDLE = tl.constexpr(128.0 + MIDDLE)  # of integers_from_128
_FEW_PAIRS = 256  # up to so many, programs with fewer columns: there are more of them


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, count_ptr, weights_ptr, table_ptr, row_adapters_ptr,
    low_rank_ptr, stride_out, stride_entry, stride_split, stride_pair, N: tl.constexpr, K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr, HALVES: tl.constexpr, BIAS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_LORA: tl.constexpr, TOP_K: tl.constexpr, MAX_RANK: tl.constexpr, A_GROUPS: tl.constexpr, SPLITS: tl.constexpr,
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
    expert, pairs, mask = load_tile(tiles_ptr + tile * 4, order_ptr, BLOCK_M)
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
    if HAS_LORA:
        acc, second = add_by_tile(
            acc, second, expert, pairs, mask, columns, column_mask, weights_ptr, table_ptr, row_adapters_ptr,
            low_rank_ptr, stride_entry, stride_split, stride_pair, N, HALVES, TOP_K, MAX_RANK, A_GROUPS, SPLITS, True,
        )  # fmt: skip
    at = out_ptr + pairs.to(tl.int64)[None, :] * stride_out + columns[:, None]
    out_mask = mask[None, :] & column_mask[:, None]
    if GATES:
        acc = activated_times(acc, second, ACTIVATION)
    tl.store(at, acc, mask=out_mask)
    if HALVES == 2 and not GATES:
        tl.store(at + N, second, mask=out_mask)


@triton.jit
def _add_bytes(acc, x, w_at, scales_at, w_mask, column_mask, GROUPED: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] + x times a block of a weight in e4m3, whose inputs have one scale."""
    w = tl.load(w_at, mask=w_mask, other=0.0).to(x.dtype)
    if GROUPED:
        part = tl.dot(x, w, input_precision="ieee")
        acc += part * tl.load(scales_at, mask=column_mask, other=0.0)[None, :]
    else:
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _add_nibbles(
    acc, even, odd, w_at, scales_at, shifts_at, table_ptr, lookup, w_mask, scale_mask, NF4: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] + x times a block of a weight in 4 bits, of which even and odd inputs share bytes.
    scales_at: [groups, BLOCK_N].
    """
    codes, scales = tl.load(w_at, mask=w_mask, other=0), tl.load(scales_at, mask=scale_mask, other=0.0)
    if NF4:
        high, low = byte_values(codes, table_ptr, lookup, _NF4_ASM, even.dtype)
    else:
        high, low = integers_from_128(codes, even.dtype)
        if SHIFTED:  # by a whole number of scales, as formats have zero points: such sums are exact in x's type too
            shifts = tl.load(shifts_at, mask=scale_mask, other=0.0)
            zeros = shifts / tl.where(scales == 0.0, 1.0, scales) - _OF_MIDDLE
            zeros = _of_inputs(zeros.to(even.dtype), high.shape)
            high += zeros
            low += zeros
        else:
            high -= _OF_MIDDLE
            low -= _OF_MIDDLE
    own = scales.to(even.dtype)
    rounded = _of_inputs(own, high.shape)
    if even.shape[0] < 64:
        high *= rounded
        low *= rounded
    else:  # the product takes longer than the codes do: what a scale loses in x's type is made up for
        rest = _of_inputs((scales - own.to(tl.float32)).to(even.dtype), high.shape)
        high = high * rounded + high * rest
        low = low * rounded + low * rest
    return tl.dot(odd, low, tl.dot(even, high, acc, input_precision="ieee"), input_precision="ieee")


@triton.jit
def _of_inputs(scales, shape: tl.constexpr):
    """[groups, columns] to [inputs, columns]"""
    GROUPS: tl.constexpr = scales.shape[0]
    wide = tl.broadcast_to(scales[:, None, :], (GROUPS, shape[0] // GROUPS, shape[1]))
    return tl.reshape(wide, shape)


@triton.jit
def _load_pairs(x_rows, k, mask, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Even and odd inputs, [BLOCK_M, BLOCK_K / 2]."""
    if x_rows.shape[0] < 64:
        ks = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + ks[None, :], mask=mask[:, None] & (ks < K)[None, :], other=0.0)
        even, odd = tl.split(tl.reshape(x, (x_rows.shape[0], BLOCK_K // 2, 2)))
    else:  # two halves of a block would be in registers, and that is what ptxas miscompiles
        ks = k + 2 * tl.arange(0, BLOCK_K // 2)
        x_mask = mask[:, None] & (ks < K)[None, :]
        even = tl.load(x_rows + ks[None, :], mask=x_mask, other=0.0)
        odd = tl.load(x_rows + ks[None, :] + 1, mask=x_mask, other=0.0)
    return even, odd


@triton.jit
def _codes_kernel(
    x_ptr, w_ptr, scales_ptr, shifts_ptr, codebook_ptr, lookup_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, count_ptr,
    weights_ptr, table_ptr, row_adapters_ptr, low_rank_ptr, stride_out, stride_entry, stride_split, stride_pair,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    FOUR_BITS: tl.constexpr, NF4: tl.constexpr, SHIFTED: tl.constexpr, PAIRS_A_ROW: tl.constexpr, HALVES: tl.constexpr,
    BIAS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LORA: tl.constexpr, TOP_K: tl.constexpr,
    MAX_RANK: tl.constexpr, A_GROUPS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As _product_kernel, of a weight in codes: they become x's type in registers, e4m3 exactly."""
    # Here x is the matrix unit's first operand. The ptxas of Triton 3.6 miscompiles Hopper's wgmma where its first
    # operand lies in registers in a pipelined loop, as converted codes do; its second one never does. Tiles of fewer
    # than 64 pairs, as decoding has them, are too small for wgmma: mma.sync, which they take, is compiled rightly.
    GROUPED: tl.constexpr = GROUPS > 1 and not FOUR_BITS
    tile = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tile >= tl.load(count_ptr):
        return
    expert, pairs, mask = load_tile(tiles_ptr + tile * 4, order_ptr, BLOCK_M)
    x_rows = x_ptr + (pairs // PAIRS_A_ROW).to(tl.int64)[:, None] * K
    w_rows = expert * (HALVES * N) + columns.to(tl.int64)
    lookup = (0, 0, 0, 0)
    if NF4:
        lookup = (tl.load(lookup_ptr), tl.load(lookup_ptr + 1), tl.load(lookup_ptr + 2), tl.load(lookup_ptr + 3))
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if FOUR_BITS:
            bytes_ = k // 2 + tl.arange(0, BLOCK_K // 2)
            even, odd = _load_pairs(x_rows, k, mask, K, BLOCK_K)
            w_at = w_ptr + w_rows[None, :] * (K // 2) + bytes_[:, None]
            w_mask = (bytes_ < K // 2)[:, None] & column_mask[None, :]
            group = k // GROUP_SIZE + tl.arange(0, max(1, BLOCK_K // GROUP_SIZE))
            groups = w_rows[None, :] * GROUPS + group[:, None]
            scale_mask = (group < GROUPS)[:, None] & column_mask[None, :]
            acc = _add_nibbles(
                acc, even, odd, w_at, scales_ptr + groups, shifts_ptr + groups, codebook_ptr, lookup, w_mask,
                scale_mask, NF4, SHIFTED,
            )  # fmt: skip
            if HALVES == 2:
                second = _add_nibbles(
                    second, even, odd, w_at + N * (K // 2), scales_ptr + groups + N * GROUPS,
                    shifts_ptr + groups + N * GROUPS, codebook_ptr, lookup, w_mask, scale_mask, NF4, SHIFTED,
                )  # fmt: skip
        else:
            ks = k + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + ks[None, :], mask=mask[:, None] & (ks < K)[None, :], other=0.0)
            w_at = w_ptr + w_rows[None, :] * K + ks[:, None]
            w_mask = (ks < K)[:, None] & column_mask[None, :]
            group = w_rows * GROUPS + k // GROUP_SIZE
            acc = _add_bytes(acc, x, w_at, scales_ptr + group, w_mask, column_mask, GROUPED)
            if HALVES == 2:
                second = _add_bytes(
                    second, x, w_at + N * K, scales_ptr + group + N * GROUPS, w_mask, column_mask, GROUPED
                )
    if not GROUPED and not FOUR_BITS:
        acc *= tl.load(scales_ptr + w_rows, mask=column_mask, other=0.0)[None, :]
        if HALVES == 2:
            second *= tl.load(scales_ptr + w_rows + N, mask=column_mask, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + w_rows, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if HALVES == 2:
            second += tl.load(bias_ptr + w_rows + N, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if HAS_LORA:
        acc, second = add_by_tile(
            acc, second, expert, pairs, mask, columns, column_mask, weights_ptr, table_ptr, row_adapters_ptr,
            low_rank_ptr, stride_entry, stride_split, stride_pair, N, HALVES, TOP_K, MAX_RANK, A_GROUPS, SPLITS, False,
        )  # fmt: skip
    at = out_ptr + pairs.to(tl.int64)[:, None] * stride_out + columns[None, :]
    out_mask = mask[:, None] & column_mask[None, :]
    if GATES:
        acc = activated_times(acc, second, ACTIVATION)
    tl.store(at, acc, mask=out_mask)
    if HALVES == 2 and not GATES:
        tl.store(at + N, second, mask=out_mask)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For byte_values."""
    return torch.tensor(CODEBOOK, device=device), int32_tensor(register_words(PAIR_BITS), device)


def tile_pairs(pairs: int, num_experts: int) -> int:
    """Of a tile at most: by how many an expert has in the mean."""
    mean = pairs / num_experts
    return 16 if mean <= 16 else 32 if mean <= 32 else 64


def grouped_product(
    x: Tensor,
    weight: Tensor | QuantizedStack,
    out: Tensor,
    groups: Groups,
    *,
    pairs_a_row: int,
    bias: Tensor | None = None,
    gates: ExpertActivation | None = None,
    halves: int = 1,
    lora: ExpertRows | None = None,
    pdl: bool,
) -> None:
    """out[pair] = x[pair // pairs_a_row] @ weight[its expert]^T + bias[its expert].

    Args:
        weight: [experts, halves * columns, in].
        bias: [experts, halves * columns].
        gates: with two halves: out [pairs, columns] is activation(first) * second, of which clamped_swiglu is
            both; None: out has both halves.
        lora: of the product, shrunk; None: there is none, or it is added later.
    """
    num_experts, rows, k = weight.shape
    n, pairs = rows // halves, out.shape[0]
    is_wide = groups.is_wide
    in_bytes = isinstance(weight, QuantizedStack) and weight.is_fp8
    block_n, block_k, stages, warps = (128 // halves, 64, 3, 8) if is_wide else (64, _BLOCK_K, 5 if in_bytes else 3, 4)
    if halves == 2 and pairs <= _FEW_PAIRS:
        block_n = 32
    block_n, block_k = min(block_n, triton.next_power_of_2(n)), min(block_k, triton.next_power_of_2(k))
    grid = (triton.cdiv(n, block_n), most_tiles(pairs, num_experts, groups.block_m))
    if isinstance(weight, QuantizedStack):
        num_groups, size = weight.scales.shape[2], weight.group_size
        if num_groups > 1 and (weight.is_fp8 or block_k % size):
            block_k = min(block_k, size & -size)  # within a group
        tables = _tables(x.device) if weight.is_nf4 else (None, None)
        codes = (weight.codes, weight.scales, weight.scales if weight.shifts is None else weight.shifts)
        _codes_kernel[grid](
            x, *codes, *tables, bias, out, groups.order, groups.tiles, groups.count,
            **tile_arguments(lora, groups.count), stride_out=out.stride(0), N=n, K=k,
            GROUPS=num_groups, GROUP_SIZE=size, FOUR_BITS=not weight.is_fp8, NF4=weight.is_nf4,
            SHIFTED=weight.shifts is not None, PAIRS_A_ROW=pairs_a_row, HALVES=halves, BIAS=bias is not None,
            GATES=gates is not None, ACTIVATION=gates or "silu", BLOCK_M=groups.block_m, BLOCK_N=block_n,
            BLOCK_K=block_k, STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
        return
    _product_kernel[grid](
        x, weight, bias, out, groups.order, groups.tiles, groups.count, **tile_arguments(lora, groups.count),
        stride_out=out.stride(0), N=n, K=k,
        PAIRS_A_ROW=pairs_a_row, HALVES=halves, BIAS=bias is not None, GATES=gates is not None,
        ACTIVATION=gates or "silu", BLOCK_M=groups.block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
