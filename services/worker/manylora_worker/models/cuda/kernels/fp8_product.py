"""Products of bf16 rows with a weight kept in FP8 (quantized/fp8.py), by the matrix unit's own FP8.

Each row of x is cut in two of FP8, whose sum it is: the upper four bits of an element, and the lower. Sums are of
32-bit floats; a scale enters behind its inputs' sum. A row's sums do not depend on the other rows, but for how many
rows there are: that chooses the tile and how the inputs are split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from manylora_worker.models.cuda.kernels.gemm import PROCESSORS, shared_bytes_of
from manylora_worker.models.quantized.fp8 import Fp8Weight

MOST_ROWS = 512  # above, rebuilding the weight whole, once, is little of the work
_MOST_BLOCK_M = 128
_CUT = 128  # inputs, that a part is a multiple of
_ALIGNED = 16  # bytes, of a tensor descriptor's rows
_LEAST_EXPONENT = tl.constexpr(-6)  # of e4m3's normal numbers
_LARGEST_EXPONENT = tl.constexpr(
    7
)  # of a row's largest element, scaled: 256 and more could round past the largest code
_LOWER = tl.constexpr(
    16.0
)  # times which the lower halves are kept: they are that much smaller, and small ones have few bits


@dataclass(frozen=True)
class _Tile:
    """Outputs and inputs of a step of a program's loop."""

    block_n: int
    block_k: int
    num_warps: int

    def stages(self, block_m: int, programs: int, shared_bytes: int) -> int:
        """How many loads are under way. programs: of one tile of rows. shared_bytes: that one may have."""
        alone = block_m > 64 or (block_m == 64 and programs <= PROCESSORS)  # on its processor
        kib = 200 if alone and shared_bytes >= 200 * 1024 else 96  # Ada's processors have 99
        return kib * 1024 // (self.block_k * (self.block_n + 2 * block_m))


@triton.jit
def _halves_kernel(x_ptr, halves_ptr, scales_ptr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """halves [rows, 2, K]: x = (upper + lower / 16) * scale. The scale is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    kept = ks < K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * K + ks, mask=kept, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127 - _LARGEST_EXPONENT
    scaled = x * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    # Rounded to four bits by a number so large that it has no further ones. Triton 3.6 reads some codes wrongly that it
    # has just made, so the upper half is not read back.
    own = tl.maximum(((scaled.to(tl.int32, bitcast=True) >> 23) & 255) - 127, _LEAST_EXPONENT)
    rounder = (((own + 147) << 23) | 0x400000).to(tl.float32, bitcast=True)
    upper = (scaled + rounder) - rounder
    lower = (scaled - upper) * _LOWER
    at = halves_ptr + 2 * row * K + ks
    tl.store(at, upper.to(tl.float8e4nv), mask=kept)
    tl.store(at + K, lower.to(tl.float8e4nv), mask=kept)
    tl.store(scales_ptr + row, ((exponent + 127) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _product_kernel(
    x_desc, w_desc, scales_ptr, row_scales_ptr, bias_ptr, out_ptr, M, N, GROUPS, GROUP_SIZE,
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
    # The weight's rows stand on the matrix unit's long side, a row's halves side by side on the other.
    acc = tl.zeros((BLOCK_N, 2 * BLOCK_M), tl.float32)
    for k in tl.range(split * K_OF_SPLIT, tl.minimum(K, (split + 1) * K_OF_SPLIT), BLOCK_K, num_stages=STAGES):
        w = w_desc.load([tile * BLOCK_N, k])
        x = x_desc.load([2 * first_row, k])
        if INTERPRETED:  # the interpreter has no products of FP8
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        if GROUPED:
            scale = tl.load(scales_ptr + columns * GROUPS + k // GROUP_SIZE, mask=kept, other=0.0)
            acc += tl.dot(w, x.T) * scale[:, None]
        else:
            # Hopper's sums of FP8 keep some 14 bits: each BLOCK_K of them are added up outside.
            acc = tl.dot(w, x.T, acc, max_num_imprecise_acc=BLOCK_K)
    upper, lower = tl.split(acc.reshape(BLOCK_N, BLOCK_M, 2))
    rows = first_row + tl.arange(0, BLOCK_M)
    there = rows < M
    y = (upper + lower / _LOWER) * tl.load(row_scales_ptr + rows, mask=there, other=0.0)[None, :]
    if not GROUPED:
        y *= tl.load(scales_ptr + columns, mask=kept, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=kept & (split == 0), other=0.0).to(tl.float32)[:, None]
    at = out_ptr + (split * M + rows)[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=there[None, :] & kept[:, None])


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
    fits = weight.codes.shape[1] % _ALIGNED == 0 and not (grouped and weight.group_size % _CUT)
    return 1 <= rows <= MOST_ROWS and dtype is torch.bfloat16 and fits


def product(x: Tensor, weight: Fp8Weight, bias: Tensor | None, *, pdl: bool) -> Tensor:
    """x [rows, in], contiguous, @ weight^T + bias, to [parts, rows, out], as gemm.linear: parts are float32."""
    num_rows, k = x.shape
    if not takes(num_rows, weight, x.dtype):
        return F.linear(x, dequantize(weight, x.dtype), bias)[None]
    n, groups = weight.scales.shape
    block_m = min(_MOST_BLOCK_M, max(16, triton.next_power_of_2(num_rows)))
    row_tiles = triton.cdiv(num_rows, block_m)
    tile = _tile_of(block_m, n, grouped=groups > 1)
    tiles = triton.cdiv(n, tile.block_n)
    splits, k_of_split = split(tiles * row_tiles, k)
    halves, row_scales = _halves(x, pdl=pdl)
    out = torch.empty(splits, num_rows, n, dtype=torch.float32 if splits > 1 else x.dtype, device=x.device)
    _product_kernel[(tiles, splits, row_tiles)](
        TensorDescriptor.from_tensor(halves, [2 * block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight.codes, [tile.block_n, tile.block_k]),
        weight.scales, row_scales, x if bias is None else bias, out, num_rows, n, groups, weight.group_size,
        K=k, K_OF_SPLIT=k_of_split, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        STAGES=tile.stages(block_m, tiles * splits, shared_bytes_of(x.device)),
        GROUPED=groups > 1, HAS_BIAS=bias is not None, PDL=pdl, INTERPRETED=_interpreted(),
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _halves(x: Tensor, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """[2 * rows, in] of FP8, a row's upper half and then its lower, and the rows' scales."""
    num_rows, k = x.shape
    halves = torch.empty(2 * num_rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _halves_kernel[(num_rows,)](
        x, halves, scales, K=k, BLOCK=triton.next_power_of_2(k), PDL=pdl, num_warps=8, launch_pdl=pdl
    )
    return halves, scales


def _tile_of(block_m: int, outputs: int, *, grouped: bool) -> _Tile:
    """As measured on an H100 for the products of Llama-3.1-8B."""
    if block_m > 64:
        return _Tile(128, 128, 8) if outputs > 4096 else _Tile(64, 128, 4)
    shared = block_m == 64 and outputs > 64 * PROCESSORS
    return _Tile(64, 128 if grouped or shared else 256, 4)


def split(programs: int, k: int) -> tuple[int, int]:
    """How many parts the inputs are cut into, and how many inputs a part has; the last may have fewer."""
    blocks = triton.cdiv(k, 2 * _CUT)
    wanted = next((s for s in (4, 2) if programs * s <= PROCESSORS), 1)
    blocks_of_part = triton.cdiv(blocks, min(wanted, blocks))
    return triton.cdiv(blocks, blocks_of_part), blocks_of_part * 2 * _CUT


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
