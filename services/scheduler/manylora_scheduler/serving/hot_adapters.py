"""The leader's list of the adapters that are used most, in the store for workers that start: written seldom, and only
where it has changed.
"""

from __future__ import annotations

import asyncio
import logging

from manylora_shared.composition import uids_of
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Put, Store, StoreUnavailable
from manylora_shared.coordination.records import HotAdapter, HotAdaptersRecord
from manylora_shared.ids import AdapterKey, AdapterUid, TenantId
from manylora_shared.telemetry.logs import fields

from manylora_scheduler.gates.recent_use import AdapterUse, UseShares

_LOG = logging.getLogger(__name__)
SAVE_S = 30.0


class HotAdapters:
    """Of one term. A next leader goes on from the list: its order stands for uses."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._use = AdapterUse()
        self.shares = UseShares()
        self._saved: bytes | None = None

    def used(self, tenant_id: TenantId, key: AdapterKey, now: float) -> None:
        for uid in uids_of(key):
            self._use.used(tenant_id, uid, now)

    async def run(self) -> None:
        """Ends by cancellation."""
        is_known = False
        while True:
            try:
                if not is_known:
                    await self._load()
                    is_known = True
                await self._save()
            except StoreUnavailable as e:
                _LOG.warning("the list of hot adapters stays as it is", extra=fields(error=str(e)))
            except Exception:
                # new workers start colder then, and nothing else depends on the list: the term goes on
                _LOG.exception("what nobody foresaw keeps the list of hot adapters as it is")
            await asyncio.sleep(SAVE_S)

    async def _load(self) -> None:
        stored = await self._store.get(keys.HOT_ADAPTERS)
        if stored is None:
            return
        try:
            record = HotAdaptersRecord.stored(stored)
        except ValueError as e:
            _LOG.error("the list of hot adapters cannot be read", extra=fields(error=str(e)))
            return
        self._saved = stored.value
        now = asyncio.get_running_loop().time()
        for rank, hot in enumerate(reversed(record.adapters), 1):
            for _ in range(rank):
                self._use.used(TenantId(hot.tenant_id), AdapterUid(hot.uid), now)

    async def _save(self) -> None:
        top = self._use.top(asyncio.get_running_loop().time())
        record = HotAdaptersRecord(tuple(HotAdapter(tenant_id, uid) for tenant_id, uid in top))
        value = record.to_json()
        if not top or value == self._saved:
            return
        leading = [Compare(keys.SCHEDULER_LEADER, self._epoch)]
        if (await self._store.txn(leading, [Put(keys.HOT_ADAPTERS, value)])).succeeded:
            self._saved = value
