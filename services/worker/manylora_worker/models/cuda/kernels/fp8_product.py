"""Products of bf16 rows with a weight kept in FP8 (quantized/fp8.py): codes become bf16, which is exact, in registers.

Sums are of 32-bit floats; a scale enters behind its inputs' sum. A row's sums do not depend on the other rows, but for
how many rows there are: that chooses the tile and how the inputs are split.

The weight is the matrix unit's second operand. As the first, from registers behind a conversion, Triton 3.6 gives wrong
sums on an H100 for tiles of 128 rows, where several programs share a processor.
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

from manylora_worker.models.quantized.fp8 import Fp8Weight

MOST_ROWS = 256  # above, reading the weight is little of the work: it is rebuilt whole, once
_MOST_BLOCK_M = 128
_PROGRAMS_WANTED = 240  # that a product should have at least: an H100 has 132 processors
_MOST_SPLITS = 4
_MOST_SPLIT_ROWS = 64  # above, half as many parts: they are written, too
_CUT = 128  # inputs, that a part is a multiple of
_ALIGNED = 16  # bytes, of a tensor descriptor's rows


@dataclass(frozen=True)
class _Tile:
    """Outputs and inputs of a step of a program's loop, and how many of its loads are under way."""

    block_n: int
    block_k: int
    stages: int


@triton.jit
def _to_bf16(codes):
    """Four codes of e4m3 at a time: their bits a bf16's by shifting, 2^-120 of what they mean. A NaN's become +-480."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, sign, bits, factor;
        mov.b32 factor, 0x7B807B80;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.b32 bits, low, 4;
        and.b32 sign, low, 0x80008000;
        lop3.b32 low, bits, 0x07F007F0, sign, 0xEA;
        shr.b32 bits, high, 4;
        and.b32 sign, high, 0x80008000;
        lop3.b32 high, bits, 0x07F007F0, sign, 0xEA;
        mul.rn.bf16x2 $0, low, factor;
        mul.rn.bf16x2 $1, high, factor;
        }
        """,
        "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


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
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(split * K_OF_SPLIT, tl.minimum(K, (split + 1) * K_OF_SPLIT), BLOCK_K, num_stages=STAGES):
        w = w_desc.load([tile * BLOCK_N, k])
        x = x_desc.load([first_row, k])
        if INTERPRETED:  # the interpreter has neither assembly nor products of bf16
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        else:
            w = _to_bf16(w)
        if GROUPED:
            scale = tl.load(scales_ptr + columns * GROUPS + k // GROUP_SIZE, mask=kept, other=0.0)
            acc += tl.dot(x, w.T) * scale[None, :]
        else:
            acc = tl.dot(x, w.T, acc)
    if not GROUPED:
        acc *= tl.load(scales_ptr + columns, mask=kept, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=kept & (split == 0), other=0.0).to(tl.float32)[None, :]
    rows = first_row + tl.arange(0, BLOCK_M)
    at = out_ptr + (split * M + rows)[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & kept[None, :])


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
    tile = _tile_of(block_m, n, grouped=groups > 1)
    tiles = triton.cdiv(n, tile.block_n)
    splits, k_of_split = split(num_rows, tiles, k)
    out = torch.empty(splits, num_rows, n, dtype=torch.float32 if splits > 1 else x.dtype, device=x.device)
    codes = weight.codes if _interpreted() else weight.codes.view(torch.uint8)
    _product_kernel[(tiles, splits, triton.cdiv(num_rows, block_m))](
        TensorDescriptor.from_tensor(x, [block_m, tile.block_k]),
        TensorDescriptor.from_tensor(codes, [tile.block_n, tile.block_k]),
        weight.scales, x if bias is None else bias, out, num_rows, n, groups, weight.group_size,
        K=k, K_OF_SPLIT=k_of_split, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        STAGES=tile.stages, GROUPED=groups > 1, HAS_BIAS=bias is not None, PDL=pdl,
        INTERPRETED=_interpreted(), num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _tile_of(block_m: int, outputs: int, *, grouped: bool) -> _Tile:
    """As measured on an H100 for the products of Llama-3.1-8B. Wide where that leaves enough programs."""
    wide = outputs >= 128 * _PROGRAMS_WANTED // 2
    if block_m > 64:
        return _Tile(128 if wide else 64, 64, 4)
    if block_m > 32:
        return _Tile(64, 128, 4)
    if wide:
        return _Tile(128, 128, 3)
    return _Tile(64, 128 if grouped else 256, 3)


def split(rows: int, tiles: int, k: int) -> tuple[int, int]:
    """How many parts the inputs are cut into, and how many inputs a part has; the last may have fewer."""
    blocks = triton.cdiv(k, 2 * _CUT)
    most = min(_MOST_SPLITS if rows <= _MOST_SPLIT_ROWS else _MOST_SPLITS // 2, blocks)
    programs = tiles * triton.cdiv(rows, _MOST_BLOCK_M)
    wanted = next((s for s in (1, 2, 4) if programs * s >= _PROGRAMS_WANTED), _MOST_SPLITS)
    blocks_of_part = triton.cdiv(blocks, min(most, wanted))
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
