"""The adapter store in a bucket of a real S3 server, and what workers fetch from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora_shared.errors import InvalidRequest, ServiceUnavailable
from manylora_shared.ids import TenantId, adapter_uid
from manylora_shared.stores.adapter_files import CONFIG_NAME, FILE_NAMES, WEIGHTS_NAME, object_path
from manylora_shared.stores.bucket import ObjectMissing
from manylora_shared.stores.bucket_files import BucketAdapterFiles
from manylora_shared.stores.disk_cache import DiskCache
from manylora_worker.weights.store import BucketStore

from tests.s3_server import S3Server, running

CONTENT = {CONFIG_NAME: b'{"r": 8}', WEIGHTS_NAME: bytes(range(256)) * 40_000}  # three parts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(tmp_path_factory.mktemp("s3")) as started:
        started.make_bucket("adapters")
        yield started


@pytest.fixture
def files(server: S3Server, tmp_path: Path) -> BucketAdapterFiles:
    return BucketAdapterFiles(server.bucket(f"s3://adapters/{tmp_path.name}"), tmp_path / "staging")


@pytest.fixture
def store(server: S3Server, tmp_path: Path) -> BucketStore:
    return BucketStore(server.bucket(f"s3://adapters/{tmp_path.name}"), DiskCache(tmp_path / "cache", 64 << 20))


async def staged(files: BucketAdapterFiles) -> str:
    incoming = await files.begin()
    for name, content in CONTENT.items():
        for first in range(0, len(content), 1 << 20):
            await files.append(incoming, name, content[first : first + (1 << 20)])
    return incoming


@pytest.mark.long
async def test_what_is_staged_is_read_by_a_worker_and_becomes_an_object(
    files: BucketAdapterFiles, store: BucketStore
) -> None:
    incoming = await staged(files)
    uid = await files.finish(incoming)
    with store.staged(incoming, uid) as folder:
        assert {name: (folder / name).read_bytes() for name in FILE_NAMES} == CONTENT
    await files.commit(incoming, uid)
    await files.discard(incoming)
    store.drop(uid)
    assert not store.has(uid)
    with pytest.raises(FileNotFoundError), store.held(uid, None):
        pass
    store.fetch(uid, None)
    with store.held(uid, None) as folder:
        assert (folder / WEIGHTS_NAME).read_bytes() == CONTENT[WEIGHTS_NAME]
    assert await files.problem(uid) == ""
    with pytest.raises(InvalidRequest, match="is missing"):
        store.fetch(uid.__class__("0" * 64), None)


@pytest.mark.long
async def test_a_changed_and_a_cut_object_are_refused_whole_and_mended_by_the_same_bytes(
    files: BucketAdapterFiles, store: BucketStore, server: S3Server, tmp_path: Path
) -> None:
    incoming = await staged(files)
    uid = await files.finish(incoming)
    await files.commit(incoming, uid)
    bucket = server.bucket(f"s3://adapters/{tmp_path.name}")
    bad = tmp_path / "bad"
    for content in (CONTENT[WEIGHTS_NAME][:-1] + b"!", CONTENT[WEIGHTS_NAME][:-100]):
        bad.write_bytes(content)
        bucket.put(f"{object_path(uid)}/{WEIGHTS_NAME}", bad)
        with pytest.raises(InvalidRequest, match="not what was registered"):
            store.fetch(uid, None)
        assert not store.has(uid)
        assert list((tmp_path / "cache" / "incoming").iterdir()) == []
        assert "not what was registered" in await files.problem(uid)
    await files.commit(incoming, uid)
    store.fetch(uid, None)
    assert store.has(uid)


@pytest.mark.long
async def test_a_worker_keeps_what_it_has_while_the_bucket_is_gone(
    files: BucketAdapterFiles, store: BucketStore, server: S3Server, tmp_path: Path
) -> None:
    incoming = await staged(files)
    uid = await files.finish(incoming)
    await files.commit(incoming, uid)
    store.fetch(uid, None)
    gone = S3Server(tmp_path)  # nobody listens at its port
    lost = BucketStore(gone.bucket(f"s3://adapters/{tmp_path.name}"), DiskCache(tmp_path / "cache", 64 << 20))
    lost.fetch(uid, None)
    lost.drop(uid)
    with pytest.raises(ServiceUnavailable, match="cannot be used now"):
        lost.fetch(uid, None)


@pytest.mark.long
async def test_a_tenants_own_copy_on_the_disk_serves_nobody_else(
    files: BucketAdapterFiles, store: BucketStore, tmp_path: Path
) -> None:
    incoming = await staged(files)
    digest = await files.finish(incoming)
    own, other = (adapter_uid(digest, TenantId(tenant)) for tenant in ("acme", "bolt"))
    with store.staged(incoming, own):
        assert [store.has(uid) for uid in (own, other, adapter_uid(digest, None))] == [True, False, False]
    await files.commit(incoming, digest)
    store.fetch(other, None)
    store.drop(own)
    with store.held(other, None) as folder:
        assert {name: (folder / name).read_bytes() for name in FILE_NAMES} == CONTENT
    assert not store.has(own)


@pytest.mark.long
async def test_objects_that_nothing_names_go_by_their_age(
    files: BucketAdapterFiles, server: S3Server, tmp_path: Path
) -> None:
    incoming = await staged(files)
    uid = await files.finish(incoming)
    await files.commit(incoming, uid)
    later = time.time() + 100
    assert await files.collect([], now_unix_s=time.time(), older_than_s=50) == []
    assert await files.collect([uid], now_unix_s=later, older_than_s=50) == []
    assert await files.collect([], now_unix_s=later, older_than_s=50) == [uid]
    with pytest.raises(ObjectMissing):
        server.bucket(f"s3://adapters/{tmp_path.name}").head(f"{object_path(uid)}/{CONFIG_NAME}")
    assert await files.sweep(now_unix_s=later, older_than_s=50) == 1


@pytest.mark.long
async def test_an_import_takes_what_an_operator_laid_there(
    files: BucketAdapterFiles, server: S3Server, tmp_path: Path
) -> None:
    bucket = server.bucket(f"s3://adapters/{tmp_path.name}")
    for name, content in {**CONTENT, "chat_template.jinja": b"{{ x }}"}.items():
        (tmp_path / name).write_bytes(content)
        bucket.put(f"staged/one/{name}", tmp_path / name)
    incoming = await files.begin()
    assert (await files.import_from(incoming, "staged/one")).chat_template == "{{ x }}"
    await files.finish(incoming)
    for path in ("objects/x", "../other", "", "a//b"):
        with pytest.raises(InvalidRequest):
            await files.import_from(incoming, path)
