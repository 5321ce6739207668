"""The adapter store in a bucket: what routers write and workers read, without a folder that they share."""

#     <prefix>/objects/<digest>/adapter_model.safetensors, adapter_config.json      the configuration last: it is there
#     <prefix>/incoming/<random>/...                                             one adapter while it is being added
#     <prefix>/<anything else>                                                   where an operator lays some to import

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.ids import AdapterDigest, is_digest
from manylora_shared.stores.adapter_files import (
    CONFIG_NAME,
    DEFAULT_MAX_WEIGHTS_BYTES,
    DOCUMENTS,
    FILE_NAMES,
    INCOMING,
    MAX_CONFIG_BYTES,
    OBJECTS,
    WEIGHTS_NAME,
    LocalAdapterFiles,
    content_hasher,
    object_path,
    parse_config,
)
from manylora_shared.stores.adapter_tokenizer import FILE_NAMES as TOKENIZER_NAMES
from manylora_shared.stores.adapter_tokenizer import MAX_FILE_BYTES, BroughtTokenizer, brought_by
from manylora_shared.stores.bucket import Bucket, ObjectMissing, StoredObject

LIMITS = {CONFIG_NAME: MAX_CONFIG_BYTES, WEIGHTS_NAME: DEFAULT_MAX_WEIGHTS_BYTES}


class BucketAdapterFiles:
    """See AdapterFiles. staging: a folder of this process alone, for what is on its way."""

    def __init__(self, bucket: Bucket, staging: Path, *, max_weights_bytes: int = DEFAULT_MAX_WEIGHTS_BYTES) -> None:
        self._bucket = bucket
        self._staging = staging
        self._local = LocalAdapterFiles(staging, max_weights_bytes=max_weights_bytes)
        self._limits = {**LIMITS, WEIGHTS_NAME: max_weights_bytes}

    async def begin(self) -> str:
        return await self._local.begin()

    async def append(self, incoming: str, file_name: str, data: bytes) -> None:
        await self._local.append(incoming, file_name, data)

    async def import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        return await asyncio.to_thread(self._import_from, incoming, store_path)

    async def finish(self, incoming: str) -> AdapterDigest:
        digest = await self._local.finish(incoming)
        for name in FILE_NAMES:
            await asyncio.to_thread(self._bucket.put, f"{incoming}/{name}", self._staging / incoming / name)
        return digest

    async def commit(self, incoming: str, digest: AdapterDigest) -> None:
        """Over what is there, too: that mends a damaged one, and its new time keeps `collect` away."""
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            await asyncio.to_thread(self._bucket.copy, f"{incoming}/{name}", f"{object_path(digest)}/{name}")

    async def problem(self, digest: AdapterDigest) -> str:
        try:
            found = await asyncio.to_thread(self._digest, digest)
        except InvalidRequest as e:
            return e.message
        return "" if found == digest else f"the files are not what was registered: their digest is {found}"

    async def discard(self, incoming: str) -> None:
        await self._local.discard(incoming)
        await asyncio.to_thread(self._bucket.delete, [f"{incoming}/{name}" for name in FILE_NAMES])

    async def sweep(self, *, now_unix_s: float, older_than_s: float) -> int:
        await self._local.sweep(now_unix_s=now_unix_s, older_than_s=older_than_s)
        return len(await asyncio.to_thread(self._remove_old, INCOMING, frozenset(), now_unix_s - older_than_s))

    async def collect(
        self, referenced: Collection[AdapterDigest], *, now_unix_s: float, older_than_s: float
    ) -> list[str]:
        return await asyncio.to_thread(self._remove_old, OBJECTS, frozenset(referenced), now_unix_s - older_than_s)

    def _digest(self, digest: AdapterDigest) -> str:
        return digest_of_files(self._bucket, stored_files(self._bucket, object_path(digest), self._limits))

    def _import_from(self, incoming: str, store_path: str) -> BroughtTokenizer:
        parts = store_path.split("/")
        if (
            not store_path.isprintable()
            or any(part in ("", ".", "..") for part in parts)
            or parts[0] in (INCOMING, OBJECTS, DOCUMENTS)
        ):
            raise InvalidRequest.of(
                "store_path", "must be a path of the adapter store, outside of incoming, objects and documents"
            )
        folder = self._staging / incoming
        problems: list[FieldViolation] = []
        for name in FILE_NAMES:
            try:
                fetch(self._bucket, f"{store_path}/{name}", folder / name, self._limits[name])
            except InvalidRequest as e:
                problems += e.violations
        if problems:
            raise InvalidRequest.of_all(problems)
        beside = folder / "tokenizer"
        beside.mkdir()
        for name in TOKENIZER_NAMES:
            try:
                stored = self._bucket.head(f"{store_path}/{name}")
            except ObjectMissing:
                continue
            if stored.size_bytes <= MAX_FILE_BYTES:
                _write(self._bucket, stored, beside / name)
            else:
                raise InvalidRequest.of(name, f"has more than {MAX_FILE_BYTES} bytes")
        return brought_by(beside, follows_links=False)

    def _remove_old(self, parent: str, kept: frozenset[str], before_unix_s: float) -> list[str]:
        folders: dict[str, list[StoredObject]] = defaultdict(list)
        for stored in self._bucket.list(parent):
            folders[stored.path.split("/")[1]].append(stored)
        removed = []
        for name, files in sorted(folders.items()):
            if name in kept or (parent == OBJECTS and not is_digest(name)):
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
        if found[name].size_bytes > limits[name]:
            problems.append(FieldViolation(name, f"has more than {limits[name]} bytes"))
    if problems:
        raise InvalidRequest.of_all(problems)
    return found


def digest_of_files(bucket: Bucket, files: Mapping[str, StoredObject], into: Path | None = None) -> str:
    """Of an adapter's files as `stored_files` found them; into: writes them, as they are read.

    Raises InvalidRequest, also where they have changed since; ServiceUnavailable.
    """
    try:
        config = b"".join(bucket.parts(files[CONFIG_NAME]))
        hasher = content_hasher(parse_config(config))
        if into is None:
            for part in bucket.parts(files[WEIGHTS_NAME]):
                hasher.update(part)
        else:
            (into / CONFIG_NAME).write_bytes(config)
            _write(bucket, files[WEIGHTS_NAME], into / WEIGHTS_NAME, hasher)
    except ObjectMissing as e:
        raise InvalidRequest.of(str(e), "went while it was read") from None
    return hasher.hexdigest()


def fetch(bucket: Bucket, path: str, target: Path, limit_bytes: int) -> None:
    """Raises InvalidRequest: missing or too large."""
    try:
        stored = bucket.head(path)
        if stored.size_bytes > limit_bytes:
            raise InvalidRequest.of(target.name, f"has more than {limit_bytes} bytes")
        _write(bucket, stored, target)
    except ObjectMissing:
        raise InvalidRequest.of(target.name, "is missing") from None


def _write(bucket: Bucket, stored: StoredObject, target: Path, hasher: hashlib._Hash | None = None) -> None:
    with target.open("wb") as file:
        for part in bucket.parts(stored):
            file.write(part)
            if hasher is not None:
                hasher.update(part)
