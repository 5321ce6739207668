"""The states of a step's sequences in recurrent layers, which stand in the first blocks of their tables.

A state is all layers' floats in a row, cut into blocks. A layer reads the blocks that its part touches, and writes them
whole: one after the other, layers do not disturb what they share of a block. A sequence's first chunk reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora_worker.models.layers.kv_cache import KvCache


@dataclass(frozen=True)
class StateRows:
    """Rows [first_row, last_row) of one sequence, in order."""

    first_row: int
    last_row: int
    is_first: bool  # nothing of the sequence was computed before
    blocks: Sequence[int]

    @property
    def num_rows(self) -> int:
        return self.last_row - self.first_row


@dataclass(frozen=True)
class LayerStates:
    """Views to be changed in place, of a copy."""

    matrices: Tensor  # [sequences, heads, of keys, of values], float32
    windows: Tensor  # [sequences, channels, tokens], float32
    _copied: Tensor
    _block_ids: Tensor


class StepStates:
    """Sequences stand in this order: those of one row (`single_rows`), then the others (`runs`)."""

    def __init__(self, cache: KvCache, rows: Sequence[StateRows], device: torch.device) -> None:
        assert cache.geometry.state is not None
        self._cache = cache
        self._geometry = cache.geometry.state
        singles = [each for each in rows if each.num_rows == 1]
        self.runs = [each for each in rows if each.num_rows > 1]
        ordered = [*singles, *self.runs]
        self.num_singles = len(singles)
        self.single_rows = torch.tensor([each.first_row for each in singles], dtype=torch.long, device=device)
        self._block_ids = torch.tensor([list(each.blocks) for each in ordered], dtype=torch.long, device=device)
        fresh = [i for i, each in enumerate(ordered) if each.is_first]
        self._fresh = torch.tensor(fresh, dtype=torch.long, device=device) if fresh else None

    def read(self, layer: int) -> LayerStates:
        size, block_floats = self._geometry.layer_elements, self._block_floats
        first = layer * size // block_floats
        last = -(-(layer + 1) * size // block_floats)
        block_ids = self._block_ids[:, first:last].reshape(-1)
        copied = self._cache.by_block.index_select(0, block_ids)
        start = layer * size - first * block_floats
        floats = copied.view(torch.float32).view(self._block_ids.shape[0], -1)[:, start : start + size]
        if self._fresh is not None:
            floats.index_fill_(0, self._fresh, 0.0)
        split = math.prod(self._geometry.matrices)
        return LayerStates(
            floats[:, :split].unflatten(1, self._geometry.matrices),
            floats[:, split:].unflatten(1, self._geometry.window),
            copied,
            block_ids,
        )

    def write(self, states: LayerStates) -> None:
        self._cache.by_block.index_copy_(0, states._block_ids, states._copied)

    @property
    def _block_floats(self) -> int:
        return self._cache.by_block[0].nbytes // torch.float32.itemsize
