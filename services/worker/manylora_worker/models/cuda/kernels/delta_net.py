"""A gated delta net, or Mamba 2, between its two products: a short causal convolution, a rule by token, a gated norm.

Source: Gated Delta Networks (Yang et al., 2024); Mamba's is in layers/mamba.py. States stand in the first blocks of
their sequences' tables (layers/recurrence.py), and are read and written in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from manylora_worker.models.layers.delta_net import NORM_EPS
from manylora_worker.models.layers.recurrent import RecurrentShape

SEQUENCE_FIELDS = 4
_MANY_PROGRAMS = 2048  # of wide parts of a state: they hide each other's waits
_WIDE, _NARROW = 16, 8  # columns of values of one program; of 32 a thread's part of a state would not fit its registers


@dataclass(frozen=True)
class StateLayout:
    """In float32. A sequence's blocks seen as one row have its layers' parts one after the other: matrices, then the
    window.
    """

    blocks: Tensor  # the arena, flat
    block_elements: int
    layer_elements: int


# Formats: `product` is [rows, channels + values + 2 * value heads]: queries, keys, values; the gates of the norm; beta
# and decay as they come from the product. Mamba's is [rows, values + channels + value heads]: the gates; values, keys,
# queries; the step, which is its beta and its decay. `sequences` is int32 [n, 4]: first row, rows (0: unused), position
# of the first row, its sequence in `tables`.
@triton.jit
def _in_blocks(states_ptr, table_ptr, elements, mask, BLOCK: tl.constexpr):
    blocks = tl.load(table_ptr + elements // BLOCK, mask=mask, other=0).to(tl.int64)
    return states_ptr + blocks * BLOCK + elements % BLOCK


@triton.jit
def _convolve_kernel(
    product_ptr, out_ptr, gates_ptr, weight_ptr, bias_ptr, decay_ptr, decay_bias_ptr, states_ptr, tables_ptr,
    table_rows_ptr, positions_ptr, offsets_ptr, num_rows_ptr, first_element, stride_product, stride_table, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SCALE: tl.constexpr,
    MAMBA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of queries, keys or values of one row."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    within = tl.arange(0, BLOCK_C)
    mask = within < tl.where(is_value, VALUE_DIM, KEY_DIM)
    if MAMBA:
        key_at = VALUES + tl.where(head < KEY_HEADS, KEYS + head * KEY_DIM, (head - KEY_HEADS) * KEY_DIM)
        channels = tl.where(is_value, value_head * VALUE_DIM, key_at) + within
    else:
        channels = tl.where(is_value, 2 * KEYS + value_head * VALUE_DIM, head * KEY_DIM) + within
    weight_at = weight_ptr + channels * (WINDOW + 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= tl.load(num_rows_ptr):
        return
    offset = tl.load(offsets_ptr + row)
    has_state = tl.load(positions_ptr + row) > offset  # the sequence's first row of this step is not its first token
    table_ptr = tables_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * stride_table
    row_at = product_ptr + row.to(tl.int64) * stride_product
    at = row_at + channels
    if MAMBA:
        at += VALUES
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    total *= tl.load(weight_at + WINDOW, mask=mask, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WINDOW + 1):
        is_here = mask & (back <= offset)
        is_old = mask & (back > offset) & has_state
        elements = first_element + VALUE_HEADS * KEY_DIM * VALUE_DIM + channels * WINDOW + (WINDOW - back + offset)
        old = tl.load(_in_blocks(states_ptr, table_ptr, elements, is_old, BLOCK), mask=is_old, other=0.0)
        seen = tl.load(at - back * stride_product, mask=is_here, other=0.0).to(tl.float32) + old
        total += seen * tl.load(weight_at + WINDOW - back, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    total = total.to(product_ptr.dtype.element_ty).to(tl.float32)
    if is_value:
        beta = 0.0
        step_at = row_at + CHANNELS + VALUES + value_head
        if not MAMBA:
            beta = tl.load(step_at).to(tl.float32)
            step_at += VALUE_HEADS
        step = tl.load(step_at).to(tl.float32)
        step += tl.load(decay_bias_ptr + value_head).to(tl.float32)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
        decay = tl.exp(-tl.exp(tl.load(decay_ptr + value_head).to(tl.float32)) * step)
        gate_at = gates_ptr + (row * VALUE_HEADS + value_head) * 2
        tl.store(gate_at, decay)
        tl.store(gate_at + 1, step if MAMBA else 1.0 / (1.0 + tl.exp(-beta)))
    elif not MAMBA:
        scale = tl.rsqrt(tl.sum(total * total, 0) + eps)
        total *= tl.where(head < KEY_HEADS, scale * SCALE, scale)
    tl.store(out_ptr + row.to(tl.int64) * CHANNELS + channels, total, mask=mask)


def convolve(
    product: Tensor,
    out: Tensor,
    gates: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    decay: Tensor,
    decay_bias: Tensor,
    shape: RecurrentShape,
    states: StateLayout,
    layer: int,
    tables: Tensor,
    table_rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    num_rows: Tensor,
    pdl: bool,
) -> None:
    """Args:
    out: float32 [rows, channels], written: queries and keys of length 1, the queries scaled; Mamba's as they are.
    gates: float32 [rows, value heads, 2], written: the decay, and beta or the step.
    weight: [channels, 1, window + 1]. bias: [channels].
    decay, decay_bias: [value heads], the former as a logarithm of what is taken off in a step.
    layer: among those that keep a state.
    offsets: int32 [rows]: how many rows of its sequence the step has before a row.
    """
    rows = product.shape[0]
    _convolve_kernel[(rows, 2 * shape.key_heads + shape.value_heads)](
        product, out, gates, weight, weight if bias is None else bias, decay, decay_bias, states.blocks, tables,
        table_rows, positions, offsets, num_rows, layer * states.layer_elements, product.stride(0), tables.stride(0),
        NORM_EPS, KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, WINDOW=shape.window,
        BLOCK_C=max(32, triton.next_power_of_2(max(shape.key_dim, shape.value_dim))), BLOCK=states.block_elements,
        HAS_BIAS=bias is not None, SCALE=shape.key_dim**-0.5, MAMBA=shape.is_mamba, PDL=pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _delta_rule_kernel(
    convolved_ptr, gates_ptr, product_ptr, out_ptr, skip_ptr, states_ptr, tables_ptr, sequences_ptr, first_element,
    stride_product, stride_table, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, WHOLE_ROWS: tl.constexpr, MAMBA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's matrix, over all rows that the step has of one sequence; and a share of its window."""
    head = tl.program_id(0) // SLICES
    part = tl.program_id(0) % SLICES
    entry = sequences_ptr + tl.program_id(1) * 4
    first_row = tl.load(entry)
    count = tl.load(entry + 1)
    has_state = tl.load(entry + 2) > 0
    table_ptr = tables_ptr + tl.load(entry + 3).to(tl.int64) * stride_table
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    ks = tl.arange(0, BLOCK_K)
    vs = part * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask = ks < KEY_DIM
    v_mask = vs < VALUE_DIM
    both = k_mask[:, None] & v_mask[None, :]
    starts = first_element + (head * KEY_DIM + ks) * VALUE_DIM
    if WHOLE_ROWS:  # no row of a matrix is cut by a block's edge
        row_at = _in_blocks(states_ptr, table_ptr, starts, k_mask & (count > 0), BLOCK)
        at = row_at[:, None] + vs[None, :]
    else:
        at = _in_blocks(states_ptr, table_ptr, starts[:, None] + vs[None, :], both & (count > 0), BLOCK)
    # What earlier steps left does not depend on the kernel before.
    state = tl.load(at, mask=both & has_state & (count > 0), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if count == 0:
        return
    row = convolved_ptr + first_row.to(tl.int64) * CHANNELS
    q_at = row + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + ks
    v_at = row + head * VALUE_DIM + vs
    TO_KEYS: tl.constexpr = -KEYS if MAMBA else KEYS
    skip = 0.0
    if MAMBA:
        q_at += VALUE_HEADS * VALUE_DIM + KEYS
        skip = tl.load(skip_ptr + head).to(tl.float32)
    else:
        v_at += 2 * KEYS
    gate_at = gates_ptr + (first_row * VALUE_HEADS + head) * 2
    out_at = out_ptr + first_row.to(tl.int64) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + vs
    q = tl.load(q_at, mask=k_mask, other=0.0)
    k = tl.load(q_at + TO_KEYS, mask=k_mask, other=0.0)
    v = tl.load(v_at, mask=v_mask, other=0.0)
    decay = tl.load(gate_at)
    beta = tl.load(gate_at + 1)
    for index in range(0, count):
        # the next token's are under way meanwhile
        is_more = index + 1 < count
        q_at += CHANNELS
        v_at += CHANNELS
        gate_at += 2 * VALUE_HEADS
        next_q = tl.load(q_at, mask=k_mask & is_more, other=0.0)
        next_k = tl.load(q_at + TO_KEYS, mask=k_mask & is_more, other=0.0)
        next_v = tl.load(v_at, mask=v_mask & is_more, other=0.0)
        next_decay = tl.load(gate_at, mask=is_more, other=0.0)
        next_beta = tl.load(gate_at + 1, mask=is_more, other=0.0)
        state *= decay
        change = v if MAMBA else v - tl.sum(state * k[:, None], 0)
        change *= beta
        answer = tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * change
        if MAMBA:
            answer += skip * v
        state += k[:, None] * change[None, :]
        tl.store(out_at, answer, mask=v_mask)
        out_at += VALUE_HEADS * VALUE_DIM
        q = next_q
        k = next_k
        v = next_v
        decay = next_decay
        beta = next_beta
    tl.store(at, state, mask=both)
    # The window's share: each channel is one thread's, which reads a place before it is written.
    SHARE: tl.constexpr = (CHANNELS + VALUE_HEADS * SLICES - 1) // (VALUE_HEADS * SLICES)
    within = tl.arange(0, BLOCK_C)
    channels = tl.program_id(0) * SHARE + within
    mask = (within < SHARE) & (channels < CHANNELS)
    last_at = product_ptr + (first_row + count - 1).to(tl.int64) * stride_product + channels
    if MAMBA:
        last_at += VALUE_HEADS * VALUE_DIM
    window = first_element + VALUE_HEADS * KEY_DIM * VALUE_DIM + channels * WINDOW
    for place in tl.static_range(0, WINDOW):
        back = WINDOW - 1 - place
        is_here = mask & (back < count)
        is_old = mask & (back >= count) & has_state
        old = tl.load(_in_blocks(states_ptr, table_ptr, window + place + count, is_old, BLOCK), mask=is_old, other=0.0)
        seen = tl.load(last_at - back * stride_product, mask=is_here, other=0.0).to(tl.float32) + old
        tl.store(_in_blocks(states_ptr, table_ptr, window + place, mask, BLOCK), seen, mask=mask)


def delta_rule(
    convolved: Tensor,
    gates: Tensor,
    product: Tensor,
    out: Tensor,
    *,
    shape: RecurrentShape,
    states: StateLayout,
    layer: int,
    tables: Tensor,
    sequences: Tensor,
    num_sequences: int,
    skip: Tensor | None = None,
    pdl: bool,
) -> None:
    """Each sequence's rows one after the other; its state moves on.

    Args:
        convolved, gates: see `convolve`.
        product: what was convolved, for the next window.
        out: float32 [rows, value heads * value_dim], written.
        num_sequences: entries of `sequences` to look at.
        skip: [value heads], Mamba's D.
    """
    whole_rows = all(edge % shape.value_dim == 0 for edge in (states.block_elements, states.layer_elements))
    is_many = num_sequences * shape.value_heads * triton.cdiv(shape.value_dim, _WIDE) >= _MANY_PROGRAMS
    block_v = min(_WIDE if is_many else _NARROW, triton.next_power_of_2(shape.value_dim))
    slices = triton.cdiv(shape.value_dim, block_v)
    share = triton.cdiv(shape.channels, shape.value_heads * slices)
    _delta_rule_kernel[(shape.value_heads * slices, num_sequences)](
        convolved, gates, product, out, skip, states.blocks, tables, sequences, layer * states.layer_elements,
        product.stride(0), tables.stride(0), KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim, WINDOW=shape.window,
        BLOCK_K=triton.next_power_of_2(shape.key_dim), BLOCK_V=block_v, SLICES=slices,
        BLOCK_C=max(32, triton.next_power_of_2(share)), BLOCK=states.block_elements,
        WHOLE_ROWS=whole_rows, MAMBA=shape.is_mamba, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _gated_norm_kernel(
    x_ptr, product_ptr, out_ptr, weight_ptr, num_rows_ptr, stride_product, eps, CHANNELS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    within = tl.arange(0, BLOCK_V)
    mask = within < VALUE_DIM
    weight = tl.load(weight_ptr + within, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= tl.load(num_rows_ptr):
        return
    at = row.to(tl.int64) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + within
    gate_at = product_ptr + row.to(tl.int64) * stride_product + CHANNELS + head * VALUE_DIM + within
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / VALUE_DIM + eps)
    tl.store(out_ptr + at, x * scale * weight * gate / (1.0 + tl.exp(-gate)), mask=mask)


@triton.jit
def _norm_of_gated_kernel(
    x_ptr, product_ptr, out_ptr, weight_ptr, num_rows_ptr, stride_product, eps, VALUES: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK_V)
    mask = within < VALUES
    weight = tl.load(weight_ptr + within, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= tl.load(num_rows_ptr):
        return
    x = tl.load(x_ptr + row * VALUES + within, mask=mask, other=0.0)
    gate = tl.load(product_ptr + row * stride_product + within, mask=mask, other=0.0).to(tl.float32)
    x *= gate / (1.0 + tl.exp(-gate))
    scale = tl.rsqrt(tl.sum(x * x, 0) / VALUES + eps)
    tl.store(out_ptr + row * VALUES + within, x * scale * weight, mask=mask)


def gated_norm(
    x: Tensor,
    product: Tensor,
    out: Tensor,
    *,
    weight: Tensor,
    eps: float,
    shape: RecurrentShape,
    num_rows: Tensor,
    pdl: bool,
) -> None:
    """x, out: [rows, value heads * value_dim], the former in float32; normed by heads, times silu of the gates. Mamba's
    is times those first, and normed whole.
    """
    if shape.is_mamba:
        block_v = triton.next_power_of_2(shape.values)
        _norm_of_gated_kernel[(x.shape[0],)](
            x, product, out, weight, num_rows, product.stride(0), eps, VALUES=shape.values, BLOCK_V=block_v, PDL=pdl,
            num_warps=min(8, max(1, block_v // 512)), launch_pdl=pdl,
        )  # fmt: skip
        return
    _gated_norm_kernel[(x.shape[0], shape.value_heads)](
        x, product, out, weight, num_rows, product.stride(0), eps, CHANNELS=shape.channels,
        VALUE_HEADS=shape.value_heads, VALUE_DIM=shape.value_dim, BLOCK_V=triton.next_power_of_2(shape.value_dim),
        PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _gate_kernel(
    x_ptr, product_ptr, squares_ptr, num_rows_ptr, stride_product, VALUES: tl.constexpr, BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK_V)
    mask = within < VALUES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= tl.load(num_rows_ptr):
        return
    x = tl.load(x_ptr + row * VALUES + within, mask=mask, other=0.0)
    gate = tl.load(product_ptr + row * stride_product + within, mask=mask, other=0.0).to(tl.float32)
    x *= gate / (1.0 + tl.exp(-gate))
    tl.store(x_ptr + row * VALUES + within, x, mask=mask)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


def gate_rows(x: Tensor, product: Tensor, squares: Tensor, *, num_rows: Tensor, pdl: bool) -> None:
    """The first part of Mamba's `gated_norm` where ranks have some of its values: x is gated in place.

    squares: float32 [rows], written: each row's sum. Rows that are not there keep theirs.
    """
    rows, values = x.shape
    block_v = triton.next_power_of_2(values)
    _gate_kernel[(rows,)](
        x, product, squares, num_rows, product.stride(0), VALUES=values, BLOCK_V=block_v, PDL=pdl,
        num_warps=min(8, max(1, block_v // 512)), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _norm_by_squares_kernel(
    x_ptr, squares_ptr, out_ptr, weight_ptr, num_rows_ptr, eps, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK_V)
    mask = within < VALUES
    weight = tl.load(weight_ptr + within, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= tl.load(num_rows_ptr):
        return
    x = tl.load(x_ptr + row * VALUES + within, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.load(squares_ptr + row) / WIDTH + eps)
    tl.store(out_ptr + row * VALUES + within, x * scale * weight, mask=mask)


def norm_by_squares(
    x: Tensor, squares: Tensor, out: Tensor, *, weight: Tensor, eps: float, width: int, num_rows: Tensor, pdl: bool
) -> None:
    """The second part. squares: of all `width` values of a row, on whichever ranks."""
    rows, values = x.shape
    block_v = triton.next_power_of_2(values)
    _norm_by_squares_kernel[(rows,)](
        x, squares, out, weight, num_rows, eps, WIDTH=width, VALUES=values, BLOCK_V=block_v, PDL=pdl,
        num_warps=min(8, max(1, block_v // 512)), launch_pdl=pdl,
    )  # fmt: skip
