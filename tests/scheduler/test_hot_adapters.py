"""The leader's list of hot adapters: who writes it, how often, and what a next leader makes of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from manylora_scheduler.serving.hot_adapters import SAVE_S, HotAdapters
from manylora_shared.composition import Part, key_of
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import HotAdaptersRecord
from manylora_shared.ids import AdapterUid, TenantId
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer

A = TenantId("a")
ONE, TWO = AdapterUid("1" * 64), AdapterUid("2" * 64)


class Rig:
    def __init__(self) -> None:
        self.server = MemoryStoreServer(random.Random(1))
        self.store = self.server.client()
        self.tasks: list[asyncio.Task[None]] = []

    async def lead(self) -> HotAdapters:
        self.leaders_store = self.server.client()
        hot = HotAdapters(self.leaders_store, await self.store.put(keys.SCHEDULER_LEADER, b"s"))
        self.tasks.append(asyncio.create_task(hot.run()))
        await asyncio.sleep(0.1)
        return hot

    async def listed(self) -> tuple[int, list[str]]:
        """The key's revision, and the adapters."""
        stored = await self.store.get(keys.HOT_ADAPTERS)
        if stored is None:
            return 0, []
        return stored.mod_revision, [hot.uid for hot in HotAdaptersRecord.stored(stored).adapters]


def simulate(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def scenario() -> None:
        rig = Rig()
        try:
            await test(rig)
        finally:
            for task in rig.tasks:
                task.cancel()
            await asyncio.gather(*rig.tasks, return_exceptions=True)

    run(scenario(), seed=1)


def use(hot: HotAdapters, *uids: AdapterUid) -> None:
    hot.used(A, key_of(Part(uid) for uid in uids), asyncio.get_running_loop().time())


def test_it_is_written_where_it_has_changed_and_a_next_leader_goes_on_from_it() -> None:
    async def test(rig: Rig) -> None:
        first = await rig.lead()
        assert await rig.listed() == (0, []), "nothing to tell"
        use(first, ONE)
        use(first, ONE, TWO)
        await asyncio.sleep(SAVE_S)
        revision, listed = await rig.listed()
        assert listed == [ONE, TWO]
        use(first, ONE)
        await asyncio.sleep(5 * SAVE_S)
        assert await rig.listed() == (revision, [ONE, TWO]), "its order is as it was"

        second = await rig.lead()
        use(first, TWO)
        use(first, TWO)
        use(first, TWO)
        await asyncio.sleep(2 * SAVE_S)
        assert (await rig.listed())[1] == [ONE, TWO], "who leads no more writes nothing"
        use(second, TWO)
        use(second, TWO)
        await asyncio.sleep(SAVE_S)
        assert (await rig.listed())[1] == [TWO, ONE]

    simulate(test)


def test_a_list_that_cannot_be_read_is_replaced() -> None:
    async def test(rig: Rig) -> None:
        await rig.store.put(keys.HOT_ADAPTERS, b"[")
        use(await rig.lead(), ONE)
        await asyncio.sleep(SAVE_S)
        assert (await rig.listed())[1] == [ONE]

    simulate(test)


def test_a_bug_in_it_ends_no_term(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        hot = await rig.lead()

        def broken(now: float) -> list[tuple[TenantId, AdapterUid]]:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(hot._use, "top", broken)
            await asyncio.sleep(2 * SAVE_S)
        assert not rig.tasks[0].done()
        assert "ZeroDivisionError" in caplog.text
        use(hot, ONE)
        await asyncio.sleep(SAVE_S)
        assert (await rig.listed())[1] == [ONE]

    simulate(test)


def test_while_the_store_is_away_nothing_ends() -> None:
    async def test(rig: Rig) -> None:
        hot = await rig.lead()
        rig.leaders_store.set_reachable(False)
        use(hot, ONE)
        await asyncio.sleep(2 * SAVE_S)
        assert not rig.tasks[0].done()
        rig.leaders_store.set_reachable(True)
        await asyncio.sleep(SAVE_S)
        assert (await rig.listed())[1] == [ONE]

    simulate(test)
