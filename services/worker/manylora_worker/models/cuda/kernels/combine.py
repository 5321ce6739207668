"""A row-cut product made whole on its rank, before the sum over the ranks: its parts and its LoRA, added up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.gemm import load_product
from manylora_worker.models.cuda.kernels.lora import LoraRows, expand, expand_arguments

_BLOCK_N = 1024


@triton.jit
def _combine_kernel(
    parts_ptr, out_ptr, num_rows_ptr, outputs_ptr, row_adapters_ptr, low_rank_ptr, weights_ptr, sites_ptr,
    stride_part, stride_low_rank, stride_split, stride_site, N: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, HAS_OUTPUTS: tl.constexpr, HAS_LORA: tl.constexpr, CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    at = row.to(tl.int64) * N + columns
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
            total[None, :], low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, 0, rows, rows >= 0,
            columns, mask, N, 1, CHUNKS, SPLIT_K, BLOCK_S, COLUMNS,
        )  # fmt: skip
        total = tl.sum(total, 0)
    tl.store(out_ptr + at, total, mask=mask)


def combine(product: Tensor, out: Tensor, *, num_rows: Tensor, lora: LoraRows | None, pdl: bool) -> None:
    """Args:
    product: [parts, rows, columns], from gemm.linear.
    out: [rows, columns], contiguous, written; may be `product[0]`.
    num_rows: int32 scalar; rows behind it are left alone.
    lora: of the product.
    """
    if lora is None and product.data_ptr() == out.data_ptr():
        return
    rows, columns = out.shape
    outputs = None if lora is None else lora.outputs
    lora = lora if outputs is None else None
    block_n = min(_BLOCK_N, triton.next_power_of_2(columns))
    _combine_kernel[(rows, triton.cdiv(columns, block_n))](
        product, out, num_rows, out if outputs is None else outputs, **expand_arguments(lora, num_rows),
        stride_part=product.stride(0), N=columns, BLOCK_N=block_n, PARTS=product.shape[0],
        HAS_OUTPUTS=outputs is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
