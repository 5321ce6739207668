"""Small files of tenants in the adapter store, beside the adapters: samples for the quality gate, validation reports.

Owns their paths. A document is replaced whole or not at all. Where there are keys it is sealed, with its tenant's key
and under its path.
"""

#     <root>/documents/<tenant>/samples/<name>         replaced by its tenant
#     <root>/documents/<tenant>/reports/<sha256>       never changed; goes when no version names it
#     <root>/documents/<tenant>/texts/<unix s>-<random>   goes in time, or with an end user's erasure

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manylora_shared.encryption.sealing import (
    MAGIC,
    SALT_BYTES,
    NoKeys,
    OpeningKeys,
    SealingKeys,
    open_bytes,
    opened,
    seal,
)
from manylora_shared.errors import NotFound
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_files import DOCUMENTS, FILE_NAMES, INCOMING, LocalAdapterFiles
from manylora_shared.stores.bucket import Bucket, ObjectMissing
from manylora_shared.stores.bucket_files import place_of

SAMPLES = "samples"
REPORTS = "reports"
TEXTS = "texts"  # and erasures: of requests, where a policy keeps them (the router's keeping/texts.py)
ERASURES = "erasures"
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

    async def seal(self, path: str) -> bool:
        """Where it lies in the clear. Whether it did. Raises NotFound."""

    async def held(self, tenant_id: str = "", kind: str = "") -> list[Document]:
        """kind: with a tenant alone."""

    async def delete(self, path: str) -> None:
        """What is gone is fine."""

    def adapter(self, uid: AdapterUid) -> AsyncIterator[tuple[str, bytes]]:
        """An owner's stored adapter's files: name and next part of each. Raises NotFound, InvalidRequest, Sealed."""


class _Seals:
    """What both stores do with a document's content."""

    def __init__(self, keys: SealingKeys | None) -> None:
        self._keys = keys
        self.opening: OpeningKeys = keys or NoKeys()

    def seal(self, path: str, data: bytes) -> bytes:
        if self._keys is None:
            return data
        return seal(data, path, self._keys.sealing(path.split("/")[1]), secrets.token_bytes(SALT_BYTES))

    def open(self, path: str, data: bytes) -> bytes:
        return open_bytes(data, path, self.opening)

    def changes(self, data: bytes) -> bool:
        """Whether sealing what is stored so changes it."""
        return self._keys is not None and not data.startswith(MAGIC)


class LocalDocuments:
    def __init__(self, root: Path, *, keys: SealingKeys | None = None) -> None:
        self._root = root
        self._seals = _Seals(keys)
        self._files = LocalAdapterFiles(root, keys=keys)

    async def put(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._put, path, data)

    async def get(self, path: str) -> bytes:
        try:
            return await asyncio.to_thread(self._get, path)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{path.rpartition('/')[2]}: there is none") from None

    async def held(self, tenant_id: str = "", kind: str = "") -> list[Document]:
        return await asyncio.to_thread(self._list, "/".join(part for part in (DOCUMENTS, tenant_id, kind) if part))

    async def delete(self, path: str) -> None:
        await asyncio.to_thread((self._root / path).unlink, missing_ok=True)

    async def adapter(self, uid: AdapterUid) -> AsyncIterator[tuple[str, bytes]]:
        folder = self._root / await asyncio.to_thread(self._files.place_of, uid)
        for name in FILE_NAMES:
            with await asyncio.to_thread(self._files.open, folder / name, name) as file:
                while part := await asyncio.to_thread(file.read, _PART_BYTES):
                    yield name, part

    async def seal(self, path: str) -> bool:
        return await asyncio.to_thread(self._seal, path)

    def _seal(self, path: str) -> bool:
        data = (self._root / path).read_bytes()
        if is_plain := self._seals.changes(data):
            self._put(path, data)
        return is_plain

    def _get(self, path: str) -> bytes:
        return self._seals.open(path, (self._root / path).read_bytes())

    def _put(self, path: str, data: bytes) -> None:
        data = self._seals.seal(path, data)
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
    def __init__(self, bucket: Bucket, *, keys: SealingKeys | None = None) -> None:
        self._bucket = bucket
        self._seals = _Seals(keys)

    async def put(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._put, path, data)

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

    async def adapter(self, uid: AdapterUid) -> AsyncIterator[tuple[str, bytes]]:
        folder = await asyncio.to_thread(place_of, self._bucket, uid)
        for name in FILE_NAMES:
            try:
                parts = await asyncio.to_thread(self._parts, f"{folder}/{name}", name)
                while (part := await asyncio.to_thread(next, parts, None)) is not None:
                    for first in range(0, len(part), _PART_BYTES):
                        yield name, part[first : first + _PART_BYTES]
            except ObjectMissing:
                raise NotFound(f"{name}: is missing in the adapter store") from None

    def _put(self, path: str, data: bytes) -> None:
        self._bucket.put_bytes(path, self._seals.seal(path, data))

    async def seal(self, path: str) -> bool:
        return await asyncio.to_thread(self._seal, path)

    def _seal(self, path: str) -> bool:
        data = self._stored(path)
        if is_plain := self._seals.changes(data):
            self._put(path, data)
        return is_plain

    def _get(self, path: str) -> bytes:
        return self._seals.open(path, self._stored(path))

    def _stored(self, path: str) -> bytes:
        return b"".join(self._bucket.parts(self._bucket.head(path)))

    def _parts(self, path: str, name: str) -> Iterator[bytes]:
        return opened(self._bucket.parts(self._bucket.head(path)), name, self._seals.opening)
