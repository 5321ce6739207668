"""Matrix products of few rows, where reading the weight once is all the work: y = x W^T."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_SPLITS = 4
# One row is a sum along the weight's rows. Up to a few dozen rows a product with few outputs leaves processors idle
# under cuBLAS, so its inner dimension is split. The rest is cuBLAS. Measured on an H200.
MOST_SPLIT_ROWS = 64
_BLOCK_N = 64
_BLOCK_K = 128
_PROCESSORS = 120  # programs that a product should have at least; an H200 has 132 processors
_FEW_OUTPUTS = 8192


@triton.jit
def load_product(at, stride_part, mask, PARTS: tl.constexpr):
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(at + part * stride_part, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _row_kernel(
    x_ptr, w_ptr, out_ptr, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
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
    tl.store(out_ptr + columns, tl.sum(acc, 1), mask=column_mask)


def linear_row(
    x: Tensor, weight: Tensor, out: Tensor, *, pdl: bool, block_n: int = 4, block_k: int = 2048, num_warps: int = 8
) -> None:
    """out [1, out] = x [1, in] @ weight [out, in]^T, summed in float32."""
    n, k = weight.shape
    block_k = min(block_k, triton.next_power_of_2(k))
    _row_kernel[(triton.cdiv(n, block_n),)](
        x, weight, out, n, K=k, BLOCK_N=block_n, BLOCK_K=block_k, PDL=pdl, num_warps=num_warps, launch_pdl=pdl
    )


@triton.jit
def _split_kernel(
    x_desc,
    w_desc,
    out_ptr,
    M,
    N,
    K_OF_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
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
    rows = tl.arange(0, BLOCK_M)
    at = out_ptr + (split * M + rows)[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(at, acc, mask=(rows < M)[None, :] & (columns < N)[:, None])


def _splits(rows: int, n: int, k: int, dtype: torch.dtype) -> int:
    # 0: leave it to cuBLAS
    if rows > MOST_SPLIT_ROWS or n > _FEW_OUTPUTS or dtype.itemsize != 2 or n % _BLOCK_N:
        return 0
    tiles = n // _BLOCK_N
    splits = next((s for s in (1, 2, MOST_SPLITS) if tiles * s >= _PROCESSORS), MOST_SPLITS)
    if tiles * splits < 1.5 * _PROCESSORS and splits < MOST_SPLITS and tiles % _PROCESSORS and n > 4096:
        splits = MOST_SPLITS  # one and a half waves: finer parts fill the second
    if rows > 32 and n > 4096:
        return 0
    return splits if k % (splits * _BLOCK_K) == 0 else 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, parts: Tensor, *, pdl: bool) -> Tensor:
    """x [rows, in] @ weight [out, in]^T + bias.

    Args:
        out: [rows, out], of x's dtype.
        parts: float32, at least MOST_SPLITS * MOST_SPLIT_ROWS * out elements.

    Returns:
        [splits, rows, out]: `out` or `parts`; the reader adds them up.
    """
    rows, k = x.shape
    n = weight.shape[0]
    if bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
        return out[None]
    if rows == 1:
        linear_row(x, weight, out, pdl=pdl)
        return out[None]
    splits = _splits(rows, n, k, x.dtype) if x.is_cuda and pdl else 0
    if not splits:
        torch.mm(x, weight.t(), out=out)
        return out[None]
    block_m = max(16, triton.next_power_of_2(rows))
    result = parts[: splits * rows * n].view(splits, rows, n)
    _split_kernel[(n // _BLOCK_N, splits)](
        TensorDescriptor.from_tensor(x, [block_m, _BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [_BLOCK_N, _BLOCK_K]),
        result,
        rows,
        n,
        K_OF_SPLIT=k // splits,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        STAGES=4 if block_m > 32 else 6,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return result
