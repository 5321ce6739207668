"""The seam between a worker and the adapter store: a folder, or a bucket with a cache on this machine's disk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from manylora_shared.encryption.sealing import NoKeys, OpeningKeys, Sealed
from manylora_shared.errors import DataLost, InvalidRequest
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid, digest_of, owner_of
from manylora_shared.stores.adapter_files import (
    CONFIG_NAME,
    FILE_NAMES,
    INCOMING,
    SEALED,
    forget_pages,
    object_path,
    open_regular,
    resolve_inside,
    sealed_path,
)
from manylora_shared.stores.bucket import Bucket
from manylora_shared.stores.bucket_files import LIMITS, digest_of_files, place_of, stored_files
from manylora_shared.stores.disk_cache import DiskCache
from manylora_shared.stores.stored_files import stored_file
from manylora_shared.telemetry.logs import fields

_LOG = logging.getLogger(__name__)


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

    def __init__(self, root: Path, keys: OpeningKeys | None = None) -> None:
        self._root = root
        self._keys = keys or NoKeys()

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
            folder = self._root / self._place_of(uid)
        try:
            yield folder
        finally:
            if owner_of(uid) is not None:
                for name in FILE_NAMES:
                    forget_pages(folder / name)

    def _place_of(self, uid: AdapterUid) -> str:
        """Of a copy that tenants share, any one's that opens: each has it sealed with its own key."""
        digest, owner = digest_of(uid), owner_of(uid)
        owners = [owner] if owner is not None else self._owners(digest)
        for each in owners:
            path = self._root / sealed_path(adapter_uid(digest, each)) / CONFIG_NAME
            if path.exists() and (owner is not None or self._opens(path)):
                return sealed_path(adapter_uid(digest, each))
        return object_path(digest)

    def _owners(self, digest: AdapterDigest) -> list[TenantId]:
        parent = self._root / SEALED / digest
        return sorted(TenantId(each.name) for each in parent.iterdir()) if parent.is_dir() else []

    def _opens(self, path: Path) -> bool:
        try:
            with stored_file(open_regular(path, field=path.name), path.name, self._keys):
                return True
        except (InvalidRequest, DataLost, Sealed):
            return False

    @contextlib.contextmanager
    def staged(self, path: str, uid: AdapterUid) -> Iterator[Path]:
        yield resolve_inside(self._root, path, field="path")

    def drop(self, uid: AdapterUid) -> None:
        pass


class BucketStore:
    """What comes is digested as it comes, and is in the cache whole or not at all."""

    is_far = True

    def __init__(self, bucket: Bucket, cache: DiskCache, keys: OpeningKeys | None = None) -> None:
        self._bucket = bucket
        self._cache = cache
        self._keys = keys or NoKeys()

    def check_path(self, path: str) -> None:
        head, _, name = path.partition("/")
        if head != INCOMING or not name.isalnum():
            raise InvalidRequest.of("path", f"must be {INCOMING}/ and a name")

    def has(self, uid: AdapterUid) -> bool:
        return self._cache.has(uid)

    def fetch(self, uid: AdapterUid, lent: str | None) -> None:
        if self._cache.has(uid):
            return
        *shared, last = [lent] if lent is not None else self._places_of(uid)
        for place in shared:
            try:
                return self._bring(uid, place)
            except (InvalidRequest, DataLost, Sealed) as error:
                _LOG.warning("another tenant's file is taken", extra=fields(adapter=uid, place=place, error=str(error)))
        self._bring(uid, last)

    def _bring(self, uid: AdapterUid, place: str) -> None:
        files = stored_files(self._bucket, place, LIMITS)

        def fill(into: Path) -> None:
            found = digest_of_files(self._bucket, files, self._keys, into)
            if found != digest_of(uid):
                raise InvalidRequest.of(
                    "adapter", f"the adapter store's files are not what was registered: their digest is {found}"
                )

        self._cache.put(uid, {name: stored.size_bytes for name, stored in files.items()}, fill)

    def _places_of(self, uid: AdapterUid) -> list[str]:
        """Of a copy that tenants share, any one's that opens: each has it sealed with its own key."""
        if owner_of(uid) is not None:
            return [place_of(self._bucket, uid)]
        parent = f"{SEALED}/{digest_of(uid)}"
        found = [each.path for each in self._bucket.list(parent) if each.path.endswith(f"/{CONFIG_NAME}")]
        return sorted(path.removesuffix(f"/{CONFIG_NAME}") for path in found) or [object_path(digest_of(uid))]

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
