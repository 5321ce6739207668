"""From the fused q, k, v product to attention: LoRA, head norms, rotary embedding, in float32; keys and values go to
the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.cuda.kernels.attention import PagedLayout
from manylora_worker.models.cuda.kernels.gemm import load_product
from manylora_worker.models.cuda.kernels.lora import (
    TILE_ROWS,
    LoraRows,
    expand,
    expand_arguments,
    expand_pair,
    load_program,
    program_rows,
)


@triton.jit
def _store_kept(at, x, mask, factor, cuts_ptr, FP8: tl.constexpr):
    # as models/layers/fp8_codes.py
    if FP8:
        x = x * factor
        cut = tl.sum(tl.sum((mask & (tl.abs(x) > 448.0)).to(tl.int32), 1), 0)
        if cut > 0:
            tl.atomic_add(cuts_ptr, cut.to(tl.int64))
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    tl.store(at, x, mask=mask)


@triton.jit
def _store_head(
    at, one, two, rest, halves, rests, mask, both, factor, cuts_ptr, HALF: tl.constexpr, REST: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    _store_kept(at + halves[None, :], one, mask, factor, cuts_ptr, FP8)
    _store_kept(at + HALF + halves[None, :], two, mask, factor, cuts_ptr, FP8)
    if REST > 0:
        _store_kept(at + 2 * HALF + rests[None, :], rest, both, factor, cuts_ptr, FP8)


@triton.jit
def _kind_of(
    head, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KV_PRODUCTS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    # own_head: its number among queries, or gates
    is_query = head < NUM_HEADS
    is_gate = head >= NUM_HEADS + 2 * NUM_KV_HEADS
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (not is_gate)
    own_head = tl.where(is_gate, head - NUM_HEADS - 2 * NUM_KV_HEADS, head)
    place = head
    has_slot = is_value
    if GATED:  # a gate stands behind its query
        place = tl.where(is_query, 2 * head, tl.where(is_gate, 2 * own_head + 1, head + NUM_HEADS))
    if KV_PRODUCTS == 1:  # a value is made of what its key is made of
        place -= tl.where(is_value, NUM_KV_HEADS, 0)
        has_slot = head < 0
    return is_query, is_gate, is_value, own_head, place, has_slot


@triton.jit
def _angles(cos_ptr, sin_ptr, places, halves, mask, HALF: tl.constexpr):
    at = places[:, None].to(tl.int64) * HALF + halves[None, :]
    return tl.load(cos_ptr + at, mask=mask, other=1.0), tl.load(sin_ptr + at, mask=mask, other=0.0)


@triton.jit
def _load_head(
    at, more, halves, rests, mask, both, stride_part, HALF: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
    HAS_OUTPUTS: tl.constexpr,
):  # fmt: skip
    # without a rest the first half stands for it
    one = load_product(at + halves[None, :], stride_part, mask, PARTS)
    two = load_product(at + HALF + halves[None, :], stride_part, mask, PARTS)
    rest = one
    if REST > 0:
        rest = load_product(at + 2 * HALF + rests[None, :], stride_part, both, PARTS)
    if HAS_OUTPUTS:
        one += tl.load(more + halves[None, :], mask=mask, other=0.0).to(tl.float32)
        two += tl.load(more + HALF + halves[None, :], mask=mask, other=0.0).to(tl.float32)
        if REST > 0:
            rest += tl.load(more + 2 * HALF + rests[None, :], mask=both, other=0.0).to(tl.float32)
    return one, two, rest


@triton.jit
def _with_lora(
    one, two, rest, start, head, of_queries, has_slot, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site,
    rows, row_mask, halves, half_mask, rests, rest_mask, QUERIES: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr,
    NUM_SLOTS: tl.constexpr, CHUNKS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if NUM_SLOTS == 1:
        slot = head * 0
        column = start
        slot_columns = slot + WIDTH
    else:
        slot = tl.where(of_queries, 0, tl.where(has_slot, 2, 1))
        column = start - tl.where(of_queries, 0, tl.where(has_slot, QUERIES + NUM_KV_HEADS, QUERIES) * HEAD_DIM)
        slot_columns = tl.where(of_queries, QUERIES, NUM_KV_HEADS) * HEAD_DIM
    one, two = expand_pair(
        one, two, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, slot, slot, rows, row_mask,
        column + halves, column + HALF + halves, half_mask, slot_columns, BLOCK_M, CHUNKS, SPLIT_K, BLOCK_S, COLUMNS,
    )  # fmt: skip
    if REST > 0:
        rest = expand(
            rest, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, slot, rows, row_mask,
            column + 2 * HALF + rests, rest_mask, slot_columns, BLOCK_M, CHUNKS, SPLIT_K, BLOCK_S, COLUMNS,
        )  # fmt: skip
    return one, two, rest


@triton.jit
def _norm_scale(one, two, rest, eps, HEAD_DIM: tl.constexpr, REST: tl.constexpr):
    total = tl.sum(one * one, 1) + tl.sum(two * two, 1)
    if REST > 0:
        total += tl.sum(rest * rest, 1)
    return tl.rsqrt(total / HEAD_DIM + eps)[:, None]


@triton.jit
def _norm_weight(at, mask, WEIGHT_PLUS_ONE: tl.constexpr):
    weight = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT_PLUS_ONE:
        weight += 1.0
    return weight[None, :]


@triton.jit
def _normed(
    one, two, rest, weight_ptr, eps, halves, half_mask, rests, rest_mask, is_turned, is_value, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HEAD_NORM: tl.constexpr, WEIGHT_PLUS_ONE: tl.constexpr,
    VALUE_NORM: tl.constexpr,
):  # fmt: skip
    if HEAD_NORM:  # noqa: SIM102 (the one is a constant of the compilation, the other is not)
        if is_turned:
            scale = _norm_scale(one, two, rest, eps, HEAD_DIM, REST)
            one = one * scale * _norm_weight(weight_ptr + halves, half_mask, WEIGHT_PLUS_ONE)
            two = two * scale * _norm_weight(weight_ptr + HALF + halves, half_mask, WEIGHT_PLUS_ONE)
            if REST > 0:
                rest = rest * scale * _norm_weight(weight_ptr + 2 * HALF + rests, rest_mask, WEIGHT_PLUS_ONE)
    if VALUE_NORM:  # noqa: SIM102
        if is_value:
            scale = _norm_scale(one, two, rest, eps, HEAD_DIM, REST)
            one = one * scale
            two = two * scale
            if REST > 0:
                rest = rest * scale
    return one, two, rest


@triton.jit
def _gates_of(x, is_gate, GATED: tl.constexpr):
    if GATED:
        x = tl.where(is_gate, 1.0 / (1.0 + tl.exp(-x)), x)
    return x


@triton.jit
def _rotate_store_kernel(
    qkv_ptr, q_ptr, cache_ptr, tables_ptr, table_rows_ptr, positions_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    gates_ptr, query_scales_ptr, num_rows_ptr, cuts_ptr, outputs_ptr, tiles_ptr, row_adapters_ptr, low_rank_ptr,
    weights_ptr, sites_ptr, stride_part, stride_table, stride_block, stride_token, stride_kv, stride_head,
    stride_low_rank, stride_split, stride_site, eps, key_factor, value_factor, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, HEAD_NORM: tl.constexpr, WEIGHT_PLUS_ONE: tl.constexpr, VALUE_NORM: tl.constexpr,
    KV_PRODUCTS: tl.constexpr, GATED: tl.constexpr, ANGLES_BY_ROW: tl.constexpr, HAS_OUTPUTS: tl.constexpr,
    HAS_LORA: tl.constexpr, BY_TILE: tl.constexpr, NUM_SLOTS: tl.constexpr, CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr, QUERIES_SCALED: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of BLOCK_M rows: its rotated halves `one` and `two`, and the `rest` that is not rotated."""
    head = tl.program_id(0)
    first_row, count, adapter = load_program(
        tl.program_id(1), num_rows_ptr, tiles_ptr, row_adapters_ptr, BLOCK_M, BY_TILE, HAS_LORA
    )
    QUERIES: tl.constexpr = NUM_HEADS * (2 if GATED else 1)  # heads wide
    WIDTH: tl.constexpr = (QUERIES + KV_PRODUCTS * NUM_KV_HEADS) * HEAD_DIM
    is_query, is_gate, is_value, own_head, place, has_slot = _kind_of(head, NUM_HEADS, NUM_KV_HEADS, KV_PRODUCTS, GATED)
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    halves = tl.arange(0, BLOCK_HALF)
    half_mask = halves < HALF
    rows, row_mask, mask = program_rows(first_row, count, half_mask, BLOCK_M)
    rests = tl.arange(0, BLOCK_REST)
    rest_mask = rests < REST
    both = row_mask[:, None] & rest_mask[None, :]
    if PDL and HAS_LORA:
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions_ptr + rows, mask=row_mask, other=0)
    if not ANGLES_BY_ROW:
        cos, sin = _angles(cos_ptr, sin_ptr, position, halves, mask & is_turned, HALF)
    table = tl.load(table_rows_ptr + rows, mask=row_mask, other=0).to(tl.int64)
    block = tl.load(tables_ptr + table * stride_table + position // BLOCK_SIZE, mask=row_mask, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    if ANGLES_BY_ROW:  # behind the wait: they are this step's
        cos, sin = _angles(cos_ptr, sin_ptr, rows, halves, mask & is_turned, HALF)
    row_at = rows[:, None].to(tl.int64) * WIDTH + place * HEAD_DIM
    one, two, rest = _load_head(
        qkv_ptr + row_at, outputs_ptr + row_at, halves, rests, mask, both, stride_part, HALF, REST, PARTS, HAS_OUTPUTS
    )
    if HAS_LORA:
        one, two, rest = _with_lora(
            one, two, rest, place * HEAD_DIM, head, is_query | is_gate, has_slot, low_rank_ptr, stride_low_rank,
            stride_split, weights_ptr, sites_ptr + adapter.to(tl.int64) * stride_site, rows, row_mask, halves,
            half_mask, rests, rest_mask, QUERIES, NUM_KV_HEADS, HEAD_DIM, WIDTH, HALF, REST, BLOCK_M, NUM_SLOTS, CHUNKS,
            SPLIT_K, BLOCK_S, COLUMNS,
        )  # fmt: skip
    one, two, rest = _normed(
        one, two, rest, q_norm_ptr if is_query else k_norm_ptr, eps, halves, half_mask, rests, rest_mask, is_turned,
        is_value, HEAD_DIM, HALF, REST, HEAD_NORM, WEIGHT_PLUS_ONE, VALUE_NORM,
    )  # fmt: skip
    one, two = one * cos - two * sin, two * cos + one * sin
    if QUERIES_SCALED:
        scale = tl.load(query_scales_ptr + position, mask=row_mask & is_query, other=1.0)[:, None]
        one, two, rest = one * scale, two * scale, rest * scale
    one, two, rest = _gates_of(one, is_gate, GATED), _gates_of(two, is_gate, GATED), _gates_of(rest, is_gate, GATED)
    if is_query | is_gate:
        out = q_ptr
        if GATED:
            out = tl.where(is_gate, gates_ptr, q_ptr)
        out += rows[:, None].to(tl.int64) * (NUM_HEADS * HEAD_DIM) + own_head * HEAD_DIM
        _store_head(out, one, two, rest, halves, rests, mask, both, 1.0, cuts_ptr, HALF, REST, False)
    else:
        kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
        token = block.to(tl.int64) * stride_block + (position % BLOCK_SIZE) * stride_token
        kv = cache_ptr + token[:, None] + tl.where(is_value, stride_kv, 0) + kv_head * stride_head
        factor = tl.where(is_value, value_factor, key_factor)
        _store_head(kv, one, two, rest, halves, rests, mask, both, factor, cuts_ptr, HALF, REST, FP8)


def rotate_store(
    qkv: Tensor,
    q: Tensor,
    cache: Tensor,
    *,
    tables: Tensor,
    table_rows: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    weight_plus_one: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layout: PagedLayout,
    num_rows: Tensor,
    lora: LoraRows | None,
    num_slots: int,
    kv_products: int = 2,
    norms_values: bool = False,
    angles_by_row: bool = False,
    gates: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    cuts: Tensor | None = None,
    query_scales: Tensor | None = None,
    pdl: bool,
) -> None:
    """Args:
    qkv: [parts, rows, (heads + kv_products * kv heads) * head_dim], from gemm.linear.
    q: [rows, heads * head_dim], written.
    cache: the arena from the layer's first element on, written.
    tables, table_rows, positions: see attention.py.
    cos, sin: float32 [positions, rotated / 2], or [rows, rotated / 2] where `angles_by_row`; a dimension pairs with the
        one half a rotation on.
    num_rows: int32 scalar; rows behind it are left alone.
    scales: see attention.py. cuts: int64 [1], to which what no code of FP8 is large enough for is added.
    lora: of the projection, with `num_slots` 1 + kv_products (q, k, v) or 1 (a family that fuses them itself).
    kv_products: 1: a value is its key before norm and rotation; 0: nothing is stored.
    norms_values: by head, without a weight.
    query_scales: float32 [positions], of queries once they are rotated.
    gates: as `q`, written where each query's gate stands behind it (and keys are made): that gate's sigmoid.
    """
    rows = qkv.shape[1]
    num_all_heads = num_heads * (1 if gates is None else 2) + (2 * num_kv_heads if kv_products else 0)
    outputs = None if lora is None else lora.outputs
    lora = lora if outputs is None else None
    by_tile = lora is not None and lora.num_tiles > 0
    if by_tile:
        block_m = TILE_ROWS
    elif lora is not None:
        block_m = 1
    else:  # programs of one head and one row are small: not more of them than keep the device busy
        block_m = min(16, triton.next_power_of_2(max(1, rows * num_all_heads // 2048)))
    half = cos.shape[1]
    rest = head_dim - 2 * half
    any_tensor = qkv
    head_norm = any_tensor if q_norm is None else q_norm
    grid = (num_all_heads, lora.num_tiles if lora is not None and by_tile else triton.cdiv(rows, block_m))
    _rotate_store_kernel[grid](
        qkv, q, cache, tables, table_rows, positions, cos, sin, head_norm, head_norm if k_norm is None else k_norm,
        q if gates is None else gates, query_scales, num_rows, num_rows if cuts is None else cuts,
        any_tensor if outputs is None else outputs,
        **expand_arguments(lora, num_rows), tiles_ptr=num_rows if lora is None else lora.tiles,
        stride_part=qkv.stride(0), stride_table=tables.stride(0), stride_block=layout.stride_block,
        stride_token=layout.stride_token, stride_kv=layout.stride_kv, stride_head=layout.stride_head, eps=eps,
        key_factor=1 / scales[0], value_factor=1 / scales[1], NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, HALF=half,
        BLOCK_HALF=max(16, triton.next_power_of_2(half)), REST=rest,
        BLOCK_REST=max(16, triton.next_power_of_2(max(rest, 1))), BLOCK_SIZE=layout.block_size, BLOCK_M=block_m,
        PARTS=qkv.shape[0], HEAD_NORM=q_norm is not None, WEIGHT_PLUS_ONE=weight_plus_one,
        VALUE_NORM=norms_values, KV_PRODUCTS=kv_products, GATED=gates is not None, ANGLES_BY_ROW=angles_by_row,
        HAS_OUTPUTS=outputs is not None, BY_TILE=by_tile, NUM_SLOTS=num_slots,
        QUERIES_SCALED=query_scales is not None, FP8=cache.dtype.itemsize == 1, PDL=pdl,
        num_warps=1 if block_m <= 2 or (by_tile and head_dim <= 256) else 4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _row_angles_kernel(
    positions_ptr, row_adapters_ptr, num_rows_ptr, ropes_ptr, cos_ptr, sin_ptr, cos_rows_ptr, sin_rows_ptr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    halves = tl.arange(0, BLOCK_HALF)
    mask = halves < HALF
    position = tl.load(positions_ptr + row)
    own = ropes_ptr + tl.load(row_adapters_ptr + row).to(tl.int64) * (HALF + 1)
    factor = tl.load(own + HALF)
    if factor != 0.0:
        angle = position.to(tl.float32) * tl.load(own + halves, mask=mask, other=0.0)
        cos = tl.cos(angle) * factor
        sin = tl.sin(angle) * factor
    else:
        at = position.to(tl.int64) * HALF + halves
        cos = tl.load(cos_ptr + at, mask=mask, other=1.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    out = row.to(tl.int64) * HALF + halves
    tl.store(cos_rows_ptr + out, cos, mask=mask)
    tl.store(sin_rows_ptr + out, sin, mask=mask)


def row_angles(
    cos_rows: Tensor,
    sin_rows: Tensor,
    *,
    positions: Tensor,
    row_adapters: Tensor,
    ropes: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_rows: Tensor,
) -> None:
    """Once a step, so that rows whose adapters rotate in their own way cost the layers nothing.

    Args:
        cos_rows, sin_rows: float32 [rows, rotated / 2], written.
        ropes: float32 [adapter slots, rotated / 2 + 1]: an adapter's own frequencies, and the factor of what they give;
            0: it has none, and the row's angles are those of its position in `cos` and `sin`.
    """
    rows, half = cos_rows.shape
    _row_angles_kernel[(rows,)](
        positions, row_adapters, num_rows, ropes, cos, sin, cos_rows, sin_rows,
        HALF=half, BLOCK_HALF=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
