"""An adapter's matrices at the places where they attach."""

from __future__ import annotations

import torch
from manylora_shared.ids import AdapterUid
from manylora_worker.weights.sites import DeviceAdapter, SiteWeights, SlotWeights


def adapter(name: str, ranks: dict[int, dict[int, int]]) -> DeviceAdapter:
    """ranks: by site and slot."""
    sites: dict[int, SiteWeights] = {}
    for site, by_slot in ranks.items():
        slots, start = [], 0
        for slot, rank in by_slot.items():
            slots.append(SlotWeights(slot, start, start + rank, torch.zeros(rank, 5)))
            start += rank
        sites[site] = SiteWeights(torch.zeros(7, start), tuple(slots))
    return DeviceAdapter(AdapterUid(name), sites, 0)


def test_adapters_of_the_same_ranks_on_the_same_layers_have_one_shape() -> None:
    one, same = adapter("a", {0: {0: 2, 1: 3}}), adapter("b", {0: {0: 2, 1: 3}})
    assert one.shape == same.shape
    assert len({one.shape, same.shape}) == 1
    for other in ({0: {0: 3, 1: 2}}, {1: {0: 2, 1: 3}}, {0: {0: 2, 2: 3}}, {0: {0: 2}, 1: {1: 3}}):
        assert adapter("c", other).shape != one.shape


def test_weights_are_counted_over_all_sites() -> None:
    found = adapter("a", {0: {0: 2, 1: 3}, 4: {2: 1}})
    assert (found.num_sites, found.num_slots) == (2, 3)
    assert found.num_weights == 7 * 6 + 5 * 6 == sum(w.numel() for w in found.weights())
    assert found.sites[0].ranks == [2, 3]
