"""Which router has an idempotency key: a record in the store a key, which goes with its router's lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Delete, LeaseExpired, Put, Store, StoreUnavailable
from manylora_shared.coordination.records import AnswerRecord
from manylora_shared.errors import ServiceUnavailable
from manylora_shared.transport.places import Places

_LOG = logging.getLogger(__name__)
_TRIES = 4
_TIMEOUT_S = 2.0
ASKING = 128  # claims under way: each asks the store twice
_ASKING_KEPT = 32


class AnswerOwners:
    def __init__(self, store: Store, router_id: str, lease_id: Callable[[], int]) -> None:
        """`lease_id` gives 0 while there is none."""
        self._store = store
        self._router_id = router_id
        self._lease_id = lease_id
        self._asking = Places(ASKING, kept=_ASKING_KEPT, few=8)

    async def claim(self, tenant: str, digest: str) -> tuple[str, int]:
        """The id of the other router that has the key, or an empty one and the record's revision. Raises
        ServiceUnavailable, or Overloaded where the tenant asks too often at once.
        """
        with self._asking.held(f"tenant {tenant} for its idempotency keys"):
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    for _ in range(_TRIES):
                        if (found := await self._try(tenant, digest)) is not None:
                            return found
            except (StoreUnavailable, LeaseExpired, TimeoutError) as e:
                _LOG.warning("who has an idempotency key is not known: %s", e)
        raise ServiceUnavailable("idempotency-key: who has it cannot be found out now", retry_after_s=1.0)

    async def _try(self, tenant: str, digest: str) -> tuple[str, int] | None:
        """None: somebody was faster."""
        record = AnswerRecord(tenant, digest, self._router_id)
        kv = await self._store.get(record.key)
        if kv is not None and (owner := AnswerRecord.stored(kv).router_id) != self._router_id:
            return owner, 0
        # One of this router's own that it does not know is of its last life.
        revision = kv.mod_revision if kv is not None else 0
        put = Put(record.key, record.to_json(), lease_id=self._lease_id())
        result = await self._store.txn([Compare(record.key, revision)], [put])
        return ("", result.revision) if result.succeeded else None

    async def release(self, tenant: str, digest: str, revision: int) -> None:
        """Only what was claimed at `revision`. Where the store is away it stands until the router's lease ends."""
        key = keys.answer(tenant, digest)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._store.txn([Compare(key, revision)], [Delete(key)])
        except (StoreUnavailable, TimeoutError) as e:
            _LOG.info("an idempotency key's record stays for now: %s", e)
