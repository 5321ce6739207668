"""Data keys: one for each owner, wrapped in the coordination store, in the clear only in the memory of processes that
use it. Keyring owns the keys that this process has unwrapped, and forgets one when its record goes.
"""

# Whoever reads or writes sealed files is a thread, and blocks; the store belongs to the event loop that `start` ran in.

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, KeyValue, Put, Store
from manylora_shared.coordination.records import DataKeyRecord
from manylora_shared.coordination.session import Mirror
from manylora_shared.encryption.key_service import KeyService, KeyServiceUnavailable, Wrapped
from manylora_shared.encryption.sealing import KEY_BYTES, KEY_ID_BYTES, DataKey, Sealed
from manylora_shared.errors import NotFound
from manylora_shared.telemetry.logs import fields

_LOG = logging.getLogger(__name__)

CLUSTER = "@cluster"  # owner of what is no tenant's
_STORE_S = 10.0
_MAX_CONFLICTS = 8
# Between the last look at the records and the end of the old keys: a new data key is wrapped and stored in less, or is
# looked at again.
SETTLE_S = 10.0
_STALE_S = SETTLE_S / 2
T = TypeVar("T")


@dataclass(frozen=True)
class Rotation:
    by: str  # what wraps from now on
    rewrapped: int
    forgotten: bool  # whether nothing opens any more that was wrapped before


class Keyring:
    """OpeningKeys. `start` and `close` in an event loop; everything else from other threads."""

    def __init__(self, service: KeyService) -> None:
        self._service = service
        self._store: Store | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._records: Mirror[DataKeyRecord] | None = None
        self._lock = threading.Lock()
        self._open: dict[str, DataKey] = {}  # by owner

    async def start(self, store: Store) -> None:
        """Returns when the records are known. Waits for the store as long as it takes."""
        self._records = Mirror(store, keys.DATA_KEYS, parse=DataKeyRecord.stored, on_change=self._changed)
        self._records.start()
        await self._records.ready()
        self._store, self._loop = store, asyncio.get_running_loop()

    def start_apart(self, open_store: Callable[[], Store]) -> None:
        """As `start`, on a thread with an event loop of its own, for as long as the process lives."""
        started = threading.Event()

        async def live() -> None:
            await self.start(open_store())
            started.set()
            await self.failed()

        threading.Thread(target=lambda: asyncio.run(live()), name="data-keys", daemon=True).start()
        started.wait()

    async def failed(self) -> None:
        """Waits until the mirror ends, which only a bug makes it do, and raises why."""
        assert self._records is not None, "start comes first"
        await self._records.failed()

    async def close(self) -> None:
        self._open.clear()
        if self._records is not None:
            await self._records.close()

    @property
    def owners(self) -> list[str]:
        """That have a data key."""
        return sorted(self._records.values) if self._records is not None else []

    def opening(self, owner: str, key_id: str) -> DataKey:
        known = self._open.get(owner)
        if known is not None and known.key_id == key_id:
            return known
        record = self._known(owner)
        if record is None or record.key_id != key_id:
            record = self._ask(self._stored(owner))
        if record is None or record.key_id != key_id:
            raise Sealed(f"the data key of {owner} that sealed this is destroyed: nothing opens it any more")
        return self._opened(record)

    def sealing(self, owner: str) -> DataKey:
        """Made where there is none. Raises NotFound: no such tenant; KeyServiceUnavailable, StoreUnavailable."""
        record = self._known(owner) or self._ask(self._stored(owner))
        for _ in range(_MAX_CONFLICTS):
            if record is not None:
                return self._opened(record)
            record = self._make(owner)
        raise KeyServiceUnavailable(f"the data key of {owner} was made and removed again and again")

    def rotate(self, *, settle_s: float = SETTLE_S) -> Rotation:
        """Another key wraps all data keys from now on. Blocks for `settle_s` and as long as it takes.

        Raises KeyServiceUnavailable, StoreUnavailable: what was rewrapped stays so; it may be called again.
        """
        self._service.rotate()
        by = self._service.current()
        rewrapped = self._rewrap_all(by, at_least_once=True)
        threading.Event().wait(settle_s)
        self._rewrap_all(by, at_least_once=False)
        forgotten = self._service.forget_others()
        _LOG.info("key-encryption key rotated", extra=fields(by=by, rewrapped=rewrapped, forgotten=forgotten))
        return Rotation(by, rewrapped, forgotten)

    def current(self) -> str:
        return self._service.current()

    def wrapped_by(self) -> dict[str, int]:
        """How many data keys each key-encryption key wraps."""
        found: dict[str, int] = {}
        for record in self._ask(self._all()):
            found[record.wrapped_by] = found.get(record.wrapped_by, 0) + 1
        return found

    # -- records

    def _make(self, owner: str) -> DataKeyRecord | None:
        """None: another was faster, or the tenant changed; look again."""
        loop = self._running()
        guards = self._ask(self._guards(owner))
        started = loop.time()
        secret = secrets.token_bytes(KEY_BYTES)
        record = _record(owner, secrets.token_hex(KEY_ID_BYTES), self._service.wrap(secret, owner))
        if not self._ask(self._put(record, [Compare(record.key, 0), *guards])):
            return self._ask(self._stored(owner))
        if loop.time() - started > _STALE_S:
            # A rotation may have looked before it was stored, and forgotten what wrapped it since.
            return self._ask(self._stored(owner)) if self._still_opens(record) else self._remake(record, secret)
        _LOG.info("data key made", extra=fields(owner=owner, by=record.wrapped_by))
        return record

    def _remake(self, record: DataKeyRecord, secret: bytes) -> DataKeyRecord | None:
        again = _record(record.owner, record.key_id, self._service.wrap(secret, record.owner))
        kv = self._ask(self._get(record.owner))
        if kv is not None and DataKeyRecord.stored(kv) == record:
            self._ask(self._put(again, [Compare(record.key, kv.mod_revision)]))
        return self._ask(self._stored(record.owner))

    def _still_opens(self, record: DataKeyRecord) -> bool:
        try:
            self._unwrap(record)
        except Sealed:
            return False
        return True

    def _rewrap_all(self, by: str, *, at_least_once: bool) -> int:
        count = 0
        for record in self._ask(self._all()):
            if at_least_once or record.wrapped_by != by:
                count += self._rewrap(record)
        return count

    def _rewrap(self, record: DataKeyRecord) -> bool:
        """Whether there still is such a record."""
        for _ in range(_MAX_CONFLICTS):
            kv = self._ask(self._get(record.owner))
            if kv is None:
                return False
            record = DataKeyRecord.stored(kv)
            wrapped = self._service.wrap(self._unwrap(record), record.owner)
            again = _record(record.owner, record.key_id, wrapped)
            if self._ask(self._put(again, [Compare(record.key, kv.mod_revision)])):
                return True
        raise KeyServiceUnavailable(f"the data key of {record.owner} is changed again and again")

    def _opened(self, record: DataKeyRecord) -> DataKey:
        known = self._open.get(record.owner)
        if known is not None and known.key_id == record.key_id:
            return known
        try:
            secret = self._unwrap(record)
        except Sealed:
            again = self._ask(self._stored(record.owner))  # a rotation may have rewrapped it since it was seen
            if again is None or again == record:
                raise
            record, secret = again, self._unwrap(again)
        key = DataKey(record.owner, record.key_id, secret)
        with self._lock:
            seen = self._known(record.owner)
            if seen is not None and seen.key_id == record.key_id:  # else it went meanwhile, or is not heard of yet
                self._open[record.owner] = key
        return key

    def _unwrap(self, record: DataKeyRecord) -> bytes:
        try:
            data = base64.b64decode(record.wrapped, validate=True)
        except binascii.Error:
            raise Sealed(f"the record of {record.owner}'s data key cannot be read") from None
        secret = self._service.unwrap(Wrapped(record.wrapped_by, data), record.owner)
        if len(secret) != KEY_BYTES:
            raise Sealed(f"the data key of {record.owner} has {len(secret)} bytes, not {KEY_BYTES}")
        return secret

    def _known(self, owner: str) -> DataKeyRecord | None:
        return self._records.values.get(owner) if self._records is not None else None

    def _changed(self, owner: str, record: DataKeyRecord | None) -> None:
        with self._lock:
            known = self._open.get(owner)
            if known is not None and (record is None or record.key_id != known.key_id):
                del self._open[owner]

    # -- the store, from other threads

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise KeyServiceUnavailable("the data keys are not known yet")
        return self._loop

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self._running()
        except KeyServiceUnavailable:
            question.close()
            raise
        asked = asyncio.run_coroutine_threadsafe(question, loop)
        try:
            return asked.result(_STORE_S)
        except TimeoutError:
            asked.cancel()
            raise KeyServiceUnavailable("the store does not tell a data key") from None

    async def _get(self, owner: str) -> KeyValue | None:
        assert self._store is not None
        return await self._store.get(keys.data_key(owner))

    async def _stored(self, owner: str) -> DataKeyRecord | None:
        kv = await self._get(owner)
        return DataKeyRecord.stored(kv) if kv is not None else None

    async def _all(self) -> list[DataKeyRecord]:
        assert self._store is not None
        return [DataKeyRecord.stored(kv) for kv in (await self._store.list(keys.DATA_KEYS)).kvs]

    async def _guards(self, owner: str) -> list[Compare]:
        """That a tenant which goes meanwhile gets no new key."""
        assert self._store is not None
        if owner.startswith("@"):
            return []
        tenant = await self._store.get(keys.tenant(owner))
        if tenant is None:
            raise NotFound(f"tenant_id: tenant {owner} is not known")
        return [Compare(tenant.key, tenant.mod_revision)]

    async def _put(self, record: DataKeyRecord, compares: list[Compare]) -> bool:
        assert self._store is not None
        return (await self._store.txn(compares, [Put(record.key, record.to_json())])).succeeded


def _record(owner: str, key_id: str, wrapped: Wrapped) -> DataKeyRecord:
    return DataKeyRecord(owner, key_id, wrapped.by, base64.b64encode(wrapped.data).decode())
