"""Where adapters' matrices for experts lie on the device: how blocks hold them, and what kernels find them by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.experts_lora import (
    A_EXPERTS_FIELD,
    B_EXPERTS_FIELD,
    FIRST_GROUP_FIELD,
    RANK_FIELD,
)
from manylora_worker.weights.layout import PlacedSite
from manylora_worker.weights.sites import Site


@dataclass(frozen=True)
class ExpertFields:
    """Of the entries of `table`; see kernels/experts_lora.py."""

    first_site: int  # the index of the first site of experts: they are the last ones
    num_sites: int
    a_groups: int
    b_groups: int

    @classmethod
    def of(cls, sites: Sequence[Site], block_elements: int, max_rank: int) -> ExpertFields | None:
        """sites: all of the model's. None: it has no experts."""
        most_a = most_b = 0
        for site in sites:
            if site.experts:
                count, outputs = site.slots_an_expert, site.slots[0].stop - site.slots[0].start
                sizes = (count * max_rank * site.in_features, count * max_rank * outputs)
                a, b = (-(-site.experts // max(1, block_elements // size)) for size in sizes)
                most_a, most_b = max(most_a, a), max(most_b, b)
        first = next((site.index for site in sites if site.experts), len(sites))
        return cls(first, len(sites) - first, most_a, most_b) if first < len(sites) else None

    @property
    def count(self) -> int:
        return FIRST_GROUP_FIELD + self.a_groups + self.b_groups

    def table(self, num_entries: int, device: torch.device) -> Tensor:
        """int64 [sites of experts, entries, fields], zeroes."""
        return torch.zeros(self.num_sites, num_entries, self.count, dtype=torch.int64, device=device)

    def words(self, placed: PlacedSite, block_elements: int) -> Iterator[tuple[int, int]]:
        """Field and word of an adapter's entry, of what is the same wherever it stands."""
        a_experts, b_experts = self._experts_a_group(placed, block_elements)
        yield RANK_FIELD, placed.slots[0][2] - placed.slots[0][1]
        yield A_EXPERTS_FIELD, a_experts
        yield B_EXPERTS_FIELD, b_experts

    def pieces(self, placed: PlacedSite, block_elements: int) -> Iterator[tuple[int, int, int]]:
        """Start and length in the host's buffer, and the field of its offset, of each group."""
        starts = (placed.a.start, placed.slots[0][3].start)
        firsts = (FIRST_GROUP_FIELD, FIRST_GROUP_FIELD + self.a_groups)
        groups = self._experts_a_group(placed, block_elements)
        for start, size, first_field, per_group in zip(starts, _sizes(placed), firsts, groups, strict=True):
            for group, expert in enumerate(range(0, placed.experts, per_group)):
                length = min(per_group, placed.experts - expert) * size
                yield start + expert * size, length, first_field + group

    def _experts_a_group(self, placed: PlacedSite, block_elements: int) -> tuple[int, int]:
        """As few as there are fields for: small groups leave little of a block."""
        a, b = (
            max(1, min(block_elements // size, -(-placed.experts // groups)))
            for size, groups in zip(_sizes(placed), (self.a_groups, self.b_groups), strict=True)
        )
        return a, b


@dataclass(frozen=True)
class ExpertAdapters:
    """What finds adapters' matrices: the arena, and `table` [sites of experts, adapter slots, fields]."""

    arena: Tensor
    table: Tensor
    fields: ExpertFields


def _sizes(placed: PlacedSite) -> tuple[int, int]:
    """Elements of one expert's A and B, of all its slots."""
    count = len(placed.slots) // placed.experts
    b = placed.slots[0][3]
    return placed.a.rows // placed.experts * placed.a.columns, count * b.rows * b.columns
