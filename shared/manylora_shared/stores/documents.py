"""Small files of tenants in the adapter store, beside the adapters: samples for the quality gate, validation reports.

Owns their paths. A document is replaced whole or not at all.
"""

#     <root>/documents/<tenant>/samples/<name>         replaced by its tenant
#     <root>/documents/<tenant>/reports/<sha256>       never changed; goes when no version names it

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from manylora_shared.errors import NotFound
from manylora_shared.ids import AdapterDigest
from manylora_shared.stores.adapter_files import DOCUMENTS, FILE_NAMES, INCOMING, object_path, open_regular
from manylora_shared.stores.bucket import Bucket, ObjectMissing

SAMPLES = "samples"
REPORTS = "reports"
_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    tenant_id: str
    kind: str
    name: str
    size_bytes: int
    changed_unix_s: float

    @property
    def path(self) -> str:
        return path_of(self.tenant_id, self.kind, self.name)


def path_of(tenant_id: str, kind: str, name: str) -> str:
    """Of names that are valid (ids.py)."""
    return f"{DOCUMENTS}/{tenant_id}/{kind}/{name}"


def _document(path: str, size_bytes: int, changed_unix_s: float) -> Document | None:
    match path.split("/"):
        case [folder, tenant_id, kind, name] if folder == DOCUMENTS:
            return Document(tenant_id, kind, name, size_bytes, changed_unix_s)
        case _:
            return None


class Documents(Protocol):
    """Paths are `path_of`'s. Any method raises ServiceUnavailable where a bucket does not answer."""

    async def put(self, path: str, data: bytes) -> None: ...

    async def get(self, path: str) -> bytes:
        """Raises NotFound."""

    async def held(self, tenant_id: str = "", kind: str = "") -> list[Document]:
        """kind: with a tenant alone."""

    async def delete(self, path: str) -> None:
        """What is gone is fine."""

    def adapter(self, digest: AdapterDigest) -> AsyncIterator[tuple[str, bytes]]:
        """A stored adapter's files: name and next part of each. Raises NotFound, InvalidRequest."""


class LocalDocuments:
    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._put, path, data)

    async def get(self, path: str) -> bytes:
        try:
            return await asyncio.to_thread((self._root / path).read_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{path.rpartition('/')[2]}: there is none") from None

    async def held(self, tenant_id: str = "", kind: str = "") -> list[Document]:
        return await asyncio.to_thread(self._list, "/".join(part for part in (DOCUMENTS, tenant_id, kind) if part))

    async def delete(self, path: str) -> None:
        await asyncio.to_thread((self._root / path).unlink, missing_ok=True)

    async def adapter(self, digest: AdapterDigest) -> AsyncIterator[tuple[str, bytes]]:
        for name in FILE_NAMES:
            with await asyncio.to_thread(self._open, digest, name) as file:
                while part := await asyncio.to_thread(file.read, _PART_BYTES):
                    yield name, part

    def _open(self, digest: AdapterDigest, name: str) -> IO[bytes]:
        return open(open_regular(self._root / object_path(digest) / name, field=name), "rb")

    def _put(self, path: str, data: bytes) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # a folder as an adapter's on its way has: what a crash leaves is swept with those
        incoming = self._root / INCOMING / secrets.token_hex(16)
        incoming.mkdir(parents=True)
        try:
            with (incoming / "document").open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(incoming / "document", target)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def _list(self, under: str) -> list[Document]:
        found: list[Document] = []
        for path in sorted((self._root / under).rglob("*")):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # removed since it was listed
            if path.name.startswith(".") or not stat.S_ISREG(status.st_mode):
                continue
            document = _document(path.relative_to(self._root).as_posix(), status.st_size, status.st_mtime)
            found += [document] if document is not None else []
        return found


class BucketDocuments:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def put(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._bucket.put_bytes, path, data)

    async def get(self, path: str) -> bytes:
        try:
            return await asyncio.to_thread(self._get, path)
        except ObjectMissing:
            raise NotFound(f"{path.rpartition('/')[2]}: there is none") from None

    async def held(self, tenant_id: str = "", kind: str = "") -> list[Document]:
        under = "/".join(part for part in (DOCUMENTS, tenant_id, kind) if part)
        stored = await asyncio.to_thread(self._bucket.list, under)
        found = (_document(each.path, each.size_bytes, each.changed_unix_s) for each in stored)
        return [document for document in found if document is not None]

    async def delete(self, path: str) -> None:
        await asyncio.to_thread(self._bucket.delete, [path])

    async def adapter(self, digest: AdapterDigest) -> AsyncIterator[tuple[str, bytes]]:
        for name in FILE_NAMES:
            try:
                parts = await asyncio.to_thread(self._parts, f"{object_path(digest)}/{name}")
                while (part := await asyncio.to_thread(next, parts, None)) is not None:
                    for first in range(0, len(part), _PART_BYTES):
                        yield name, part[first : first + _PART_BYTES]
            except ObjectMissing:
                raise NotFound(f"{name}: is missing in the adapter store") from None

    def _get(self, path: str) -> bytes:
        return b"".join(self._bucket.parts(self._bucket.head(path)))

    def _parts(self, path: str) -> Iterator[bytes]:
        return self._bucket.parts(self._bucket.head(path))
