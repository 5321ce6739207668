"""Keeps what a leader leaves to the next in the coordination store, and reads what the last one left. Moves bytes."""

from __future__ import annotations

import asyncio
import logging

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Compare, Put, Store
from manylora_shared.coordination.records import ClockIndexRecord
from manylora_shared.telemetry.logs import fields

from manylora_scheduler.serving.clock_codec import Legacy, decode, encode

_LOG = logging.getLogger(__name__)
PART_BYTES = 512 * 1024  # the store takes 1.5 MiB in a request


# A clock's parts go to the bank that the index does not name, then the index names it. Every write holds only while the
# leader's key has this term's revision.
class ClockKeeper:
    """One term's; `epoch` is the revision of the leader's key. One task saves."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._bank: int | None = 0  # that the index does not name; None: what became of the last index is not known
        self._saved: bytes | None = None

    async def load(self) -> Legacy | None:
        """None: there is none that can be read. Raises StoreUnavailable."""
        kv = await self._store.get(keys.SCHEDULER_CLOCK)
        if kv is None:
            return None
        try:
            index = ClockIndexRecord.stored(kv)
            self._bank = 1 - index.bank
            data = b""
            for i in range(index.parts):
                part = await self._store.get(keys.scheduler_clock_part(index.bank, i))
                if part is None:
                    break
                data += part.value
            if len(data) != index.size_bytes:
                raise ValueError(f"{len(data)} of {index.size_bytes} bytes are there")
            return decode(data)
        except ValueError as e:
            # Fairness begins anew then, as in a new cluster; requests are served all the same.
            _LOG.error("the last leader's clock cannot be read", extra=fields(error=str(e)))
            return None

    async def save(self, legacy: Legacy) -> bool:
        """False: another leads by now, and nothing was written. Raises StoreUnavailable."""
        steps = []
        for step in encode(legacy):
            steps.append(step)
            await asyncio.sleep(0)  # a large clock takes a while, and grants go out meanwhile
        data = b"".join(steps)
        if data == self._saved:
            return True
        bank = await self._free_bank()
        parts = [data[i : i + PART_BYTES] for i in range(0, len(data), PART_BYTES)]
        for i, part in enumerate(parts):
            if not await self._put(keys.scheduler_clock_part(bank, i), part):
                return False
        index = ClockIndexRecord(bank=bank, parts=len(parts), size_bytes=len(data))
        self._bank = None
        if not await self._put(keys.SCHEDULER_CLOCK, index.to_json()):
            return False
        self._bank, self._saved = 1 - bank, data
        return True

    async def _free_bank(self) -> int:
        if self._bank is None:  # the answer was lost, and the store may have written it
            kv = await self._store.get(keys.SCHEDULER_CLOCK)
            self._bank = 0 if kv is None else 1 - ClockIndexRecord.stored(kv).bank
        return self._bank

    async def _put(self, key: str, value: bytes) -> bool:
        leading = [Compare(keys.SCHEDULER_LEADER, self._epoch)]
        return (await self._store.txn(leading, [Put(key, value)])).succeeded
