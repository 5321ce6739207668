"""How a weight file becomes an adapter's buffer: what is copied from where to where.

A Packing holds for all files that are alike but for their weights; a reader keeps the last ones (Scratch) and checks
the next file only for digest and NaN.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from manylora_shared.ids import AdapterUid, TenantId
from manylora_shared.stores.adapter_rope import RopeScaling
from torch import Tensor

from manylora_worker.weights.layout import (
    ALIGNMENT,
    Extras,
    HostAdapter,
    Layout,
    VectorKind,
    elements_with,
    lay_out,
    place_tokens,
    place_vectors,
)
from manylora_worker.weights.sites import Site

_KEPT_SCRATCH_BYTES = 256 << 20
_KEPT_PACKINGS = 64  # a thread's; each takes some hundred bytes a matrix
_KEPT_COPIES = 1 << 17  # of matrices, in all of them: adapters of experts have tens of thousands each


class StoredMatrix(NamedTuple):
    dtype: torch.dtype
    rows: int
    columns: int
    first_byte: int
    row_stride: int = 0  # elements from one row to the next; 0: `columns`
    column_stride: int = 1

    @property
    def strides(self) -> tuple[int, int]:
        return self.row_stride or self.columns, self.column_stride


class ModuleWeights(NamedTuple):
    a: StoredMatrix  # [rank, in]
    b: StoredMatrix  # [out, rank]
    scale: float  # of their product


class ModuleVector(NamedTuple):
    path: str
    kind: VectorKind
    stored: StoredMatrix  # [1, out]
    scale: float


class ModuleTokens(NamedTuple):
    ids: tuple[int, ...]
    embeds: bool
    heads: bool
    stored: StoredMatrix  # [ids, width]


class _Copy(NamedTuple):
    """[shape] in both; `strides` are the file's."""

    dtype: torch.dtype
    shape: tuple[int, int]
    strides: tuple[int, int]
    first_byte: int
    start: int  # in elements of the buffer
    columns: int  # of the matrix there
    scale: float
    is_scaled_there: bool  # a product of two such numbers is rounded once there, as from float32


@dataclass(frozen=True)
class Packing:
    config: dict[str, Any]  # the kind's adapter_config.json
    layout: Layout
    dtype: torch.dtype  # the buffer's
    copies: Sequence[_Copy]
    extras: Extras = field(default_factory=Extras)
    is_padded: bool = False  # the buffer has places that nothing is copied to, which are zero

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        modules: Mapping[str, ModuleWeights],
        sites: Sequence[Site],
        dtype: torch.dtype,
        rope: RopeScaling | None = None,
        vectors: Sequence[ModuleVector] = (),
        tokens: Sequence[ModuleTokens] = (),
    ) -> Packing:
        """modules: by path. Each belongs to a site, and its shapes fit, as those of `vectors`."""
        layout = lay_out(sites, {path: weights.a.rows for path, weights in modules.items()})
        copies: list[_Copy] = []
        is_padded = False
        for placed in layout:
            site = sites[placed.site]
            for slot, start, stop, b in placed.slots:
                own = modules.get(site.slots[slot].path)
                is_padded |= own is None or own.a.rows < stop - start
                is_padded |= any(each.rows * each.columns % ALIGNMENT for each in (placed.a, b))
                if own is None:
                    continue
                stored_a, stored_b, scale = own
                a_start = placed.a.start + start * placed.a.columns
                a_shape = (stored_a.rows, placed.a.columns)
                a_first = stored_a.first_byte + site.first_input * stored_a.dtype.itemsize
                copies.append(
                    _Copy(stored_a.dtype, a_shape, stored_a.strides, a_first, a_start, placed.a.columns, 1.0, True)
                )
                is_scaled_there = stored_b.dtype is dtype and _is_exact(scale, dtype)
                b_start = b.start
                for outputs in site.slots[slot].outputs or (range(b.columns),):
                    b_first = stored_b.first_byte + outputs.start * stored_b.strides[0] * stored_b.dtype.itemsize
                    b_shape, strides = (stored_b.columns, len(outputs)), stored_b.strides[::-1]
                    copies.append(
                        _Copy(stored_b.dtype, b_shape, strides, b_first, b_start, b.columns, scale, is_scaled_there)
                    )
                    b_start += len(outputs)
        slots = {slot.path: (site.index, i) for site in sites for i, slot in enumerate(site.slots)}
        width = tokens[0].stored.columns if tokens else 0
        placed_tokens = place_tokens([each[:3] for each in tokens], layout, width)
        for token, rows in zip(tokens, placed_tokens, strict=True):
            stored = token.stored
            shape = (stored.rows, width)
            start = rows.placed.start
            copies.append(_Copy(stored.dtype, shape, stored.strides, stored.first_byte, start, width, 1.0, True))
        wanted = [(each.kind, *slots[each.path]) for each in vectors]
        placed_vectors = place_vectors(wanted, layout, sites, placed_tokens)
        for vector, found in zip(vectors, placed_vectors, strict=True):
            stored, start, width = vector.stored, found.placed.start, found.placed.columns
            for outputs in sites[found.site].slots[found.slot].outputs or (range(width),):
                first_byte = stored.first_byte + outputs.start * stored.dtype.itemsize
                shape = (1, len(outputs))
                copies.append(_Copy(stored.dtype, shape, (1, 1), first_byte, start, width, vector.scale, False))
                start += len(outputs)
        return cls(config, layout, dtype, copies, Extras(rope, placed_tokens, placed_vectors), is_padded)

    def pack(self, content: Tensor, uid: AdapterUid, allocate: Callable[[int, torch.dtype], Tensor]) -> HostAdapter:
        """content: the whole file, [bytes] uint8. allocate: see source.read_adapter."""
        buffer = allocate(elements_with(self.layout, self.extras), self.dtype)
        if self.is_padded:
            buffer.zero_()
        origin = buffer.storage_offset()
        wholes = {dtype: _whole(content, dtype) for dtype in {copy.dtype for copy in self.copies}}
        # In two calls for all matrices: hundreds of short ones would each wait for the interpreter, and hold up steps.
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        scaled: dict[float, list[Tensor]] = defaultdict(list)
        for dtype, shape, strides, first_byte, start, width, scale, is_scaled_there in self.copies:
            rows, columns = shape
            first, rest = divmod(first_byte, dtype.itemsize)
            if rest == 0:
                whole = wholes[dtype]
                source = whole.as_strided(shape, strides, whole.storage_offset() + first)
            else:
                extent = (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1
                source = (
                    content[first_byte : first_byte + extent * dtype.itemsize]
                    .clone()
                    .view(dtype)
                    .as_strided(shape, strides)
                )
            target = buffer.as_strided(shape, (width, 1), origin + start)
            if scale != 1.0:
                if is_scaled_there:
                    scaled[scale].append(target)
                else:
                    source = source.float() * scale
            sources.append(source)
            targets.append(target)
        torch._foreach_copy_(targets, sources)
        for scale, matrices in scaled.items():
            torch._foreach_mul_(matrices, scale)
        return HostAdapter(uid, buffer, self.layout, self.extras)


def _whole(content: Tensor, dtype: torch.dtype) -> Tensor:
    return content[: content.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _is_exact(value: float, dtype: torch.dtype) -> bool:
    return bool(torch.tensor(value, dtype=dtype).item() == value)


class Scratch(threading.local):
    # fresh memory costs page faults, and giving it back interrupts all threads

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._packings: OrderedDict[bytes, Packing] = OrderedDict()
        self._kept_copies = 0

    def take(self, size_bytes: int) -> Tensor:
        """[size_bytes] uint8; the thread's next call gives it out again."""
        if self._buffer is None or self._buffer.numel() < size_bytes:
            buffer = torch.empty(size_bytes, dtype=torch.uint8)
            if size_bytes > _KEPT_SCRATCH_BYTES:
                return buffer
            self._buffer = buffer
        return self._buffer[:size_bytes]

    def packing(self, kind: bytes) -> Packing | None:
        packing = self._packings.get(kind)
        if packing is not None:
            self._packings.move_to_end(kind)
        return packing

    def keep(self, kind: bytes, packing: Packing) -> None:
        before = self._packings.get(kind)
        self._kept_copies += len(packing.copies) - (0 if before is None else len(before.copies))
        self._packings[kind] = packing
        while len(self._packings) > _KEPT_PACKINGS or (self._kept_copies > _KEPT_COPIES and len(self._packings) > 1):
            self._kept_copies -= len(self._packings.popitem(last=False)[1].copies)


def kind_of(owner: TenantId | None, config: bytes, header: bytes, size_bytes: int) -> bytes:
    """Equal for adapters of one owner with the same configuration, header and size: a read that is quicker for a known
    kind tells nobody of another tenant's.
    """
    digest = hashlib.sha256(b"%s %d %d " % ((owner or "").encode(), len(config), size_bytes))
    digest.update(config)
    digest.update(header)
    return digest.digest()
