"""Which adapters were asked for most of late, over all tenants: what a new worker loads before it takes requests. Pure.

A use counts half as much ten minutes later. One tenant has a bounded part, of what is known and of what is told.
"""

from __future__ import annotations

import math

from manylora_shared.ids import AdapterUid, TenantId

HALF_LIFE_S = 600.0
MAX_TENANTS = 4096
OF_TENANT = 32  # known of one
TOP = 32
TOP_OF_TENANT = 8


class AdapterUse:
    def __init__(self) -> None:
        # (score, when it was), by tenant and adapter; used last stands last, in both
        self._scores: dict[TenantId, dict[AdapterUid, tuple[float, float]]] = {}

    def used(self, tenant_id: TenantId, uid: AdapterUid, now: float) -> None:
        mine = self._scores.pop(tenant_id, {})
        self._scores[tenant_id] = mine
        mine[uid] = (_decayed(mine.pop(uid, (0.0, now)), now) + 1.0, now)
        if len(mine) > OF_TENANT:
            del mine[min(mine, key=lambda each: _decayed(mine[each], now))]
        if len(self._scores) > MAX_TENANTS:
            del self._scores[next(iter(self._scores))]

    def top(self, now: float) -> list[tuple[TenantId, AdapterUid]]:
        """The most used first, TOP at most, TOP_OF_TENANT of a tenant."""
        found: list[tuple[float, TenantId, AdapterUid]] = []
        for tenant, mine in self._scores.items():
            ranked = sorted(((_decayed(score, now), tenant, uid) for uid, score in mine.items()), reverse=True)
            found += ranked[:TOP_OF_TENANT]
        return [(tenant, uid) for _, tenant, uid in sorted(found, reverse=True)[:TOP]]


def _decayed(score: tuple[float, float], now: float) -> float:
    value, at = score
    return value * math.exp2((at - now) / HALF_LIFE_S)
