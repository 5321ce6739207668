"""The seam between a worker and the adapter store: a folder, or a bucket with a cache on this machine's disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import AdapterUid, digest_of, owner_of
from manylora_shared.stores.adapter_files import FILE_NAMES, INCOMING, forget_pages, object_path, resolve_inside
from manylora_shared.stores.bucket import Bucket
from manylora_shared.stores.bucket_files import LIMITS, digest_of_files, stored_files
from manylora_shared.stores.disk_cache import DiskCache


class AdapterStore(Protocol):
    """From any thread. lent: where an adapter's files are while it is no object of the store yet; relative to it."""

    @property
    def is_far(self) -> bool:
        """Whether `fetch` uses a network."""

    def check_path(self, path: str) -> None:
        """Raises InvalidRequest: `path` names nothing that may be lent."""

    def has(self, uid: AdapterUid) -> bool:
        """On this machine."""

    def fetch(self, uid: AdapterUid, lent: str | None) -> None:
        """Blocks until it is on this machine. Raises InvalidRequest, OSError, ServiceUnavailable, Overloaded."""

    def held(self, uid: AdapterUid, lent: str | None) -> AbstractContextManager[Path]:
        """Its folder, which stays. Raises FileNotFoundError: it must be fetched again."""

    def staged(self, path: str, uid: AdapterUid) -> AbstractContextManager[Path]:
        """The folder lent at `path`, fetched. Raises as `fetch`."""

    def drop(self, uid: AdapterUid) -> None:
        """This machine's copy could not be used: the next `fetch` brings another."""


class FolderStore:
    is_far = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def check_path(self, path: str) -> None:
        resolve_inside(self._root, path, field="path")

    def has(self, uid: AdapterUid) -> bool:
        return True

    def fetch(self, uid: AdapterUid, lent: str | None) -> None:
        pass

    @contextlib.contextmanager
    def held(self, uid: AdapterUid, lent: str | None) -> Iterator[Path]:
        # What is lent comes first: by the time it takes nobody can tell whether another tenant's object is there.
        folder = self._root / (lent or "")
        if lent is None or not folder.is_dir():
            folder = self._root / object_path(digest_of(uid))
        try:
            yield folder
        finally:
            if owner_of(uid) is not None:
                for name in FILE_NAMES:
                    forget_pages(folder / name)

    @contextlib.contextmanager
    def staged(self, path: str, uid: AdapterUid) -> Iterator[Path]:
        yield resolve_inside(self._root, path, field="path")

    def drop(self, uid: AdapterUid) -> None:
        pass


class BucketStore:
    """What comes is digested as it comes, and is in the cache whole or not at all."""

    is_far = True

    def __init__(self, bucket: Bucket, cache: DiskCache) -> None:
        self._bucket = bucket
        self._cache = cache

    def check_path(self, path: str) -> None:
        head, _, name = path.partition("/")
        if head != INCOMING or not name.isalnum():
            raise InvalidRequest.of("path", f"must be {INCOMING}/ and a name")

    def has(self, uid: AdapterUid) -> bool:
        return self._cache.has(uid)

    def fetch(self, uid: AdapterUid, lent: str | None) -> None:
        if self._cache.has(uid):
            return
        folder = lent or object_path(digest_of(uid))
        files = stored_files(self._bucket, folder, LIMITS)

        def fill(into: Path) -> None:
            found = digest_of_files(self._bucket, files, into)
            if found != digest_of(uid):
                raise InvalidRequest.of(
                    "adapter", f"the adapter store's files are not what was registered: their digest is {found}"
                )

        self._cache.put(uid, {name: stored.size_bytes for name, stored in files.items()}, fill)

    def held(self, uid: AdapterUid, lent: str | None) -> AbstractContextManager[Path]:
        return self._cache.held(uid)

    @contextlib.contextmanager
    def staged(self, path: str, uid: AdapterUid) -> Iterator[Path]:
        self.check_path(path)
        self.fetch(uid, path)
        with self._cache.held(uid) as folder:
            yield folder

    def drop(self, uid: AdapterUid) -> None:
        self._cache.drop(uid)
