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

from manylora_worker.models.layers.fp8_codes import FP8, FP8_LARGEST, FP8_NAN, codes_of, numbers_of
from manylora_worker.models.layers.kv_cuts import KvCuts

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
    # by layer, powers of two that the codes of keys and of values kept in FP8 (e4m3) are multiplied with; empty: they
    # are kept in the model's dtype
    scales: tuple[tuple[float, float], ...] = ()

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
        return self.token_elements * (FP8 if self.scales else dtype).itemsize

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
        self.dtype = dtype  # of keys and values as they are read
        self.state_blocks = geometry.state_blocks(block_size, dtype)
        self.block_elements = geometry.token_elements * block_size
        self.marks_free = marks_free
        self.cuts = KvCuts(device) if geometry.scales else None
        # torch's operators on indices know bytes, not FP8
        kept = torch.uint8 if geometry.scales else dtype
        # NaN: the sampler then names a sequence that read a free block
        self._free_value = 0 if not marks_free else FP8_NAN if geometry.scales else math.nan
        self._by_block_id = torch.full((num_blocks, self.block_elements), self._free_value, dtype=kept, device=device)
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
        self._places, self._scales = geometry.places, geometry.scales
        self._gathered = (self._arena.new_empty(0, 0), self._arena.new_empty(0, 0))
        self._joined = (self._arena.new_empty(0), self._arena.new_empty(0))
        self._numbers = (self._arena.new_empty(0, dtype=self.dtype), self._arena.new_empty(0, dtype=self.dtype))
        self._scratch = self._arena.new_empty(0, dtype=torch.int16)
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
        # as elements of the model's dtype
        return self._by_block_id.view(-1).view(self.dtype)

    @property
    def kept(self) -> Tensor:
        # as elements of keys and values
        return self._by_block_id.view(-1).view(FP8 if self._scales else self.dtype)

    @property
    def by_block(self) -> Tensor:
        """[num_blocks, elements of a block]; bytes where they are FP8."""
        return self._by_block_id

    def block_row(self, block_id: int) -> int:
        return block_id * self._rows_per_block

    def token_row(self, block_id: int, offset: int) -> int:
        return block_id * self._rows_per_block * self.block_size + offset

    def gather(self, layer: int, block_rows: Tensor) -> tuple[Tensor, Tensor]:
        """[len(block_rows), block_size * kv_heads * head_dim] each, good until the next call."""
        return self.read(layer, self._gather_layer(layer, block_rows))

    def read(self, layer: int, kept: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """kept: as `write` has returned them. Good until the next call of this or of `gather`."""
        if not self._scales:
            return kept
        size = kept[0].numel()
        if len(self._scratch) < size:
            self._numbers = (self._numbers[0].new_empty(2 * size), self._numbers[1].new_empty(2 * size))
            self._scratch = self._scratch.new_empty(2 * size)
        pairs = zip(kept, self._scales[layer], self._numbers, strict=True)
        keys, values = (
            numbers_of(codes.view(-1), scale, to[:size], self._scratch[:size]).view(codes.shape)
            for codes, scale, to in pairs
        )
        return keys, values

    def _gather_layer(self, layer: int, block_rows: Tensor) -> tuple[Tensor, Tensor]:
        # as they are kept
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

    def write(self, layer: int, token_rows: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values: [num_tokens, kv_heads * head_dim]. Of a layer that reads another's: they stand there. Returns
        them as they are kept.
        """
        place = self._places[layer]
        if self._scales:
            pairs = zip((keys, values), self._scales[layer], strict=True)
            keys, values = (self._codes(x, scale, counts=place.is_own) for x, scale in pairs)
        if place.is_own:
            parts = zip(keys.chunk(place.count, 1), values.chunk(place.count, 1), strict=True)
            for row, (own_keys, own_values) in enumerate(parts, place.first):
                key_view, value_view = self._token_views[row]
                key_view.index_copy_(0, token_rows, own_keys)
                value_view.index_copy_(0, token_rows, own_values)
        return keys, values

    def _codes(self, x: Tensor, scale: float, *, counts: bool) -> Tensor:
        assert self.cuts is not None
        if counts:
            self.cuts.count.add_((x.abs() > scale * FP8_LARGEST).sum())
        return codes_of(x, scale).view(torch.uint8)

    def clear_blocks(self, block_ids: Tensor) -> None:
        # zero, or NaN, as free blocks are
        self._by_block_id.index_fill_(0, block_ids, self._free_value)

    def zero_blocks(self, block_ids: Tensor) -> None:
        # for a reader that multiplies what is masked by 0
        self._own.index_fill_(0, block_ids, 0)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """All reads before all writes. sources, targets: [n]."""
        self._by_block_id.index_copy_(0, targets, self._by_block_id.index_select(0, sources))
