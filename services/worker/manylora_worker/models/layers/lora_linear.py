"""Linear layers that add each row's own LoRA, and the two ways to compute a batch of mixed adapters.

No form multiplies a row by another row's adapter, so an infinity or a NaN stays in its row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from manylora_shared.ids import AdapterUid
from torch import Tensor, nn

from manylora_worker.weights.sites import DeviceAdapter, Site


class LoraBatch(Protocol):
    def add(self, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        """inputs: [T, in]; outputs: [T, out], changed in place."""


class LoraSwitch:
    def __init__(self) -> None:
        self.batch: LoraBatch | None = None  # None: no row of the step has an adapter
        self.experts: Any = None  # mixture.ExpertLora: of rows whose adapters change experts; None: there are none


class LoraLinear(nn.Module):
    """A base linear layer of any kind (plain, fused, 4-bit) and the step's adapters on top of it. reduce: sums the
    outputs over the ranks that have a share of the inputs each, in place.
    """

    def __init__(
        self, base: nn.Module, site: Site, switch: LoraSwitch, reduce: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__()
        self.base = base
        self.site = site
        self.switch = switch
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.base(x)
        batch = self.switch.batch
        if batch is not None:
            batch.add(self.site, x.view(-1, x.shape[-1]), outputs.view(-1, outputs.shape[-1]))
        if self.reduce is not None:
            self.reduce(outputs)
        return outputs


class FusedProjection:
    """Computes a fused site once for its layers, which the model calls one after the other."""

    def __init__(self, linear: LoraLinear) -> None:
        self.linear = linear
        self._input: Tensor | None = None  # held until every member was served: no later tensor can be mistaken for it
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
    """Rows [first_row, last_row) of one adapter, or of several: then `adapter` is the first, with weight `weight`."""

    first_row: int
    last_row: int
    adapter: DeviceAdapter
    weight: float = 1.0
    others: Sequence[tuple[DeviceAdapter, float]] = ()

    @property
    def is_composed(self) -> bool:
        return self.weight != 1.0 or bool(self.others)


class SegmentedLora:
    """segments: in order of rows, not overlapping."""

    def __init__(self, segments: Sequence[Segment], num_rows: int) -> None:
        self._sizes: list[int] = []  # all rows cut into runs, those without an adapter included
        self._adapters: list[tuple[int, DeviceAdapter, float]] = []  # (run, an adapter of it, its weight)
        self._columned = [segment for segment in segments if segment.adapter.columns]
        end = 0
        for segment in segments:
            if segment.first_row > end:
                self._sizes.append(segment.first_row - end)
            self._adapters.append((len(self._sizes), segment.adapter, segment.weight))
            self._adapters += [(len(self._sizes), adapter, weight) for adapter, weight in segment.others]
            self._sizes.append(segment.last_row - segment.first_row)
            end = segment.last_row
        if end < num_rows:
            self._sizes.append(num_rows - end)

    def add(self, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        # Called for every site of every step, so views are made by the handful: slicing costs as much as a product.
        parts = inputs.split_with_sizes(self._sizes)
        targets: list[Sequence[Tensor] | None] = [None] * len(site.slots)
        for i, adapter, weight in self._adapters:
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
                target[i].addmm_(low_rank, part.b, alpha=weight)
        for segment in self._columned:
            for columns in segment.adapter.columns.get(site.index, ()):
                slot = site.slots[columns.slot]
                own = outputs[segment.first_row : segment.last_row, slot.start : slot.stop]
                if columns.gain is not None:
                    own.mul_(columns.gain)
                if columns.shift is not None:
                    own.add_(columns.shift)


@dataclass(frozen=True)
class _StackedSite:
    a_t: Tensor  # [adapters, in, sum of ranks]
    ranks: list[int]
    slots: tuple[tuple[int, Tensor], ...]  # (slot, B [adapters, rank, out])


class AdapterStack:
    def __init__(self, adapters: Sequence[DeviceAdapter]) -> None:
        self.num_weights = sum(adapter.num_weights for adapter in adapters)
        self.sites: dict[int, _StackedSite] = {}
        for index, first in adapters[0].sites.items():
            members = [adapter.sites[index] for adapter in adapters]
            self.sites[index] = _StackedSite(
                a_t=torch.stack([member.a_t.t() for member in members]).transpose(1, 2),
                ranks=first.ranks,
                slots=tuple(
                    (part.slot, torch.stack([member.slots[i].b for member in members]))
                    for i, part in enumerate(first.slots)
                ),
            )


class StackedLora:
    """One batched product a matrix. An adapter with fewer rows repeats one of its own and drops the copies. segments:
    one an adapter, in the stack's order and in order of rows.
    """

    def __init__(self, stack: AdapterStack, segments: Sequence[Segment], device: torch.device) -> None:
        self._stack = stack
        self._num_adapters = len(segments)
        counts = [segment.last_row - segment.first_row for segment in segments]
        first_row, last_row = segments[0].first_row, segments[-1].last_row
        self._range: slice | None = None  # the rows, where they are consecutive
        if last_row - first_row == sum(counts):
            self._range = slice(first_row, last_row)
        # [adapters * most rows]: where the products' rows come from; None: they are the range as it is
        self._gather: Tensor | None = None
        most = max(counts)
        if self._range is None or min(counts) < most:
            source = [s.first_row + min(i, n - 1) for s, n in zip(segments, counts, strict=True) for i in range(most)]
            kept = [k * most + i for k, n in enumerate(counts) for i in range(n)]
            rows = [row for s in segments for row in range(s.first_row, s.last_row)]
            self._gather, self._kept, self._rows = (torch.tensor(x, device=device) for x in (source, kept, rows))

    def add(self, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        weights = self._stack.sites.get(site.index)
        if weights is None:
            return
        own = inputs[self._range] if self._gather is None else inputs.index_select(0, self._gather)
        hidden = torch.bmm(own.view(self._num_adapters, -1, own.shape[1]), weights.a_t)
        columns = hidden.split_with_sizes(weights.ranks, 2) if len(weights.slots) > 1 else (hidden,)
        for (slot_index, b), low_rank in zip(weights.slots, columns, strict=True):
            product = torch.bmm(low_rank, b).view(-1, b.shape[2])
            slot = site.slots[slot_index]
            target = outputs[:, slot.start : slot.stop]
            if self._gather is not None:
                product = product.index_select(0, self._kept)
            if self._range is not None:
                target[self._range].add_(product)
            else:
                target.index_add_(0, self._rows, product)


class CombinedLora:
    def __init__(self, parts: Sequence[LoraBatch]) -> None:
        self._parts = parts

    def add(self, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        for part in self._parts:
            part.add(site, inputs, outputs)


@dataclass(frozen=True)
class LoraCosts:
    """In floating point operations that take as long."""

    product: float  # starting one small matrix product, or a selection or addition of rows
    copied_weight: float


class LoraPlanner:
    # Segments cost a fixed time a product and adapter. A stack costs it once for all adapters of one shape, plus
    # an addition a slot and a selection of rows where they are uneven. Stacking copies weights: a set is stacked
    # once its steps as segments have lost as much as the copy costs, so no more than twice the best is ever
    # spent.

    def __init__(self, costs: LoraCosts, *, max_stacked_weights: int) -> None:
        self._costs = costs
        self._max_stacked_weights = max_stacked_weights
        self._stacks: OrderedDict[tuple[AdapterUid, ...], AdapterStack] = OrderedDict()
        # of the last step's sets, by not being stacked, over consecutive steps
        self._losses: dict[tuple[AdapterUid, ...], float] = {}

    def plan(self, segments: Sequence[Segment], num_rows: int, device: torch.device) -> LoraBatch | None:
        """segments: in order of rows, one an adapter or composition; rows of [0, num_rows) in none have no adapter."""
        if not segments:
            return None
        by_shape: dict[Hashable, list[Segment]] = {}
        alone: list[Segment] = []
        for segment in segments:
            is_alone = segment.is_composed or segment.adapter.columns
            of_its_kind = alone if is_alone else by_shape.setdefault(segment.adapter.shape, [])
            of_its_kind.append(segment)
        losses: dict[tuple[AdapterUid, ...], float] = {}
        parts: list[LoraBatch] = []
        for alike in by_shape.values():
            stack = self._stack_for(alike, losses)
            if stack is None:
                alone += alike
            else:
                parts.append(StackedLora(stack, alike, device))
        self._losses = losses
        if alone:
            parts.append(SegmentedLora(sorted(alone, key=lambda s: s.first_row), num_rows))
        return parts[0] if len(parts) == 1 else CombinedLora(parts)

    def forget(self, uid: AdapterUid) -> None:
        for key in [key for key in self._stacks if uid in key]:
            del self._stacks[key]

    def _stack_for(self, alike: Sequence[Segment], losses: dict[tuple[AdapterUid, ...], float]) -> AdapterStack | None:
        """None: not worth using; the loss is then noted in `losses`."""
        gain = self._gain(alike)
        if gain <= 0:
            return None
        key = tuple(segment.adapter.uid for segment in alike)
        stack = self._stacks.get(key)
        if stack is None:
            num_weights = sum(segment.adapter.num_weights for segment in alike)
            losses[key] = self._losses.get(key, 0.0) + gain
            if num_weights > self._max_stacked_weights or losses[key] < num_weights * self._costs.copied_weight:
                return None
            while self._stacks and num_weights + self._num_stacked_weights() > self._max_stacked_weights:
                self._stacks.popitem(last=False)
            stack = self._stacks[key] = AdapterStack([segment.adapter for segment in alike])
        self._stacks.move_to_end(key)
        return stack

    def _num_stacked_weights(self) -> int:
        return sum(stack.num_weights for stack in self._stacks.values())

    def _gain(self, alike: Sequence[Segment]) -> float:
        if len(alike) == 1:
            return 0.0
        counts = [segment.last_row - segment.first_row for segment in alike]
        adapter = alike[0].adapter
        repeated_rows = len(counts) * max(counts) - sum(counts)
        products = adapter.num_sites + adapter.num_slots
        saved = (len(alike) - 1) * products - adapter.num_slots
        if repeated_rows or alike[-1].last_row - alike[0].first_row > sum(counts):
            saved -= products  # a selection a site, and one a slot
        return saved * self._costs.product - 2.0 * repeated_rows * adapter.num_weights
