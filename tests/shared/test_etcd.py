"""EtcdStore against etcds that die, stall and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.coordination.binary import EtcdProcess, free_port, start_etcd
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.coordination.session import Election, LeaseSession, Mirror

pytestmark = pytest.mark.e2e  # each starts an etcd of its own, and kills it

# etcd 3.5.0 to 3.5.2 may lose what it acknowledged since its backend's last commit, 0.1 s ago, when it is killed
BACKEND_COMMIT_S = 0.3


@pytest_asyncio.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EtcdProcess]:
    process = await start_etcd(tmp_path, sync_to_disk=False)
    yield process
    await process.kill()


async def put_when_up(store: EtcdStore, key: str, value: bytes) -> int:
    async with asyncio.timeout(10):
        while True:
            try:
                return await store.put(key, value)
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_a_watch_outlives_kill_9_and_misses_nothing(etcd: EtcdProcess) -> None:
    watcher, writer = EtcdStore([etcd.endpoint]), EtcdStore([etcd.endpoint])
    first = await writer.put("/k/0", b"0")
    async with aclosing(watcher.watch("/k/", start_revision=first)) as batches:
        seen = [event.kv.key for event in (await anext(batches)).events]
        for i in range(1, 200):
            await writer.put(f"/k/{i}", b"x")  # while the watch is not read: a backlog
        await asyncio.sleep(BACKEND_COMMIT_S)
        await etcd.kill()
        with pytest.raises(StoreUnavailable):
            await writer.get("/k/0")
        await etcd.start()
        await put_when_up(writer, "/k/200", b"x")
        async with asyncio.timeout(10):
            while len(seen) < 201:
                batch = await anext(batches)
                assert not batch.reset
                seen += [event.kv.key for event in batch.events]
    assert seen == [f"/k/{i}" for i in range(201)]
    await watcher.close()
    await writer.close()


async def test_a_history_that_was_written_anew_resets_the_watch(etcd: EtcdProcess, tmp_path: Path) -> None:
    """etcd comes back with other data, whose revisions are not behind the watch: it lost some, and went on."""
    store = EtcdStore([etcd.endpoint])
    for i in range(5):
        revision = await store.put(f"/k/{i}", b"old")
    async with aclosing(store.watch("/k/", start_revision=revision)) as batches:
        await anext(batches)
        await etcd.kill()
        port = int(etcd.endpoint.rpartition(":")[2])
        aside = await start_etcd(tmp_path / "fresh", sync_to_disk=False)
        other = EtcdStore([aside.endpoint])
        for i in (0, 1, 2, 3, 9):
            anew = await other.put(f"/k/{i}", b"old")
        assert anew == revision
        await other.close()
        await aside.stop()
        fresh = await start_etcd(tmp_path / "fresh", client_port=port, sync_to_disk=False)
        batch = await asyncio.wait_for(anext(batches), 10)
    assert batch.reset
    assert sorted(event.kv.key for event in batch.events) == [f"/k/{i}" for i in (0, 1, 2, 3, 9)]
    await store.close()
    await fresh.kill()


async def test_a_lost_history_resets_the_watch(etcd: EtcdProcess, tmp_path: Path) -> None:
    """etcd comes back with empty data: its revisions are behind the watch."""
    store = EtcdStore([etcd.endpoint])
    for _ in range(5):
        revision = await store.put("/k/old", b"1")
    async with aclosing(store.watch("/k/", start_revision=revision)) as batches:
        await anext(batches)
        await etcd.kill()
        other = await start_etcd(
            tmp_path / "fresh", client_port=int(etcd.endpoint.rpartition(":")[2]), sync_to_disk=False
        )
        await put_when_up(store, "/k/new", b"2")
        batch = await asyncio.wait_for(anext(batches), 10)
        assert batch.reset
        assert {event.kv.key for event in batch.events} <= {"/k/new"}
    await store.close()
    await other.kill()


async def test_calls_to_a_stalled_etcd_are_bounded(etcd: EtcdProcess) -> None:
    store = EtcdStore([etcd.endpoint], call_timeout_s=0.3)
    lease_id = await store.grant(60)
    loop = asyncio.get_running_loop()
    etcd.pause()
    started = loop.time()
    results = await asyncio.gather(
        store.get("/a"),
        store.list("/a"),
        store.put("/a", b""),
        store.delete("/a"),
        store.txn([], []),
        store.grant(5),
        store.keep_alive(lease_id),
        store.revoke(lease_id),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [StoreUnavailable] * 8
    assert loop.time() - started < 1.0
    etcd.resume()
    store_again = EtcdStore([etcd.endpoint])
    await store_again.put("/b", b"")
    assert await store_again.get("/b") is not None
    await store_again.close()
    await store.close()


async def test_nobody_there_fails_at_once() -> None:
    store = EtcdStore([f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"])
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(StoreUnavailable, match="127"):
        await store.put("/a", b"")
    assert loop.time() - started < 1.0
    await store.close()


async def test_an_endpoint_that_is_down_is_passed_over(etcd: EtcdProcess) -> None:
    store = EtcdStore([f"127.0.0.1:{free_port()}", etcd.endpoint])
    revision = await store.put("/a", b"1")
    assert (await store.list("/a")).revision == revision
    async with aclosing(store.watch("/a", start_revision=revision)) as batches:
        assert (await asyncio.wait_for(anext(batches), 5)).revision == revision
    await store.close()


async def test_sessions_outlive_a_restart_of_etcd(etcd: EtcdProcess) -> None:
    """Registration, leadership and a mirror, over one kill -9 that is longer than their leases. Who leads leads on."""
    store, other = EtcdStore([etcd.endpoint]), EtcdStore([etcd.endpoint])
    session = LeaseSession(store, ttl_s=2)
    election = Election(store, key="/leader", value=b"me", ttl_s=2)
    mirror = Mirror(other, "/members/", parse=lambda kv: kv.value)
    for part in (session, election, mirror):
        part.start()
    async with asyncio.timeout(20):
        await session.register("/members/a", b"1")
        epoch = await election.elected()
        await mirror.ready()
        await eventually(lambda: mirror.values == {"a": b"1"})
        await etcd.kill()
        await asyncio.sleep(3)
        assert mirror.values == {"a": b"1"}
        await etcd.start()
        assert await election.elected() == epoch
        await session.register("/members/a", b"2")
        await eventually(lambda: mirror.values == {"a": b"2"})
        await session.close()
        await election.resign()
        await eventually(lambda: not mirror.values)
        await mirror.close()
        assert await other.get("/leader") is None
    await store.close()
    await other.close()
