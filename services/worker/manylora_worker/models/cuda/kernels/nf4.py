"""Products with a weight kept in 4 bits (nf4_format.py). The number of rows chooses the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from manylora_worker.models.cuda.kernels.nf4_format import BLOCK_SIZE, CODEBOOK, Nf4Weight, quantize
from manylora_worker.models.cuda.kernels.nf4_hopper import HopperProducts
from manylora_worker.models.cuda.kernels.nf4_lookup import (
    FLOATS_ASM,
    FLOATS_CONSTRAINTS,
    PAIR_BITS,
    PAIRS_CONSTRAINTS,
    REDUCTION_CODEBOOK,
    REPEATED_BITS,
    bf16_bits,
    interleave,
    register_words,
    scaled_pairs_asm,
    table_values,
)
from manylora_worker.models.quantized.linear import QuantizedLinear

# | rows | way | rounds |
# |---|---|---|
# | 1 .. 16 on Hopper | nf4_rows.py (CUDA C++): its table is in shared memory | code values to bf16 |
# | .. 128 on Hopper | nf4_tiles.py (CUDA C++): likewise, a warpgroup's products | code value, scale, their product |
# | 1 .. REDUCTION_ROWS | `_reduction_kernel`: no dot, lanes along the inputs | code values to 8 bits of significand |
# | .. FUSED_ROWS | `_product_kernel`: tensor cores, split along the inputs | code value, scale, their product to bf16 |
# | more | `dequantize` to bf16 once, then an ordinary product | as bitsandbytes |
REDUCTION_ROWS = 4  # a row costs it one FMA a weight, the tensor cores take 16 for nothing; measured on an H200
FUSED_ROWS = 64  # above, the weight is rebuilt whole: on an H200 that takes longer than the fused product of 64 rows


@triton.jit
def _to_bf16(values, INTERPRETED: tl.constexpr):
    # to nearest even, for finite values; Triton's interpreter truncates, so there the bits are rounded by hand
    if INTERPRETED:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(tl.bfloat16)


# ---- dequantize


@triton.jit
def _dequantize_kernel(
    words_ptr, absmax_ptr, table_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """out: num_blocks blocks of 64 bf16. Code value times scale in float32, rounded once."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    kept = block < num_blocks
    word = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    words = tl.load(words_ptr + word, mask=kept[:, None], other=0)
    absmax = tl.load(absmax_ptr + block, mask=kept, other=0.0)
    v0, v1, v2, v3, v4, v5, v6, v7 = table_values(words, table_ptr)
    values = interleave(v0, v1, v2, v3, v4, v5, v6, v7).reshape(BLOCKS, 64)
    values = _to_bf16(values * absmax[:, None], INTERPRETED)
    element = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + element, values, mask=kept[:, None])


# ---- a few rows: a reduction


@triton.jit
def _reduction_kernel(
    x_ptr, words_ptr, absmax_ptr, table_ptr, lookup_ptr, bias_ptr, y_ptr,
    num_rows, out_features, num_words,
    ROWS: tl.constexpr, OUTS: tl.constexpr, WORDS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y[row, out] for OUTS outputs and all rows. x: [num_rows, num_words * 8], contiguous."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    out_kept = out < out_features
    row = tl.arange(0, ROWS)
    row_kept = row < num_rows
    safe_out = tl.minimum(out, out_features - 1)
    safe_row = tl.minimum(row, num_rows - 1)
    word_rows = words_ptr + safe_out.to(tl.int64)[:, None] * num_words
    scale_rows = absmax_ptr + safe_out.to(tl.int64)[:, None] * (num_words // 8)
    sums = tl.zeros((ROWS, OUTS, WORDS), tl.float32)
    if not INTERPRETED:
        lookup0 = tl.load(lookup_ptr)
        lookup1 = tl.load(lookup_ptr + 1)
        lookup2 = tl.load(lookup_ptr + 2)
        lookup3 = tl.load(lookup_ptr + 3)
    # A lane holds single words of OUTS outputs, all in flight at once, and its part of x. With four words a lane every
    # value would cross shared memory. A scale enters once a word, after its 8 products.
    for first in range(0, num_words, WORDS):
        word = first + tl.arange(0, WORDS)
        # Hints: an unknown alignment makes it one word a lane; "contiguous" gives the scales' loads the same lanes.
        at = tl.multiple_of(tl.broadcast_to(word[None, :], (OUTS, WORDS)), (1, 1))
        scale_at = tl.max_contiguous(tl.multiple_of(at >> 3, (1, 1)), (1, WORDS))
        element = first * 8 + tl.arange(0, WORDS * 8)
        x_at = x_ptr + safe_row[:, None] * (num_words * 8) + element[None, :]
        if EVEN:
            words = tl.load(word_rows + at)
            absmax = tl.load(scale_rows + scale_at)
            x = tl.load(x_at)
        else:
            words = tl.load(word_rows + at, mask=at < num_words, other=0)
            absmax = tl.load(scale_rows + scale_at, mask=at < num_words, other=0.0)
            x = tl.load(x_at, mask=(element < num_words * 8)[None, :], other=0.0)
        even, odd = tl.split(x.to(tl.float32).reshape(ROWS, 1, WORDS, 2, 2, 2))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        words = words[None]
        if INTERPRETED:
            v0, v1, v2, v3, v4, v5, v6, v7 = table_values(words, table_ptr)
        else:
            v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
                FLOATS_ASM, FLOATS_CONSTRAINTS, [words, lookup0, lookup1, lookup2, lookup3],
                dtype=(
                    tl.float32, tl.float32, tl.float32, tl.float32,
                    tl.float32, tl.float32, tl.float32, tl.float32,
                ),
                is_pure=True, pack=1,
            )  # fmt: skip
        part = v0 * x0 + v1 * x1 + v2 * x2 + v3 * x3 + v4 * x4 + v5 * x5 + v6 * x6 + v7 * x7
        sums += part * absmax[None]
    y = tl.sum(sums, axis=2)
    if HAS_BIAS:
        y += tl.load(bias_ptr + out, mask=out_kept, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * out_features + out[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=row_kept[:, None] & out_kept[None, :])


# ---- up to 64 rows: tensor cores


@triton.jit
def _product_kernel(
    x_ptr, words_ptr, absmax_ptr, table_ptr, lookup_ptr, bias_ptr, y_ptr, parts_ptr, arrivals_ptr,
    num_rows, out_features, num_blocks, blocks_per_split,
    ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PAIRS_ASM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y[row, out] for OUTS outputs and all rows; program (tile of outputs, split of the inputs).

    A split leaves its part in parts_ptr [SPLITS, num_rows, out_features] and counts itself in arrivals_ptr [tiles]. The
    last one adds the parts up, always in the same order, and resets the count.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    out = tile * OUTS + tl.arange(0, OUTS)
    out_kept = out < out_features
    row = tl.arange(0, ROWS)
    row_kept = row < num_rows
    safe_out = tl.minimum(out, out_features - 1)
    end = tl.minimum(num_blocks, (split + 1) * blocks_per_split)
    wide = safe_out.to(tl.int64)[:, None, None] * num_blocks
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    if not INTERPRETED:
        lookup0 = tl.load(lookup_ptr)
        lookup1 = tl.load(lookup_ptr + 1)
        lookup2 = tl.load(lookup_ptr + 2)
        lookup3 = tl.load(lookup_ptr + 3)
    for first in range(split * blocks_per_split, end, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = wide + block[None, :, None]
        word_at = words_ptr + at * 8 + tl.arange(0, 8)[None, None, :]
        element = first * 64 + tl.arange(0, BLOCKS * 64)
        x_at = x_ptr + row[:, None] * (num_blocks * 64) + element[None, :]
        if EVEN:
            words = tl.load(word_at)
            absmax = tl.load(absmax_ptr + at)
            x = tl.load(x_at, mask=row_kept[:, None], other=0.0)  # rows past the last cost no traffic
        else:
            kept = (block < end)[None, :, None]
            words = tl.load(word_at, mask=kept, other=0)
            absmax = tl.load(absmax_ptr + at, mask=kept, other=0.0)
            x = tl.load(x_at, mask=row_kept[:, None] & (element < end * 64)[None, :], other=0.0)
        if INTERPRETED:
            v0, v1, v2, v3, v4, v5, v6, v7 = table_values(words, table_ptr)
            weight = interleave(v0, v1, v2, v3, v4, v5, v6, v7).reshape(OUTS, BLOCKS, 64) * absmax
            weight = _to_bf16(weight, INTERPRETED).to(tl.float32)  # the interpreter cannot multiply bf16
            x = x.to(tl.float32)
        else:
            v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
                PAIRS_ASM, PAIRS_CONSTRAINTS, [words, lookup0, lookup1, lookup2, lookup3, absmax],
                dtype=(
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                ),
                is_pure=True, pack=1,
            )  # fmt: skip
            weight = interleave(v0, v1, v2, v3, v4, v5, v6, v7).reshape(OUTS, BLOCKS, 64)
        sums = tl.dot(x, tl.trans(weight.reshape(OUTS, BLOCKS * 64)), sums)
    kept = row_kept[:, None] & out_kept[None, :]
    at = row[:, None] * out_features + out[None, :]
    last = True
    if SPLITS > 1:
        size = num_rows * out_features
        tl.store(parts_ptr + split * size + at, sums, mask=kept)
        tl.debug_barrier()  # every thread's part is written before the one that counts goes on
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.debug_barrier()
            sums = tl.zeros((ROWS, OUTS), tl.float32)
            for other in range(SPLITS):
                # Past L1, which may hold lines of another launch.
                sums += tl.load(parts_ptr + other * size + at, mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
        if HAS_BIAS:
            sums += tl.load(bias_ptr + out, mask=out_kept, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=kept)


# ---- launching


@dataclass(frozen=True)
class _ReductionTile:
    outs: int
    words: int
    num_warps: int


# by rows; compiled for sm_90, one row takes 5.2 instructions an element, 3.3 of them on integer units
_REDUCTION_TILES = {1: _ReductionTile(4, 128, 1), 2: _ReductionTile(4, 64, 1), 4: _ReductionTile(4, 64, 1)}


@dataclass(frozen=True)
class _ProductTile:
    rows: int
    outs: int
    blocks: int
    num_warps: int
    num_stages: int


# Ascending by rows; on sm_90 6.3 to 6.9 instructions an element. Each tile of outputs reads x again: at 64 rows four
# times the bytes of its codes, out of L2. With 128 outputs or 32 rows the compiler sends every value through shared
# memory in 2-byte pieces (or, with 64 x 128, fails).
_PRODUCT_TILES = (_ProductTile(16, 64, 4, 4, 2), _ProductTile(64, 64, 2, 4, 3))

_PROGRAMS_WANTED = 264  # two on each of an H200's multiprocessors: below, the inputs are split
_LARGEST_SPLIT = 16
_DEQUANTIZE_BLOCKS = 32


class TileWorkspace:
    """Tables and room for `product_by_tiles` on one device, 9 MB. Products that share it follow each other on one
    stream (graphs included).
    """

    def __init__(self, device: torch.device, values: Sequence[float]) -> None:
        """values: of the 16 codes."""
        largest = max(tile.rows * tile.outs for tile in _PRODUCT_TILES)
        self.parts = torch.empty(2 * _PROGRAMS_WANTED * largest, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(_PROGRAMS_WANTED, dtype=torch.int32, device=device)
        self.codebook = torch.tensor(values, dtype=torch.float32, device=device)
        bits = tuple(bf16_bits(value) for value in values)
        self.lookup = int32_tensor(register_words(bits), device)
        self.pairs_asm = scaled_pairs_asm(bits)


class Nf4Workspace(TileWorkspace):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device, CODEBOOK)
        self.hopper = HopperProducts.where_they_run(PAIR_BITS, device)
        self.reduction_codebook = torch.tensor(REDUCTION_CODEBOOK, dtype=torch.float32, device=device)
        self.reduction_lookup = int32_tensor(register_words(REPEATED_BITS), device)


def int32_tensor(words: list[int], device: torch.device) -> Tensor:
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32, device=device)


def dequantize(weight: Nf4Weight, codebook: Tensor, out: Tensor | None = None) -> Tensor:
    """[out, in] bf16, bit-equal to bitsandbytes'. codebook: 16 of float32. `out`: where to write, contiguous."""
    if out is None:
        out = torch.empty(weight.out_features, weight.in_features, dtype=torch.bfloat16, device=weight.codes.device)
    assert out.is_contiguous()
    assert out.dtype == torch.bfloat16
    num_blocks = weight.absmax.numel()
    _dequantize_kernel[(triton.cdiv(num_blocks, _DEQUANTIZE_BLOCKS),)](
        weight.codes.view(torch.int32), weight.absmax, codebook, out, num_blocks,
        BLOCKS=_DEQUANTIZE_BLOCKS, INTERPRETED=_interpreted(), num_warps=4,
    )  # fmt: skip
    return out


def product_by_reduction(
    x: Tensor, weight: Nf4Weight, workspace: Nf4Workspace, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias for at most 4 rows. x: [rows, in] contiguous; the result has x's type."""
    num_rows, out = _checked(x, weight, out, limit=max(_REDUCTION_TILES))
    rows = triton.next_power_of_2(num_rows)
    tile = _REDUCTION_TILES[rows]
    _reduction_kernel[(triton.cdiv(weight.out_features, tile.outs),)](
        x, weight.codes.view(torch.int32), weight.absmax, workspace.reduction_codebook, workspace.reduction_lookup,
        x if bias is None else bias, out, num_rows, weight.out_features, weight.in_features // 8,
        ROWS=rows, OUTS=tile.outs, WORDS=tile.words, HAS_BIAS=bias is not None,
        EVEN=weight.in_features // 8 % tile.words == 0, INTERPRETED=_interpreted(),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def product_by_tiles(
    x: Tensor, weight: Nf4Weight, workspace: TileWorkspace, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """As `product_by_reduction`, for at most 64 rows of bf16. Sums do not depend on the other rows."""
    num_rows, out = _checked(x, weight, out, limit=_PRODUCT_TILES[-1].rows)
    tile = next(tile for tile in _PRODUCT_TILES if tile.rows >= num_rows)
    num_tiles = triton.cdiv(weight.out_features, tile.outs)
    splits, blocks_per_split = _split(num_tiles, weight.in_features // BLOCK_SIZE, tile.blocks)
    _product_kernel[(num_tiles, splits)](
        x, weight.codes.view(torch.int32), weight.absmax, workspace.codebook, workspace.lookup,
        x if bias is None else bias, out, workspace.parts, workspace.arrivals,
        num_rows, weight.out_features, weight.in_features // BLOCK_SIZE, blocks_per_split,
        ROWS=tile.rows, OUTS=tile.outs, BLOCKS=tile.blocks, SPLITS=splits, HAS_BIAS=bias is not None,
        EVEN=weight.in_features // BLOCK_SIZE % tile.blocks == 0, PAIRS_ASM=workspace.pairs_asm,
        INTERPRETED=_interpreted(),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _split(num_tiles: int, num_blocks: int, tile_blocks: int) -> tuple[int, int]:
    # (splits, blocks of 64 inputs a split): enough programs for the device, whole tiles, no empty split
    splits = min(-(-_PROGRAMS_WANTED // num_tiles), _LARGEST_SPLIT)
    per_split = -(-num_blocks // splits)
    per_split = -(-per_split // tile_blocks) * tile_blocks
    return -(-num_blocks // per_split), per_split


def _checked(x: Tensor, weight: Nf4Weight, out: Tensor | None, limit: int) -> tuple[int, Tensor]:
    num_rows, in_features = x.shape
    assert in_features == weight.in_features
    assert 1 <= num_rows <= limit
    assert x.is_contiguous()
    if out is None:
        out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    assert out.is_contiguous()
    assert out.shape == (num_rows, weight.out_features)
    return num_rows, out


def _interpreted() -> bool:
    return bool(knobs.runtime.interpret)


class Nf4Linear(QuantizedLinear):
    def __init__(self, weight: Nf4Weight, bias: Tensor | None, workspace: Nf4Workspace) -> None:
        super().__init__(weight.out_features, weight.in_features, bias, weight.num_bytes)
        self._weight = weight
        self._workspace = workspace

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None, workspace: Nf4Workspace) -> Nf4Linear:
        return cls(quantize(weight), bias, workspace)

    def dequantized(self, rows: slice, dtype: torch.dtype) -> Tensor:
        part = Nf4Weight(self._weight.codes[rows], self._weight.absmax[rows])
        return dequantize(part, self._workspace.codebook).to(dtype)

    def parts(self, x: Tensor, *, pdl: bool) -> Tensor:
        num_rows = x.shape[0]
        x = x.contiguous()
        weight, workspace = self._weight, self._workspace
        hopper = workspace.hopper if x.dtype == torch.bfloat16 else None
        if hopper is not None and hopper.takes(num_rows, self.in_features, self.out_features):
            return hopper.product(x, weight.codes, weight.absmax, self.bias, pdl=pdl)
        if num_rows <= REDUCTION_ROWS:
            return product_by_reduction(x, weight, workspace, self.bias)[None]
        if num_rows <= FUSED_ROWS:
            return product_by_tiles(x, weight, workspace, self.bias)[None]
        return F.linear(x, dequantize(weight, workspace.codebook), self.bias)[None]
