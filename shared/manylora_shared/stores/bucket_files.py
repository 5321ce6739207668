"""The adapter store in a bucket: what routers write and workers read, without a folder that they share."""

#     <prefix>/objects/<digest>/adapter_model.safetensors, adapter_config.json      the configuration last: it is there
#     <prefix>/sealed/<digest>/<tenant>/...                    the same, sealed with the data key of the tenant it is of
#     <prefix>/incoming/<random>/...                                             one adapter while it is being added
#     <prefix>/<anything else>                                                   where an operator lays some to import

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from manylora_shared.encryption.sealing import NoKeys, OpeningKeys, Sealed, SealingKeys, most_sealed_bytes, opened
from manylora_shared.errors import DataLost, FieldViolation, InvalidRequest
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid, digest_of, is_uid, owner_of
from manylora_shared.stores.adapter_files import (
    CONFIG_NAME,
    DEFAULT_MAX_WEIGHTS_BYTES,
    FILE_NAMES,
    INCOMING,
    MAX_CONFIG_BYTES,
    OBJECTS,
    OWN_FOLDERS,
    SEALED,
    WEIGHTS_NAME,
    LocalAdapterFiles,
    content_hasher,
    object_path,
    parse_config,
    sealed_path,
)
from manylora_shared.stores.adapter_tokenizer import FILE_NAMES as TOKENIZER_NAMES
from manylora_shared.stores.adapter_tokenizer import MAX_FILE_BYTES, BroughtTokenizer, brought_by
from manylora_shared.stores.bucket import Bucket, ObjectMissing, StoredObject

LIMITS = {CONFIG_NAME: MAX_CONFIG_BYTES, WEIGHTS_NAME: DEFAULT_MAX_WEIGHTS_BYTES}


class BucketAdapterFiles:
    """See AdapterFiles. staging: a folder of this process alone, for what is on its way."""

    def __init__(
        self,
        bucket: Bucket,
        staging: Path,
        *,
        max_weights_bytes: int = DEFAULT_MAX_WEIGHTS_BYTES,
        keys: SealingKeys | None = None,
    ) -> None:
        self._bucket = bucket
        self._staging = staging
        self._keys: OpeningKeys = keys or NoKeys()
        self._local = LocalAdapterFiles(staging, max_weights_bytes=max_weights_bytes, keys=keys)
        self._limits = {**LIMITS, WEIGHTS_NAME: max_weights_bytes}

    async def begin(self, owner: TenantId | None = None) -> str:
        return await self._local.begin(owner)

    async def append(self, incoming: str, file_name: str, data: bytes) -> None:
        await self._local.append(incoming, file_name, data)

    async def import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        return await asyncio.to_thread(self._import_from, incoming, store_path)

    async def copy_plain(self, incoming: str, digest: AdapterDigest) -> None:
        await asyncio.to_thread(self._copy_in, incoming, object_path(digest))

    async def is_sealed(self, uid: AdapterUid) -> bool:
        return await asyncio.to_thread(place_of, self._bucket, uid) == sealed_path(uid)

    async def put_rope(self, incoming: str, rope: str) -> None:
        await self._local.put_rope(incoming, rope)

    async def finish(self, incoming: str) -> AdapterDigest:
        digest = await self._local.finish(incoming)
        for name in FILE_NAMES:
            await asyncio.to_thread(self._bucket.put, f"{incoming}/{name}", self._staging / incoming / name)
        return digest

    async def commit(self, incoming: str, digest: AdapterDigest) -> None:
        """Over what is there, too: that mends a damaged one, and its new time keeps `collect` away."""
        owner = self._local.owner_of(incoming)
        target = object_path(digest) if owner is None else sealed_path(adapter_uid(digest, owner))
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            await asyncio.to_thread(self._bucket.copy, f"{incoming}/{name}", f"{target}/{name}")

    async def problem(self, uid: AdapterUid) -> str:
        try:
            found = await asyncio.to_thread(self._digest, uid)
        except (InvalidRequest, DataLost, Sealed) as e:
            return e.message
        return "" if found == digest_of(uid) else f"the files are not what was registered: their digest is {found}"

    async def discard(self, incoming: str) -> None:
        await self._local.discard(incoming)
        await asyncio.to_thread(self._bucket.delete, [f"{incoming}/{name}" for name in FILE_NAMES])

    async def sweep(self, *, now_unix_s: float, older_than_s: float) -> int:
        await self._local.sweep(now_unix_s=now_unix_s, older_than_s=older_than_s)
        return len(await asyncio.to_thread(self._remove_old, INCOMING, frozenset(), now_unix_s - older_than_s))

    async def collect(self, referenced: Collection[AdapterUid], *, now_unix_s: float, older_than_s: float) -> list[str]:
        return await asyncio.to_thread(self._collect, frozenset(referenced), now_unix_s - older_than_s)

    def _collect(self, referenced: frozenset[AdapterUid], before_unix_s: float) -> list[str]:
        sealed = self._bucket.list(SEALED)
        there = {AdapterUid("@".join(stored.path.split("/")[1:3])) for stored in sealed}
        plain = frozenset(digest_of(uid) for uid in referenced if uid not in there)
        removed = self._remove_old(OBJECTS, plain, before_unix_s)
        return removed + self._remove_old(SEALED, referenced, before_unix_s)

    def _digest(self, uid: AdapterUid) -> str:
        folder = place_of(self._bucket, uid)
        return digest_of_files(self._bucket, stored_files(self._bucket, folder, self._limits), self._keys)

    def _copy_in(self, incoming: str, source: str) -> None:
        """An adapter's files. Raises InvalidRequest."""
        problems: list[FieldViolation] = []
        for name in FILE_NAMES:
            try:
                with self._local.writing(incoming, name) as write:
                    fetch(self._bucket, f"{source}/{name}", write, self._limits[name])
            except InvalidRequest as e:
                problems += e.violations
        if problems:
            raise InvalidRequest.of_all(problems)

    def _import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        parts = store_path.split("/")
        if not store_path.isprintable() or any(part in ("", ".", "..") for part in parts) or parts[0] in OWN_FOLDERS:
            raise InvalidRequest.of(
                "store_path", f"must be a path of the adapter store, outside of {', '.join(OWN_FOLDERS)}"
            )
        self._copy_in(incoming, store_path)
        folder = self._staging / incoming
        beside = folder / "tokenizer"
        beside.mkdir()
        for name in TOKENIZER_NAMES:
            try:
                stored = self._bucket.head(f"{store_path}/{name}")
            except ObjectMissing:
                continue
            if stored.size_bytes > MAX_FILE_BYTES:
                raise InvalidRequest.of(name, f"has more than {MAX_FILE_BYTES} bytes")
            (beside / name).write_bytes(b"".join(self._bucket.parts(stored)))
        return brought_by(beside, follows_links=False)

    def _remove_old(self, parent: str, kept: frozenset[str], before_unix_s: float) -> list[str]:
        folders: dict[str, list[StoredObject]] = defaultdict(list)
        for stored in self._bucket.list(parent):
            parts = stored.path.split("/")
            folders["@".join(parts[1:3]) if parent == SEALED else parts[1]].append(stored)
        removed = []
        for name, files in sorted(folders.items()):
            if name in kept or (parent != INCOMING and not is_uid(name)):
                continue
            # looked at again: a commit of the same bytes may have come since the list was made
            if all(self._is_older(stored, before_unix_s) for stored in files):
                self._bucket.delete(sorted(stored.path for stored in files))
                removed.append(name)
        return removed

    def _is_older(self, stored: StoredObject, before_unix_s: float) -> bool:
        if stored.changed_unix_s >= before_unix_s:
            return False
        try:
            return self._bucket.head(stored.path).changed_unix_s < before_unix_s
        except ObjectMissing:
            return True


def place_of(bucket: Bucket, uid: AdapterUid) -> str:
    """Where an owner's adapter is, sealed or plain."""
    if owner_of(uid) is not None:
        with suppress(ObjectMissing):
            bucket.head(f"{sealed_path(uid)}/{CONFIG_NAME}")
            return sealed_path(uid)
    return object_path(digest_of(uid))


def stored_files(bucket: Bucket, folder: str, limits: dict[str, int]) -> dict[str, StoredObject]:
    """Of an adapter's files, by name. Raises InvalidRequest: one is missing or too large."""
    found: dict[str, StoredObject] = {}
    problems: list[FieldViolation] = []
    for name in FILE_NAMES:
        try:
            found[name] = bucket.head(f"{folder}/{name}")
        except ObjectMissing:
            problems.append(FieldViolation(name, "is missing in the adapter store"))
            continue
        if found[name].size_bytes > most_sealed_bytes(limits[name]):
            problems.append(FieldViolation(name, f"has more than {limits[name]} bytes"))
    if problems:
        raise InvalidRequest.of_all(problems)
    return found


def digest_of_files(
    bucket: Bucket, files: Mapping[str, StoredObject], keys: OpeningKeys, into: Path | None = None
) -> str:
    """Of an adapter's files as `stored_files` found them; into: writes them, as they are stored and as they come.

    Raises InvalidRequest, also where they have changed since; Sealed, ServiceUnavailable.
    """
    with ExitStack() as written:
        parts: dict[str, Iterator[bytes]] = {name: bucket.parts(stored) for name, stored in files.items()}
        if into is not None:
            parts = {n: _teed(each, written.enter_context((into / n).open("wb"))) for n, each in parts.items()}
        try:
            hasher = content_hasher(parse_config(b"".join(opened(parts[CONFIG_NAME], CONFIG_NAME, keys))))
            for part in opened(parts[WEIGHTS_NAME], WEIGHTS_NAME, keys):
                hasher.update(part)
        except ObjectMissing as e:
            raise InvalidRequest.of(str(e), "went while it was read") from None
    return hasher.hexdigest()


def _teed(parts: Iterator[bytes], file: IO[bytes]) -> Iterator[bytes]:
    for part in parts:
        file.write(part)
        yield part


def fetch(bucket: Bucket, path: str, write: Callable[[bytes], object], limit_bytes: int) -> None:
    """Raises InvalidRequest: missing or too large."""
    name = path.rpartition("/")[2]
    try:
        stored = bucket.head(path)
        if stored.size_bytes > limit_bytes:
            raise InvalidRequest.of(name, f"has more than {limit_bytes} bytes")
        for part in bucket.parts(stored):
            write(part)
    except ObjectMissing:
        raise InvalidRequest.of(name, "is missing") from None
