"""Where an adapter's matrices lie in host memory: one flat buffer in the model's compute type, A stacked by site, B
transposed and scaled.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_rope import RopeScaling, parsed
from torch import Tensor

from manylora_worker.weights.sites import DeviceAdapter, Site, SiteWeights, SlotWeights, TokenRows

ALIGNMENT = 8  # elements at whose multiples matrices begin: a GPU's kernels read so many at once


def aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Placed:
    """A matrix in the buffer: elements [start, start + rows * columns)."""

    start: int
    rows: int
    columns: int

    def of(self, buffer: Tensor) -> Tensor:
        # One call, for it is made hundreds of times an adapter beside the engine's steps.
        return buffer.as_strided((self.rows, self.columns), (self.columns, 1), buffer.storage_offset() + self.start)


@dataclass(frozen=True)
class PlacedSite:
    site: int
    a: Placed
    slots: tuple[tuple[int, int, int, Placed], ...]  # (slot, first column, last column of the stacked A product, B)
    experts: int = 0  # as the site's


Layout = tuple[PlacedSite, ...]  # a function of the base model's sites and the adapter's ranks


class VectorKind(enum.StrEnum):
    """Of a layer, one number an output."""

    MAGNITUDE = "magnitude"  # DoRA's
    BIAS = "bias"  # in the place of the base model's
    LOW_RANK_BIAS = "low_rank_bias"  # added, scaled as the product of A and B


@dataclass(frozen=True)
class PlacedVector:
    kind: VectorKind
    site: int
    slot: int
    placed: Placed  # one row


@dataclass(frozen=True)
class PlacedTokens:
    """Some tokens' rows of the input embeddings, of the head, or of both."""

    ids: tuple[int, ...]
    embeds: bool
    heads: bool
    placed: Placed  # a row each


@dataclass(frozen=True)
class Extras:
    """What an adapter brings beside its matrices."""

    rope: RopeScaling | None = None
    tokens: tuple[PlacedTokens, ...] = ()  # behind the layout, in order
    vectors: tuple[PlacedVector, ...] = ()  # behind the tokens


NO_EXTRAS = Extras()


def told_extras(extras: Extras) -> dict[str, Any]:
    """In JSON, for `heard_extras` in another process."""
    told: dict[str, Any] = {"vectors": [[each.kind, each.site, each.slot] for each in extras.vectors]}
    told["tokens"] = [[each.ids, each.embeds, each.heads, each.placed.columns] for each in extras.tokens]
    rope = extras.rope
    return told if rope is None else {**told, "rope": dict(rope.parameters), "context": rope.max_context_tokens}


def heard_extras(told: Mapping[str, Any], layout: Layout, sites: Sequence[Site]) -> Extras:
    """Raises ValueError, LookupError, TypeError where it makes no sense."""
    rope = None
    if "rope" in told:
        rope = RopeScaling(tuple(sorted(parsed(told["rope"]).items())), int(told["context"]))
    wanted = [(VectorKind(kind), int(site), int(slot)) for kind, site, slot in told["vectors"]]
    rows = [(tuple(map(int, ids)), bool(embeds), bool(heads)) for ids, embeds, heads, _ in told["tokens"]]
    tokens = place_tokens(rows, layout, int(told["tokens"][0][3]) if rows else 0)
    return Extras(rope, tokens, place_vectors(wanted, layout, sites, tokens))


def place_tokens(
    wanted: Sequence[tuple[tuple[int, ...], bool, bool]], layout: Layout, width: int
) -> tuple[PlacedTokens, ...]:
    """wanted: ids, embeds, heads of each."""
    start, placed = elements_of(layout), []
    for ids, embeds, heads in wanted:
        placed.append(PlacedTokens(ids, embeds, heads, Placed(start, len(ids), width)))
        start += len(ids) * width
    return tuple(placed)


def place_vectors(
    wanted: Sequence[tuple[VectorKind, int, int]],
    layout: Layout,
    sites: Sequence[Site],
    tokens: Sequence[PlacedTokens] = (),
) -> tuple[PlacedVector, ...]:
    """wanted: kind, site, slot of each."""
    start, placed = elements_before(layout, tokens), []
    for kind, site, slot in wanted:
        width = sites[site].slots[slot].stop - sites[site].slots[slot].start
        placed.append(PlacedVector(kind, site, slot, Placed(start, 1, width)))
        start += width
    return tuple(placed)


def elements_with(layout: Layout, extras: Extras) -> int:
    last = extras.vectors[-1].placed if extras.vectors else None
    return elements_before(layout, extras.tokens) if last is None else last.start + last.columns


def elements_before(layout: Layout, tokens: Sequence[PlacedTokens]) -> int:
    """Of all but the vectors."""
    return elements_of(layout) + sum(each.placed.rows * each.placed.columns for each in tokens)


@dataclass(frozen=True)
class PlacedColumns:
    """Of a slot, on a device whose kernels scale and shift its outputs: gains, then shifts, in the vectors' place."""

    site: int
    slot: int
    start: int
    width: int


def place_columns(layout: Layout, extras: Extras) -> list[PlacedColumns]:
    """In order."""
    widths = {(each.site, each.slot): each.placed.columns for each in extras.vectors}
    start, placed = elements_before(layout, extras.tokens), []
    for (site, slot), width in sorted(widths.items()):
        placed.append(PlacedColumns(site, slot, start, width))
        start += 2 * width
    return placed


@dataclass(frozen=True)
class HostAdapter:
    uid: AdapterUid
    buffer: Tensor
    layout: Layout
    extras: Extras = NO_EXTRAS

    @property
    def size_bytes(self) -> int:
        return int(self.buffer.nbytes)

    def on(self, device: torch.device) -> DeviceAdapter:
        """On the host it shares the buffer."""
        buffer = self.buffer.to(device, non_blocking=True)
        sites: dict[int, SiteWeights] = {}
        experts: dict[int, SiteWeights] = {}
        for placed in self.layout:
            kept = experts if placed.experts else sites
            kept[placed.site] = SiteWeights(
                a_t=placed.a.of(buffer).t(),
                slots=tuple(SlotWeights(slot, start, stop, b.of(buffer)) for slot, start, stop, b in placed.slots),
            )
        tokens = tuple(
            TokenRows(torch.tensor(each.ids, device=device), each.placed.of(buffer), each.embeds, each.heads)
            for each in self.extras.tokens
        )
        return DeviceAdapter(self.uid, sites, buffer.nbytes, self.extras.rope, experts=experts, tokens=tokens)


def lay_out(sites: Sequence[Site], ranks: Mapping[str, int]) -> Layout:
    """ranks: by module path; an absent module is not adapted."""
    layout: list[PlacedSite] = []
    for site in sites:
        placed = _place_site(site, ranks, elements_of(layout))
        if placed is not None:
            layout.append(placed)
    return tuple(layout)


def elements_of(layout: Sequence[PlacedSite]) -> int:
    if not layout:
        return 0
    last = layout[-1].slots[-1][3]
    return last.start + aligned(last.rows * last.columns)


def ranks_by_slot(layout: Layout, sites: Sequence[Site]) -> list[int]:
    """Over all sites, 0 where there is none."""
    ranks = {(placed.site, slot): stop - start for placed in layout for slot, start, stop, _ in placed.slots}
    return [ranks.get((site.index, slot), 0) for site in sites for slot in range(len(site.slots))]


def _place_site(site: Site, ranks: Mapping[str, int], start: int) -> PlacedSite | None:
    # from element `start` on: A of all its slots, then each slot's B
    ranked = [(i, ranks[slot.path], slot) for i, slot in enumerate(site.slots) if slot.path in ranks]
    if not ranked:
        return None
    if site.experts:
        most = max(rank for _, rank, _ in ranked)
        ranked = [(i, most, slot) for i, slot in enumerate(site.slots)]
    total_rank = sum(rank for _, rank, _ in ranked)
    a = Placed(start, total_rank, site.in_features)
    slots = []
    next_start = start + aligned(total_rank * site.in_features)
    column = 0
    for i, rank, slot in ranked:
        b = Placed(next_start, rank, slot.stop - slot.start)
        slots.append((i, column, column + rank, b))
        next_start += aligned(rank * (slot.stop - slot.start))
        column += rank
    return PlacedSite(site.index, a, tuple(slots), site.experts)


def lies_in(data_bytes: int, dtype: torch.dtype | None, entry: Mapping[str, Any]) -> bool:
    """entry: of a file's header. What lies behind the file's data in the reader's memory may be another tenant's."""
    first, last = entry["data_offsets"]
    return dtype is None or (
        0 <= first <= last <= data_bytes and last - first == math.prod(entry["shape"]) * dtype.itemsize
    )
