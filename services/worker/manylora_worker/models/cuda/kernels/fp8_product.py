"""Products of bf16 rows with a weight kept in FP8 (quantized/fp8.py): codes become bf16, which is exact, in registers.

Sums are of 32-bit floats; a scale enters behind its inputs' sum. A row's sums do not depend on the other rows, but for
how many rows there are: that chooses the tile and how the inputs are split.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from manylora_worker.models.quantized.fp8 import Fp8Weight

MOST_ROWS = 256  # above, reading the weight is little of the work: it is rebuilt whole, once
_BLOCK_N = 64
_BLOCK_K = 128
_PROGRAMS_WANTED = 240  # that a product should have at least: an H100 has 132 processors
_MOST_SPLITS = 4
_MOST_SPLIT_ROWS = 64
_ALIGNED = 16  # bytes, of a tensor descriptor's rows


@triton.jit
def _product_kernel(
    x_desc, w_desc, scales_ptr, bias_ptr, out_ptr, M, N, GROUPS, GROUP_SIZE,
    K: tl.constexpr, K_OF_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out [splits, M, N]; program (tile of outputs, split of the inputs, tile of rows)."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK_M
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = columns < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The weight's rows stand on the matrix unit's long side, where its operand may come from registers.
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(split * K_OF_SPLIT, tl.minimum(K, (split + 1) * K_OF_SPLIT), BLOCK_K, num_stages=STAGES):
        w = w_desc.load([tile * BLOCK_N, k])
        x = x_desc.load([first_row, k])
        if INTERPRETED:  # the interpreter cannot multiply bf16
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        else:
            w = w.to(tl.bfloat16)
        if GROUPED:
            scale = tl.load(scales_ptr + columns * GROUPS + k // GROUP_SIZE, mask=kept, other=0.0)
            acc += tl.dot(w, x.T) * scale[:, None]
        else:
            acc = tl.dot(w, x.T, acc)
    if not GROUPED:
        acc *= tl.load(scales_ptr + columns, mask=kept, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=kept & (split == 0), other=0.0).to(tl.float32)[:, None]
    rows = first_row + tl.arange(0, BLOCK_M)
    at = out_ptr + (split * M + rows)[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[None, :] & kept[:, None])


@triton.jit
def _dequantize_kernel(codes_ptr, scales_ptr, out_ptr, K, GROUPS, GROUP_SIZE, BLOCK: tl.constexpr):
    """One row's BLOCK inputs."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = k < K
    codes = tl.load(codes_ptr + row * K + k, mask=kept, other=0.0).to(tl.float32)
    scales = tl.load(scales_ptr + row * GROUPS + k // GROUP_SIZE, mask=kept, other=0.0)
    tl.store(out_ptr + row * K + k, (codes * scales).to(out_ptr.dtype.element_ty), mask=kept)


def takes(rows: int, weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether `product` multiplies with the codes themselves."""
    grouped = weight.scales.shape[1] > 1
    fits = weight.codes.shape[1] % _ALIGNED == 0 and not (grouped and weight.group_size % _BLOCK_K)
    return 1 <= rows <= MOST_ROWS and dtype is torch.bfloat16 and fits


def product(x: Tensor, weight: Fp8Weight, bias: Tensor | None, *, pdl: bool) -> Tensor:
    """x [rows, in], contiguous, @ weight^T + bias, to [parts, rows, out], as gemm.linear: parts are float32."""
    num_rows, k = x.shape
    if not takes(num_rows, weight, x.dtype):
        return F.linear(x, dequantize(weight, x.dtype), bias)[None]
    n, groups = weight.scales.shape
    block_m = min(64, max(16, triton.next_power_of_2(num_rows)))
    tiles = triton.cdiv(n, _BLOCK_N)
    splits, k_of_split = split(num_rows, tiles, k)
    out = torch.empty(splits, num_rows, n, dtype=torch.float32 if splits > 1 else x.dtype, device=x.device)
    _product_kernel[(tiles, splits, triton.cdiv(num_rows, block_m))](
        TensorDescriptor.from_tensor(x, [block_m, _BLOCK_K]),
        TensorDescriptor.from_tensor(weight.codes, [_BLOCK_N, _BLOCK_K]),
        weight.scales, x if bias is None else bias, out, num_rows, n, groups, weight.group_size,
        K=k, K_OF_SPLIT=k_of_split, BLOCK_M=block_m, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K,
        STAGES=4 if block_m > 32 else 6, GROUPED=groups > 1, HAS_BIAS=bias is not None, PDL=pdl,
        INTERPRETED=_interpreted(), num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def split(rows: int, tiles: int, k: int) -> tuple[int, int]:
    """How many parts the inputs are cut into, and how many inputs a part has; the last may have fewer."""
    blocks = triton.cdiv(k, _BLOCK_K)
    most = min(_MOST_SPLITS, blocks) if rows <= _MOST_SPLIT_ROWS else 1
    wanted = next((s for s in (1, 2, 4) if tiles * s >= _PROGRAMS_WANTED), _MOST_SPLITS)
    blocks_of_part = triton.cdiv(blocks, min(most, wanted))
    return triton.cdiv(blocks, blocks_of_part), blocks_of_part * _BLOCK_K


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """[out, in], as Fp8Weight.dequantized, without a copy in float32."""
    codes, scales = weight.codes, weight.scales
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    n, k = codes.shape
    block = min(4096, triton.next_power_of_2(k))
    _dequantize_kernel[(n, triton.cdiv(k, block))](
        codes, scales, out, k, scales.shape[1], weight.group_size, BLOCK=block, num_warps=4
    )
    return out


def _interpreted() -> bool:
    return bool(knobs.runtime.interpret)
