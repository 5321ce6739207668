"""What the tenants' policies ask of dedicated workers, looked up once a second and handed to the term."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store, StoreUnavailable
from manylora_shared.coordination.policies import StoredPolicy, stored_policy
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.ids import AdapterDigest, TenantId
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.policy import TenantPolicy

from manylora_scheduler.core.reports import Owner

_LOG = logging.getLogger(__name__)
LOOK_S = 1.0
_WORD = b"dedicated"  # no policy without it is read: there may be ten thousands

Wanted = Mapping[str, Mapping[Owner, int]]  # by pool: how many workers each is to have


class Dedications:
    """policies: the mirror's."""

    def __init__(self, store: Store, policies: Mapping[str, StoredPolicy], tell: Callable[[Wanted], None]) -> None:
        self._store = store
        self._tell = tell
        self._asking: dict[TenantId, TenantPolicy] = {}
        for name, stored in policies.items():
            self.policy_changed(TenantId(name), stored)

    def policy_changed(self, tenant_id: TenantId, stored: StoredPolicy | None) -> None:
        """None: the tenant is no more. One that cannot be read leaves the last in force."""
        if stored is None or _WORD not in stored.in_force:
            self._asking.pop(tenant_id, None)
        elif (policy := stored_policy(tenant_id, stored.in_force)) is not None:
            self._asking[tenant_id] = policy

    async def run(self) -> None:
        """Ends by cancellation."""
        while True:
            try:
                self._tell(await self.wanted())
            except StoreUnavailable as e:
                _LOG.warning("dedicated workers stay as they are while the store is away", extra=fields(error=str(e)))
            await asyncio.sleep(LOOK_S)

    async def wanted(self) -> Wanted:
        """Raises StoreUnavailable."""
        found: dict[str, dict[Owner, int]] = {}
        for tenant_id, policy in list(self._asking.items()):
            for name, count in policy.dedicated.items():
                stored = await self._store.get(keys.adapter(tenant_id, name))
                try:
                    record = AdapterRecord.stored(stored) if stored is not None else None
                except ValueError as e:
                    _LOG.error("an adapter's record cannot be read", extra=fields(tenant=tenant_id, error=str(e)))
                    continue
                if record is not None and record.line.in_force.is_served and record.pool in policy.pools:
                    uid = policy.copy_of(AdapterDigest(record.uid))
                    found.setdefault(record.pool, {})[Owner(uid, tenant_id)] = count
        return found
