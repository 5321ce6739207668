"""Data keys: made once, unwrapped where they are used, rewrapped in a rotation, and gone with their tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import DataKeyRecord
from manylora_shared.encryption.key_service import KeyService, KeyServiceUnavailable, LocalKeys, Wrapped
from manylora_shared.encryption.keyring import CLUSTER, Keyring
from manylora_shared.encryption.sealing import DataKey, Sealed
from manylora_shared.errors import NotFound
from manylora_sim.store import MemoryStore, MemoryStoreServer

Bench = tuple[Keyring, Keyring, MemoryStore]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Two processes' keyrings of one file, and the store, in which acme is a tenant."""
    server = MemoryStoreServer()
    store = server.client()
    await store.put(keys.tenant("acme"), b"tenant_id: acme\n")
    both = [Keyring(LocalKeys(tmp_path / "kek.json")) for _ in range(2)]
    for each in both:
        await each.start(server.client())
    yield both[0], both[1], store
    for each in both:
        await each.close()


async def sealing(keyring: Keyring, owner: str = "acme") -> DataKey:
    return await asyncio.to_thread(keyring.sealing, owner)


async def opening(keyring: Keyring, key: DataKey) -> DataKey:
    return await asyncio.to_thread(keyring.opening, key.owner, key.key_id)


async def test_two_processes_have_the_same_key_and_the_store_none(bench: Bench) -> None:
    ours, theirs, store = bench
    made = await asyncio.gather(*(sealing(each) for each in (ours, theirs) for _ in range(3)))
    assert len({key.secret for key in made}) == len({key.key_id for key in made}) == 1
    assert await opening(theirs, made[0]) == made[0]
    stored = await store.get(keys.data_key("acme"))
    assert stored is not None
    assert made[0].secret not in stored.value
    assert (await sealing(ours, CLUSTER)).secret != made[0].secret


async def test_a_tenant_that_is_gone_gets_no_key(bench: Bench) -> None:
    with pytest.raises(NotFound, match="nobody"):
        await sealing(bench[0], "nobody")


async def test_a_key_that_is_destroyed_opens_nothing_in_any_process(bench: Bench) -> None:
    ours, theirs, store = bench
    key = await sealing(ours)
    await opening(theirs, key)
    await store.delete(keys.data_key("acme"))
    for keyring in (ours, theirs):
        async with asyncio.timeout(10):
            while "acme" in keyring.owners:  # noqa: ASYNC110 - a mirror tells nobody of what it has heard
                await asyncio.sleep(0)
        with pytest.raises(Sealed, match="destroyed"):
            await opening(keyring, key)
    again = await sealing(ours)  # the tenant's name was given again
    assert again.key_id != key.key_id
    with pytest.raises(Sealed, match="destroyed"):
        await opening(theirs, key)


async def test_a_rotation_rewraps_what_stays_readable_meanwhile(bench: Bench) -> None:
    ours, theirs, store = bench
    before = [await sealing(ours), await sealing(ours, CLUSTER)]
    old = await store.get(keys.data_key("acme"))
    told = await asyncio.to_thread(ours.rotate, settle_s=0.0)
    assert (told.rewrapped, told.forgotten) == (2, True)
    assert await asyncio.to_thread(theirs.wrapped_by) == {told.by: 2}
    fresh = [await opening(theirs, key) for key in before]
    assert fresh == before
    # A copy of the store from before the rotation is of no use: nothing unwraps it.
    assert old is not None
    await store.put(old.key, old.value)
    theirs._open.clear()
    with pytest.raises(Sealed, match="not in kek"):
        await opening(theirs, before[0])


async def test_a_key_made_while_another_rotates_still_opens(bench: Bench, tmp_path: Path) -> None:
    """The rotation forgets the key that wrapped it before it was stored."""
    ours, theirs, _ = bench
    service = ours._service
    others = LocalKeys(tmp_path / "kek.json")

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(service, name)

        def wrap(self, secret: bytes, owner: str) -> Wrapped:
            wrapped = service.wrap(secret, owner)
            if others.current() == wrapped.by and not self.has_rotated:
                self.has_rotated = True
                others.rotate()
                others.forget_others()
                service.current()
            return wrapped

        has_rotated = False

    slow: KeyService = Slow()  # type: ignore[assignment]
    ours._service = slow
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("manylora_shared.encryption.keyring._STALE_S", -1.0)
        key = await sealing(ours)
    assert await opening(theirs, key) == key


async def test_a_record_of_another_tenant_is_of_no_use(bench: Bench) -> None:
    ours, theirs, store = bench
    await store.put(keys.tenant("other"), b"tenant_id: other\n")
    await sealing(ours)
    stored = await store.get(keys.data_key("acme"))
    assert stored is not None
    record = DataKeyRecord.stored(stored)
    forged = DataKeyRecord("other", record.key_id, record.wrapped_by, record.wrapped)
    await store.put(forged.key, forged.to_json())
    with pytest.raises(Sealed):
        await asyncio.to_thread(theirs.opening, "other", record.key_id)


async def test_before_its_start_a_keyring_has_no_keys(tmp_path: Path) -> None:
    with pytest.raises(KeyServiceUnavailable, match="not known yet"):
        await sealing(Keyring(LocalKeys(tmp_path / "kek.json")))


def test_a_rank_has_its_keyring_on_a_thread(tmp_path: Path) -> None:
    keyring = Keyring(LocalKeys(tmp_path / "kek.json"))
    keyring.start_apart(lambda: MemoryStoreServer().client())
    assert keyring.sealing(CLUSTER) == keyring.sealing(CLUSTER)
