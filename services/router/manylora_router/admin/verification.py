"""Whether registered adapters' files in the adapter store are what was registered. Owns the verifications under way:
each reads as fast as the store gives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from manylora.v1 import admin_pb2
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid
from manylora_shared.stores.adapter_files import AdapterFiles
from manylora_shared.transport.places import Places

from manylora_router.links.wire import adapter_info

_MAX = 2  # of one router, at a time
_KEPT = 1  # of these, for whoever has none


class Verification:
    def __init__(self, files: AdapterFiles) -> None:
        self._files = files
        self._places = Places(_MAX, kept=_KEPT, few=1)

    async def answers(
        self, records: Sequence[AdapterRecord], account: str
    ) -> AsyncIterator[admin_pb2.VerifyAdaptersResponse]:
        """One after the other, in the order given. Raises Overloaded."""
        with self._places.held(f"{account or 'operators'} that verify adapters"):
            problems: dict[AdapterUid, str] = {}  # many names of a tenant may have the same files
            for record in records:
                uid = adapter_uid(AdapterDigest(record.uid), TenantId(record.tenant_id))
                if uid not in problems:
                    problems[uid] = await self._files.problem(uid)
                yield admin_pb2.VerifyAdaptersResponse(adapter=adapter_info(record), problem=problems[uid])
