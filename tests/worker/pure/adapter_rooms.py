"""Adapters on a device of ten bytes, and whom they count against."""

from __future__ import annotations

from manylora_shared.ids import AdapterUid, TenantId
from manylora_worker.adapters.room import Entry, TierRoom
from manylora_worker.kinds.api import AdapterTier

DEVICE, HOST = AdapterTier.DEVICE, AdapterTier.HOST


def weight_of(tenant_id: TenantId) -> int:
    return 1


def room_of(budget_bytes: int = 10, tier: AdapterTier = DEVICE, **options: float) -> TierRoom:
    times = {"borrow_after_s": 60.0, "borrow_copy_after_s": 10.0, "patience_s": 5.0, **options}
    return TierRoom(tier, budget_bytes, weight_of, **times)


def on_device(room: TierRoom, name: str, size_bytes: int, **claims: float) -> Entry:
    """claims: by tenant, when it used the adapter last."""
    entry = Entry(AdapterUid(name), size_bytes, on_host=True, on_device=True)
    entry.claims[DEVICE] = {TenantId(tenant): used_at for tenant, used_at in claims.items()}
    room.entries[entry.uid] = entry
    return entry


def wanted(name: str, size_bytes: int, **queued: int) -> Entry:
    """queued: by tenant that waits for it, its number in the order of coming."""
    entry = Entry(AdapterUid(name), size_bytes, on_host=True)
    entry.queued = {TenantId(tenant): number for tenant, number in queued.items()}
    return entry
