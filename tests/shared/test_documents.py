"""Tenants' documents in the adapter store: one suite over a folder, a bucket and the simulation's memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora_shared.errors import InvalidRequest, NotFound
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, LocalAdapterFiles
from manylora_shared.stores.bucket_files import BucketAdapterFiles
from manylora_shared.stores.documents import REPORTS, SAMPLES, BucketDocuments, Documents, LocalDocuments, path_of
from manylora_sim.adapter_files import MemoryAdapterFiles
from manylora_sim.documents import MemoryDocuments

from tests.s3_server import S3Server, running

CONTENT = {CONFIG_NAME: b'{"r": 8}', WEIGHTS_NAME: bytes(range(256)) * 9_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(tmp_path_factory.mktemp("s3")) as started:
        started.make_bucket("adapters")
        yield started


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.long), "memory"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[AdapterFiles, Documents]:
    if request.param == "folder":
        return LocalAdapterFiles(tmp_path), LocalDocuments(tmp_path)
    if request.param == "memory":
        files = MemoryAdapterFiles()
        return files, MemoryDocuments(files)
    bucket = request.getfixturevalue("server").bucket(f"s3://adapters/{tmp_path.name}")
    return BucketAdapterFiles(bucket, tmp_path / "staging"), BucketDocuments(bucket)


async def test_documents_are_replaced_listed_and_removed(pair: tuple[AdapterFiles, Documents]) -> None:
    documents = pair[1]
    golden, other = path_of("acme", SAMPLES, "golden"), path_of("birch", REPORTS, "a" * 64)
    assert await documents.held() == []
    with pytest.raises(NotFound):
        await documents.get(golden)
    await documents.put(golden, b"first")
    await documents.put(golden, b"second")
    await documents.put(other, b"{}")
    assert await documents.get(golden) == b"second"
    assert [each.path for each in await documents.held()] == [golden, other]
    assert [(each.name, each.size_bytes) for each in await documents.held("acme", SAMPLES)] == [("golden", 6)]
    assert await documents.held("acme", REPORTS) == await documents.held("nobody") == []
    await documents.delete(golden)
    await documents.delete(golden)
    assert [each.path for each in await documents.held("acme")] == []


async def test_what_a_crash_leaves_of_a_document_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, files = LocalDocuments(tmp_path), LocalAdapterFiles(tmp_path)

    def crash(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # nothing runs after a crash
        with pytest.raises(KeyboardInterrupt):
            documents._put(path_of("acme", SAMPLES, "golden"), b"half")
    assert await documents.held() == []
    (left,) = (tmp_path / "incoming").iterdir()
    assert await files.sweep(now_unix_s=time.time() + 100, older_than_s=50) == 1
    assert not left.exists()


async def test_an_adapters_files_come_in_parts(pair: tuple[AdapterFiles, Documents]) -> None:
    files, documents = pair
    incoming = await files.begin()
    for name, content in CONTENT.items():
        for first in range(0, len(content), 1 << 20):
            await files.append(incoming, name, content[first : first + (1 << 20)])
    uid = await files.finish(incoming)
    await files.commit(incoming, uid)
    read: dict[str, bytes] = {}
    async for name, part in documents.adapter(uid):
        read[name] = read.get(name, b"") + part
    assert read == CONTENT
    with pytest.raises((NotFound, InvalidRequest)):
        [part async for part in documents.adapter("b" * 64)]  # type: ignore[arg-type]


async def test_what_is_not_finished_is_in_no_list(tmp_path: Path) -> None:
    folder = tmp_path / "documents/acme/samples"
    folder.mkdir(parents=True)
    (folder / ".0123").write_bytes(b"half")
    (folder / "link").symlink_to(tmp_path)
    assert await LocalDocuments(tmp_path).held() == []


async def test_the_folder_of_documents_is_no_place_to_import_from(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    (tmp_path / "documents/acme").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="belongs to the store itself"):
        await files.import_from(await files.begin(), "documents/acme")


async def test_what_goes_while_it_is_listed_is_in_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = LocalDocuments(tmp_path)
    kept, gone = (path_of("acme", SAMPLES, name) for name in ("kept", "gone"))
    await documents.put(kept, b"x")
    monkeypatch.setattr(Path, "rglob", lambda *_: [tmp_path / kept, tmp_path / gone])
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # as it was a moment ago
    assert [each.path for each in await documents.held()] == [kept]
