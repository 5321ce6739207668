"""What DoRA's magnitudes and trained biases make of a layer's outputs: a gain and a shift an output, worked out when an
adapter comes to the device, for they need the base model's weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manylora_worker.models.layers.lora_linear import LoraLinear
from manylora_worker.models.loader import LoadedModel
from manylora_worker.weights.layout import HostAdapter, VectorKind
from manylora_worker.weights.sites import SlotColumns

_ROWS_AT_ONCE = 128
_OUTPUTS_AT_ONCE = 1024  # of a weight that is taken out of its few bits


class BaseColumns:
    """Of a model whose layers are whole here. From one thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._dtype, self._device = loaded.dtype, loaded.device
        self._linears = {each.site.index: each for each in loaded.model.modules() if isinstance(each, LoraLinear)}
        self._squares: dict[int, Tensor] = {}  # by site: of the norms of its rows

    def flat(self, adapter: HostAdapter) -> Tensor:
        """[elements]: as layout.place_columns has them, ones and zeros where an adapter has no gain or shift."""
        parts: list[Tensor] = []
        for site, slots in sorted(self.of(adapter).items()):
            for each in slots:
                place = self._linears[site].site.slots[each.slot]
                like = torch.empty(place.stop - place.start, dtype=self._dtype, device=self._device)
                parts.append(torch.ones_like(like) if each.gain is None else each.gain)
                parts.append(torch.zeros_like(like) if each.shift is None else each.shift)
        return torch.cat(parts)

    def of(self, adapter: HostAdapter) -> Mapping[int, tuple[SlotColumns, ...]]:
        """By site index; y = gain * (W x + s B A x + base bias) + shift."""
        vectors: dict[tuple[int, int], dict[VectorKind, Tensor]] = defaultdict(dict)
        for vector in adapter.extras.vectors:
            vectors[vector.site, vector.slot][vector.kind] = self._here(vector.placed.of(adapter.buffer)[0]).float()
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
        a, b = (self._here(x) for x in (placed.a.of(adapter.buffer)[start:stop], b_place.of(adapter.buffer)))
        b = b.double()
        crossed = self._product(site, a)[:, place.start : place.stop].double()
        gram = a.double() @ a.double().T
        squares = self._site_squares(site)[place.start : place.stop]
        return (squares + 2 * (crossed * b).sum(0) + (b * (gram @ b)).sum(0)).clamp_(min=0).sqrt().float()

    def _site_squares(self, site: int) -> Tensor:
        squares = self._squares.get(site)
        base = self._linears[site].base
        if squares is None and _is_stored(base):
            pieces = [piece.float().square().sum(1) for piece in _pieces(base, self._dtype)]
            squares = self._squares[site] = torch.cat(pieces).double()
        if squares is None:
            width, outputs = self._linears[site].site.in_features, self._linears[site].site.slots[-1].stop
            squares = torch.zeros(outputs, dtype=torch.float64, device=self._device)
            for first in range(0, width, _ROWS_AT_ONCE):
                rows = torch.zeros(min(_ROWS_AT_ONCE, width - first), width, dtype=self._dtype, device=self._device)
                rows[:, first:].fill_diagonal_(1)
                squares += self._product(site, rows).double().square().sum(0)
            self._squares[site] = squares
        return squares

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _product(self, site: int, rows: Tensor) -> Tensor:
        """[rows, out]: with the base's weight alone, whatever form it has."""
        base: nn.Module = self._linears[site].base
        if _is_stored(base):
            return torch.cat([F.linear(rows.to(self._dtype), each) for each in _pieces(base, self._dtype)], 1)
        outputs: Tensor = base(rows.to(self._dtype))
        bias = getattr(base, "bias", None)
        return outputs if bias is None else outputs - bias


def _is_stored(base: nn.Module) -> bool:
    """Whether `_pieces` gives its weight. On a GPU it does: products of 4 bits share room with those of steps."""
    return type(base) is nn.Linear or hasattr(base, "dequantized")


def _pieces(base: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    """[outputs, in] each."""
    for first in range(0, int(base.out_features), _OUTPUTS_AT_ONCE):
        rows = slice(first, first + _OUTPUTS_AT_ONCE)
        yield base.weight[rows] if type(base) is nn.Linear else base.dequantized(rows, dtype)
