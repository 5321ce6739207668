"""What a new worker loads before it takes requests."""

from __future__ import annotations

import asyncio
import random

import pytest
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord, HotAdapter, HotAdaptersRecord
from manylora_shared.ids import AdapterUid
from manylora_sim.store import MemoryStoreServer
from manylora_worker.kinds.api import AdapterTier

from tests.worker.worker_fakes import OTHER_UID, UID, config, make_engine, running_worker

MINE, OTHERS = AdapterUid(f"{UID}@acme"), AdapterUid(f"{OTHER_UID}@acme")


async def store_of(*hot: tuple[str, str], registered: tuple[str, ...] = (UID, OTHER_UID)) -> MemoryStoreServer:
    store = MemoryStoreServer(random.Random(1))
    record = HotAdaptersRecord(tuple(HotAdapter(*each) for each in hot))
    await store.client().put(record.key, record.to_json())
    for number, digest in enumerate(registered):
        adapter = AdapterRecord("acme", f"a{number}", digest, 8, 1, ("q_proj",), 0.0)
        await store.client().put(adapter.key, adapter.to_json())
    return store


async def test_the_hot_ones_are_there_when_it_is_registered() -> None:
    store = await store_of(("acme", MINE), ("acme", OTHERS))
    async with running_worker(store=store) as worker:
        assert set(worker.engine.backend.on_device) == {MINE, OTHERS}
        assert any(key.startswith(keys.WORKERS) for key in store.keys)


async def test_what_is_gone_broken_or_anothers_holds_nothing_up() -> None:
    store = await store_of(
        ("acme", OTHERS), ("beta", MINE), ("acme", "ef" * 32 + "@acme"), ("acme", "x"), ("acme", MINE)
    )
    engine = make_engine(config(), error_of=lambda uid, tier: "broken" if uid == OTHERS else None)
    began = asyncio.get_running_loop().time()
    async with running_worker(store=store, engine=engine) as worker:
        assert asyncio.get_running_loop().time() < began + 5
        assert list(worker.engine.backend.on_device) == [MINE]


@pytest.mark.parametrize(("limit_s", "loads"), [(0.05, True), (0.0, False)])
async def test_it_does_not_wait_for_longer_than_its_setting(limit_s: float, loads: bool) -> None:
    store = await store_of(("acme", MINE))
    settings = config(warm_up_s=limit_s)
    engine = make_engine(settings, load_s=0.5)
    async with running_worker(store=store, engine=engine, settings=settings) as worker:
        assert worker.engine.runtime.view.adapters.get(MINE) is not AdapterTier.DEVICE
        assert (worker.engine.core._adapters.num_loading > 0) == loads


@pytest.mark.parametrize("stored", [None, b"[", b'{"adapters": [1]}'])
async def test_without_a_list_it_starts_cold(stored: bytes | None) -> None:
    store = MemoryStoreServer(random.Random(1))
    if stored is not None:
        await store.client().put(keys.HOT_ADAPTERS, stored)
    async with running_worker(store=store) as worker:
        assert not worker.engine.backend.on_device
