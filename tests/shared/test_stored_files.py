"""The adapter store where it is sealed: one suite over a folder and a bucket, from the upload to the worker's read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora_shared.encryption.sealing import MAGIC, NoKeys, Sealed, SealingKeys
from manylora_shared.errors import DataLost
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, LocalAdapterFiles
from manylora_shared.stores.bucket import Bucket
from manylora_shared.stores.bucket_files import BucketAdapterFiles
from manylora_shared.stores.disk_cache import DiskCache
from manylora_shared.stores.documents import SAMPLES, BucketDocuments, Documents, LocalDocuments, path_of
from manylora_shared.stores.stored_files import FileSealer, stored_file
from manylora_worker.weights.store import AdapterStore, BucketStore, FolderStore

from tests.s3_server import S3Server, running
from tests.sealing_keys import MemoryKeys

CONTENT = {CONFIG_NAME: b'{"r": 8}', WEIGHTS_NAME: bytes(range(256)) * 9_000}  # more than a chunk
ACME, BIRCH = TenantId("acme"), TenantId("birch")
LATER_S = 1000.0


class Place:
    """A store, as routers and workers of one cluster see it."""

    def __init__(self, root: Path, bucket: Bucket | None) -> None:
        self.root = root
        self.keys = MemoryKeys()
        self._bucket = bucket

    def files(self, keys: SealingKeys | None) -> AdapterFiles:
        if self._bucket is None:
            return LocalAdapterFiles(self.root, keys=keys)
        return BucketAdapterFiles(self._bucket, self.root / "staging", keys=keys)

    def documents(self, keys: SealingKeys | None) -> Documents:
        if self._bucket is None:
            return LocalDocuments(self.root, keys=keys)
        return BucketDocuments(self._bucket, keys=keys)

    def store(self) -> AdapterStore:
        if self._bucket is None:
            return FolderStore(self.root, self.keys)
        return BucketStore(self._bucket, DiskCache(self.root / "cache", 64 << 20), self.keys)

    def everything(self) -> dict[str, bytes]:
        found = {str(path): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        for stored in self._bucket.list("") if self._bucket is not None else []:
            found[stored.path] = b"".join(self._bucket.parts(stored)) if self._bucket is not None else b""
        return found

    def read(self, uid: AdapterUid) -> dict[str, bytes]:
        """As a worker reads it."""
        store = self.store()
        store.fetch(uid, None)
        with store.held(uid, None) as folder:
            found = {}
            for name in CONTENT:
                with stored_file(os.open(folder / name, os.O_RDONLY), name, self.keys) as file:
                    found[name] = file.read()
            return found

    async def add(self, owner: TenantId | None, *, is_sealed: bool = True) -> AdapterDigest:
        files = self.files(self.keys if is_sealed else None)
        incoming = await files.begin(owner)
        for name, content in CONTENT.items():
            for first in range(0, len(content), 1 << 20):
                await files.append(incoming, name, content[first : first + (1 << 20)])
        digest = await files.finish(incoming)
        await files.commit(incoming, digest)
        await files.discard(incoming)
        return digest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(tmp_path_factory.mktemp("s3")) as started:
        started.make_bucket("adapters")
        yield started


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    bucket = None
    if request.param == "bucket":
        bucket = request.getfixturevalue("server").bucket(f"s3://adapters/{tmp_path.name}")
    return Place(tmp_path, bucket)


async def test_a_sealed_adapter_is_in_no_file_and_a_worker_reads_it(place: Place) -> None:
    digest = await place.add(ACME)
    uid = adapter_uid(digest, ACME)
    assert place.read(uid) == CONTENT
    assert await place.files(place.keys).problem(uid) == ""
    parts: dict[str, bytes] = {}
    async for name, part in place.documents(place.keys).adapter(uid):
        parts[name] = parts.get(name, b"") + part
    assert parts == CONTENT
    stored = place.everything()
    assert stored
    for path, data in stored.items():
        assert data.startswith(MAGIC), path
        assert all(content[:64] not in data for content in CONTENT.values()), path
        assert all(key.secret not in data for key in place.keys.keys.values()), path


async def test_every_tenant_has_its_own_and_a_shared_copy_is_read_from_any(place: Place) -> None:
    digest = await place.add(ACME)
    assert await place.add(BIRCH) == digest
    assert place.read(adapter_uid(digest, None)) == CONTENT
    place.keys.destroy(ACME)
    store = place.store()
    store.drop(adapter_uid(digest, None))  # the cache of a bucket has acme's
    assert place.read(adapter_uid(digest, None)) == place.read(adapter_uid(digest, BIRCH)) == CONTENT
    with pytest.raises(Sealed):
        place.read(adapter_uid(digest, ACME))
    assert "destroyed" in await place.files(place.keys).problem(adapter_uid(digest, ACME))


async def test_a_tenants_name_that_is_given_again_gets_files_that_open(place: Place) -> None:
    digest = await place.add(ACME)
    place.keys.destroy(ACME)
    await place.add(ACME)
    assert place.read(adapter_uid(digest, ACME)) == CONTENT


async def test_plain_and_sealed_stand_beside_one_another(place: Place) -> None:
    """Encryption was switched on later: what was there is read, and goes once its tenants have it sealed."""
    digest = await place.add(None, is_sealed=False)
    files = place.files(place.keys)
    ours, theirs = (adapter_uid(digest, owner) for owner in (ACME, BIRCH))
    assert place.read(ours) == place.read(adapter_uid(digest, None)) == CONTENT
    assert await files.problem(ours) == ""
    await place.add(ACME)
    times = {"now_unix_s": time.time() + LATER_S, "older_than_s": LATER_S / 2}
    assert await files.collect([ours, theirs], **times) == []
    assert await files.collect([ours], **times) == [digest]
    assert place.read(ours) == CONTENT
    assert await files.collect([], **times) == [ours]
    assert place.everything() == {} or all("cache" in path for path in place.everything())


async def test_a_changed_byte_is_found(place: Place) -> None:
    if place._bucket is not None:
        pytest.skip("a bucket's objects are changed as a folder's files")
    digest = await place.add(ACME)
    path = place.root / "sealed" / digest / ACME / WEIGHTS_NAME
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    assert "not what was sealed" in await place.files(place.keys).problem(adapter_uid(digest, ACME))
    await place.add(ACME)  # adding it again mends it
    assert await place.files(place.keys).problem(adapter_uid(digest, ACME)) == ""


async def test_documents_are_sealed_under_their_path(place: Place) -> None:
    documents = place.documents(place.keys)
    path, other = path_of(ACME, SAMPLES, "golden"), path_of(ACME, SAMPLES, "other")
    await place.documents(None).put(path, b"plain")
    assert await documents.get(path) == b"plain"
    await documents.put(path, b"a tenant's text")
    assert await documents.get(path) == b"a tenant's text"
    assert all(b"text" not in data for data in place.everything().values())
    with pytest.raises(Sealed, match="--encryption"):
        await place.documents(None).get(path)
    if place._bucket is None:
        (place.root / path).rename(place.root / other)
        with pytest.raises(DataLost, match="not what was sealed"):
            await documents.get(other)


async def test_a_plain_store_needs_no_owner_and_a_sealed_one_does(tmp_path: Path) -> None:
    assert await LocalAdapterFiles(tmp_path).begin()
    with pytest.raises(AssertionError, match="for whom"):
        await LocalAdapterFiles(tmp_path, keys=MemoryKeys()).begin()


def test_a_file_is_filled_anew_and_has_its_length(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(b"0123456789")
    sealed = FileSealer(tmp_path / "sealed", MemoryKeys().sealing("acme"))
    sealed.add(b"0123")
    sealed.discard()
    with stored_file(os.open(path, os.O_RDONLY), "plain", NoKeys()) as file:
        assert (file.plain_bytes, file.read(3)) == (10, b"012")
        path.write_bytes(b"abcdefghij")
        target = bytearray(10)
        assert file.fill(target)
        assert target == b"abcdefghij"
        assert not file.fill(bytearray(9))
        assert not file.fill(bytearray(11))
