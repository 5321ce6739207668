"""The clock in the store."""

from __future__ import annotations

import asyncio
import random

import pytest
from manylora_scheduler.serving import clock_keeper
from manylora_scheduler.serving.clock_keeper import ClockKeeper
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import StoreUnavailable
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


@pytest.mark.parametrize("is_written", [True, False])
def test_an_index_whose_answer_is_lost_leaves_a_whole_clock_at_each_later_write(
    monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """Seed 303 of the simulation: the next parts went to the bank that the index named."""

    async def scenario() -> None:
        store = MemoryStoreServer(random.Random(1)).client()
        keeper = ClockKeeper(store, await store.put(keys.SCHEDULER_LEADER, b"s0"))
        assert await keeper.save(some_legacy(11))
        put = keeper._put

        async def lose(key: str, value: bytes) -> bool:
            if key != keys.SCHEDULER_CLOCK:
                return await put(key, value)
            if is_written:
                await put(key, value)
            raise StoreUnavailable("the answer is lost")

        monkeypatch.setattr(keeper, "_put", lose)
        with pytest.raises(StoreUnavailable):
            await keeper.save(some_legacy(12))
        with pytest.raises(StoreUnavailable):
            await keeper.save(some_legacy(13))  # its parts are there, and its index may be
        assert await ClockKeeper(store, 1).load() == some_legacy(13 if is_written else 11)

        async def die(key: str, value: bytes) -> bool:
            if key == keys.SCHEDULER_CLOCK:
                raise asyncio.CancelledError
            return await put(key, value)

        monkeypatch.setattr(keeper, "_put", die)
        with pytest.raises(asyncio.CancelledError):
            await keeper.save(some_legacy(14))
        assert await ClockKeeper(store, 1).load() == some_legacy(13 if is_written else 11)

    run(scenario(), seed=1)
