"""What stands between two products of a decoder layer on the residual stream: one kernel, in float32, rounded when
stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.gemm import load_product
from manylora_worker.models.cuda.kernels.lora import LoraRows, expand, expand_arguments
from manylora_worker.models.decoder.weights import DecoderWeights


@triton.jit
def _add_norm_kernel(
    delta_ptr, residual_ptr, out_ptr, post_weight_ptr, pre_weight_ptr, num_rows_ptr, counters_ptr, outputs_ptr,
    row_adapters_ptr, low_rank_ptr, weights_ptr, sites_ptr, stride_part, stride_low_rank, stride_split, stride_site,
    eps, factor, N: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr,
    HAS_DELTA: tl.constexpr, HAS_POST: tl.constexpr, HAS_PRE: tl.constexpr, WEIGHT_PLUS_ONE: tl.constexpr,
    HAS_OUTPUTS: tl.constexpr, HAS_LORA: tl.constexpr, CHUNKS: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    BLOCK_P: tl.constexpr = BLOCK_N // PIECES
    columns = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = columns < N
    row_at = row.to(tl.int64) * N
    at = row_at + columns
    is_there = row < tl.load(num_rows_ptr)
    all_columns = tl.arange(0, BLOCK_N)
    all_mask = all_columns < N
    if HAS_PRE:
        pre_weight = tl.load(pre_weight_ptr + all_columns, mask=all_mask, other=0.0).to(tl.float32)
        if WEIGHT_PLUS_ONE:
            pre_weight += 1.0
    if PDL and HAS_LORA:
        tl.extra.cuda.gdc_wait()
    if HAS_DELTA:
        # Written by a kernel before the one that made delta, and that one waited: it may be read now.
        residual = tl.load(residual_ptr + at, mask=mask & is_there, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if not is_there:
        return
    if HAS_DELTA:
        delta = load_product(delta_ptr + at, stride_part, mask, PARTS)
        if HAS_OUTPUTS:
            delta += tl.load(outputs_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_LORA:
            site = sites_ptr + tl.load(row_adapters_ptr + row).to(tl.int64) * stride_site
            rows = row + tl.arange(0, 1)
            delta = expand(
                delta[None, :], low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, 0, rows, rows >= 0,
                columns, mask, N, 1, CHUNKS, SPLIT_K, BLOCK_S, COLUMNS,
            )  # fmt: skip
            delta = tl.sum(delta, 0)
        if HAS_POST:
            scale = tl.rsqrt(tl.sum(delta * delta, 0) / N + eps)
            weight = tl.load(post_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            if WEIGHT_PLUS_ONE:
                weight += 1.0
            delta = delta * scale * weight
        residual = (residual + delta) * factor
        tl.store(residual_ptr + at, residual, mask=mask)
    else:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rounded = residual.to(residual_ptr.dtype.element_ty).to(tl.float32)
    if PIECES > 1:
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") != PIECES - 1:
            return
        # The last piece of a row normalizes it. volatile: other programs of this launch wrote it, so not from the L1
        rounded = tl.load(residual_ptr + row_at + all_columns, mask=all_mask, other=0.0, volatile=True).to(tl.float32)
        tl.store(counters_ptr + row, 0)
    if HAS_PRE:
        scale = tl.rsqrt(tl.sum(rounded * rounded, 0) / N + eps)
        rounded = rounded * scale * pre_weight
    tl.store(out_ptr + row_at + all_columns, rounded, mask=all_mask)


def add_norm(
    delta: Tensor | None,
    residual: Tensor,
    out: Tensor,
    *,
    post_weight: Tensor | None,
    pre_weight: Tensor | None,
    eps: float,
    weight_plus_one: bool,
    num_rows: Tensor,
    counters: Tensor,
    lora: LoraRows | None,
    factor: float = 1.0,
    pdl: bool,
) -> None:
    """residual = (residual + post_norm(delta + LoRA)) * factor; out = pre_norm(residual). A norm without a weight is
    left out.

    Args:
        delta: [parts, rows, hidden], from gemm.linear.
        residual, out: [rows, hidden], contiguous.
        num_rows: int32 scalar; rows behind it are left alone.
        counters: int32 [rows], zero; left zero.
        lora: of the product that made `delta`.
    """
    rows, hidden = residual.shape
    outputs = None if lora is None else lora.outputs
    lora = lora if outputs is None else None
    block_n = triton.next_power_of_2(hidden)
    # An adapter's B is more than one processor reads quickly: four share a row, while rows are few.
    pieces = 4 if lora is not None and rows <= 512 and post_weight is None and block_n >= 2048 else 1
    num_warps = max(1, min(8, block_n // 512))
    if lora is not None:
        num_warps = max(1, min(16, block_n // pieces // 256))
    _add_norm_kernel[(rows, pieces)](
        residual if delta is None else delta, residual, out, residual if post_weight is None else post_weight,
        residual if pre_weight is None else pre_weight, num_rows, counters, residual if outputs is None else outputs,
        **expand_arguments(lora, num_rows),
        stride_part=0 if delta is None else delta.stride(0), eps=eps, factor=factor, N=hidden, BLOCK_N=block_n,
        PIECES=pieces, PARTS=1 if delta is None else delta.shape[0], HAS_DELTA=delta is not None,
        HAS_POST=post_weight is not None, HAS_PRE=pre_weight is not None,
        WEIGHT_PLUS_ONE=weight_plus_one, HAS_OUTPUTS=outputs is not None, PDL=pdl, num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip


class Norms:
    """With what all of a model's have."""

    def __init__(self, weights: DecoderWeights, max_rows: int, device: torch.device, *, pdl: bool) -> None:
        self._eps, self._weight_plus_one, self._pdl = weights.eps, weights.norm_weight_plus_one, pdl
        self._counters = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def add(
        self,
        delta: Tensor | None,
        residual: Tensor,
        normed: Tensor,
        post: Tensor | None,
        pre: Tensor | None,
        num_rows: Tensor,
        lora: LoraRows | None,
        *,
        factor: float = 1.0,
    ) -> None:
        add_norm(
            delta,
            residual,
            normed,
            post_weight=post,
            pre_weight=pre,
            eps=self._eps,
            weight_plus_one=self._weight_plus_one,
            num_rows=num_rows,
            counters=self._counters,
            lora=lora,
            factor=factor,
            pdl=self._pdl,
        )
