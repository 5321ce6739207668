"""The worker's record in the coordination store: there while it serves, gone when it stops or its lease runs out.

Owns the lease session. The store being away changes nothing for the worker: it goes on with what it has.
"""

from __future__ import annotations

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.coordination.session import LeaseSession


class Registration:
    def __init__(self, store: Store, record: WorkerRecord, *, lease_ttl_s: int) -> None:
        self._record = record
        self._session = LeaseSession(store, ttl_s=lease_ttl_s)

    async def start(self) -> None:
        """Returns when the record stands in the store, through any outage."""
        self._session.start()
        await self._session.register(keys.worker(self._record.worker_id), self._record.to_json())

    def withdraw(self) -> None:
        """Takes the record away, without waiting."""
        self._session.unset(keys.worker(self._record.worker_id))

    async def stop(self) -> None:
        """Revokes the lease; where the store cannot be reached, the record expires by itself."""
        await self._session.close()
