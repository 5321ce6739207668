"""Adapters of bench/engine.py: random ones of any rank and kind, and those that stay on the device by their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_rope import RopeScaling
from manylora_worker.models.cuda.runner import DeviceModelRunner
from manylora_worker.models.loader import LoadedModel
from manylora_worker.weights.layout import (
    Extras,
    HostAdapter,
    VectorKind,
    elements_of,
    elements_with,
    lay_out,
    place_vectors,
)

Kind = Literal["rotated", "gains"]


def make_adapter(loaded: LoadedModel, index: int, rank: int, expert_rank: int = -1) -> HostAdapter:
    ranks = {
        slot.path: expert_rank if site.experts and expert_rank >= 0 else rank
        for site in loaded.sites
        for slot in site.slots
    }
    layout = lay_out(loaded.sites, {path: each for path, each in ranks.items() if each})
    generator = torch.Generator("cuda").manual_seed(index)
    buffer = torch.randn(elements_of(layout), device="cuda", dtype=torch.bfloat16, generator=generator).mul_(0.02)
    return HostAdapter(AdapterUid(f"adapter-{rank}-{index}"), buffer, layout)


def make_of_kind(loaded: LoadedModel, index: int, rank: int, kind: Kind, context: int) -> HostAdapter:
    """With a rotation of its own (LongLoRA), or with gains (DoRA)."""
    rope = RopeScaling((("factor", 4.0), ("rope_type", "linear")), 4 * context)
    sites = [(site.index, slot) for site in loaded.sites for slot in range(len(site.slots))]
    vectors = [(VectorKind.MAGNITUDE, *each) for each in sites] if kind == "gains" else []
    adapter = make_adapter(loaded, index, rank)
    placed = place_vectors(vectors, adapter.layout, loaded.sites)
    extras = Extras(rope if kind == "rotated" else None, vectors=placed)
    room = torch.ones(elements_with(adapter.layout, extras), device="cuda", dtype=torch.bfloat16)
    room[: adapter.buffer.numel()] = adapter.buffer
    return HostAdapter(AdapterUid(f"{adapter.uid}-{kind}"), room, adapter.layout, extras)


def rank_of(adapter: HostAdapter) -> int:
    _, start, stop, _ = adapter.layout[0].slots[0]
    return stop - start


class Resident:
    """Adapters on the runner's device. Of those that stay the host keeps no weights."""

    def __init__(self, loaded: LoadedModel, runner: DeviceModelRunner, expert_rank: int) -> None:
        self.sizes: dict[AdapterUid, int] = {}
        self._loaded = loaded
        self._runner = runner
        self._expert_rank = expert_rank
        self._by_rank: dict[int, list[HostAdapter]] = {}

    def of(self, ranks: Sequence[int]) -> list[HostAdapter]:
        """One for each entry of `ranks`."""
        taken: dict[int, int] = {}
        found = []
        for rank in ranks:
            have = self._by_rank.setdefault(rank, [])
            index = taken.get(rank, 0)
            taken[rank] = index + 1
            if index == len(have):
                adapter = make_adapter(self._loaded, index, rank, self._expert_rank)
                self.put(adapter)
                have.append(HostAdapter(adapter.uid, torch.empty(0, dtype=torch.bfloat16), adapter.layout))
            found.append(have[index])
        return found

    def put(self, adapter: HostAdapter) -> None:
        self._runner.reserve_adapter(adapter)
        self._runner.fill_adapter(adapter)
        self.sizes[adapter.uid] = adapter.size_bytes
