"""What stands between the matrix products of a decoder layer, one kernel each, with the adapters' expand fused in.

`add_norm`      residual += delta (+ LoRA), through an RMSNorm before and after as the family has it
`rotate_store`  q, k, v (+ LoRA), head norms, rotary embedding; keys and values go to the paged cache
`gate`          activation(gate) * up (+ LoRA on both)

All arithmetic is in float32 and rounds once, when it is stored. Rows beyond `num_rows` (a device scalar: a captured
graph serves every batch up to its bucket) are left alone.

With `pdl` (programmatic dependent launch, Hopper) a kernel may start while the one before it ends: what it reads of
weights and tables comes before its gdc_wait, what that kernel made after it. Every program waits, those without work
too: a kernel that ended before its predecessor would let its successor run ahead of both. With LoRA the wait comes
first: reading ahead then takes more registers than it saves time (measured on an H200).
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.kernels.attention import PagedLayout
from manylora_worker.kernels.lora import TILE_ROWS, LoraRows, expand, expand_pair, load_tile

Activation = Literal["silu", "gelu_tanh"]


@triton.jit
def _load_base(at, stride_part, mask, PARTS: tl.constexpr):
    """A product's result, its parts added up (see gemm.linear)."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(at + part * stride_part, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _add_norm_kernel(
    delta_ptr,
    residual_ptr,
    out_ptr,
    post_weight_ptr,
    pre_weight_ptr,
    num_rows_ptr,
    counters_ptr,
    row_adapters_ptr,
    low_rank_ptr,
    weights_ptr,
    sites_ptr,
    stride_part,
    stride_low_rank,
    stride_split,
    stride_site,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_POST: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    HAS_LORA: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    BLOCK_P: tl.constexpr = BLOCK_N // PIECES
    columns = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = columns < N
    row_at = row.to(tl.int64) * N
    at = row_at + columns
    is_there = row < tl.load(num_rows_ptr)
    all_columns = tl.arange(0, BLOCK_N)
    all_mask = all_columns < N
    pre_weight = tl.load(pre_weight_ptr + all_columns, mask=all_mask, other=0.0).to(tl.float32)
    if WEIGHT_PLUS_ONE:
        pre_weight += 1.0
    if PDL and HAS_LORA:
        tl.extra.cuda.gdc_wait()
    if HAS_DELTA:
        # Written by a kernel before the one that made delta, and that one waited: it may be read now.
        residual = tl.load(residual_ptr + at, mask=mask & is_there, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not is_there:
        return
    if HAS_DELTA:
        delta = _load_base(delta_ptr + at, stride_part, mask, PARTS)
        if HAS_LORA:
            site = sites_ptr + tl.load(row_adapters_ptr + row).to(tl.int64) * stride_site
            rows = row + tl.arange(0, 1)
            delta = expand(
                delta[None, :], low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, 0, rows, rows >= 0,
                columns, mask, N, 1, CHUNKS, SPLIT_K, BLOCK_S,
            )  # fmt: skip
            delta = tl.sum(delta, 0)
        if HAS_POST:
            scale = tl.rsqrt(tl.sum(delta * delta, 0) / N + eps)
            weight = tl.load(post_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            if WEIGHT_PLUS_ONE:
                weight += 1.0
            delta = delta * scale * weight
        residual += delta
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
    scale = tl.rsqrt(tl.sum(rounded * rounded, 0) / N + eps)
    tl.store(out_ptr + row_at + all_columns, rounded * scale * pre_weight, mask=all_mask)


def add_norm(
    delta: Tensor | None,
    residual: Tensor,
    out: Tensor,
    *,
    post_weight: Tensor | None,
    pre_weight: Tensor,
    eps: float,
    weight_plus_one: bool,
    num_rows: Tensor,
    counters: Tensor,
    lora: LoraRows | None,
    pdl: bool,
) -> None:
    """residual += post_norm(delta + LoRA); out = pre_norm(residual). A post-norm without a weight is left out.

    Args:
        delta: [parts, rows, hidden], from gemm.linear.
        residual, out: [rows, hidden], contiguous.
        num_rows: int32 scalar tensor.
        counters: int32 [rows], zero; left zero.
        lora: of the product that made `delta` (a site of one slot).
    """
    rows, hidden = residual.shape
    block_n = triton.next_power_of_2(hidden)
    # An adapter's B is more than one processor reads quickly: four share a row, while rows are few.
    pieces = 4 if lora is not None and rows <= 512 and post_weight is None and block_n >= 2048 else 1
    num_warps = max(1, min(8, block_n // 512))
    if lora is not None:
        num_warps = max(1, min(16, block_n // pieces // 256))
    _add_norm_kernel[(rows, pieces)](
        residual if delta is None else delta,
        residual,
        out,
        residual if post_weight is None else post_weight,
        pre_weight,
        num_rows,
        counters,
        num_rows if lora is None else lora.row_adapters,
        residual if lora is None else lora.low_rank,
        residual if lora is None else lora.weights,
        num_rows if lora is None else lora.sites,
        0 if delta is None else delta.stride(0),
        0 if lora is None else lora.low_rank.stride(1),
        0 if lora is None else lora.low_rank.stride(0),
        0 if lora is None else lora.sites.stride(0),
        eps,
        N=hidden,
        BLOCK_N=block_n,
        PIECES=pieces,
        PARTS=1 if delta is None else delta.shape[0],
        HAS_DELTA=delta is not None,
        HAS_POST=post_weight is not None,
        WEIGHT_PLUS_ONE=weight_plus_one,
        HAS_LORA=lora is not None,
        CHUNKS=1 if lora is None else lora.chunks,
        SPLIT_K=1 if lora is None else lora.low_rank.shape[0],
        BLOCK_S=1 if lora is None else triton.next_power_of_2(lora.low_rank.shape[0]),
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )


@triton.jit
def _rotate_store_kernel(
    qkv_ptr,
    q_ptr,
    cache_ptr,
    tables_ptr,
    table_rows_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    num_rows_ptr,
    tiles_ptr,
    row_adapters_ptr,
    low_rank_ptr,
    weights_ptr,
    sites_ptr,
    stride_part,
    stride_table,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    stride_low_rank,
    stride_split,
    stride_site,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    HAS_LORA: tl.constexpr,
    BY_TILE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of BLOCK_M rows: its rotated halves `one` and `two`, and the `rest` that is not rotated."""
    head = tl.program_id(0)
    if BY_TILE:
        first_row, count, adapter = load_tile(tiles_ptr, tl.program_id(1))
    else:
        first_row = tl.program_id(1) * BLOCK_M
        count = tl.minimum(tl.load(num_rows_ptr) - first_row, BLOCK_M)
        if HAS_LORA:
            adapter = tl.load(row_adapters_ptr + first_row, mask=count > 0, other=0)
    offsets = tl.arange(0, BLOCK_M)
    rows = first_row + offsets
    row_mask = offsets < count
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    start = head * HEAD_DIM
    halves = tl.arange(0, BLOCK_HALF)
    half_mask = halves < HALF
    mask = row_mask[:, None] & half_mask[None, :]
    rests = tl.arange(0, BLOCK_REST)
    rest_mask = rests < REST
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    if PDL and HAS_LORA:
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions_ptr + rows, mask=row_mask, other=0)
    angle = position[:, None].to(tl.int64) * HALF + halves[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask & (not is_value), other=1.0)
    sin = tl.load(sin_ptr + angle, mask=mask & (not is_value), other=0.0)
    table = tl.load(table_rows_ptr + rows, mask=row_mask, other=0).to(tl.int64)
    block = tl.load(tables_ptr + table * stride_table + position // BLOCK_SIZE, mask=row_mask, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    at = qkv_ptr + rows[:, None].to(tl.int64) * WIDTH + start
    one = _load_base(at + halves[None, :], stride_part, mask, PARTS)
    two = _load_base(at + HALF + halves[None, :], stride_part, mask, PARTS)
    if REST > 0:
        both = row_mask[:, None] & rest_mask[None, :]
        rest = _load_base(at + 2 * HALF + rests[None, :], stride_part, both, PARTS)
    if HAS_LORA:
        site = sites_ptr + adapter.to(tl.int64) * stride_site
        if NUM_SLOTS == 1:
            slot = head * 0
            column = start
            slot_columns = slot + WIDTH
        else:
            slot = tl.where(is_query, 0, tl.where(is_value, 2, 1))
            column = start - tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS) * HEAD_DIM)
            slot_columns = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS) * HEAD_DIM
        one, two = expand_pair(
            one, two, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, slot, slot, rows, row_mask,
            column + halves, column + HALF + halves, half_mask, slot_columns, BLOCK_M, CHUNKS, SPLIT_K, BLOCK_S,
        )  # fmt: skip
        if REST > 0:
            rest = expand(
                rest, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, slot, rows, row_mask,
                column + 2 * HALF + rests, rest_mask, slot_columns, BLOCK_M, CHUNKS, SPLIT_K, BLOCK_S,
            )  # fmt: skip
    if HEAD_NORM:  # noqa: SIM102 (the one is a constant of the compilation, the other is not)
        if head < NUM_HEADS + NUM_KV_HEADS:
            total = tl.sum(one * one, 1) + tl.sum(two * two, 1)
            if REST > 0:
                total += tl.sum(rest * rest, 1)
            scale = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
            weight_ptr = q_norm_ptr if is_query else k_norm_ptr
            w_one = tl.load(weight_ptr + halves, mask=half_mask, other=0.0).to(tl.float32)
            w_two = tl.load(weight_ptr + HALF + halves, mask=half_mask, other=0.0).to(tl.float32)
            if WEIGHT_PLUS_ONE:
                w_one += 1.0
                w_two += 1.0
            one = one * scale * w_one[None, :]
            two = two * scale * w_two[None, :]
            if REST > 0:
                w_rest = tl.load(weight_ptr + 2 * HALF + rests, mask=rest_mask, other=0.0).to(tl.float32)
                if WEIGHT_PLUS_ONE:
                    w_rest += 1.0
                rest = rest * scale * w_rest[None, :]
    turned = one * cos - two * sin
    two = two * cos + one * sin
    one = turned
    if is_query:
        out = q_ptr + rows[:, None].to(tl.int64) * (NUM_HEADS * HEAD_DIM) + start
        tl.store(out + halves[None, :], one, mask=mask)
        tl.store(out + HALF + halves[None, :], two, mask=mask)
        if REST > 0:
            tl.store(out + 2 * HALF + rests[None, :], rest, mask=row_mask[:, None] & rest_mask[None, :])
    else:
        kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
        token = block.to(tl.int64) * stride_block + (position % BLOCK_SIZE) * stride_token
        kv = cache_ptr + token[:, None] + tl.where(is_value, stride_kv, 0) + kv_head * stride_head
        tl.store(kv + halves[None, :], one, mask=mask)
        tl.store(kv + HALF + halves[None, :], two, mask=mask)
        if REST > 0:
            tl.store(kv + 2 * HALF + rests[None, :], rest, mask=row_mask[:, None] & rest_mask[None, :])


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
    pdl: bool,
) -> None:
    """From the fused projection to rotated queries in `q` and keys and values in the cache.

    Args:
        qkv: [parts, rows, (heads + 2 kv heads) * head_dim], from gemm.linear.
        q: [rows, heads * head_dim], written.
        cache: the arena from the layer's first element on.
        tables, table_rows, positions: which token of which sequence a row is; see attention.py.
        cos, sin: float32 [positions, rotated / 2]; the rotation pairs a dimension with the one half a rotation on.
        lora: of the projection, with `num_slots` 3 (q, k, v) or 1 (a family that fuses them itself).
    """
    rows = qkv.shape[1]
    num_all_heads = num_heads + 2 * num_kv_heads
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
    grid = (num_all_heads, lora.num_tiles if lora is not None and by_tile else triton.cdiv(rows, block_m))
    _rotate_store_kernel[grid](
        qkv,
        q,
        cache,
        tables,
        table_rows,
        positions,
        cos,
        sin,
        any_tensor if q_norm is None else q_norm,
        any_tensor if k_norm is None else k_norm,
        num_rows,
        num_rows if lora is None else lora.tiles,
        num_rows if lora is None else lora.row_adapters,
        any_tensor if lora is None else lora.low_rank,
        any_tensor if lora is None else lora.weights,
        num_rows if lora is None else lora.sites,
        qkv.stride(0),
        tables.stride(0),
        layout.stride_block,
        layout.stride_token,
        layout.stride_kv,
        layout.stride_head,
        0 if lora is None else lora.low_rank.stride(1),
        0 if lora is None else lora.low_rank.stride(0),
        0 if lora is None else lora.sites.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=max(16, triton.next_power_of_2(half)),
        REST=rest,
        BLOCK_REST=max(16, triton.next_power_of_2(max(rest, 1))),
        BLOCK_SIZE=layout.block_size,
        BLOCK_M=block_m,
        PARTS=qkv.shape[0],
        HEAD_NORM=q_norm is not None,
        WEIGHT_PLUS_ONE=weight_plus_one,
        HAS_LORA=lora is not None,
        BY_TILE=by_tile,
        NUM_SLOTS=num_slots,
        CHUNKS=1 if lora is None else lora.chunks,
        SPLIT_K=1 if lora is None else lora.low_rank.shape[0],
        BLOCK_S=1 if lora is None else triton.next_power_of_2(lora.low_rank.shape[0]),
        PDL=pdl,
        num_warps=1 if block_m <= 2 or by_tile else 4,
        launch_pdl=pdl,
    )


@triton.jit
def _gate_kernel(
    gate_up_ptr,
    out_ptr,
    num_rows_ptr,
    tiles_ptr,
    row_adapters_ptr,
    low_rank_ptr,
    weights_ptr,
    sites_ptr,
    stride_low_rank,
    stride_split,
    stride_site,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GELU: tl.constexpr,
    HAS_LORA: tl.constexpr,
    BY_TILE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    if BY_TILE:
        first_row, count, adapter = load_tile(tiles_ptr, tl.program_id(1))
    else:
        first_row = tl.program_id(1) * BLOCK_M
        count = tl.minimum(tl.load(num_rows_ptr) - first_row, BLOCK_M)
        if HAS_LORA:
            adapter = tl.load(row_adapters_ptr + first_row, mask=count > 0, other=0)
    offsets = tl.arange(0, BLOCK_M)
    rows = first_row + offsets
    row_mask = offsets < count
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    mask = row_mask[:, None] & column_mask[None, :]
    at = gate_up_ptr + rows[:, None].to(tl.int64) * (2 * N) + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=mask, other=0.0).to(tl.float32)
    if HAS_LORA:
        site = sites_ptr + adapter.to(tl.int64) * stride_site
        # A family that fuses gate and up itself has one slot with the columns of both.
        UP_SLOT: tl.constexpr = 0 if NUM_SLOTS == 1 else 1
        UP_COLUMN: tl.constexpr = N if NUM_SLOTS == 1 else 0
        SLOT_COLUMNS: tl.constexpr = 2 * N if NUM_SLOTS == 1 else N
        gate, up = expand_pair(
            gate, up, low_rank_ptr, stride_low_rank, stride_split, weights_ptr, site, 0, UP_SLOT, rows, row_mask,
            columns, columns + UP_COLUMN, column_mask, SLOT_COLUMNS, BLOCK_M, CHUNKS, SPLIT_K, BLOCK_S,
        )  # fmt: skip
    if GELU:
        # tanh(z) = 1 - 2 / (exp(2 z) + 1), which is right at both ends of the range
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], activated * up, mask=mask)


def gate(
    gate_up: Tensor,
    out: Tensor,
    *,
    activation: Activation,
    num_rows: Tensor,
    lora: LoraRows | None,
    num_slots: int,
    pdl: bool,
) -> None:
    """out = activation(gate) * up, both with their LoRA.

    Args:
        gate_up: [rows, 2 * width], the gate's columns first.
        out: [rows, width], written.
        lora: of the projection, with `num_slots` 2 (gate, up) or 1 (a family that fuses them itself).
    """
    rows, width = out.shape
    by_tile = lora is not None and lora.num_tiles > 0
    block_m = TILE_ROWS if by_tile else 1
    if by_tile:
        block_n, num_warps = (512, 8) if rows <= 512 else (128, 4)
    else:
        block_n, num_warps = (1024, 4) if lora is None else (512, 2)
    block_n = min(block_n, triton.next_power_of_2(width))
    any_tensor = gate_up
    grid = (triton.cdiv(width, block_n), lora.num_tiles if lora is not None and by_tile else rows)
    _gate_kernel[grid](
        gate_up,
        out,
        num_rows,
        num_rows if lora is None else lora.tiles,
        num_rows if lora is None else lora.row_adapters,
        any_tensor if lora is None else lora.low_rank,
        any_tensor if lora is None else lora.weights,
        num_rows if lora is None else lora.sites,
        0 if lora is None else lora.low_rank.stride(1),
        0 if lora is None else lora.low_rank.stride(0),
        0 if lora is None else lora.sites.stride(0),
        N=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        GELU=activation == "gelu_tanh",
        HAS_LORA=lora is not None,
        BY_TILE=by_tile,
        NUM_SLOTS=num_slots,
        CHUNKS=1 if lora is None else lora.chunks,
        SPLIT_K=1 if lora is None else lora.low_rank.shape[0],
        BLOCK_S=1 if lora is None else triton.next_power_of_2(lora.low_rank.shape[0]),
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
