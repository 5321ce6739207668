"""Adapters on the device: their weights in blocks of the arena, and the table by which kernels find them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from manylora_shared.composition import parts_of, uids_of
from manylora_shared.ids import AdapterKey, AdapterUid, TenantId, owner_of
from manylora_shared.stores.adapter_rope import RopeScaling
from torch import Tensor

from manylora_worker.models.cuda.expert_tables import ExpertAdapters, ExpertFields
from manylora_worker.models.cuda.kernels.lora import (
    CHUNK_ALIGNMENT,
    CHUNK_RANKS,
    a_field,
    b_field,
    column_field,
    column_word,
    compose_entries,
    num_chunks,
    part_field,
    part_word,
    site_fields,
)
from manylora_worker.weights.layout import (
    Extras,
    HostAdapter,
    Layout,
    PlacedSite,
    PlacedVector,
    aligned,
    elements_before,
    place_columns,
)
from manylora_worker.weights.sites import DeviceAdapter, Site, SlotColumns

_BLOCKS_AT_ONCE = 4
_LAYOUTS = 64
_KNOWN_ADAPTERS = 1 << 16
_NOBODY = TenantId("")  # KV was there, or nothing


class NoRoom(Exception): ...


_Kind = tuple[tuple[PlacedSite, ...], tuple[PlacedVector, ...]]


# Matrices are cut in chunks of CHUNK_RANKS ranks (kernels/lora.py), or of fewer where a block has no room for so many
# rows; a rank counts as if all chunks but the last were whole. Chunks that follow one another in the host buffer
# share a block while they fit: an adapter is one copy a block, and any free blocks serve any adapter.
def ranks_of_chunk(width: int, block_elements: int) -> int:
    """Of matrices of rows of `width` weights: as many as a block has room for."""
    return max(1, min(CHUNK_RANKS, block_elements // width))


def arena_chunks(sites: Sequence[Site], block_elements: int, max_rank: int) -> int:
    """Of an adapter of the largest rank, or of several that take it together in steps of CHUNK_RANKS, on the widest of
    the sites' layers.
    """
    products = [site for site in sites if not site.experts]
    widths = [max(site.in_features, *(slot.stop - slot.start for slot in site.slots)) for site in products]
    return num_chunks(max_rank) * -(-CHUNK_RANKS // ranks_of_chunk(max(widths), block_elements))


@dataclass(frozen=True)
class _Run:
    """A stretch of the host buffer, or of what lies behind it, that lies in one block."""

    start: int
    length: int


@dataclass(frozen=True)
class Placement:
    """How an adapter is laid out over blocks, before any block is chosen."""

    runs: Sequence[_Run]
    chunks: np.ndarray  # int64 [chunks, 4]: site, field of its entry, run, elements from the run's begin
    columns: np.ndarray  # as `chunks`, of gains and shifts
    matrices: int  # elements, behind which runs are of gains and shifts, not of the host buffer
    words: np.ndarray  # int64 [words, 3]: site, field, word: what of its entries is the same wherever it stands

    @property
    def num_blocks(self) -> int:
        return len(self.runs)


def place(adapter: HostAdapter, block_elements: int, chunks: int, experts: ExpertFields | None = None) -> Placement:
    """Raises ValueError where a chunk is larger than a block or the matrices' widths are odd."""
    pieces: list[tuple[int, int, int, int]] = []  # start, length, site, field
    words: list[tuple[int, int, int]] = []
    for placed in adapter.layout:
        if placed.experts:
            assert experts is not None
            words += [(placed.site, *word) for word in experts.words(placed, block_elements)]
            for start, length, field in experts.pieces(placed, block_elements):
                pieces.append((start, length, placed.site, field))
            continue
        for slot, start, stop, b in placed.slots:
            most = ranks_of_chunk(max(placed.a.columns, b.columns), block_elements)
            full, rest = divmod(stop - start - 1, most)
            words.append((placed.site, slot, full * CHUNK_RANKS + rest + 1))
            for chunk in range(full + 1):
                first = chunk * most
                rows = min(most, stop - start - first)
                words.append((placed.site, part_field(slot, chunk, chunks), part_word(rows)))
                a_start = placed.a.start + (start + first) * placed.a.columns
                pieces.append((a_start, rows * placed.a.columns, placed.site, a_field(slot, chunk, chunks)))
                b_start = b.start + first * b.columns
                pieces.append((b_start, rows * b.columns, placed.site, b_field(slot, chunk, chunks)))
    runs: list[_Run] = []
    matrices = elements_before(adapter.layout, adapter.extras.tokens)
    for each in place_columns(adapter.layout, adapter.extras):
        pieces.append((each.start, 2 * each.width, each.site, column_field(each.slot, chunks)))
    cut: list[tuple[int, int, int, int]] = []
    for start, length, site, field in sorted(pieces):
        if length > block_elements:
            raise ValueError(f"{length} weights of one matrix do not fit in a block of {block_elements}")
        if start % CHUNK_ALIGNMENT or block_elements % CHUNK_ALIGNMENT:
            raise ValueError(f"the width of a matrix is no multiple of {CHUNK_ALIGNMENT}")
        length = aligned(length)  # the buffer goes on there
        joins = bool(runs) and runs[-1].start + runs[-1].length == start != matrices
        if joins and start + length - runs[-1].start <= block_elements:
            runs[-1] = _Run(runs[-1].start, start + length - runs[-1].start)
        else:
            runs.append(_Run(start, length))
        cut.append((site, field, len(runs) - 1, start - runs[-1].start))
    num_columns = sum(runs[run].start >= matrices for _, _, run, _ in cut)
    table = np.array(cut, dtype=np.int64).reshape(-1, 4)
    own, columns = np.split(table, [len(cut) - num_columns])
    return Placement(runs, own, columns, matrices, np.array(words, dtype=np.int64).reshape(-1, 3))


@dataclass(frozen=True)
class _Place:
    slot: int
    blocks: Sequence[int]
    placement: Placement
    entry: np.ndarray  # int64 [sites, fields]
    expert_entry: np.ndarray | None  # int64 [sites of experts, fields]; None: it changes none
    rope: Tensor | None  # float32 [angles + 1], of one that rotates positions in its own way
    layout: Layout
    extras: Extras
    freed: torch.cuda.Event | None  # when the blocks' last readers are done


class AdapterArena:
    """Slot 0 is "no adapter".

    Args:
        arena: [elements], flat; block b begins at b * block_elements.
        blocks: those that adapters may use.
        num_angles: frequencies of a rotation.
        scaled: an adapter's own, and their factor.
        columns: gains and shifts of an adapter that has any, flat on the device (layout.place_columns).
        experts: of a model that has any.
        chunks: of one matrix, at most; see arena_chunks.
        num_composed: at least as many as one step's rows can name.
        clear: blocks that an adapter gives back, [n]; None: they keep their content.
    """

    def __init__(
        self,
        arena: Tensor,
        block_elements: int,
        blocks: Sequence[int],
        *,
        num_slots: int,
        num_composed: int,
        num_sites: int,
        chunks: int,
        num_angles: int,
        scaled: Callable[[RopeScaling], tuple[Tensor, float]],
        columns: Callable[[HostAdapter], Tensor],
        clear: Callable[[Tensor], None] | None = None,
        experts: ExpertFields | None = None,
    ) -> None:
        self._clear = clear
        self._experts = experts
        self.chunks = chunks
        self.block_elements = block_elements
        fields = site_fields(self.chunks)
        num_entries = num_slots + 1 + num_composed
        self.sites = torch.zeros(num_sites, num_entries, fields, dtype=torch.int64, device=arena.device)
        self.experts = None if experts is None else experts.table(num_entries, arena.device)
        self.expert_adapters = None
        if experts is not None and self.experts is not None:
            self.expert_adapters = ExpertAdapters(arena, self.experts, experts)
        self._changing_experts: set[int] = set()  # slots that `experts` has something of
        self.ropes = torch.zeros(num_entries, num_angles + 1, device=arena.device)  # see rotate.row_angles
        self._rotating: set[int] = set()  # slots that `ropes` has something of
        self._scaled, self._columns = scaled, columns
        self._scaling: set[int] = set()  # slots whose adapters have gains and shifts
        self._max_composed = num_composed
        self._composed: OrderedDict[AdapterKey, int] = OrderedDict()  # compositions' slots, last used last
        self._free_composed = list(range(num_slots + 1, num_entries))
        self._by_block = arena.view(-1, block_elements)
        self.block_bytes: int = block_elements * arena.element_size()
        self._free_blocks = list(reversed(blocks))
        self._free_slots = list(range(num_slots, 0, -1))
        self._places: dict[AdapterKey, _Place] = {}
        self._placements: OrderedDict[_Kind, Placement] = OrderedDict()
        # most adapters of a model have one of a few layouts; one takes milliseconds to work out
        self._known: OrderedDict[AdapterUid, Placement] = OrderedDict()
        # whose adapter a block holds or held last, as the copying thread knows; None: a copy that tenants share
        self._last_owner: dict[int, TenantId | None] = {}
        self._lock = threading.Lock()

    def slot_of(self, key: AdapterKey) -> int:
        """Raises KeyError for what is not on the device, ValueError for a composition of too high a rank or of adapters
        that change experts.
        """
        place = self._places.get(key)
        if place is not None:
            return place.slot
        composed = self._composed.get(key)
        if composed is None:
            return self._compose(key)
        self._composed.move_to_end(key)
        return composed

    def _compose(self, key: AdapterKey) -> int:
        # The parts' chunks stand where they are: this is an entry in the table alone.
        entry = torch.zeros(self.sites.shape[0], self.sites.shape[2], dtype=torch.int64)
        parts = [(self._places[part.uid], part.weight) for part in parts_of(key)]
        if any(place.expert_entry is not None for place, _ in parts):
            raise ValueError("adapters that change experts are not composed here")
        if any(len(place.placement.columns) for place, _ in parts):
            raise ValueError("adapters that scale or shift outputs (DoRA, biases) are not composed")
        compose_entries([(place.entry, weight) for place, weight in parts], entry.numpy())
        if len(self._composed) == self._max_composed:
            self._free_composed.append(self._composed.popitem(last=False)[1])
        slot = self._composed[key] = self._free_composed.pop()
        self._put_rope(slot, parts[0][0].rope)  # the same of all: they go not together else
        self.sites[:, slot].copy_(entry.pin_memory() if self.sites.is_cuda else entry, non_blocking=True)
        return slot

    def scales(self, slot: int) -> bool:
        """Whether what stands there has gains and shifts. A composition has none."""
        return slot in self._scaling

    def holds(self, uid: AdapterUid) -> bool:
        return uid in self._places

    def size_bytes(self, adapter: HostAdapter) -> int:
        """In whole blocks. From any thread."""
        return self._placement(adapter).num_blocks * self.block_bytes

    def give(self, blocks: Sequence[int]) -> None:
        """For adapters to use. On the engine's thread, as `take`."""
        self._free_blocks += blocks

    def take(self, count: int) -> list[int]:
        """Free ones, up to `count`. Steps that read adapters there are before those that write KV there."""
        kept = max(0, len(self._free_blocks) - count)
        taken = self._free_blocks[kept:]
        del self._free_blocks[kept:]
        for block in taken:
            self._last_owner.pop(block, None)
        return taken

    def reserve(self, adapter: HostAdapter) -> None:
        """On the engine's thread. Raises NoRoom."""
        assert adapter.uid not in self._places
        placement = self._placement(adapter)
        if placement.num_blocks > len(self._free_blocks) or not self._free_slots:
            raise NoRoom(f"the adapter takes {placement.num_blocks} blocks, {len(self._free_blocks)} are free")
        rope = self._rope_of(adapter)
        blocks = [self._free_blocks.pop() for _ in placement.runs]
        # The blocks' last readers are steps that were started before: the copy comes after them.
        freed = None
        if self.sites.is_cuda:
            freed = torch.cuda.Event()
            freed.record()
        entry, expert_entry = self._entries(placement, blocks)
        slot = self._free_slots.pop()
        if len(placement.columns):
            self._scaling.add(slot)
        self._places[adapter.uid] = _Place(
            slot, blocks, placement, entry, expert_entry, rope, adapter.layout, adapter.extras, freed
        )

    def fill(self, adapter: HostAdapter) -> None:
        """Returns when steps may use the weights. May run on a thread of its own."""
        with torch.inference_mode():
            self._fill(adapter)

    def _fill(self, adapter: HostAdapter) -> None:
        if not self.sites.is_cuda:
            self._copy(adapter, self._places[adapter.uid])
            return
        stream = torch.cuda.Stream(self.sites.device)
        with torch.cuda.stream(stream):
            place = self._places[adapter.uid]
            assert place.freed is not None
            stream.wait_event(place.freed)
            self._copy(adapter, place)
        stream.synchronize()

    def read(self, uid: AdapterUid) -> DeviceAdapter:
        """A copy of its matrices, in a buffer of their own on the device. Raises KeyError."""
        place = self._places[uid]
        runs = zip(place.placement.runs, place.blocks, strict=True)
        buffer = torch.cat([self._by_block[block, : run.length] for run, block in runs])
        adapter = HostAdapter(uid, buffer, place.layout, place.extras).on(self.sites.device)
        columns: dict[int, tuple[SlotColumns, ...]] = {}
        for each in place_columns(place.layout, place.extras):
            gain, shift = buffer[each.start : each.start + 2 * each.width].view(2, -1).unbind(0)
            columns[each.site] = (*columns.get(each.site, ()), SlotColumns(each.slot, gain, shift))
        return replace(adapter, columns=columns)

    def drop(self, uid: AdapterUid) -> None:
        place = self._places.pop(uid, None)
        if place is not None:
            self._free_slots.append(place.slot)
            self._scaling.discard(place.slot)
            self._free_blocks += place.blocks
            for key in [key for key in self._composed if uid in uids_of(key)]:
                self._free_composed.append(self._composed.pop(key))
            if self._clear is not None:  # behind all steps that may read them, and before the next copy into them
                self._clear(torch.tensor(place.blocks, device=self.sites.device))

    def _copy(self, adapter: HostAdapter, place: _Place) -> None:
        owner, matrices = owner_of(adapter.uid), place.placement.matrices
        behind: torch.cuda.Event | None = None
        columns = self._columns(adapter) if len(place.placement.columns) else None
        for i, (run, block) in enumerate(zip(place.placement.runs, place.blocks, strict=True)):
            source = adapter.buffer[run.start : run.start + run.length]
            if run.start >= matrices:
                assert columns is not None
                source = columns[run.start - matrices : run.start - matrices + run.length]
            self._by_block[block, : run.length].copy_(source, non_blocking=True)
            if self._last_owner.get(block, _NOBODY) != owner:  # as KV's: nothing of another tenant's stays
                self._by_block[block, run.length :].zero_()
                self._last_owner[block] = owner
            if self.sites.is_cuda and i % _BLOCKS_AT_ONCE == _BLOCKS_AT_ONCE - 1:
                # A device does copies in the order asked, a step's metadata among them: with the whole adapter under
                # way, a step would wait for all of it.
                event = torch.cuda.Event()
                event.record()
                if behind is not None:
                    behind.synchronize()
                behind = event
        self._put_rope(place.slot, place.rope)
        entry = torch.from_numpy(place.entry)
        self.sites[:, place.slot].copy_(entry.pin_memory() if self.sites.is_cuda else entry, non_blocking=True)
        self._put_experts(place.slot, place.expert_entry)

    def _put_experts(self, slot: int, entry: np.ndarray | None) -> None:
        if self.experts is None:
            return
        if entry is not None:
            self._changing_experts.add(slot)
            told = torch.from_numpy(entry)
            self.experts[:, slot].copy_(told.pin_memory() if self.experts.is_cuda else told, non_blocking=True)
        elif slot in self._changing_experts:
            self._changing_experts.discard(slot)
            self.experts[:, slot].zero_()

    def _rope_of(self, adapter: HostAdapter) -> Tensor | None:
        if adapter.extras.rope is None:
            return None
        frequencies, factor = self._scaled(adapter.extras.rope)
        return torch.cat((frequencies.cpu(), torch.tensor([factor])))

    def _put_rope(self, slot: int, rope: Tensor | None) -> None:
        if rope is not None:
            self._rotating.add(slot)
            self.ropes[slot].copy_(rope.pin_memory() if self.ropes.is_cuda else rope, non_blocking=True)
        elif slot in self._rotating:
            self._rotating.discard(slot)
            self.ropes[slot].zero_()

    def _entries(self, placement: Placement, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
        """Of its sites, and of those that are of experts."""
        words, chunks, num_sites = placement.words, placement.chunks, self.sites.shape[0]
        tables = [self.sites] if self.experts is None else [self.sites, self.experts]
        width = max(table.shape[2] for table in tables)
        whole = np.zeros((sum(table.shape[0] for table in tables), width), dtype=np.int64)
        whole[words[:, 0], words[:, 1]] = words[:, 2]
        places = np.array(blocks, dtype=np.int64)
        whole[chunks[:, 0], chunks[:, 1]] = places[chunks[:, 2]] * self.block_elements + chunks[:, 3]
        scaled = placement.columns
        if len(scaled):
            offsets = places[scaled[:, 2]] * self.block_elements + scaled[:, 3]
            whole[scaled[:, 0], scaled[:, 1]] = column_word(offsets)
        entry = np.ascontiguousarray(whole[:num_sites, : self.sites.shape[2]])
        if self.experts is None or not whole[num_sites:].any():
            return entry, None
        return entry, np.ascontiguousarray(whole[num_sites:, : self.experts.shape[2]])

    def _placement(self, adapter: HostAdapter) -> Placement:
        with self._lock:
            known = self._known.get(adapter.uid)
        if known is not None:
            return known
        kind = adapter.layout, adapter.extras.vectors
        placement = self._placements.get(kind) or place(adapter, self.block_elements, self.chunks, self._experts)
        with self._lock:
            self._placements[kind] = self._known[adapter.uid] = placement
            if len(self._placements) > _LAYOUTS:
                self._placements.popitem(last=False)
            if len(self._known) > _KNOWN_ADAPTERS:
                self._known.popitem(last=False)
        return placement
