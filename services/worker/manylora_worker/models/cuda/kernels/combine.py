"""A product made whole, its parts and its LoRA added up: before ranks' sum, where many read it, or behind gates."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.gemm import load_product
from manylora_worker.models.cuda.kernels.lora import MAX_SLOTS, LoraRows, expand, expand_arguments

_BLOCK_N = 1024


@triton.jit
def _combine_kernel(
    parts_ptr, out_ptr, num_rows_ptr, gates_ptr, outputs_ptr, row_adapters_ptr, low_rank_ptr, weights_ptr, sites_ptr,
    stride_part, stride_low_rank, stride_split, stride_site, WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr, WIDTH_3: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    ADDS: tl.constexpr, HAS_GATES: tl.constexpr, HAS_OUTPUTS: tl.constexpr, HAS_LORA: tl.constexpr,
    CHUNKS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.program_id(1)
    END_0: tl.constexpr = (WIDTH_0 + BLOCK_N - 1) // BLOCK_N
    END_1: tl.constexpr = END_0 + (WIDTH_1 + BLOCK_N - 1) // BLOCK_N
    END_2: tl.constexpr = END_1 + (WIDTH_2 + BLOCK_N - 1) // BLOCK_N
    slot = (block >= END_0).to(tl.int32) + (block >= END_1) + (block >= END_2)
    first_block = tl.where(slot == 0, 0, tl.where(slot == 1, END_0, tl.where(slot == 2, END_1, END_2)))
    width = tl.where(slot == 0, WIDTH_0, tl.where(slot == 1, WIDTH_1, tl.where(slot == 2, WIDTH_2, WIDTH_3)))
    start = tl.where(slot > 0, WIDTH_0, 0) + tl.where(slot > 1, WIDTH_1, 0) + tl.where(slot > 2, WIDTH_2, 0)
    columns = (block - first_block) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < width
    at = row.to(tl.int64) * (WIDTH_0 + WIDTH_1 + WIDTH_2 + WIDTH_3) + start + columns
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= tl.load(num_rows_ptr):
        return
    total = load_product(parts_ptr + at, stride_part, mask, PARTS)
    if HAS_OUTPUTS:
        total += tl.load(outputs_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_LORA:
        site = sites_ptr + tl.load(row_adapters_ptr + row).to(tl.int64) * stride_site
        rows = row + tl.arange(0, 1)
        total = expand(
            total[None, :], low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, slot, rows,
            rows >= 0, columns, mask, width, 1, CHUNKS, SPLIT_K, BLOCK_S, COLUMNS,
        )  # fmt: skip
        total = tl.sum(total, 0)
    if HAS_GATES:
        total /= 1.0 + tl.exp(-tl.load(gates_ptr + row).to(tl.float32))
    if ADDS:
        total += tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total, mask=mask)


def combine(
    product: Tensor,
    out: Tensor,
    *,
    num_rows: Tensor,
    lora: LoraRows | None,
    widths: Sequence[int] = (),
    adds: bool = False,
    gates: Tensor | None = None,
    pdl: bool,
) -> None:
    """Args:
    product: [parts, rows, columns], from gemm.linear.
    out: [rows, columns], contiguous, written; may be `product[0]`, where it is not added to.
    num_rows: int32 scalar; rows behind it are left alone.
    lora: of the product.
    widths: of its slots; empty: there is one.
    adds: to what `out` has.
    gates: [rows, 1]: as much of the product counts as the sigmoid of a row's gate says.
    """
    if lora is None and gates is None and not adds and product.data_ptr() == out.data_ptr():
        return
    rows, columns = out.shape
    outputs = None if lora is None else lora.outputs
    lora = lora if outputs is None else None
    widths = widths or (columns,)
    block_n = min(_BLOCK_N, triton.next_power_of_2(max(widths)))
    of_slots = [*widths, *[0] * (MAX_SLOTS - len(widths))]
    _combine_kernel[(rows, sum(triton.cdiv(width, block_n) for width in widths))](
        product, out, num_rows, out if gates is None else gates, out if outputs is None else outputs,
        **expand_arguments(lora, num_rows),
        stride_part=product.stride(0), WIDTH_0=of_slots[0], WIDTH_1=of_slots[1], WIDTH_2=of_slots[2],
        WIDTH_3=of_slots[3], BLOCK_N=block_n, PARTS=product.shape[0], ADDS=adds,
        HAS_GATES=gates is not None, HAS_OUTPUTS=outputs is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
