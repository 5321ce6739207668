"""The low-rank products of a mixed batch: shrink (x A^T) as a kernel, expand (s B) inside the readers of the base
product (add_norm, rotate, gate).

Source: grouped products over adapter segments, Punica (Chen et al., 2023), S-LoRA (Sheng et al., 2023).
"""

# *By row* suits rows of many adapters: multiply-adds with all of a row's weights in flight. *By tile* suits prompts and
# rows that share adapters: up to TILE_ROWS consecutive rows of one adapter on the matrix unit. Loops run over each
# adapter's own rank.

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl
from manylora_shared.composition import RANKS_AT_ONCE
from torch import Tensor

from manylora_worker.models.cuda.kernels.gemm import load_product

TILE_FIELDS = 4
CHUNK_RANKS = RANKS_AT_ONCE
CHUNK_ALIGNMENT = 8  # elements: 16 bytes, one load of a thread
TILE_ROWS = 16
MAX_SLOTS = 4  # linear layers in one fused site
_FIRST_OFFSET = 4


def num_chunks(rank: int) -> int:
    return -(-rank // CHUNK_RANKS)


# A chunk is up to CHUNK_RANKS ranks of A [ranks, in] or of B [ranks, out], row-major, B scaled by alpha / r already.
# It may stand anywhere in the arena. Offsets count elements of `weights`, the arena. C: chunks of the largest rank.
#
#     tiles         int32 [n, 4]           first row, rows (0: an unused entry), adapter slot, of the first entry: how
#                                          many are used; by tile
#     row_adapters  int32 [rows]           adapter slot of each row; by row
#     sites         int64 [slots, fields]  one site of every adapter slot (slot 0: no adapter, of rank 0):
#                                          0..3              rank of each linear layer ("slot") of the site; 0: none
#                                          4 + s * C + c     offset of A's chunk c of slot s
#                                          4 + (4 + s) C + c offset of B's chunk c of slot s
#                                          4 + (8 + s) C + c ranks that stand in both chunks c, and in the upper half
#                                                            the float32 by which what A makes of a row is multiplied
#                                          4 + 12 C + s      where a slot's outputs are scaled and shifted: twice the
#                                                            offset of its gains, behind which its shifts are, and one
#                                          A composition's chunks are its parts', one after the other: its rank counts
#                                          16 for each, and what stands in `low_rank` for absent ones is zero.
#     low_rank      float32 [splits, rows, 4 * C * CHUNK_RANKS]
def site_fields(chunks: int) -> int:
    return column_field(MAX_SLOTS, chunks)


def a_field(slot: int, chunk: int, chunks: int) -> int:
    return _FIRST_OFFSET + slot * chunks + chunk


def b_field(slot: int, chunk: int, chunks: int) -> int:
    return _FIRST_OFFSET + (MAX_SLOTS + slot) * chunks + chunk


def part_field(slot: int, chunk: int, chunks: int) -> int:
    return _FIRST_OFFSET + (2 * MAX_SLOTS + slot) * chunks + chunk


def column_field(slot: int, chunks: int) -> int:
    return _FIRST_OFFSET + 3 * MAX_SLOTS * chunks + slot


def column_word(offset: np.ndarray) -> np.ndarray:
    return offset << 1 | 1


def part_word(ranks: int, weight: float = 1.0) -> int:
    return struct.unpack("<q", struct.pack("<if", ranks, weight))[0]  # type: ignore[no-any-return]


def compose_entries(parts: Sequence[tuple[np.ndarray, float]], entry: np.ndarray) -> None:
    """parts: entries of adapters [sites, fields], and their weights. entry: zeros, to be filled.

    Raises:
        ValueError: it has not enough chunks.
    """
    chunks = (entry.shape[1] - _FIRST_OFFSET - MAX_SLOTS) // (3 * MAX_SLOTS)
    sites = np.arange(entry.shape[0])
    for slot in range(MAX_SLOTS):
        used = np.zeros(entry.shape[0], dtype=np.int64)
        for part, weight in parts:
            bits = struct.unpack("<i", struct.pack("<f", weight))[0]
            own = -(-part[:, slot] // CHUNK_RANKS)
            if (used + own).max(initial=0) > chunks:
                raise ValueError(f"the adapters' ranks are together more than {chunks * CHUNK_RANKS}")
            for chunk in range(own.max(initial=0)):
                at = sites[own > chunk]
                to = used[at] + chunk
                for field in (a_field, b_field):
                    entry[at, field(slot, 0, chunks) + to] = part[at, field(slot, chunk, chunks)]
                ranks = part[at, part_field(slot, chunk, chunks)] & 0xFFFFFFFF
                entry[at, part_field(slot, 0, chunks) + to] = ranks | bits << 32
            used += own
        entry[:, slot] = used * CHUNK_RANKS


def low_rank_columns(chunks: int) -> int:
    return MAX_SLOTS * chunks * CHUNK_RANKS


@dataclass(frozen=True)
class LoraRows:
    weights: Tensor  # the arena, flat
    sites: Tensor
    tiles: Tensor
    num_tiles: int  # entries of `tiles` to look at; 0: compute by row
    row_adapters: Tensor
    low_rank: Tensor  # [splits of this site, rows, columns]
    chunks: int
    outputs: Tensor | None = None  # [rows, out]: s B, where lora_tiles.py computes it and the reader only adds it
    columns: bool = False  # whether an adapter of these rows may scale and shift outputs


def expand_arguments(lora: LoraRows | None, unused: Tensor) -> dict[str, Any]:
    """`unused` stands for tensors of no LoRA."""
    if lora is None:
        return {
            "row_adapters_ptr": unused, "low_rank_ptr": unused, "weights_ptr": unused, "sites_ptr": unused,
            "stride_low_rank": 0, "stride_split": 0, "stride_site": 0,
            "HAS_LORA": False, "CHUNKS": 1, "SPLIT_K": 1, "BLOCK_S": 1, "COLUMNS": False,
        }  # fmt: skip
    splits = lora.low_rank.shape[0]
    return {
        "row_adapters_ptr": lora.row_adapters, "low_rank_ptr": lora.low_rank, "weights_ptr": lora.weights,
        "sites_ptr": lora.sites, "stride_low_rank": lora.low_rank.stride(1), "stride_split": lora.low_rank.stride(0),
        "stride_site": lora.sites.stride(0),
        "HAS_LORA": True, "CHUNKS": lora.chunks, "SPLIT_K": splits, "BLOCK_S": triton.next_power_of_2(splits),
        "COLUMNS": lora.columns,
    }  # fmt: skip


@triton.jit
def load_tile(tiles_ptr, tile):
    """Returns first row, number of rows, adapter slot."""
    first_row = tl.load(tiles_ptr + tile * 4)
    num_rows = tl.load(tiles_ptr + tile * 4 + 1)
    adapter = tl.load(tiles_ptr + tile * 4 + 2)
    return first_row, num_rows, adapter


@triton.jit
def load_program(
    program, num_rows_ptr, tiles_ptr, row_adapters_ptr, BLOCK_M: tl.constexpr, BY_TILE: tl.constexpr,
    HAS_LORA: tl.constexpr,
):  # fmt: skip
    """Returns first row, number of rows (0 or less: none), adapter slot."""
    if BY_TILE:
        first_row, count, adapter = load_tile(tiles_ptr, program)
    else:
        first_row = program * BLOCK_M
        count = tl.minimum(tl.load(num_rows_ptr) - first_row, BLOCK_M)
        adapter = tl.load(row_adapters_ptr + first_row, mask=(count > 0) & HAS_LORA, other=0)
    return first_row, count, adapter


@triton.jit
def program_rows(first_row, count, column_mask, BLOCK_M: tl.constexpr):
    offsets = tl.arange(0, BLOCK_M)
    row_mask = offsets < count
    return first_row + offsets, row_mask, row_mask[:, None] & column_mask[None, :]


@triton.jit
def load_adapted(
    product_ptr, first_row, count, adapter, columns, column_mask, stride_part, low_rank_ptr, stride_low_rank,
    stride_split, weights_ptr, sites_ptr, stride_site, N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
    HAS_LORA: tl.constexpr, CHUNKS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # of a product [parts, rows, N]
    rows, row_mask, mask = program_rows(first_row, count, column_mask, BLOCK_M)
    product = load_product(product_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], stride_part, mask, PARTS)
    if HAS_LORA:
        site = sites_ptr + adapter.to(tl.int64) * stride_site
        product = expand(
            product, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, 0, rows, row_mask, columns,
            column_mask, N, BLOCK_M, CHUNKS, SPLIT_K, BLOCK_S, COLUMNS,
        )  # fmt: skip
    return product, rows, mask


@triton.jit
def _load_b(weights_ptr, site, slot, chunk, columns, column_mask, slot_columns, CHUNKS: tl.constexpr):
    """[16, BLOCK_N]: one chunk of B; zero where the slot has no such ranks."""
    within = tl.arange(0, 16)
    rank_mask = within < tl.load(site + 4 + (8 + slot) * CHUNKS + chunk).to(tl.int32)
    b_ptr = weights_ptr + tl.multiple_of(tl.load(site + 4 + (4 + slot) * CHUNKS + chunk), 8)
    return tl.load(
        b_ptr + within[:, None] * slot_columns + columns[None, :],
        mask=rank_mask[:, None] & column_mask[None, :],
        other=0.0,
    )


@triton.jit
def _add_low_rank(
    acc,
    b,
    low_rank_ptr,
    stride_low_rank,
    stride_split,
    site,
    slot,
    chunk,
    rows,
    row_mask,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """acc [BLOCK_M, BLOCK_N] + s[rows, chunk] @ b."""
    within = tl.arange(0, 16)
    rank_mask = within < tl.load(site + slot).to(tl.int32) - chunk * 16
    s_ptr = low_rank_ptr + slot * (CHUNKS * 16) + chunk * 16
    if BLOCK_M == 1:
        row = tl.max(rows, 0).to(tl.int64)
        splits = tl.arange(0, BLOCK_S)
        parts = tl.load(
            s_ptr + row * stride_low_rank + splits[:, None] * stride_split + within[None, :],
            mask=(splits < SPLIT_K)[:, None] & rank_mask[None, :],
            other=0.0,
        )
        s_row = tl.sum(parts, 0).to(b.dtype).to(tl.float32)
        return acc + tl.sum(s_row[:, None] * b.to(tl.float32), 0)[None, :]
    else:
        at = s_ptr + rows[:, None].to(tl.int64) * stride_low_rank + within[None, :]
        both = row_mask[:, None] & rank_mask[None, :]
        s = tl.load(at, mask=both, other=0.0)
        for split in tl.static_range(1, SPLIT_K):
            s += tl.load(at + split * stride_split, mask=both, other=0.0)
        return tl.dot(s.to(b.dtype), b, acc, input_precision="ieee")


@triton.jit
def _scale_columns(acc, weights_ptr, site, slot, columns, column_mask, slot_columns, CHUNKS: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] times the adapter's gains, plus its shifts, where it has any."""
    word = tl.load(site + 4 + 12 * CHUNKS + slot)
    if word != 0:
        gain_ptr = weights_ptr + tl.multiple_of(word >> 1, 8)
        gain = tl.load(gain_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
        shift = tl.load(gain_ptr + slot_columns + columns, mask=column_mask, other=0.0).to(tl.float32)
        acc = acc * gain[None, :] + shift[None, :]
    return acc


@triton.jit
def expand(
    acc,
    low_rank_ptr,
    stride_low_rank,
    stride_split,
    weights_ptr,
    site,
    slot,
    rows,
    row_mask,
    columns,
    column_mask,
    slot_columns,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """acc [BLOCK_M, BLOCK_N] += s[rows] @ B[:, columns] of one slot; `columns` count inside the slot. BLOCK_M is 1 or
    large enough for the matrix unit. COLUMNS: what the sum is is scaled and shifted, too, so `acc` is the product.
    """
    for chunk in range(0, tl.cdiv(tl.load(site + slot).to(tl.int32), 16)):
        b = _load_b(weights_ptr, site, slot, chunk, columns, column_mask, slot_columns, CHUNKS)
        acc = _add_low_rank(
            acc, b, low_rank_ptr, stride_low_rank, stride_split, site, slot, chunk, rows, row_mask, BLOCK_M, CHUNKS,
            SPLIT_K, BLOCK_S,
        )  # fmt: skip
    if COLUMNS:
        acc = _scale_columns(acc, weights_ptr, site, slot, columns, column_mask, slot_columns, CHUNKS)
    return acc


@triton.jit
def expand_pair(
    one,
    two,
    low_rank_ptr,
    stride_low_rank,
    stride_split,
    weights_ptr,
    site,
    slot_one,
    slot_two,
    rows,
    row_mask,
    columns_one,
    columns_two,
    column_mask,
    slot_columns,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`expand` of two slots of equal width: both are under way together."""
    rank = tl.maximum(tl.load(site + slot_one), tl.load(site + slot_two)).to(tl.int32)
    for chunk in range(0, tl.cdiv(rank, 16)):
        b_one = _load_b(weights_ptr, site, slot_one, chunk, columns_one, column_mask, slot_columns, CHUNKS)
        b_two = _load_b(weights_ptr, site, slot_two, chunk, columns_two, column_mask, slot_columns, CHUNKS)
        one = _add_low_rank(
            one, b_one, low_rank_ptr, stride_low_rank, stride_split, site, slot_one, chunk, rows, row_mask, BLOCK_M,
            CHUNKS, SPLIT_K, BLOCK_S,
        )  # fmt: skip
        two = _add_low_rank(
            two, b_two, low_rank_ptr, stride_low_rank, stride_split, site, slot_two, chunk, rows, row_mask, BLOCK_M,
            CHUNKS, SPLIT_K, BLOCK_S,
        )  # fmt: skip
    if COLUMNS:
        one = _scale_columns(one, weights_ptr, site, slot_one, columns_one, column_mask, slot_columns, CHUNKS)
        two = _scale_columns(two, weights_ptr, site, slot_two, columns_two, column_mask, slot_columns, CHUNKS)
    return one, two


@triton.jit
def _weight(part):
    return (part >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _shrink_rows_kernel(
    x_ptr,
    weights_ptr,
    sites_ptr,
    row_adapters_ptr,
    num_rows_ptr,
    low_rank_ptr,
    stride_x,
    stride_site,
    stride_low_rank,
    stride_split,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    STRIDES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, a share of the columns, and of a slot's chunks every STRIDES-th."""
    slot = tl.program_id(0) // STRIDES
    first_chunk = tl.program_id(0) % STRIDES
    split = tl.program_id(1)
    row = tl.program_id(2)
    is_there = row < tl.load(num_rows_ptr)
    site = sites_ptr + tl.load(row_adapters_ptr + row, mask=is_there, other=0).to(tl.int64) * stride_site
    rank = tl.load(site + slot).to(tl.int32)
    within = tl.arange(0, 16)
    ks = split * BLOCK_K + tl.arange(0, BLOCK_K)
    k_mask = ks < K
    out = low_rank_ptr + split * stride_split + row.to(tl.int64) * stride_low_rank + slot * (CHUNKS * 16)
    if PDL and rank <= first_chunk * 16:
        tl.extra.cuda.gdc_wait()
    for chunk in range(first_chunk, tl.cdiv(rank, 16), STRIDES):
        part = tl.load(site + 4 + (8 + slot) * CHUNKS + chunk)
        rank_mask = within < part.to(tl.int32)
        a_ptr = weights_ptr + tl.multiple_of(tl.load(site + 4 + slot * CHUNKS + chunk), 8)
        a = tl.load(a_ptr + within[:, None] * K + ks[None, :], mask=rank_mask[:, None] & k_mask[None, :], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr + row.to(tl.int64) * stride_x + ks, mask=k_mask, other=0.0).to(tl.float32)
        s = tl.sum(a.to(tl.float32) * x[None, :], 1) * _weight(part)
        tl.store(out + chunk * 16 + within, s, mask=within < rank - chunk * 16)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _shrink_tiles_kernel(
    x_ptr,
    weights_ptr,
    sites_ptr,
    tiles_ptr,
    low_rank_ptr,
    stride_x,
    stride_site,
    stride_low_rank,
    stride_split,
    K: tl.constexpr,
    K_OF_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(0)
    split = tl.program_id(1)
    first_row, num_rows, adapter = load_tile(tiles_ptr, tl.program_id(2))
    site = sites_ptr + adapter.to(tl.int64) * stride_site
    rank = tl.load(site + slot).to(tl.int32)
    offsets = tl.arange(0, BLOCK_M)
    rows = first_row + offsets
    row_mask = offsets < num_rows
    x_rows = x_ptr + rows[:, None].to(tl.int64) * stride_x
    within = tl.arange(0, 16)
    out = low_rank_ptr + split * stride_split + rows[:, None].to(tl.int64) * stride_low_rank + slot * (CHUNKS * 16)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_rows == 0:
        return
    for chunk in range(0, tl.cdiv(rank, 16)):
        part = tl.load(site + 4 + (8 + slot) * CHUNKS + chunk)
        rank_mask = within < part.to(tl.int32)
        a_rows = weights_ptr + tl.multiple_of(tl.load(site + 4 + slot * CHUNKS + chunk), 8) + within[:, None] * K
        acc = tl.zeros((BLOCK_M, 16), tl.float32)
        for k in range(split * K_OF_SPLIT, split * K_OF_SPLIT + K_OF_SPLIT, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            k_mask = ks < K
            x = tl.load(x_rows + ks[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0)
            a = tl.load(a_rows + ks[None, :], mask=rank_mask[:, None] & k_mask[None, :], other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        there = within < rank - chunk * 16
        tl.store(out + (chunk * 16 + within)[None, :], acc * _weight(part), mask=row_mask[:, None] & there[None, :])


_K_OF_SPLIT = 1024
_FEW_PROGRAMS_ROWS = 512  # up to so many rows a shrink has too few programs unless its inner dimension is split
_CHUNK_STRIDES = 2  # programs that share a row's chunks of a slot; 4: 2 % faster up to rank 64, 1 % slower for rank 16


def shrink_splits(in_features: int, rows: int) -> int:
    return triton.cdiv(in_features, _K_OF_SPLIT) if rows <= _FEW_PROGRAMS_ROWS else 1


def shrink(x: Tensor, lora: LoraRows, *, num_slots: int, num_rows: Tensor, pdl: bool) -> None:
    """low_rank[split, row, :] = x[row] A^T over the split's columns; the reader adds the splits up.

    Args:
        x: [rows, in], of the arena's dtype.
        lora: rows without an adapter are left as they are.
        num_rows: int32 scalar.
    """
    rows, in_features = x.shape
    splits = lora.low_rank.shape[0]
    if lora.num_tiles == 0:
        strides = min(_CHUNK_STRIDES, lora.chunks)
        assert in_features <= splits * _K_OF_SPLIT, "so many rows are computed by tile"
        _shrink_rows_kernel[(num_slots * strides, splits, rows)](
            x,
            lora.weights,
            lora.sites,
            lora.row_adapters,
            num_rows,
            lora.low_rank,
            x.stride(0),
            lora.sites.stride(0),
            lora.low_rank.stride(1),
            lora.low_rank.stride(0),
            K=in_features,
            BLOCK_K=_K_OF_SPLIT,
            CHUNKS=lora.chunks,
            STRIDES=strides,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
        return
    block_k = min(256, triton.next_power_of_2(in_features))
    _shrink_tiles_kernel[(num_slots, splits, lora.num_tiles)](
        x,
        lora.weights,
        lora.sites,
        lora.tiles,
        lora.low_rank,
        x.stride(0),
        lora.sites.stride(0),
        lora.low_rank.stride(1),
        lora.low_rank.stride(0),
        K=in_features,
        K_OF_SPLIT=triton.cdiv(triton.cdiv(in_features, splits), block_k) * block_k,
        BLOCK_M=TILE_ROWS,
        BLOCK_K=block_k,
        CHUNKS=lora.chunks,
        PDL=pdl,
        num_warps=4,
        num_stages=3,
        launch_pdl=pdl,
    )
