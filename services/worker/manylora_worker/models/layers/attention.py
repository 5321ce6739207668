"""Paged attention behind transformers' AttentionInterface: the torch reference, on any device.

The keyword `manylora_attention` brings an object with an `attend` method: AttentionStep or the loader's probe. A row
reads only blocks of its own table.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.recurrence import StepStates

ATTENTION = "manylora_paged"
STEP_KEYWORD = "manylora_attention"


class Attends(Protocol):
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        others: dict[str, Any],
    ) -> Tensor:
        """query: [1, heads, T, head_dim]; key, value: [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim].

        sinks: [heads], a logit more in each softmax, which no value goes with.
        """

    def recur(self, net: Recurs, hidden_states: Tensor) -> Tensor:
        """hidden_states: [1, T, hidden] -> the same."""


class Recurs(Protocol):
    """A layer that keeps a state in place of keys and values."""

    index: int  # among these

    def rows(self, hidden_states: Tensor, states: StepStates) -> Tensor:
        """[T, hidden] -> the same."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    manylora_attention: Attends,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    attended = manylora_attention.attend(module, query, key, value, scaling, sliding_window, softcap, s_aux, others)
    return attended, None


@functools.cache
def register_attention() -> None:
    """Once a process. transformers builds no mask for a name that AttentionMaskInterface does not list."""
    AttentionInterface.register(ATTENTION, _attention)


@dataclass(frozen=True)
class DecodeRow:
    """One new token, at position context_tokens - 1."""

    row: int
    context_tokens: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class PrefillRows:
    """Rows [first_row, last_row) of one sequence, at positions from start_position on."""

    first_row: int
    last_row: int
    start_position: int
    block_table: Sequence[int]

    @property
    def context_tokens(self) -> int:
        return self.start_position + self.last_row - self.first_row


@dataclass(frozen=True)
class _DecodeGroup:
    rows: slice | Tensor  # [B] indices where they are not consecutive
    block_rows: Tensor  # [B * blocks]: cache rows to gather
    num_rows: int
    gathered_tokens: int  # per row, padding included
    seen: slice  # of the gathered tokens those that any row sees
    mask: Tensor | None  # [B, 1, 1, seen tokens], 0 or -inf; None: every row sees all of them


@dataclass(frozen=True)
class _PrefillPlan:
    rows: PrefillRows
    block_rows: Tensor | None  # [blocks] to gather; None: the chunk is all the context there is, and causal
    mask: Tensor | None  # [new tokens, gathered tokens], 0 or -inf; None where `block_rows` is None
    context_in_gather: int


@dataclass(frozen=True)
class _Plan:
    decode_groups: Sequence[_DecodeGroup]
    prefills: Sequence[_PrefillPlan]


def group_by_length(lengths: Sequence[int], *, slack: int = 2, share: float = 0.75) -> list[list[int]]:
    """A member is at least `share` of its group's longest, less `slack`. All come in order of falling length."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[i] + slack >= share * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _parts(members: list[int], longest: int, most: int | None) -> list[list[int]]:
    # no part of more than one member gathers more than `most` blocks
    if most is None:
        return [members]
    size = max(1, most // longest)
    return [members[i : i + size] for i in range(0, len(members), size)]


# Padding repeats the row's own blocks, masked with -inf before the softmax, and model_runner.py zeroes a block when a
# sequence enters it: neither another tenant's values nor a stale NaN takes part.
class AttentionStep:
    """Tables and masks are worked out once per sliding window. token_rows: [T], where each new token goes. states: of
    a model with recurrent layers.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        token_rows: Tensor,
        num_rows: int,
        decodes: Sequence[DecodeRow],
        prefills: Sequence[PrefillRows],
        states: StepStates | None = None,
    ) -> None:
        self._cache = cache
        self._token_rows = token_rows
        self._num_rows = num_rows
        self._decodes = decodes
        self._prefills = prefills
        self._states = states
        self._plans: dict[int | None, _Plan] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        others: dict[str, Any],
    ) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        _, num_heads, num_rows, head_dim = query.shape
        num_kv_heads = key.shape[1]
        queries = query[0].transpose(0, 1).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        keys = key[0].transpose(0, 1).reshape(num_rows, -1)
        values = value[0].transpose(0, 1).reshape(num_rows, -1)
        scale = head_dim**-0.5 if scaling is None else scaling
        attended = self.attend_rows(layer, queries, keys, values, scale, sliding_window, softcap, sinks)
        return attended.reshape(1, num_rows, num_heads, head_dim)

    def recur(self, net: Recurs, hidden_states: Tensor) -> Tensor:
        assert self._states is not None, "the step has no states"
        return net.rows(hidden_states[0], self._states)[None]

    def attend_rows(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes the new tokens' keys and values, and attends.

        queries: [T, kv_heads, query heads of each, head_dim]; keys, values: [T, kv_heads * head_dim] -> as queries.
        sinks: [heads].
        """
        if sinks is not None:
            sinks = sinks.view(*queries.shape[1:3], 1)
        kept = self._cache.write(layer, self._token_rows, keys, values)
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._build_plan(window, queries.device)
        groups = plan.decode_groups
        if len(groups) == 1 and groups[0].num_rows == self._num_rows:
            return self._attend_decode(layer, groups[0], queries, scale, softcap, sinks)
        output = queries.new_empty(queries.shape)
        for group in groups:
            output[group.rows] = self._attend_decode(layer, group, queries[group.rows], scale, softcap, sinks)
        if plan.prefills and plan.prefills[0].block_rows is None:
            keys, values = self._cache.read(layer, kept)
        for prefill in plan.prefills:
            rows = slice(prefill.rows.first_row, prefill.rows.last_row)
            local = (keys[rows], values[rows])
            output[rows] = self._attend_prefill(layer, prefill, queries[rows], local, scale, softcap, sinks)
        return output

    def _attend_decode(
        self,
        layer: int,
        group: _DecodeGroup,
        queries: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        # queries: [B, kv_heads, group, head_dim] -> the same; the query heads of one kv head stand as its
        # rows
        shape = (group.num_rows, group.gathered_tokens, queries.shape[1], queries.shape[3])
        keys, values = (
            x.view(shape)[:, group.seen].transpose(1, 2) for x in self._cache.gather(layer, group.block_rows)
        )
        return _attend(queries, keys, values, group.mask, scale, softcap, sinks)

    def _attend_prefill(
        self,
        layer: int,
        prefill: _PrefillPlan,
        queries: Tensor,
        local: tuple[Tensor, Tensor],
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        # queries: [n, kv_heads, group, head_dim] -> the same; the kv heads stand as the batch
        num_kv_heads, group_size, head_dim = queries.shape[1:]
        if prefill.block_rows is None:
            keys, values = (x.reshape(-1, num_kv_heads, head_dim) for x in local)
        else:
            keys, values = (
                x.view(-1, num_kv_heads, head_dim)[: prefill.context_in_gather]
                for x in self._cache.gather(layer, prefill.block_rows)
            )
        batched_queries = queries.permute(1, 2, 0, 3)
        batched_keys = keys.transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1)
        batched_values = values.transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1)
        attended = _attend(
            batched_queries,
            batched_keys,
            batched_values,
            prefill.mask,
            scale,
            softcap,
            None if sinks is None else sinks[..., None],
            is_causal=prefill.block_rows is None,
        )
        return attended.permute(2, 0, 1, 3)

    def _build_plan(self, window: int | None, device: torch.device) -> _Plan:
        return _Plan(
            decode_groups=self._plan_decodes(window, device),
            # what was just written is read first: it is good until the next gathering
            prefills=sorted(
                (self._plan_prefill(rows, window, device) for rows in self._prefills),
                key=lambda prefill: prefill.block_rows is not None,
            ),
        )

    def _plan_decodes(self, window: int | None, device: torch.device) -> list[_DecodeGroup]:
        block_size = self._cache.block_size
        first_positions = [_first_position(d.context_tokens - 1, window) for d in self._decodes]
        first_blocks = [position // block_size for position in first_positions]
        last_blocks = [-(-d.context_tokens // block_size) for d in self._decodes]
        lengths = [last - first for first, last in zip(first_blocks, last_blocks, strict=True)]
        groups = []
        members_of_groups = [
            part
            for members in group_by_length(lengths)
            for part in _parts(members, lengths[members[0]], self._cache.most_gathered_blocks)
        ]
        for members in members_of_groups:
            members = sorted(members, key=lambda i: self._decodes[i].row)
            num_blocks = max(lengths[i] for i in members)
            block_rows, bounds = [], []
            for i in members:
                row = self._decodes[i]
                blocks = row.block_table[first_blocks[i] : last_blocks[i]]
                block_rows += [self._cache.block_row(b) for b in blocks]
                block_rows += [self._cache.block_row(blocks[0])] * (num_blocks - len(blocks))
                origin = first_blocks[i] * block_size
                bounds.append((first_positions[i] - origin, row.context_tokens - origin))
            seen = slice(min(first for first, _ in bounds), max(last for _, last in bounds))
            mask = None
            if any(bound != (seen.start, seen.stop) for bound in bounds):
                limits = torch.tensor(bounds, device=device)
                offsets = torch.arange(seen.start, seen.stop, device=device)
                visible = (offsets >= limits[:, :1]) & (offsets < limits[:, 1:])
                mask = _additive(visible, self._cache.dtype)[:, None, None, :]
            groups.append(
                _DecodeGroup(
                    rows=_index([self._decodes[i].row for i in members], device),
                    block_rows=torch.tensor(block_rows, device=device),
                    num_rows=len(members),
                    gathered_tokens=num_blocks * block_size,
                    seen=seen,
                    mask=mask,
                )
            )
        return groups

    def _plan_prefill(self, rows: PrefillRows, window: int | None, device: torch.device) -> _PrefillPlan:
        context_tokens = rows.context_tokens
        if rows.start_position == 0 and (window is None or context_tokens <= window):
            return _PrefillPlan(rows, block_rows=None, mask=None, context_in_gather=context_tokens)
        block_size = self._cache.block_size
        first_block = _first_position(rows.start_position, window) // block_size
        blocks = rows.block_table[first_block : -(-context_tokens // block_size)]
        origin = first_block * block_size
        key_positions = torch.arange(origin, context_tokens, device=device)
        query_positions = torch.arange(rows.start_position, context_tokens, device=device)[:, None]
        visible = key_positions <= query_positions
        if window is not None:
            visible &= key_positions > query_positions - window
        return _PrefillPlan(
            rows,
            block_rows=torch.tensor([self._cache.block_row(b) for b in blocks], device=device),
            mask=_additive(visible, self._cache.dtype),
            context_in_gather=context_tokens - origin,
        )


def _index(rows: list[int], device: torch.device) -> slice | Tensor:
    # in rising order
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _first_position(query_position: int, window: int | None) -> int:
    # The query sees itself and the window - 1 positions before it.
    return 0 if window is None else max(0, query_position - window + 1)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """[batch, heads, n, head_dim] over [batch, heads, m, head_dim]. is_causal: n = m, no mask. sinks: one a row of
    scores, or what is broadcast to that.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        n = queries.shape[2]
        mask = _additive(torch.ones(n, n, dtype=torch.bool, device=scores.device).tril_(), scores.dtype)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype)
    return torch.matmul(weights[..., : keys.shape[2]], values)
