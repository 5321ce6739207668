"""The clock in the store."""

from __future__ import annotations

import random

import pytest
from manylora_scheduler.serving import clock_keeper
from manylora_scheduler.serving.clock_keeper import ClockKeeper
from manylora_shared.coordination import keys
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer
from test_clock_codec import some_legacy


def test_the_clock_is_kept_whole_and_by_the_leader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_keeper, "PART_BYTES", 100)

    async def scenario() -> None:
        store = MemoryStoreServer(random.Random(1)).client()
        first = ClockKeeper(store, await store.put(keys.SCHEDULER_LEADER, b"s0"))
        assert await first.load() is None
        for seed in (11, 12, 13):
            assert await first.save(some_legacy(seed))
            assert await ClockKeeper(store, 1).load() == some_legacy(seed)
        revision = (await store.list(keys.ROOT)).revision
        assert await first.save(some_legacy(13))
        assert (await store.list(keys.ROOT)).revision == revision, "nothing changed, nothing is written"

        await store.delete(keys.SCHEDULER_LEADER)
        second = ClockKeeper(store, await store.put(keys.SCHEDULER_LEADER, b"s1"))
        assert not await first.save(some_legacy(14)), "it does not lead any more"
        assert await second.load() == some_legacy(13)
        assert await second.save(some_legacy(15))
        assert await first.load() == some_legacy(15)

        index = await store.get(keys.SCHEDULER_CLOCK)
        assert index is not None
        await store.put(keys.SCHEDULER_CLOCK, index.value.replace(b'"parts": ', b'"parts": 9'))
        assert await second.load() is None, "and not for parts that were never written"
        await store.put(keys.SCHEDULER_CLOCK, index.value.replace(b'"parts": ', b'"parts": 99999999'))
        assert await second.load() is None
        await store.put(keys.SCHEDULER_CLOCK, index.value)
        await store.put(keys.scheduler_clock_part(second._bank ^ 1, 0), b"?")
        assert await second.load() is None

    run(scenario(), seed=1)
