"""How often the device is used past a tenant's first request that finds no room there (*blocked*): `max_overtakes`
times by its own others and, where it is within its share, by tenants above theirs; freely by the rest. AdapterCache
writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manylora_shared.ids import TenantId

from manylora_worker.adapters.room import Entry, Standing, TierRoom


@dataclass
class _Blocked:
    entry: Entry
    overtakes: int
    is_due: bool  # within the tenant's share: others have to make way


class Overtaking:
    def __init__(self, device: TierRoom, standing: Callable[[], Standing], max_overtakes: int) -> None:
        self._device = device
        self._standing = standing
        self._max_overtakes = max_overtakes
        self._blocked: dict[TenantId, _Blocked] = {}

    def __bool__(self) -> bool:
        return bool(self._blocked)

    def is_allowed(self, tenant_id: TenantId, entry: Entry, *, counts: bool = True) -> bool:
        """Past the blocked ones; `counts`: they are then overtaken once more."""
        if not self._blocked:
            return True
        number = entry.queued.get(tenant_id)
        passed: list[_Blocked] = []
        for tenant, blocked in self._blocked.items():
            if blocked.entry is entry or (number is not None and number < blocked.entry.queued[tenant]):
                continue
            if tenant != tenant_id:
                if not blocked.is_due:
                    continue
                more_bytes = 0 if entry.uses(self._device.tier) else entry.size_bytes
                if self._standing().is_within(tenant_id, more_bytes):
                    continue
            if blocked.overtakes >= self._max_overtakes:
                return False
            passed.append(blocked)
        if counts:
            for blocked in passed:
                blocked.overtakes += 1
        return True

    def block(self, tenant_id: TenantId, entry: Entry) -> None:
        """The first in a tenant's queue counts."""
        before = self._blocked.get(tenant_id)
        if before is not None and before.entry.queued[tenant_id] < entry.queued[tenant_id]:
            return
        is_due = self._standing().is_within(tenant_id, entry.size_bytes) or self._device.is_alone(tenant_id, entry)
        self._blocked[tenant_id] = _Blocked(entry, before.overtakes if before is not None else 0, is_due)

    def unblock(self, tenant_id: TenantId, entry: Entry) -> None:
        blocked = self._blocked.get(tenant_id)
        if blocked is not None and blocked.entry is entry:
            del self._blocked[tenant_id]

    def check_invariants(self) -> None:
        assert all(tenant in blocked.entry.queued for tenant, blocked in self._blocked.items())
