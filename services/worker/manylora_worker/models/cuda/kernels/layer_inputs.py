"""Inputs of single layers (models/decoder): what stands behind their products, with LoRA, in float32, rounded when
stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.gate import activated
from manylora_worker.models.cuda.kernels.lora import TILE_ROWS, LoraRows, expand_arguments, load_adapted, load_program
from manylora_worker.models.decoder.weights import Activation

_BLOCK_N = 256


@triton.jit
def _token_inputs_kernel(
    product_ptr, inputs_ptr, norm_ptr, num_rows_ptr, tiles_ptr, row_adapters_ptr, low_rank_ptr, weights_ptr, sites_ptr,
    stride_part, stride_low_rank, stride_split, stride_site, eps, factor, scale, N: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, WEIGHT_PLUS_ONE: tl.constexpr,
    HAS_LORA: tl.constexpr, BY_TILE: tl.constexpr, CHUNKS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One layer's part of BLOCK_M rows."""
    first_row, count, adapter = load_program(
        tl.program_id(1), num_rows_ptr, tiles_ptr, row_adapters_ptr, BLOCK_M, BY_TILE, HAS_LORA
    )
    within = tl.arange(0, BLOCK_W)
    width_mask = within < WIDTH
    columns = tl.program_id(0) * WIDTH + within
    weight = tl.load(norm_ptr + within, mask=width_mask, other=0.0).to(tl.float32)
    if WEIGHT_PLUS_ONE:
        weight += 1.0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    projected, rows, mask = load_adapted(
        product_ptr, first_row, count, adapter, columns, width_mask, stride_part, low_rank_ptr, stride_low_rank,
        stride_split, weights_ptr, sites_ptr, stride_site, N, BLOCK_M, PARTS, HAS_LORA, CHUNKS, SPLIT_K, BLOCK_S,
        COLUMNS,
    )  # fmt: skip
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    projected = projected * factor
    inverse = tl.rsqrt(tl.sum(projected * projected, 1) / WIDTH + eps)
    own = tl.load(inputs_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(inputs_ptr + at, (projected * inverse[:, None] * weight[None, :] + own) * scale, mask=mask)


def token_inputs(
    product: Tensor,
    inputs: Tensor,
    *,
    norm: Tensor,
    eps: float,
    weight_plus_one: bool,
    factor: float,
    scale: float,
    num_rows: Tensor,
    lora: LoraRows | None,
    pdl: bool,
) -> None:
    """inputs = (norm((product + LoRA) * factor) + inputs) * scale, normed by stretches of `norm`'s length.

    Args:
        product: [parts, rows, columns], from gemm.linear.
        inputs: [rows, columns], contiguous.
        num_rows: int32 scalar; rows behind it are left alone.
        lora: of the product.
    """
    rows, columns = inputs.shape
    by_tile = lora is not None and lora.num_tiles > 0
    width = len(norm)
    grid = (columns // width, lora.num_tiles if lora is not None and by_tile else rows)
    _token_inputs_kernel[grid](
        product, inputs, norm, num_rows, **expand_arguments(lora, num_rows),
        tiles_ptr=num_rows if lora is None else lora.tiles, stride_part=product.stride(0), eps=eps, factor=factor,
        scale=scale, N=columns, WIDTH=width, BLOCK_W=max(16, triton.next_power_of_2(width)),
        BLOCK_M=TILE_ROWS if by_tile else 1, PARTS=product.shape[0], WEIGHT_PLUS_ONE=weight_plus_one, BY_TILE=by_tile,
        PDL=pdl, num_warps=4 if by_tile else 1, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _gate_input_kernel(
    gate_ptr, input_ptr, out_ptr, num_rows_ptr, tiles_ptr, row_adapters_ptr, low_rank_ptr, weights_ptr, sites_ptr,
    stride_part, stride_input, stride_low_rank, stride_split, stride_site, N: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LORA: tl.constexpr,
    BY_TILE: tl.constexpr, CHUNKS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    first_row, count, adapter = load_program(
        tl.program_id(1), num_rows_ptr, tiles_ptr, row_adapters_ptr, BLOCK_M, BY_TILE, HAS_LORA
    )
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    gate, rows, mask = load_adapted(
        gate_ptr, first_row, count, adapter, columns, column_mask, stride_part, low_rank_ptr, stride_low_rank,
        stride_split, weights_ptr, sites_ptr, stride_site, N, BLOCK_M, PARTS, HAS_LORA, CHUNKS, SPLIT_K, BLOCK_S,
        COLUMNS,
    )  # fmt: skip
    given_at = rows[:, None].to(tl.int64) * stride_input + columns[None, :]
    given = tl.load(input_ptr + given_at, mask=mask, other=0.0).to(tl.float32)
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptr + at, activated(gate, ACTIVATION) * given, mask=mask)


def gate_input(
    gate: Tensor,
    given: Tensor,
    out: Tensor,
    *,
    activation: Activation,
    num_rows: Tensor,
    lora: LoraRows | None,
    pdl: bool,
) -> None:
    """out = activation(gate + LoRA) * given.

    Args:
        gate: [parts, rows, width], from gemm.linear.
        given: [rows, width], columns of what token_inputs left.
        out: [rows, width], contiguous, written.
        num_rows: int32 scalar; rows behind it are left alone.
        lora: of the product that made `gate`.
    """
    rows, width = out.shape
    by_tile = lora is not None and lora.num_tiles > 0
    block_n = min(_BLOCK_N, max(16, triton.next_power_of_2(width)))
    grid = (triton.cdiv(width, block_n), lora.num_tiles if lora is not None and by_tile else rows)
    _gate_input_kernel[grid](
        gate, given, out, num_rows, **expand_arguments(lora, num_rows),
        tiles_ptr=num_rows if lora is None else lora.tiles, stride_part=gate.stride(0), stride_input=given.stride(0),
        N=width, BLOCK_N=block_n, BLOCK_M=TILE_ROWS if by_tile else 1, PARTS=gate.shape[0], ACTIVATION=activation,
        BY_TILE=by_tile, PDL=pdl, num_warps=4 if by_tile else 1, launch_pdl=pdl,
    )  # fmt: skip
