"""What every coordination store does alike: the suite runs against a real etcd and against the model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from manylora_shared.coordination.base import (
    Compare,
    Delete,
    EventKind,
    LeaseExpired,
    Put,
    Store,
    StoreUnavailable,
    WatchBatch,
)
from manylora_shared.coordination.binary import EtcdProcess
from manylora_shared.coordination.etcd import EtcdStore
from manylora_sim.store import MemoryStoreServer

SOON_S = 8.0
_NUMBERS = itertools.count()


class Kit:
    """One store, two clients of it, and what the interface does not offer but the tests need."""

    def __init__(self, one: Any, other: Any, server: MemoryStoreServer | None) -> None:
        self.one: Store = one
        self.other: Store = other
        self._etcd: EtcdStore | None = None if server is not None else one
        self._server = server
        self.prefix = f"/test/{next(_NUMBERS)}/"

    async def compact(self) -> None:
        if self._server is not None:
            self._server.compact()
        else:
            assert self._etcd is not None
            await self._etcd.compact((await self._etcd.list("/")).revision)

    async def let_expire(self, lease_id: int) -> None:
        if self._server is not None:
            self._server.expire_lease(lease_id)


@pytest.fixture(params=["etcd", "memory"])
def endpoint(request: pytest.FixtureRequest) -> str | None:
    """The real etcd's; None for the model."""
    if request.param == "memory":
        return None
    etcd: EtcdProcess = request.getfixturevalue("shared_etcd")
    return etcd.endpoint


@pytest_asyncio.fixture
async def kit(endpoint: str | None) -> AsyncIterator[Kit]:
    if endpoint is not None:
        kit = Kit(EtcdStore([endpoint]), EtcdStore([endpoint]), None)
    else:
        server = MemoryStoreServer()
        kit = Kit(server.client(), server.client(), server)
    yield kit
    await kit.one.close()
    await kit.other.close()


async def take(batches: AsyncIterator[WatchBatch], count: int) -> list[tuple[str, str, bytes, int]]:
    """The next `count` events of a watch."""
    found: list[tuple[str, str, bytes, int]] = []
    async with asyncio.timeout(SOON_S):
        while len(found) < count:
            batch = await anext(batches)
            assert not batch.reset
            assert batch.revision == batch.events[-1].kv.mod_revision
            found += [(e.kind.value, e.kv.key, e.kv.value, e.kv.mod_revision) for e in batch.events]
    assert len(found) == count
    return found


async def test_put_get_and_what_they_count(kit: Kit) -> None:
    key = kit.prefix + "a"
    assert await kit.one.get(key) is None
    first = await kit.one.put(key, b"1")
    second = await kit.one.put(key, b"2")
    assert second == first + 1
    kv = await kit.other.get(key)
    assert kv is not None
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease_id) == (
        key,
        b"2",
        first,
        second,
        2,
        0,
    )
    assert await kit.one.delete(key) is True
    assert await kit.one.delete(key) is False
    third = await kit.one.put(key, b"")
    assert third == second + 2
    kv = await kit.one.get(key)
    assert kv is not None
    assert (kv.value, kv.create_revision, kv.version) == (b"", third, 1)


async def test_list_is_by_prefix_in_order_at_a_revision(kit: Kit) -> None:
    for name in ("b", "a", "a/ü", "aa"):
        revision = await kit.one.put(kit.prefix + name, name.encode())
    listing = await kit.one.list(kit.prefix + "a")
    assert [kv.key.removeprefix(kit.prefix) for kv in listing.kvs] == ["a", "a/ü", "aa"]
    assert listing.revision == revision
    empty = await kit.one.list(kit.prefix + "nothing")
    assert (empty.kvs, empty.revision) == ((), revision)


async def test_a_transaction_is_one_revision_or_nothing(kit: Kit) -> None:
    a, b, c = (kit.prefix + name for name in "abc")
    created = await kit.one.txn([Compare(a, 0)], [Put(a, b"1"), Put(b, b"2")])
    assert created.succeeded
    listing = await kit.one.list(kit.prefix)
    assert {kv.mod_revision for kv in listing.kvs} == {created.revision}
    again = await kit.one.txn([Compare(a, 0)], [Put(a, b"x"), Put(c, b"x")])
    assert (again.succeeded, again.revision) == (False, created.revision)
    swapped = await kit.one.txn([Compare(a, created.revision), Compare(c, 0)], [Delete(a), Put(c, b"3")])
    assert swapped.succeeded
    assert [kv.key for kv in (await kit.one.list(kit.prefix)).kvs] == [b, c]
    stale = await kit.one.txn([Compare(b, created.revision - 1)], [Delete(b)])
    assert not stale.succeeded
    nothing = await kit.one.txn([], [Delete(a)])
    assert (nothing.succeeded, nothing.revision) == (True, swapped.revision)


async def test_of_two_racing_creations_one_wins(kit: Kit) -> None:
    key = kit.prefix + "leader"
    results = await asyncio.gather(
        *(store.txn([Compare(key, 0)], [Put(key, bytes([i]))]) for i in range(10) for store in (kit.one, kit.other))
    )
    assert [r.succeeded for r in results].count(True) == 1


async def test_watch_tells_every_change_from_a_revision_on(kit: Kit) -> None:
    a, b = kit.prefix + "a", kit.prefix + "b"
    r1 = await kit.one.put(a, b"1")
    r2 = await kit.one.put(a, b"2")
    await kit.one.put("/elsewhere" + kit.prefix, b"x")
    async with aclosing(kit.other.watch(kit.prefix, start_revision=r1 + 1)) as batches:
        assert await take(batches, 1) == [("put", a, b"2", r2)]
        r3 = (await kit.one.txn([], [Put(b, b"3"), Delete(a)])).revision
        assert sorted(await take(batches, 2)) == [("delete", a, b"", r3), ("put", b, b"3", r3)]
        await kit.one.delete(a)
        r4 = await kit.one.put(b, b"4")
        assert await take(batches, 1) == [("put", b, b"4", r4)]
    async with aclosing(kit.one.watch(kit.prefix, start_revision=r1)) as batches:
        assert [revision for *_, revision in await take(batches, 5)] == [r1, r2, r3, r3, r4]


async def test_watch_and_list_leave_no_gap(kit: Kit) -> None:
    async def write() -> None:
        for i in range(50):
            await kit.one.put(kit.prefix + str(i), b"x")

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    listing = await kit.other.list(kit.prefix)
    async with aclosing(kit.other.watch(kit.prefix, start_revision=listing.revision + 1)) as batches:
        seen = [kv.key for kv in listing.kvs] + [key for _, key, *_ in await take(batches, 50 - len(listing.kvs))]
    await writing
    assert sorted(seen) == sorted(kit.prefix + str(i) for i in range(50))


async def test_compaction_resets_a_watch_that_is_behind(kit: Kit) -> None:
    a, b = kit.prefix + "a", kit.prefix + "b"
    start = await kit.one.put(a, b"1")
    await kit.one.put(b, b"1")
    await kit.one.delete(a)
    now = await kit.one.put(b, b"2")
    await kit.compact()
    async with aclosing(kit.other.watch(kit.prefix, start_revision=start)) as batches:
        batch = await asyncio.wait_for(anext(batches), SOON_S)
        assert batch.reset
        assert batch.revision == now
        assert [(e.kind, e.kv.key, e.kv.value) for e in batch.events] == [(EventKind.PUT, b, b"2")]
        later = await kit.one.put(a, b"3")
        assert await take(batches, 1) == [("put", a, b"3", later)]


async def test_compaction_hides_no_deletion(kit: Kit) -> None:
    """The watch stands exactly at the compacted revision, which is a deletion."""
    await kit.one.put(kit.prefix + "a", b"1")
    listing = await kit.one.list(kit.prefix)
    await kit.one.delete(kit.prefix + "a")
    await kit.compact()
    async with aclosing(kit.other.watch(kit.prefix, start_revision=listing.revision + 1)) as batches:
        batch = await asyncio.wait_for(anext(batches), SOON_S)
    assert batch.reset
    assert batch.events == ()


async def test_compaction_leaves_a_watch_that_is_up_to_date(kit: Kit) -> None:
    first = await kit.one.put(kit.prefix + "a", b"1")
    async with aclosing(kit.other.watch(kit.prefix, start_revision=first)) as batches:
        await take(batches, 1)
        await kit.compact()
        later = await kit.one.put(kit.prefix + "a", b"2")
        assert await take(batches, 1) == [("put", kit.prefix + "a", b"2", later)]


async def test_a_watch_from_a_revision_that_was_never_reached_is_reset(kit: Kit) -> None:
    revision = await kit.one.put(kit.prefix + "a", b"1")
    async with aclosing(kit.one.watch(kit.prefix, start_revision=revision + 1000)) as batches:
        batch = await asyncio.wait_for(anext(batches), SOON_S)
    assert batch.reset
    assert [e.kv.key for e in batch.events] == [kit.prefix + "a"]


async def test_revoking_a_lease_deletes_its_keys_in_one_revision(kit: Kit) -> None:
    lease_id = await kit.one.grant(5)
    assert await kit.one.keep_alive(lease_id) >= 5
    a, b = kit.prefix + "a", kit.prefix + "b"
    await kit.one.put(a, b"1", lease_id=lease_id)
    revision = (await kit.one.txn([], [Put(b, b"1", lease_id), Put(kit.prefix + "c", b"free")])).revision
    kv = await kit.other.get(a)
    assert kv is not None
    assert kv.lease_id == lease_id
    async with aclosing(kit.other.watch(kit.prefix, start_revision=revision + 1)) as batches:
        await kit.one.revoke(lease_id)
        events = await take(batches, 2)
    assert [(kind, key) for kind, key, *_ in sorted(events)] == [("delete", a), ("delete", b)]
    assert [kv.key for kv in (await kit.one.list(kit.prefix)).kvs] == [kit.prefix + "c"]
    await kit.one.revoke(lease_id)
    with pytest.raises(LeaseExpired):
        await kit.one.keep_alive(lease_id)
    with pytest.raises(LeaseExpired):
        await kit.one.put(a, b"2", lease_id=lease_id)
    with pytest.raises(LeaseExpired):
        await kit.one.txn([], [Put(kit.prefix + "d", b"2"), Put(a, b"2", lease_id)])
    assert await kit.one.get(kit.prefix + "d") is None


async def test_a_lease_that_nobody_keeps_alive_expires(kit: Kit) -> None:
    lease_id = await kit.one.grant(2)
    key = kit.prefix + "a"
    revision = await kit.one.put(key, b"1", lease_id=lease_id)
    async with aclosing(kit.other.watch(kit.prefix, start_revision=revision + 1)) as batches:
        await kit.let_expire(lease_id)
        assert [event[:2] for event in await take(batches, 1)] == [("delete", key)]
    with pytest.raises(LeaseExpired):
        await kit.one.keep_alive(lease_id)


async def test_a_key_goes_over_to_the_lease_of_its_last_put(kit: Kit) -> None:
    old, new = await kit.one.grant(5), await kit.other.grant(5)
    key = kit.prefix + "a"
    await kit.one.put(key, b"1", lease_id=old)
    await kit.other.put(key, b"2", lease_id=new)
    await kit.one.revoke(old)
    kv = await kit.one.get(key)
    assert kv is not None
    assert (kv.value, kv.lease_id) == (b"2", new)
    await kit.other.put(key, b"3")
    await kit.other.revoke(new)
    assert await kit.one.get(key) is not None


async def test_a_closed_store_is_unavailable(kit: Kit) -> None:
    await kit.one.close()
    with pytest.raises(StoreUnavailable):
        await kit.one.get(kit.prefix + "a")
