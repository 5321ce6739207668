"""What DoRA's magnitudes and trained biases make of a layer's outputs: a gain and a shift an output, worked out when an
adapter comes to the device, for they need the base model's weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from manylora_worker.models.layers.lora_linear import LoraLinear
from manylora_worker.models.loader import LoadedModel
from manylora_worker.weights.layout import HostAdapter, VectorKind
from manylora_worker.weights.sites import SlotColumns

_ROWS_AT_ONCE = 128


class BaseColumns:
    """Of a model whose layers are whole here. From one thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._dtype = loaded.dtype
        self._linears = {each.site.index: each for each in loaded.model.modules() if isinstance(each, LoraLinear)}
        self._squares: dict[int, Tensor] = {}  # by site: of the norms of its rows

    def of(self, adapter: HostAdapter) -> Mapping[int, tuple[SlotColumns, ...]]:
        """By site index; y = gain * (W x + s B A x + base bias) + shift."""
        vectors: dict[tuple[int, int], dict[VectorKind, Tensor]] = defaultdict(dict)
        for vector in adapter.extras.vectors:
            vectors[vector.site, vector.slot][vector.kind] = vector.placed.of(adapter.buffer)[0].float()
        found: dict[int, list[SlotColumns]] = defaultdict(list)
        with torch.inference_mode():
            for (site, slot), own in sorted(vectors.items()):
                found[site].append(self._columns(adapter, site, slot, own))
        return {site: tuple(each) for site, each in found.items()}

    def _columns(self, adapter: HostAdapter, site: int, slot: int, own: Mapping[VectorKind, Tensor]) -> SlotColumns:
        magnitude = own.get(VectorKind.MAGNITUDE)
        gain = None if magnitude is None else (magnitude / self._norms(adapter, site, slot)).to(self._dtype)
        before = self._bias(site, slot)
        shift = own.get(VectorKind.LOW_RANK_BIAS)
        after = own.get(VectorKind.BIAS, before)
        if before is not None and after is not None and (gain is not None or after is not before):
            moved = after - (before if gain is None else gain.float() * before)
            shift = moved if shift is None else shift + moved
        return SlotColumns(slot, gain, None if shift is None else shift.to(self._dtype))

    def _bias(self, site: int, slot: int) -> Tensor | None:
        linear = self._linears[site]
        bias = getattr(linear.base, "bias", None)
        place = linear.site.slots[slot]
        return None if bias is None else bias[place.start : place.stop].float()

    def _norms(self, adapter: HostAdapter, site: int, slot: int) -> Tensor:
        """[out]: of the rows of W + s B A, without making them: |w|^2 + 2 w.(s b A) + |s b A|^2."""
        place = self._linears[site].site.slots[slot]
        placed = next(each for each in adapter.layout if each.site == site)
        start, stop, b_place = next((start, stop, b) for each, start, stop, b in placed.slots if each == slot)
        a, b = placed.a.of(adapter.buffer)[start:stop], b_place.of(adapter.buffer).double()
        crossed = self._product(site, a)[:, place.start : place.stop].double()
        gram = a.double() @ a.double().T
        squares = self._site_squares(site)[place.start : place.stop]
        return (squares + 2 * (crossed * b).sum(0) + (b * (gram @ b)).sum(0)).clamp_(min=0).sqrt().float()

    def _site_squares(self, site: int) -> Tensor:
        squares = self._squares.get(site)
        if squares is None:
            width = self._linears[site].site.in_features
            squares = torch.zeros(self._linears[site].site.slots[-1].stop, dtype=torch.float64)
            for first in range(0, width, _ROWS_AT_ONCE):
                rows = torch.zeros(min(_ROWS_AT_ONCE, width - first), width, dtype=self._dtype)
                rows[:, first:].fill_diagonal_(1)
                squares += self._product(site, rows).double().square().sum(0)
            self._squares[site] = squares
        return squares

    def _product(self, site: int, rows: Tensor) -> Tensor:
        """[rows, out]: with the base's weight alone, whatever form it has."""
        base: nn.Module = self._linears[site].base
        outputs: Tensor = base(rows.to(self._dtype))
        bias = getattr(base, "bias", None)
        return outputs if bias is None else outputs - bias
