"""Which loads of adapters begin now. AdapterCache says whose turn it is, TierRoom makes the room. Turns without room
are remembered until something changes.
"""

from __future__ import annotations

from manylora_shared.ids import TenantId

from manylora_worker.adapters.load_order import LoadOrder
from manylora_worker.adapters.overtaking import Overtaking
from manylora_worker.adapters.residency import Residency
from manylora_worker.adapters.room import Entry, Plan
from manylora_worker.adapters.standings import Standings
from manylora_worker.kinds.api import AdapterTier

LOOK_AGAIN_S = 0.1  # how soon room that only time has made is found
Versions = tuple[int, int, int]


class Loading:
    def __init__(self, residency: Residency, standings: Standings, order: LoadOrder, overtaking: Overtaking) -> None:
        self._residency = residency
        self._standings = standings
        self._order = order
        self._overtaking = overtaking
        # no room on the device for a tenant's turn: when (versions, time in LOOK_AGAIN_S), for which size
        self._refused: dict[TenantId, tuple[tuple[Versions, int], int]] = {}

    @property
    def versions(self) -> Versions:
        """Change with all that decides on room, except time."""
        return self._standings.claims_version, self._order.version, self._residency.idle_version

    def to_device(self, entry: Entry, tenant_id: TenantId, now: float) -> None:
        """From the host."""
        if not self._residency.may_load(AdapterTier.DEVICE):
            return
        moment = self.versions, int(now / LOOK_AGAIN_S)
        refused = self._refused.get(tenant_id)
        if refused is not None and refused[0] == moment and entry.size_bytes >= refused[1]:
            return
        if not self._overtaking.is_allowed(tenant_id, entry, counts=False):
            return
        plan = self._plan(entry, AdapterTier.DEVICE, tenant_id, now)
        if plan is None:
            self._overtaking.block(tenant_id, entry)
            self._refused[tenant_id] = moment, entry.size_bytes
            return
        self._overtaking.unblock(tenant_id, entry)
        self._begin(entry, AdapterTier.DEVICE, tenant_id, plan)

    def fetch(self, entry: Entry, tenant_id: TenantId) -> None:
        """From a far store."""
        if self._residency.may_fetch(tenant_id):
            self._residency.begin_fetch(entry, tenant_id)

    def to_host(self, entry: Entry, tenant_id: TenantId, now: float) -> None:
        """From disk."""
        if not self._residency.may_load(AdapterTier.HOST):
            return
        plan = self._plan(entry, AdapterTier.HOST, tenant_id, now)
        if plan is not None:
            self._begin(entry, AdapterTier.HOST, tenant_id, plan)

    def prefetch(self, entry: Entry, tenant_id: TenantId | None, now: float) -> bool:
        """A tier up, if there is room without waiting. Returns whether nothing is left to do."""
        tier = AdapterTier.DEVICE if entry.on_host else AdapterTier.HOST
        if tier is AdapterTier.HOST and not self._residency.is_near(entry):
            if self._residency.may_fetch(tenant_id, is_prefetch=True):
                self._residency.begin_fetch(entry, tenant_id)
            return False
        if tier is AdapterTier.DEVICE and self._overtaking:
            return True
        if not self._residency.may_load(tier):
            return tier is AdapterTier.DEVICE
        room = self._residency.rooms[tier]
        standing = self._standings.of(tier, None if tenant_id is None else (tenant_id, entry.size_bytes))
        plan = room.plan(entry, tenant_id, entry.size_bytes, standing, now, is_prefetch=True)
        if plan is None:
            return True
        self._residency.make_way(plan, room, tenant_id)
        if tenant_id is not None:
            entry.claims[tier][tenant_id] = now
        self._residency.begin_load(entry, tier)
        return tier is AdapterTier.DEVICE

    def settle_on_host(self, entry: Entry, now: float) -> None:
        """Its size may be known only now: it stays if it fits."""
        tenant_id = min(entry.queued, key=lambda tenant: entry.queued[tenant], default=None)
        if tenant_id is None:
            tenant_id = next(iter(entry.claims[AdapterTier.HOST]), None)
        room, standing = self._residency.rooms[AdapterTier.HOST], self._standings.of(AdapterTier.HOST)
        plan = room.plan(entry, tenant_id, 0, standing, now, is_prefetch=not entry.queued)
        if plan is not None:
            self._residency.make_way(plan, room, tenant_id)
        else:
            self._residency.drop(entry, AdapterTier.HOST)
            self._residency.forget_if_unused(entry)

    def left_queue(self, entry: Entry, tenant_id: TenantId) -> None:
        entry.no_room_since.pop(tenant_id, None)
        self._overtaking.unblock(tenant_id, entry)
        self._refused.pop(tenant_id, None)

    def _plan(self, entry: Entry, tier: AdapterTier, tenant_id: TenantId, now: float) -> Plan | None:
        room = self._residency.rooms[tier]
        plan = room.plan(entry, tenant_id, entry.size_bytes, self._standings.of(tier), now)
        if plan is None:
            entry.no_room_since.setdefault(tenant_id, now)
        return plan

    def _begin(self, entry: Entry, tier: AdapterTier, tenant_id: TenantId, plan: Plan) -> None:
        self._residency.make_way(plan, self._residency.rooms[tier], tenant_id)
        self._order.charge(tenant_id, self._residency.load_cost(entry))
        self._residency.begin_load(entry, tier)
