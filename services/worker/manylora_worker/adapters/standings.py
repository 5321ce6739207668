"""What counts against each tenant on a tier, and its share now; kept until claims, queues or pins change."""

from __future__ import annotations

from manylora_shared.ids import TenantId

from manylora_worker.adapters.load_order import LoadOrder
from manylora_worker.adapters.pins import PinBook
from manylora_worker.adapters.residency import Residency
from manylora_worker.adapters.room import Standing
from manylora_worker.kinds.api import AdapterTier


class Standings:
    def __init__(self, residency: Residency, order: LoadOrder, pins: PinBook) -> None:
        self._residency = residency
        self._order = order
        self._pins = pins
        self._known: dict[AdapterTier, tuple[tuple[int, int], Standing]] = {}  # with the versions of what went into it

    @property
    def claims_version(self) -> int:
        """Grows when what tenants have or pin changes."""
        return self._residency.claims_version + self._pins.version

    def clear(self) -> None:
        """The tenants' weights have changed."""
        self._known.clear()

    def of(self, tier: AdapterTier, more: tuple[TenantId, int] | None = None) -> Standing:
        """more: what a tenant wants besides what it waits for."""
        versions = self.claims_version, self._order.version
        known = self._known.get(tier)
        if more is None and known is not None and known[0] == versions:
            return known[1]
        waiting: dict[TenantId, int] = {} if more is None else dict([more])
        for tenant, queue in self._order.queues.items():
            wanted = sum(e.size_bytes for e in queue.values() if not e.uses(tier) and not e.on_device)
            waiting[tenant] = waiting.get(tenant, 0) + wanted
        floors = self._pinned_bytes() if tier is AdapterTier.DEVICE else {}
        standing = self._residency.rooms[tier].standing(waiting, floors)
        if more is None:
            self._known[tier] = versions, standing
        return standing

    def _pinned_bytes(self) -> dict[TenantId, int]:
        entries = self._residency.entries
        pinned: dict[TenantId, int] = {}
        for tenant in self._pins.tenants:
            mine = [e for uid in self._pins.uids_of(tenant) if (e := entries.get(uid)) and tenant in e.pinned_by]
            if mine:
                pinned[tenant] = sum(entry.size_bytes for entry in mine)
        return pinned
