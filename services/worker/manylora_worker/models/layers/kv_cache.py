"""The paged KV cache: owns the one tensor of all keys and values, and knows nothing of who holds a block.

Where a model has recurrent layers, a sequence's first blocks hold their state instead (layers/recurrence.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIB = 1 << 20
_GATHERED_BYTES = 2 * MIB  # of keys, and of values as many


@dataclass(frozen=True)
class StateGeometry:
    """What a sequence keeps in each recurrent layer, in float32: a matrix a head, and what a convolution sees of the
    tokens before.
    """

    num_layers: int
    matrices: tuple[int, int, int]  # heads, of keys, of values
    window: tuple[int, int]  # channels, tokens

    @property
    def layer_elements(self) -> int:
        return math.prod(self.matrices) + math.prod(self.window)

    @property
    def size_bytes(self) -> int:
        return self.num_layers * self.layer_elements * torch.float32.itemsize


@dataclass(frozen=True)
class LayerKv:
    """Where a layer's keys and values stand: in `count` of a block's rows from `first` on, side by side."""

    first: int
    count: int
    num_kv_heads: int
    head_dim: int
    is_own: bool = True  # False: it reads those that a layer before it writes


@dataclass(frozen=True)
class KvGeometry:
    """Of a block, `num_layers` rows of keys and as many of values; layers that are alike have one each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    state: StateGeometry | None = None  # of layers that do not attend
    layers: tuple[LayerKv, ...] = ()  # empty: all are alike
    # of a draft model, whose keys and values stand behind these in each block
    beside: KvGeometry | None = None

    @classmethod
    def of(
        cls, shapes: Sequence[tuple[int, int]], sources: Sequence[int], state: StateGeometry | None = None
    ) -> KvGeometry:
        """shapes: KV heads and their size, by layer. sources: by layer, itself or the one whose KV it reads."""
        if len(set(shapes)) == 1 and list(sources) == list(range(len(shapes))):
            return cls(len(shapes), *shapes[0], state)
        unit = math.gcd(*(heads * head_dim for heads, head_dim in shapes))
        layers: list[LayerKv] = []
        end = 0
        for index, (source, (heads, head_dim)) in enumerate(zip(sources, shapes, strict=True)):
            count, is_own = heads * head_dim // unit, source == index
            layers.append(LayerKv(end if is_own else layers[source].first, count, heads, head_dim, is_own))
            end += count if is_own else 0
        return cls(end, 1, unit, state, tuple(layers))

    @property
    def places(self) -> tuple[LayerKv, ...]:
        return self.layers or tuple(LayerKv(i, 1, self.num_kv_heads, self.head_dim) for i in range(self.num_layers))

    @property
    def row_elements(self) -> int:
        return self.num_kv_heads * self.head_dim  # of one token's keys (or values) in one layer

    @property
    def own_elements(self) -> int:
        return 2 * self.num_layers * self.row_elements  # of one token's keys and values over all layers

    @property
    def first_beside(self) -> int:
        """Elements of a token before those of `beside`."""
        return self.own_elements if self.beside is None else _up_to(self.own_elements, self.beside.row_elements)

    @property
    def token_elements(self) -> int:
        """Rows of either model fill a block evenly."""
        if self.beside is None:
            return self.own_elements
        rows = math.lcm(self.row_elements, self.beside.row_elements)
        return _up_to(self.first_beside + self.beside.own_elements, rows)

    def token_bytes(self, dtype: torch.dtype) -> int:
        return self.token_elements * dtype.itemsize

    def state_blocks(self, block_size: int, dtype: torch.dtype) -> int:
        """Of a sequence, beside those of its tokens."""
        return 0 if self.state is None else -(-self.state.size_bytes // (self.token_bytes(dtype) * block_size))

    def blocks_in(self, budget_bytes: int, block_size: int, dtype: torch.dtype) -> int:
        return budget_bytes // (self.token_bytes(dtype) * block_size)


def _up_to(count: int, unit: int) -> int:
    return -(-count // unit) * unit


# Block-major, so clearing or copying a block is one contiguous write:
#
#     arena row = block * rows_per_block + 2 * layer + (0 keys | 1 values)      holds [block_size, kv_heads, head_dim]
#     token row = arena row * block_size + position % block_size                holds [kv_heads, head_dim]
#
# A layer's view starts `2 * layer + kv` arena rows further on: one index tensor a step serves every layer. Where layers
# differ in their widths, a row is as wide as their greatest common divisor, and a layer has several ("layer" above is
# then a part of one), so that pool, swapping and indices know nothing of it; a GPU's kernels take the same stretch of a
# block as the layer's keys, all of them, and then its values. A draft model's rows follow in the same
# block, in arena rows of its own size: `beside` is the same tensor as it sees it.
class KvCache:
    def __init__(
        self,
        geometry: KvGeometry,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        marks_free: bool = False,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.state_blocks = geometry.state_blocks(block_size, dtype)
        self.block_elements = geometry.token_elements * block_size
        self.marks_free = marks_free
        # NaN: the sampler then names a sequence that read a free block
        self._free_value = math.nan if marks_free else 0.0
        self._by_block_id = torch.full((num_blocks, self.block_elements), self._free_value, dtype=dtype, device=device)
        self._see(0)

    def _see(self, first_element: int) -> None:
        geometry, block_size = self.geometry, self.block_size
        row_elements, num_rows = geometry.row_elements, 2 * geometry.num_layers
        self.first_element = first_element  # of a block, for this model
        self._rows_per_block = self.block_elements // (block_size * row_elements)
        self._arena = self._by_block_id.view(-1, block_size * row_elements)
        self._own = self._by_block_id[:, first_element : first_element + num_rows * block_size * row_elements]
        by_token = self._arena.view(-1, row_elements)
        first_row = first_element // (block_size * row_elements)
        rows = range(first_row, first_row + num_rows, 2)
        self._places = geometry.places
        self._gathered = (self._arena.new_empty(0, 0), self._arena.new_empty(0, 0))
        self._joined = (self._arena.new_empty(0), self._arena.new_empty(0))
        self._block_views = [(self._arena[i:], self._arena[i + 1 :]) for i in rows]
        self._token_views = [(by_token[i * block_size :], by_token[(i + 1) * block_size :]) for i in rows]

    def beside(self) -> KvCache:
        """The same blocks, for the draft model."""
        assert self.geometry.beside is not None
        found = copy.copy(self)
        found.geometry, found.state_blocks = self.geometry.beside, 0
        found._see(self.geometry.first_beside * self.block_size)
        return found

    @property
    def most_gathered_blocks(self) -> int | None:
        """At a time: on the CPU what its caches hold; None: any number."""
        widest = max(place.count for place in self._places) * self.geometry.row_elements
        block_bytes = self.block_size * widest * self.dtype.itemsize
        return max(1, _GATHERED_BYTES // block_bytes) if self._arena.device.type == "cpu" else None

    @property
    def size_bytes(self) -> int:
        return self._by_block_id.nbytes

    @property
    def flat(self) -> Tensor:
        return self._by_block_id.view(-1)

    @property
    def by_block(self) -> Tensor:
        """[num_blocks, elements of a block]."""
        return self._by_block_id

    def block_row(self, block_id: int) -> int:
        return block_id * self._rows_per_block

    def token_row(self, block_id: int, offset: int) -> int:
        return block_id * self._rows_per_block * self.block_size + offset

    def gather(self, layer: int, block_rows: Tensor) -> tuple[Tensor, Tensor]:
        """[len(block_rows), block_size * kv_heads * head_dim] each, good until the next call."""
        place = self._places[layer]
        if place.count == 1:
            return self._gather(place.first, block_rows)
        shape = (block_rows.shape[0], self.block_size, place.count, self.geometry.row_elements)
        size = math.prod(shape)
        if self._joined[0].shape[0] < size:
            self._joined = (self._arena.new_empty(2 * size), self._arena.new_empty(2 * size))
        keys, values = (x[:size].view(shape) for x in self._joined)
        for part in range(place.count):
            own = self._gather(place.first + part, block_rows)
            keys[:, :, part], values[:, :, part] = (x.view(*shape[:2], -1) for x in own)
        return keys.flatten(1), values.flatten(1)

    def _gather(self, row: int, block_rows: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._block_views[row]
        if self._arena.device.type != "cpu":
            return keys.index_select(0, block_rows), values.index_select(0, block_rows)
        count = block_rows.shape[0]
        if self._gathered[0].shape[0] < count:
            self._gathered = (keys.new_empty(2 * count, keys.shape[1]), values.new_empty(2 * count, values.shape[1]))
        # New memory comes page by page, two to four times as slowly as the copy and the attention over it.
        kept_keys, kept_values = self._gathered
        return (
            torch.index_select(keys, 0, block_rows, out=kept_keys[:count]),
            torch.index_select(values, 0, block_rows, out=kept_values[:count]),
        )

    def write(self, layer: int, token_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values: [num_tokens, kv_heads * head_dim]. Of a layer that reads another's: they stand there."""
        place = self._places[layer]
        if not place.is_own:
            return
        parts = zip(keys.chunk(place.count, 1), values.chunk(place.count, 1), strict=True)
        for row, (own_keys, own_values) in enumerate(parts, place.first):
            key_view, value_view = self._token_views[row]
            key_view.index_copy_(0, token_rows, own_keys)
            value_view.index_copy_(0, token_rows, own_values)

    def clear_blocks(self, block_ids: Tensor) -> None:
        # zero, or NaN, as free blocks are
        self._by_block_id.index_fill_(0, block_ids, self._free_value)

    def zero_blocks(self, block_ids: Tensor) -> None:
        # for a reader that multiplies what is masked by 0
        self._own.index_fill_(0, block_ids, 0)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """All reads before all writes. sources, targets: [n]."""
        self._by_block_id.index_copy_(0, targets, self._by_block_id.index_select(0, sources))
