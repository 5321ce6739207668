"""Where an adapter's matrices lie in one buffer."""

from __future__ import annotations

import torch
from manylora_shared.ids import AdapterUid
from manylora_worker.weights.layout import (
    ALIGNMENT,
    HostAdapter,
    Placed,
    aligned,
    elements_of,
    lay_out,
    ranks_by_slot,
)
from manylora_worker.weights.sites import Site, Slot

SITES = [
    Site(0, 10, (Slot("q", 0, 6), Slot("k", 6, 8), Slot("v", 8, 10))),
    Site(1, 6, (Slot("o", 0, 10),)),
    Site(2, 10, (Slot("up", 0, 12),)),
]


def test_matrices_follow_one_another_and_begin_at_eights() -> None:
    layout = lay_out(SITES, {"q": 2, "v": 3, "up": 4})
    spans: list[tuple[int, int]] = []
    for placed in layout:
        for matrix in (placed.a, *(b for _, _, _, b in placed.slots)):
            spans.append((matrix.start, matrix.start + aligned(matrix.rows * matrix.columns)))
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert elements_of(layout) == spans[-1][1] == 56 + 16 + 8 + 40 + 48
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert [placed.site for placed in layout] == [0, 2]


def test_a_sites_slots_part_the_columns_of_its_stacked_a() -> None:
    (placed,) = lay_out(SITES, {"q": 2, "v": 3})
    assert (placed.a.rows, placed.a.columns) == (5, 10)
    assert [(slot, first, last) for slot, first, last, _ in placed.slots] == [(0, 0, 2), (2, 2, 5)]
    assert [(b.rows, b.columns) for *_, b in placed.slots] == [(2, 6), (3, 2)]


def test_ranks_stand_by_slot_and_are_0_where_nothing_is() -> None:
    assert ranks_by_slot(lay_out(SITES, {"q": 2, "up": 4}), SITES) == [2, 0, 0, 0, 4]
    assert lay_out(SITES, {}) == ()
    assert elements_of(()) == 0


def test_on_its_device_an_adapter_is_views_of_the_buffer() -> None:
    layout = lay_out(SITES, {"k": 1, "up": 2})
    buffer = torch.arange(float(elements_of(layout) + 3))[3:]
    host = HostAdapter(AdapterUid("u"), buffer, layout)
    device = host.on(torch.device("cpu"))
    assert host.size_bytes == device.size_bytes == buffer.nbytes
    site = device.sites[2]
    a = layout[1].a
    assert torch.equal(site.a_t, buffer[a.start : a.start + 20].view(2, 10).t())
    assert torch.equal(site.slots[0].b, buffer[-24:].view(2, 12))
    assert Placed(1, 1, 2).of(buffer).tolist() == [[4.0, 5.0]], "its own beginning counts"
