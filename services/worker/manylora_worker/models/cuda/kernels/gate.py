"""Gates: activation(gate) * up, both with their LoRA, in float32, rounded when stored; and what was attended to."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.gemm import load_product
from manylora_worker.models.cuda.kernels.lora import (
    TILE_ROWS,
    LoraRows,
    expand_arguments,
    expand_pair,
    load_program,
    program_rows,
)
from manylora_worker.models.decoder.weights import Activation
from manylora_worker.models.layers.mixture import CLAMP_ALPHA, CLAMP_LIMIT

_ALPHA, _LIMIT = tl.constexpr(CLAMP_ALPHA), tl.constexpr(CLAMP_LIMIT)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    elif ACTIVATION == "gelu_tanh":
        # tanh(z) = 1 - 2 / (exp(2 z) + 1), which is right at both ends of the range
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * tl.minimum(z, 40.0)) + 1.0))
    else:
        return gate / (1.0 + tl.exp(-gate))


@triton.jit
def activated_times(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)  # what is no number stays so
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        return (up + 1.0) * gate / (1.0 + tl.exp(gate * -_ALPHA))
    else:
        return activated(gate, ACTIVATION) * up


@triton.jit
def _gate_kernel(
    gate_up_ptr,
    out_ptr,
    num_rows_ptr,
    tiles_ptr,
    row_adapters_ptr,
    low_rank_ptr,
    weights_ptr,
    sites_ptr,
    stride_part,
    stride_low_rank,
    stride_split,
    stride_site,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LORA: tl.constexpr,
    BY_TILE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    first_row, count, adapter = load_program(
        tl.program_id(1), num_rows_ptr, tiles_ptr, row_adapters_ptr, BLOCK_M, BY_TILE, HAS_LORA
    )
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    # A family that fuses gate and up itself has one slot with the columns of both.
    UP_SLOT: tl.constexpr = 0 if NUM_SLOTS == 1 else 1
    UP_COLUMN: tl.constexpr = N if NUM_SLOTS == 1 else 0
    SLOT_COLUMNS: tl.constexpr = 2 * N if NUM_SLOTS == 1 else N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    rows, row_mask, mask = program_rows(first_row, count, column_mask, BLOCK_M)
    at = gate_up_ptr + rows[:, None].to(tl.int64) * (2 * N) + columns[None, :]
    gate = load_product(at, stride_part, mask, PARTS)
    up = load_product(at + N, stride_part, mask, PARTS)
    if HAS_LORA:
        site = sites_ptr + adapter.to(tl.int64) * stride_site
        gate, up = expand_pair(
            gate, up, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, 0, UP_SLOT, rows, row_mask,
            columns, columns + UP_COLUMN, column_mask, SLOT_COLUMNS, BLOCK_M, CHUNKS, SPLIT_K, BLOCK_S,
            COLUMNS,
        )  # fmt: skip
    tl.store(out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], activated(gate, ACTIVATION) * up, mask=mask)


def gate(
    gate_up: Tensor,
    out: Tensor,
    *,
    activation: Activation,
    num_rows: Tensor,
    lora: LoraRows | None,
    num_slots: int,
    pdl: bool,
) -> None:
    """Args:
    gate_up: [parts, rows, 2 * width], from gemm.linear, the gate's columns first.
    out: [rows, width], written.
    num_rows: int32 scalar; rows behind it are left alone.
    lora: of the projection, with `num_slots` 2 (gate, up) or 1 (a family that fuses them itself).
    """
    rows, width = out.shape
    by_tile = lora is not None and lora.num_tiles > 0
    block_m = TILE_ROWS if by_tile else 1
    if by_tile:
        block_n, num_warps = (512, 8) if rows <= 512 else (128, 4)
    else:
        block_n, num_warps = (1024, 4) if lora is None else (512, 2)
    block_n = min(block_n, triton.next_power_of_2(width))
    grid = (triton.cdiv(width, block_n), lora.num_tiles if lora is not None and by_tile else rows)
    _gate_kernel[grid](
        gate_up,
        out,
        num_rows,
        **expand_arguments(lora, num_rows),
        tiles_ptr=num_rows if lora is None else lora.tiles,
        stride_part=gate_up.stride(0),
        N=width,
        PARTS=gate_up.shape[0],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        ACTIVATION=activation,
        BY_TILE=by_tile,
        NUM_SLOTS=num_slots,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )


@triton.jit
def _gate_attended_kernel(
    attended_ptr, gates_ptr, num_rows_ptr, N: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= tl.load(num_rows_ptr):
        return
    at = row.to(tl.int64) * N + columns
    gates = tl.load(gates_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(attended_ptr + at, tl.load(attended_ptr + at, mask=mask, other=0.0).to(tl.float32) * gates, mask=mask)


def gate_attended(attended: Tensor, gates: Tensor, *, num_rows: Tensor, pdl: bool) -> None:
    """attended: [rows, heads * head_dim], times gates, in place."""
    rows, columns = attended.shape
    block_n = min(1024, triton.next_power_of_2(columns))
    _gate_attended_kernel[(triton.cdiv(columns, block_n), rows)](
        attended, gates, num_rows, N=columns, BLOCK_N=block_n, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
