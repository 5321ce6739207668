from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from manylora_shared.ids import AdapterUid
from manylora_worker.models.experts import _down_site, _gate_up_site
from manylora_worker.weights.layout import HostAdapter, elements_of, lay_out
from manylora_worker.weights.sites import ExpertShape, Site, Slot
from torch import Tensor

pytest.importorskip("triton", reason="the arena's tables are those of the kernels")

from manylora_worker.models.cuda.adapter_arena import AdapterArena
from manylora_worker.models.cuda.expert_tables import ExpertFields
from manylora_worker.models.cuda.kernels.lora import num_chunks

pytestmark = pytest.mark.kernels

SHAPE = ExpertShape(experts=5, hidden=16, width=8, top_k=2)


def sites_of(shape: ExpertShape) -> list[Site]:
    return [Site(0, 16, (Slot("q", 0, 16),)), _gate_up_site(1, "e", shape), _down_site(2, "e", shape)]


SITES = sites_of(SHAPE)
BLOCK = 1024  # a group is of some experts, and another rank's of more
MAX_RANK = 20
EXPERTS_ALONE = {slot.path for site in SITES[1:] for slot in site.slots}


def made(ranks: dict[str, int], seed: int, device: str = "cpu", sites: Sequence[Site] = SITES) -> HostAdapter:
    layout = lay_out(sites, ranks)
    torch.manual_seed(seed)
    return HostAdapter(AdapterUid(f"a{seed}"), (torch.randn(elements_of(layout)) * 0.3).to(device), layout)


def filled(
    adapters: list[HostAdapter], device: str = "cpu", sites: Sequence[Site] = SITES, block: int = BLOCK,
    num_blocks: int = 40,
) -> tuple[AdapterArena, Tensor, ExpertFields]:  # fmt: skip
    fields = ExpertFields.of(sites, block, MAX_RANK)
    assert fields is not None
    flat = torch.full((num_blocks * block,), float("nan"), dtype=adapters[0].buffer.dtype, device=device)
    arena = AdapterArena(
        flat, block, range(num_blocks), num_slots=8, num_composed=2, num_sites=fields.first_site,
        chunks=num_chunks(MAX_RANK), num_angles=1, scaled=lambda _: (torch.zeros(1), 1.0), experts=fields,
        columns=lambda adapter: adapter.buffer[:0],
    )  # fmt: skip
    for adapter in adapters:
        arena.reserve(adapter)
        arena.fill(adapter)
    return arena, flat, fields


def test_every_experts_matrices_are_where_the_table_says() -> None:
    adapters = [made(dict.fromkeys(EXPERTS_ALONE, 20), 1), made({"q": 3, "e.2.down_proj": 5, "e.0.up_proj": 1}, 2)]
    arena, flat, fields = filled(adapters)
    assert arena.experts is not None
    for adapter in adapters:
        weights = adapter.on(torch.device("cpu")).experts
        for index, site in enumerate(SITES[1:]):
            entry = arena.experts[index, arena.slot_of(adapter.uid)].tolist()
            count, rank = site.slots_an_expert, entry[0]
            outputs = site.slots[0].stop
            assert rank == weights[site.index].ranks[0]
            for expert in range(SHAPE.experts):
                own = weights[site.index].slots[expert * count : (expert + 1) * count]
                for i, slot in enumerate(own):
                    a_at = entry[3 + expert // entry[1]] + (expert % entry[1] * count + i) * rank * site.in_features
                    b_group = entry[3 + fields.a_groups + expert // entry[2]]
                    b_at = b_group + (expert % entry[2] * count + i) * rank * outputs
                    a = flat[a_at : a_at + rank * site.in_features].view(rank, -1)
                    assert torch.equal(a.T, weights[site.index].a_t[:, slot.start : slot.stop])
                    assert torch.equal(flat[b_at : b_at + rank * outputs].view(rank, -1), slot.b)
    assert torch.equal(
        next(iter(arena.read(adapters[0].uid).experts.values())).a_t, adapters[0].on(flat.device).experts[1].a_t
    )


def test_a_slot_that_is_used_again_forgets_experts() -> None:
    adapters = [made(dict.fromkeys(EXPERTS_ALONE, 2), 1)]
    arena, _, _ = filled(adapters)
    slot = arena.slot_of(adapters[0].uid)
    arena.drop(adapters[0].uid)
    plain = made({"q": 4}, 3)
    arena.reserve(plain)
    arena.fill(plain)
    assert arena.slot_of(plain.uid) == slot
    assert arena.experts is not None
    assert not arena.experts[:, slot].any()
