"""Matrix products of few rows, where reading the weight once is all the work: y = x W^T."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# One row is a sum along the weight's rows. Up to MOST_SPLIT_ROWS the weight's tiles are read by our own kernel, which
# starts before the kernel ahead of it ends. More rows are cuBLAS. Tiles and stages were tuned on an H100.
MOST_SPLIT_ROWS = 64
_BLOCK_N = 64
_BLOCK_K = 128
PROCESSORS = 132  # of an H100 and an H200. A product whose programs leave half of them idle is split along its inputs
PARTS_ELEMENTS = PROCESSORS * _BLOCK_N * MOST_SPLIT_ROWS
# By rows of a tile of x: loads under way where two programs share a processor, and where each has one.
_STAGES = {16: (5, 10), 32: (4, 8), 64: (3, 6)}


@triton.jit
def load_product(at, stride_part, mask, PARTS: tl.constexpr):
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(at + part * stride_part, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _row_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    w_rows = w_ptr + columns[:, None].to(tl.int64) * K
    ks = tl.arange(0, BLOCK_K)
    # The weight does not depend on the kernel before: its first tile is under way before that kernel ends.
    w = tl.load(w_rows + ks[None, :], mask=column_mask[:, None] & (ks < K)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + ks, mask=ks < K, other=0.0)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for k in tl.static_range(BLOCK_K, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        k_mask = ks < K
        w = tl.load(w_rows + ks[None, :], mask=column_mask[:, None] & k_mask[None, :], other=0.0)
        x = tl.load(x_ptr + ks, mask=k_mask, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, y, mask=column_mask)


def linear_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    pdl: bool,
    block_n: int = 4,
    block_k: int = 2048,
    num_warps: int = 8,
) -> None:
    """out [1, out] = x [1, in] @ weight [out, in]^T + bias, summed in float32."""
    n, k = weight.shape
    block_k = min(block_k, triton.next_power_of_2(k))
    _row_kernel[(triton.cdiv(n, block_n),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        n,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )


@triton.jit
def _split_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    out_ptr,
    M,
    N,
    K_OF_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The weight's rows stand on the matrix unit's long side: the rows of x are few.
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(split * K_OF_SPLIT, (split + 1) * K_OF_SPLIT, BLOCK_K, num_stages=STAGES):
        w = w_desc.load([tile * BLOCK_N, k])
        x = x_desc.load([0, k])
        acc = tl.dot(w, x.T, acc)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=(columns < N) & (split == 0), other=0.0).to(tl.float32)[:, None]
    rows = tl.arange(0, BLOCK_M)
    at = out_ptr + (split * M + rows)[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[None, :] & (columns < N)[:, None])


def _fits(rows: int, n: int, k: int, dtype: torch.dtype) -> bool:
    return 1 < rows <= MOST_SPLIT_ROWS and dtype.itemsize == 2 and n % _BLOCK_N == 0 and k % _BLOCK_K == 0


def shared_bytes_of(device: torch.device) -> int:
    """That a program may have. 0: no GPU."""
    if device.type != "cuda":
        return 0
    most: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return most


def _stages(block_m: int, programs: int, shared_bytes: int) -> int:
    shared, alone = _STAGES[block_m]
    most = shared_bytes // (2 * _BLOCK_K * (_BLOCK_N + block_m))
    return min(alone if programs <= PROCESSORS else shared, max(2, most - 1))


def _splits(n: int, k: int) -> int:
    tiles = n // _BLOCK_N
    fitting = (s for s in (4, 2) if tiles * s <= PROCESSORS and k % (s * _BLOCK_K) == 0)
    return next(fitting, 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, parts: Tensor, *, pdl: bool) -> Tensor:
    """x [rows, in] @ weight [out, in]^T + bias.

    Args:
        out: [rows, out], of x's dtype or, without a bias, float32.
        parts: float32 [PARTS_ELEMENTS].

    Returns:
        [splits, rows, out]: `out` or `parts`; the reader adds them up.
    """
    rows, k = x.shape
    n = weight.shape[0]
    if rows == 1:
        linear_row(x, weight, bias, out, pdl=pdl)
        return out[None]
    if not (pdl and _fits(rows, n, k, x.dtype)):
        if out.dtype is not x.dtype:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)
        return out[None]
    splits = _splits(n, k)
    result = out[None] if splits == 1 else parts[: splits * rows * n].view(splits, rows, n)
    block_m = max(16, triton.next_power_of_2(rows))
    programs = n // _BLOCK_N * splits
    _split_kernel[(n // _BLOCK_N, splits)](
        TensorDescriptor.from_tensor(x, [block_m, _BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [_BLOCK_N, _BLOCK_K]),
        x if bias is None else bias,
        result,
        rows,
        n,
        K_OF_SPLIT=k // splits,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        STAGES=_stages(block_m, programs, shared_bytes_of(x.device)),
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return result
