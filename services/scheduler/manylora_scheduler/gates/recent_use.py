"""Which adapters were asked for most of late, over all tenants: what a new worker loads before it takes requests. Pure.

A use counts half as much ten minutes later. One tenant has a bounded part, of what is known and of what is told.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from manylora_shared.composition import uids_of
from manylora_shared.coordination.pool import MAX_POOLS
from manylora_shared.ids import AdapterKey, AdapterUid, TenantId

HALF_LIFE_S = 600.0
MAX_TENANTS = 4096
OF_TENANT = 32  # known of one
TOP = 32
TOP_OF_TENANT = 8
OF_POOL = 256  # adapters whose shares of a pool's requests are known
LEAST_REQUESTS = 100.0  # of a pool, before a share says anything


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


class PoolUse(NamedTuple):
    pool: str
    tenant_id: TenantId
    adapter_uid: AdapterUid
    share: float  # of the pool's requests


class UseShares:
    """Which part of a pool's requests of late asks for which adapter. Compositions are nobody's."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}
        self._scores: dict[str, dict[tuple[TenantId, AdapterUid], tuple[float, float]]] = {}

    def asked(self, pool: str, tenant_id: TenantId, key: AdapterKey | None, now: float) -> None:
        if pool not in self._totals and len(self._totals) >= MAX_POOLS:
            least = min(self._totals, key=lambda each: _decayed(self._totals[each], now))
            del self._totals[least]
            self._scores.pop(least, None)
        self._totals[pool] = (_decayed(self._totals.get(pool, (0.0, now)), now) + 1.0, now)
        uids = uids_of(key) if key is not None else ()
        if len(uids) != 1:
            return
        scores = self._scores.setdefault(pool, {})
        mine = (tenant_id, uids[0])
        scores[mine] = (_decayed(scores.get(mine, (0.0, now)), now) + 1.0, now)
        if len(scores) > 2 * OF_POOL:
            best = sorted(scores, key=lambda each: -_decayed(scores[each], now))[:OF_POOL]
            self._scores[pool] = {each: scores[each] for each in best}

    def shares(self, now: float) -> list[PoolUse]:
        """The greatest first; none of a pool that was asked little."""
        found: list[PoolUse] = []
        for pool, total in self._totals.items():
            requests = _decayed(total, now)
            if requests >= LEAST_REQUESTS:
                scores = self._scores.get(pool, {})
                found += [PoolUse(pool, *mine, _decayed(score, now) / requests) for mine, score in scores.items()]
        return sorted(found, key=lambda use: (-use.share, use))


def _decayed(score: tuple[float, float], now: float) -> float:
    value, at = score
    return value * math.exp2((at - now) / HALF_LIFE_S)
