"""Adapter blocks through hand-overs between tenants, and to KV and back: nothing of another stays in one."""

from __future__ import annotations

import random

import pytest
import torch
from manylora_shared.composition import Part, key_of
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid
from manylora_shared.stores.adapter_rope import RopeScaling
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.layout import HostAdapter, Placed, PlacedSite
from manylora_worker.weights.sites import Site, Slot

pytest.importorskip("triton", reason="the arena's tables are those of the kernels")

from manylora_worker.models.cuda.adapter_arena import AdapterArena, NoRoom, arena_chunks
from manylora_worker.models.cuda.kernels.lora import CHUNK_ALIGNMENT, CHUNK_RANKS, a_field, b_field, part_field

pytestmark = pytest.mark.kernels

WIDTH = 2 * CHUNK_ALIGNMENT
BLOCK = CHUNK_RANKS * WIDTH + CHUNK_ALIGNMENT  # a chunk leaves some of it
NUM_BLOCKS = 24
TENANTS = 5
OF_KV = -1.0


def adapter_of(tenant: int, number: int, rank: int, memory: HostMemory) -> HostAdapter:
    """Its tenant's number in every weight."""
    a, b = Placed(0, rank, WIDTH), Placed(rank * WIDTH, rank, WIDTH)
    layout = (PlacedSite(0, a, ((0, 0, rank, b),)),)
    buffer = memory.allocate(2 * rank * WIDTH, torch.float32)
    buffer.fill_(tenant + 1)
    uid = adapter_uid(AdapterDigest(f"{number:064x}"), TenantId(f"t{tenant}"))
    return HostAdapter(uid, buffer, layout)


def _none_scales(scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    raise AssertionError(scaling)


def hand_over(times: int, seed: int, device: str = "cpu") -> int:
    """Returns how many adapters took the place of others."""
    rng = random.Random(seed)
    flat = torch.full((NUM_BLOCKS * BLOCK,), OF_KV, device=device)
    by_block = flat.view(NUM_BLOCKS, BLOCK)
    arena = AdapterArena(
        flat, BLOCK, range(NUM_BLOCKS), num_slots=NUM_BLOCKS, num_composed=1, num_sites=1, chunks=2,
        num_angles=1, scaled=_none_scales, columns=lambda adapter: adapter.buffer[:0],
    )  # fmt: skip
    memory = HostMemory(64 * 4096 * WIDTH)
    there: dict[AdapterUid, HostAdapter] = {}
    of_kv: list[int] = []
    filled = 0
    for number in range(times):
        tenant = rng.randrange(TENANTS)
        adapter = adapter_of(tenant, number, rng.randrange(1, 2 * CHUNK_RANKS + 1), memory)
        while True:
            try:
                arena.reserve(adapter)
                break
            except NoRoom:
                gone = rng.choice(list(there)) if there else None
                if gone is None:
                    arena.give(of_kv)
                    of_kv = []
                    continue
                arena.drop(gone)
                memory.free(there.pop(gone).buffer)
        arena.fill(adapter)
        there[adapter.uid] = adapter
        filled += 1
        for block in arena._places[adapter.uid].blocks:
            seen = by_block[block].unique().tolist()
            assert set(seen) <= {0.0, tenant + 1.0}, f"{seen} in a block of tenant {tenant}"
        if rng.random() < 0.1:
            blocks = arena.take(rng.randrange(3))
            for block in blocks:
                by_block[block] = OF_KV
            of_kv += blocks
        if of_kv and rng.random() < 0.3:
            arena.give(of_kv)
            of_kv = []
    return filled


def test_chunks_of_fewer_ranks_where_a_block_has_no_room() -> None:
    """Alone and in a composition: each chunk says how many ranks stand in it, and is where its entry says."""
    block, ranks = 10 * WIDTH, (23, 16)
    chunks = arena_chunks([Site(0, WIDTH, (Slot("q", 0, WIDTH),))], block, 48)
    flat = torch.zeros(NUM_BLOCKS * block)
    arena = AdapterArena(
        flat, block, range(NUM_BLOCKS), num_slots=2, num_composed=1, num_sites=1, chunks=chunks, num_angles=1,
        scaled=_none_scales, columns=lambda adapter: adapter.buffer[:0],
    )  # fmt: skip
    memory = HostMemory(64 * 4096 * WIDTH)
    adapters = [adapter_of(tenant, tenant, rank, memory) for tenant, rank in enumerate(ranks)]
    for adapter in adapters:
        adapter.buffer.copy_(torch.randn(len(adapter.buffer)))
        arena.reserve(adapter)
        arena.fill(adapter)
        assert torch.equal(next(arena.read(adapter.uid).weights()), next(adapter.on(torch.device("cpu")).weights()))
    key = key_of([Part(adapter.uid) for adapter in adapters])
    for uids, of_chunks in (((adapters[0].uid,), (10, 10, 3)), ((key,), (10, 10, 3, 10, 6))):
        entry = arena.sites[0, arena.slot_of(uids[0])]
        assert -(-int(entry[0]) // CHUNK_RANKS) == len(of_chunks) <= chunks
        for chunk, count in enumerate(of_chunks):
            assert int(entry[part_field(0, chunk, chunks)]) & 0xFFFFFFFF == count
        whole = adapters[0].buffer if len(of_chunks) == 3 else torch.cat([each.buffer for each in adapters])
        for field, start in ((a_field, 0), (b_field, ranks[0] * WIDTH)):
            at = int(entry[field(0, 1, chunks)])
            assert torch.equal(flat[at : at + 10 * WIDTH], whole[start + 10 * WIDTH : start + 20 * WIDTH])


def test_nothing_of_another_tenant_stays_in_an_adapters_blocks() -> None:
    assert hand_over(10_000, seed=1) == 10_000


@pytest.mark.gpu
def test_nothing_of_another_tenant_stays_on_the_device() -> None:
    assert hand_over(10_000, seed=3, device="cuda") == 10_000


@pytest.mark.slow
def test_a_million_hand_overs_leave_nothing() -> None:
    assert hand_over(1_000_000, seed=2) == 1_000_000
