"""Linear layers that add each row's own LoRA: who stands where, and the two ways to compute a mixed batch.

A *site* is one matrix product of the base model: one linear layer, or several that were fused (q, k and v; gate and
up). The model's own layers are its *slots*: slot i makes the columns [start, stop) of the site's output. An adapter
has, for a site, its A matrices stacked (every slot's rank is its own) and one B a slot, scaled by alpha / r already.
Ranks are exact: nothing is padded to a common rank.

LoraSwitch holds the step's LoraBatch, or None when no row has an adapter; the model runner sets it, every LoraLinear
of the model reads it. Both are used by the engine thread only. DeviceAdapter objects are immutable and may be built by
another thread.

Isolation: what a row gets depends on that row and its own adapter alone. Segments touch only their own rows; the
concatenated form computes every adapter's A for every row and drops the foreign columns with masked_fill, never by a
multiplication that an infinity or a NaN would survive. B is finite (checked at load).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from manylora_shared.ids import AdapterUid
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One of the model's linear layers inside a site's output."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Site:
    index: int
    in_features: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class SlotWeights:
    """B of one slot: columns [start, stop) of the site's stacked A product -> the slot's output columns."""

    slot: int
    start: int
    stop: int
    b: Tensor
    """[rank, out], scaled."""


@dataclass(frozen=True)
class SiteWeights:
    a_t: Tensor
    """[in, sum of the slots' ranks]: A of all slots side by side, transposed (a view)."""
    slots: tuple[SlotWeights, ...]
    """In order of columns, without gaps."""
    ranks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", [slot.stop - slot.start for slot in self.slots])


@dataclass(frozen=True)
class DeviceAdapter:
    """An adapter's weights on the device, by site index; sites that it does not touch are absent."""

    uid: AdapterUid
    sites: Mapping[int, SiteWeights]
    size_bytes: int

    num_products: int = field(init=False)
    """Matrix products that one segment of rows costs over the whole model."""
    num_weights: int = field(init=False)

    def __post_init__(self) -> None:
        sites = self.sites.values()
        object.__setattr__(self, "num_products", sum(1 + len(site.slots) for site in sites))
        object.__setattr__(
            self, "num_weights", sum(site.a_t.numel() + sum(s.b.numel() for s in site.slots) for site in sites)
        )


class LoraBatch(Protocol):
    """The adapters of one step's rows."""

    def add(self, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        """Adds every row's low-rank product. inputs: [T, in]; outputs: [T, out], changed in place."""


class LoraSwitch:
    """The step's adapters: written by the model runner before the pass, read by every LoraLinear during it."""

    def __init__(self) -> None:
        self.batch: LoraBatch | None = None


class LoraLinear(nn.Module):
    """A base linear layer (of any kind: plain, fused, 4-bit) and the step's adapters on top of it."""

    def __init__(self, base: nn.Module, site: Site, switch: LoraSwitch) -> None:
        super().__init__()
        self.base = base
        self.site = site
        self._switch = switch

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.base(x)
        batch = self._switch.batch
        if batch is not None:
            batch.add(self.site, x.view(-1, x.shape[-1]), outputs.view(-1, outputs.shape[-1]))
        return outputs


class FusedProjection:
    """Computes a fused site once for the layers that it replaced, which the model calls one after the other.

    The first member called with an input computes the whole site; the others, called with the same tensor object, take
    their columns of it. The input is held until every member has been served, so a later tensor cannot be mistaken
    for it.
    """

    def __init__(self, linear: LoraLinear) -> None:
        self.linear = linear
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._unserved = 0

    def columns(self, member: int, x: Tensor) -> Tensor:
        if self._input is not x:
            self._input, self._output = x, self.linear(x)
            self._unserved = (1 << len(self.linear.site.slots)) - 1
        assert self._output is not None
        slot = self.linear.site.slots[member]
        result = self._output[..., slot.start : slot.stop]
        self._unserved &= ~(1 << member)
        if not self._unserved:
            self._input = self._output = None
        return result


class FusedMember(nn.Module):
    """Stands where one of the fused layers stood."""

    def __init__(self, projection: FusedProjection, member: int) -> None:
        super().__init__()
        self._projection = projection
        self._member = member
        if member == 0:
            self.linear = projection.linear  # registered once, so that the module tree owns the weights

    def forward(self, x: Tensor) -> Tensor:
        return self._projection.columns(self._member, x)


@dataclass(frozen=True)
class Segment:
    """Consecutive rows [first_row, last_row) of one adapter."""

    first_row: int
    last_row: int
    adapter: DeviceAdapter


class SegmentedLora:
    """Every adapter's rows by themselves: the fewest operations, and two or more products an adapter and site.

    Args:
        segments: in order of rows, not overlapping.
        num_rows: of the step.
    """

    def __init__(self, segments: Sequence[Segment], num_rows: int) -> None:
        self._sizes: list[int] = []
        """All rows cut into runs, those without an adapter included."""
        self._adapters: list[tuple[int, DeviceAdapter]] = []
        """(run, its adapter)"""
        end = 0
        for segment in segments:
            if segment.first_row > end:
                self._sizes.append(segment.first_row - end)
            self._adapters.append((len(self._sizes), segment.adapter))
            self._sizes.append(segment.last_row - segment.first_row)
            end = segment.last_row
        if end < num_rows:
            self._sizes.append(num_rows - end)

    def add(self, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        # Called for every site of every step, so views are made by the handful: slicing costs as much as a product.
        parts = inputs.split_with_sizes(self._sizes)
        targets: list[Sequence[Tensor] | None] = [None] * len(site.slots)
        for i, adapter in self._adapters:
            weights = adapter.sites.get(site.index)
            if weights is None:
                continue
            hidden = torch.mm(parts[i], weights.a_t)
            columns = hidden.split_with_sizes(weights.ranks, 1) if len(weights.slots) > 1 else (hidden,)
            for part, low_rank in zip(weights.slots, columns, strict=True):
                target = targets[part.slot]
                if target is None:
                    slot = site.slots[part.slot]
                    target = outputs[:, slot.start : slot.stop].split_with_sizes(self._sizes)
                    targets[part.slot] = target
                target[i].addmm_(low_rank, part.b)


@dataclass(frozen=True)
class _JoinedSite:
    a_t: Tensor
    """[in, total rank]: by slot, then by adapter."""
    column_owners: Tensor
    """[total rank]: which adapter of the set each column of the product belongs to."""
    owner_key: tuple[tuple[int, int], ...]
    """(adapter, rank) runs of `column_owners`: sites of one key share the step's mask."""
    slots: tuple[SlotWeights, ...]


class JoinedAdapters:
    """The weights of a set of adapters side by side, site by site."""

    def __init__(self, adapters: Sequence[DeviceAdapter]) -> None:
        self.index_of = {adapter.uid: i for i, adapter in enumerate(adapters)}
        self.sites: dict[int, _JoinedSite] = {}
        for site_index in sorted({i for adapter in adapters for i in adapter.sites}):
            self.sites[site_index] = _join_site([adapter.sites.get(site_index) for adapter in adapters])
        self.num_weights = sum(s.a_t.numel() + sum(p.b.numel() for p in s.slots) for s in self.sites.values())


def _join_site(members: Sequence[SiteWeights | None]) -> _JoinedSite:
    present = [(i, weights) for i, weights in enumerate(members) if weights is not None]
    a_parts: list[Tensor] = []
    owner_runs: list[tuple[int, int]] = []
    slots: list[SlotWeights] = []
    column = 0
    for slot in sorted({part.slot for _, weights in present for part in weights.slots}):
        b_parts = []
        start = column
        for i, weights in present:
            for part in weights.slots:
                if part.slot == slot:
                    a_parts.append(weights.a_t[:, part.start : part.stop])
                    b_parts.append(part.b)
                    owner_runs.append((i, part.stop - part.start))
                    column += part.stop - part.start
        slots.append(SlotWeights(slot=slot, start=start, stop=column, b=torch.cat(b_parts)))
    a_t = torch.cat(a_parts, dim=1)
    owners = torch.tensor([i for i, rank in owner_runs for _ in range(rank)], device=a_t.device)
    return _JoinedSite(a_t=a_t, column_owners=owners, owner_key=tuple(owner_runs), slots=tuple(slots))


class JoinedLora:
    """All rows through all adapters' A at once, foreign columns dropped, then all B at once: few, wasteful products.

    Args:
        joined: a set that holds at least the adapters of these rows.
        row_owners: [T], each row's adapter as an index into the set, -1 for none.
    """

    def __init__(self, joined: JoinedAdapters, row_owners: Tensor) -> None:
        self._joined = joined
        self._row_owners = row_owners[:, None]
        self._foreign: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def add(self, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        weights = self._joined.sites.get(site.index)
        if weights is None:
            return
        foreign = self._foreign.get(weights.owner_key)
        if foreign is None:
            foreign = self._foreign[weights.owner_key] = self._row_owners != weights.column_owners
        hidden = torch.mm(inputs, weights.a_t).masked_fill_(foreign, 0)
        for part in weights.slots:
            slot = site.slots[part.slot]
            outputs[:, slot.start : slot.stop].addmm_(hidden[:, part.start : part.stop], part.b)


class LoraPlanner:
    """Chooses, step by step, how to compute a batch's adapters, and keeps the joined weights of recent sets.

    Segments cost a fixed time per product; joining costs the operations of rows x all adapters. The cheaper estimate
    wins. Joined weights are a copy, so a set is joined only when it comes the second time in a row, and at most
    `max_joined_weights` elements are kept (least recently used sets go first; one that is too large is never joined).

    Args:
        product_overhead_flops: how many floating point operations take as long as starting one small product.
        max_joined_weights: elements over all joined sets.
    """

    def __init__(self, *, product_overhead_flops: float, max_joined_weights: int) -> None:
        self._product_overhead_flops = product_overhead_flops
        self._max_joined_weights = max_joined_weights
        self._joined: OrderedDict[tuple[AdapterUid, ...], JoinedAdapters] = OrderedDict()
        self._last_set: tuple[AdapterUid, ...] = ()

    def plan(self, segments: Sequence[Segment], num_rows: int, device: torch.device) -> LoraBatch | None:
        """The batch for a step whose rows [0, num_rows) are covered by `segments` but for the rows without adapter."""
        if not segments:
            return None
        adapters = {segment.adapter.uid: segment.adapter for segment in segments}
        wanted = tuple(sorted(adapters))
        seen_before, self._last_set = wanted == self._last_set, wanted
        if not self._is_joining_cheaper(segments, list(adapters.values()), num_rows):
            return SegmentedLora(segments, num_rows)
        joined = self._joined.get(wanted)
        if joined is None:
            num_weights = sum(adapter.num_weights for adapter in adapters.values())
            if not seen_before or num_weights > self._max_joined_weights:
                return SegmentedLora(segments, num_rows)
            joined = JoinedAdapters([adapters[uid] for uid in wanted])
            self._joined[wanted] = joined
            while sum(j.num_weights for j in self._joined.values()) > self._max_joined_weights:
                self._joined.popitem(last=False)
        self._joined.move_to_end(wanted)
        owners = [-1] * num_rows
        for segment in segments:
            count = segment.last_row - segment.first_row
            owners[segment.first_row : segment.last_row] = [joined.index_of[segment.adapter.uid]] * count
        return JoinedLora(joined, torch.tensor(owners, device=device))

    def forget(self, uid: AdapterUid) -> None:
        """Drops every joined set that holds the adapter, which is leaving the device."""
        for key in [key for key in self._joined if uid in key]:
            del self._joined[key]

    def _is_joining_cheaper(
        self, segments: Sequence[Segment], adapters: Sequence[DeviceAdapter], num_rows: int
    ) -> bool:
        if len(segments) == 1:
            return False
        joined_flops = 2.0 * num_rows * sum(adapter.num_weights for adapter in adapters)
        joined_products = max(adapter.num_products for adapter in adapters)
        exact_flops = sum(2.0 * (s.last_row - s.first_row) * s.adapter.num_weights for s in segments)
        exact_products = sum(s.adapter.num_products for s in segments)
        saved = (exact_products - joined_products) * self._product_overhead_flops
        return joined_flops - exact_flops < saved
