"""An adapter added to the base model's weights in their place, and taken out again bit for bit: what is written over is
kept on the host. Storage stays where it is, so captured graphs stay right; fused layers are written slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from manylora_worker.kinds.api import MergeRefused
from manylora_worker.models.layers.lora_linear import LoraLinear
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.loader import LoadedModel
from manylora_worker.weights.sites import DeviceAdapter, SiteWeights, Slot

_ROWS_AT_ONCE = 1024  # of a matrix in float32 beside the weights


class MergedWeights:
    """On the engine's thread, between steps."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._linears = {each.site.index: each for each in loaded.model.modules() if isinstance(each, LoraLinear)}
        self._is_shared = loaded.group is not None
        self._left: list[tuple[int, SiteWeights]] | None = None  # to be written, the last one first; None: none is
        self._undo: list[Callable[[], None]] = []  # by matrix, the first that was written first

    @property
    def problem(self) -> str:
        """Why no adapter goes into these weights; empty: one does."""
        if self._is_shared:
            return "layers that several processes share (--tensor-parallel) are not merged"
        for linear in self._linears.values():
            if not isinstance(linear.base, PackedLinear) and type(linear.base) is not nn.Linear:
                kind = type(linear.base).__name__
                return f"layers of {kind} are not merged: what is quantized would be rounded to few bits"
        return ""

    def merge_some(self, adapter: Callable[[], DeviceAdapter]) -> bool:
        """See api.MergingRunner. adapter: asked for at the first."""
        if self._left is None:
            self._check(found := adapter())
            self._left = list(found.sites.items())
        with torch.inference_mode():
            self._write(*self._left.pop())
        if self._left:
            return False
        self._left = None
        return True

    def restore_some(self) -> bool:
        self._left = None
        if self._undo:
            with torch.inference_mode():
                self._undo[-1]()
            self._undo.pop()
        return not self._undo

    def _check(self, adapter: DeviceAdapter) -> None:
        """Raises MergeRefused."""
        assert not self._undo
        if self.problem:
            raise MergeRefused(self.problem)
        if adapter.rope is not None:
            raise MergeRefused("the adapter rotates positions in its own way, which is not in the weights")
        if adapter.experts:
            raise MergeRefused("the adapter changes experts, which are not merged")
        if adapter.tokens:
            raise MergeRefused("the adapter brings tokens' rows of the embeddings or the head, which are not merged")
        if adapter.columns:
            raise MergeRefused("the adapter scales or shifts what layers give (DoRA, biases), which is not merged")
        if any(site not in self._linears for site in adapter.sites):
            raise MergeRefused("the adapter changes the output head, which is not merged")

    def _write(self, site: int, weights: SiteWeights) -> None:
        linear = self._linears[site]
        base, slots = linear.base, linear.site.slots
        if isinstance(base, PackedLinear):  # another copy in the place of this one, which is kept as it is
            whole = base.unpacked()
            _add(whole, slots, weights)
            self._undo.append(partial(base.replace, base.packed))
            base.replace(base.pack(whole))
            return
        whole = base.weight.data
        kept = [(own, own.to("cpu", copy=True)) for own, _, _ in _parts(whole, slots, weights)]
        self._undo.append(partial(_put_back, kept))
        _add(whole, slots, weights)


def _parts(weight: Tensor, slots: Sequence[Slot], weights: SiteWeights) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of weight [out, in]: a slot's rows, and its A [rank, in] and B [rank, out]."""
    return [
        (weight[slots[part.slot].start : slots[part.slot].stop], weights.a_t[:, part.start : part.stop].T, part.b)
        for part in weights.slots
    ]


def _add(weight: Tensor, slots: Sequence[Slot], weights: SiteWeights) -> None:
    """In its place. Sums and products are of float32, rounded once."""
    for own, a, b in _parts(weight, slots, weights):
        a = a.to(weight.device, torch.float32)
        for first in range(0, own.shape[0], _ROWS_AT_ONCE):
            rows = own[first : first + _ROWS_AT_ONCE]
            b_rows = b[:, first : first + _ROWS_AT_ONCE].to(weight.device, torch.float32)
            rows.copy_(torch.addmm(rows.float(), b_rows.T, a))


def _put_back(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    for own, before in kept:
        own.copy_(before)
