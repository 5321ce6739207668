"""The operator's key in a file that not everybody may read: how a cluster without keys gets its first one.

A key that was revoked is never brought back: a new one takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from manylora_shared.audit.log import NotAudited
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Put, Store, StoreUnavailable
from manylora_shared.coordination.records import KeyRecord
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.identity import NewKey, has_expired, hash_of, is_key, new_key, split_key
from manylora_shared.tenancy.roles import Scope

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.2
_MODE = 0o600
KEY_NAME = "operator key file"
SCOPES = (Scope.GATEWAY.value, Scope.OPERATOR.value)


async def ensure(
    store: Store,
    path: Path,
    *,
    getrandbits: Callable[[int], int],
    now_unix_s: float,
    will: Callable[[str, str, bytes], Awaitable[None]],
) -> None:
    """Returns once the file has a key in force. Raises OSError where everybody may read the file.

    Args:
        will: told what is to be done, for which key, and its record.
    """
    while True:
        try:
            await _ensure(store, path, getrandbits, now_unix_s, will)
            return
        except (StoreUnavailable, NotAudited):
            await asyncio.sleep(_RETRY_S)


async def _ensure(
    store: Store,
    path: Path,
    getrandbits: Callable[[int], int],
    now_unix_s: float,
    will: Callable[[str, str, bytes], Awaitable[None]],
) -> None:
    text = await asyncio.to_thread(_read, path)
    made = _as_key(text, now_unix_s) if text is not None else None
    if made is not None:
        found = await store.get(keys.api_key(made.record.key_id))
        if found is not None:
            try:
                record = KeyRecord.stored(found)
                if is_key(made.key, record) and not record.revoked_unix_s and not has_expired(record, now_unix_s):
                    return
            except ValueError as e:
                _LOG.error("the record at %s is unreadable: another key takes its place: %s", found.key, e)
            made = None
    if made is None:
        made = new_key(
            getrandbits, tenant_id="", scopes=SCOPES, name=KEY_NAME,
            now_unix_s=now_unix_s,
        )  # fmt: skip
        await asyncio.to_thread(_write, path, made.key)
    key = keys.api_key(made.record.key_id)
    await will("operator key file", f"key {made.record.key_id}", made.record.to_json())
    result = await store.txn([Compare(key, 0)], [Put(key, made.record.to_json())])
    if result.succeeded:
        _LOG.info("the operator's key is registered", extra=fields(key_id=made.record.key_id, file=str(path)))


def _as_key(text: str, now_unix_s: float) -> NewKey | None:
    """None: the file holds no key."""
    parts = split_key(text.strip())
    if parts is None:
        return None
    record = KeyRecord(
        key_id=parts[0],
        secret_hash=hash_of(*parts),
        tenant_id="",
        scopes=SCOPES,
        name=KEY_NAME,
        created_unix_s=now_unix_s,
    )
    return NewKey(text.strip(), record)


def _read(path: Path) -> str | None:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            if os.fstat(file.fileno()).st_mode & 0o007:
                raise PermissionError(f"{path}: everybody on this machine may read it; its mode must be 0600 or 0640")
            return file.read(4096)
    except FileNotFoundError:
        return None


def _write(path: Path, key: str) -> None:
    """Whole or not at all, and never readable by others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "w", encoding="ascii") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
