"""The worker's record in the store, under its lease. While the store is away the worker goes on with what it has."""

from __future__ import annotations

from dataclasses import replace

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.coordination.session import LeaseSession


class Registration:
    def __init__(self, store: Store, record: WorkerRecord, *, lease_ttl_s: int) -> None:
        self._record = record
        self._session = LeaseSession(store, ttl_s=lease_ttl_s)

    async def start(self) -> None:
        self._session.start()
        await self._session.register(keys.worker(self._record.worker_id), self._record.to_json())

    async def leave(self) -> None:
        """Others count with it no more; waits until the store has it."""
        record = replace(self._record, is_leaving=True)
        await self._session.register(keys.worker(record.worker_id), record.to_json())

    def withdraw(self) -> None:
        self._session.unset(keys.worker(self._record.worker_id))

    async def stop(self) -> None:
        # Where the store cannot be reached, the record expires by itself.
        await self._session.close()
