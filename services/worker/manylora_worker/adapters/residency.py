"""Which adapter is on which tier, and the loads between them. AdapterCache writes it; an AdapterBackend loads.

a far store --fetch--> disk --load--> HOST --load--> DEVICE, which may lose its host copy

A fetch may hang for as long as its time limit: it has a place of its tenant, and none of a load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.room import Entry, Eviction, Plan, TierRoom
from manylora_worker.adapters.tier_counts import tier_of
from manylora_worker.kinds.api import AdapterBackend, AdapterEvent, AdapterTier, FarBackend

_KNOWN_SIZES = 4096  # remembered of adapters that are on disk only
_MAX_REFETCHES = 2  # of what leaves the disk before it is read


@dataclass(frozen=True)
class FetchLimits:
    """At the same time. Once half of all are under way, a tenant begins one only where it has none."""

    all: int = 64
    of_tenant: int = 4


class Residency:
    """max_loads: to each tier at the same time."""

    def __init__(
        self,
        backend: AdapterBackend,
        rooms: Mapping[AdapterTier, TierRoom],
        max_loads: Mapping[AdapterTier, int],
        fetches: FetchLimits = FetchLimits(),
    ) -> None:
        self._backend = backend
        self._far = backend if isinstance(backend, FarBackend) else None
        self._fetch_limits = fetches
        self._fetches: dict[TenantId | None, int] = {}
        self.rooms = rooms
        self.entries: dict[AdapterUid, Entry] = {}
        self.version = 0  # grows with each change of where an adapter is
        self.claims_version = 0  # and of what counts against whom, and with each load that begins
        self.idle_version = 0  # grows whenever an adapter is no longer in use
        self._max_loads = max_loads
        self._loads = dict.fromkeys(rooms, 0)
        self._known_bytes: dict[AdapterUid, int] = {}
        self._counts: dict[TenantId, list[int]] = {}  # [evictions, displaced], both cumulative
        self._evictions: list[Eviction] = []  # since they were taken
        self._tick = 0

    @property
    def num_loading(self) -> int:
        return sum(self._loads.values()) + sum(self._fetches.values())

    def tiers(self) -> Mapping[AdapterUid, AdapterTier]:
        return {
            uid: AdapterTier.DEVICE if e.on_device else AdapterTier.HOST
            for uid, e in self.entries.items()
            if e.on_device or e.on_host
        }

    def evicted(self) -> Mapping[TenantId, tuple[int, int]]:
        """By tenant: adapters lost from the device, and how many of them to others."""
        return {tenant: (evictions, displaced) for tenant, (evictions, displaced) in self._counts.items()}

    def take_evictions(self) -> list[Eviction]:
        evictions, self._evictions = self._evictions, []
        return evictions

    # -- entries and claims

    def entry(self, uid: AdapterUid) -> Entry:
        """Made where there is none."""
        entry = self.entries.get(uid)
        if entry is None:
            entry = self.entries[uid] = Entry(uid, size_bytes=self._known_bytes.get(uid, 0))
        return entry

    def size_of(self, uid: AdapterUid) -> int:
        """0: not learned yet."""
        entry = self.entries.get(uid)
        return max(self._known_bytes.get(uid, 0), entry.size_bytes if entry is not None else 0)

    def learn_size(self, entry: Entry, size_bytes: int) -> bool:
        """Whether another size was known."""
        has_changed = entry.size_bytes != size_bytes
        entry.size_bytes = size_bytes
        self._known_bytes.pop(entry.uid, None)
        self._known_bytes[entry.uid] = size_bytes
        if len(self._known_bytes) > _KNOWN_SIZES:
            del self._known_bytes[next(iter(self._known_bytes))]
        return has_changed

    def load_cost(self, entry: Entry) -> int:
        """In bytes; of what was never loaded, the size learned last."""
        return entry.size_bytes or next(reversed(self._known_bytes.values()), 1)

    def touch(self, entry: Entry, tenant_id: TenantId, now: float) -> None:
        self._tick += 1
        entry.last_tick = self._tick
        for claims in entry.claims.values():
            if tenant_id not in claims:
                self.claims_version += 1
            claims[tenant_id] = now

    def end_use(self, entry: Entry, holder: RequestId, tenant_id: TenantId, now: float) -> None:
        del entry.users[holder]
        self.touch(entry, tenant_id, now)
        self.idle_version += not entry.users

    def forget_if_unused(self, entry: Entry) -> None:
        if entry.is_unused:
            del self.entries[entry.uid]

    def drop_claims(self, entry: Entry, tenant_id: TenantId) -> None:
        for claims in entry.claims.values():
            self.claims_version += claims.pop(tenant_id, None) is not None

    def drop_vain_claims(self, entry: Entry) -> None:
        """On a tier where it is not, only who waits for it claims it."""
        for tier, claims in entry.claims.items():
            if not entry.uses(tier) and not entry.on_device:
                for tenant in [t for t in claims if t not in entry.queued and t not in entry.pinned_by]:
                    del claims[tenant]

    # -- loads

    def may_load(self, tier: AdapterTier) -> bool:
        return self._loads[tier] < self._max_loads[tier]

    def begin_load(self, entry: Entry, tier: AdapterTier) -> None:
        entry.loading = tier
        entry.is_near = None
        entry.no_room_since.clear()
        self._loads[tier] += 1
        self.rooms[tier].entries[entry.uid] = entry
        self.claims_version += 1
        if tier is AdapterTier.HOST:
            self._backend.start_host_load(entry.uid)
        else:
            self._backend.start_device_load(entry.uid)

    def end_load(self, event: AdapterEvent) -> Entry:
        """It is on the tier now, unless the load failed."""
        entry = self.entries[event.uid]
        assert entry.loading is event.tier, f"{event.uid}: a load ended that was not asked for"
        entry.loading = None
        self.claims_version += 1
        if event.tier is AdapterTier.DISK:
            self._end_fetch(entry)
            entry.is_near = event.error is None or None
            return entry
        self._loads[event.tier] -= 1
        if event.error is not None:
            del self.rooms[event.tier].entries[entry.uid]
            return entry
        entry.num_refetches = 0
        self.version += 1
        if event.tier is AdapterTier.DEVICE:
            entry.on_device = True
        else:
            entry.on_host = True
        return entry

    # -- fetches

    def is_near(self, entry: Entry) -> bool:
        if entry.is_near is None:
            entry.is_near = self._far is None or self._far.is_near(entry.uid)
        return entry.is_near

    def found(self, uid: AdapterUid) -> str:
        """On which tier it is now."""
        entry = self.entries.get(uid) or Entry(uid)
        is_near = entry.on_host or entry.on_device or self.is_near(entry)
        return tier_of(entry, is_near=is_near)

    def may_fetch(self, tenant_id: TenantId | None, *, is_prefetch: bool = False) -> bool:
        """is_prefetch: only while nearly all places are free."""
        limits, mine, taken = self._fetch_limits, self._fetches.get(tenant_id, 0), sum(self._fetches.values())
        if is_prefetch:
            return mine == 0 and taken < max(1, limits.all // 4)
        most = limits.of_tenant if taken < limits.all // 2 else 1
        return mine < most and taken < limits.all

    def begin_fetch(self, entry: Entry, tenant_id: TenantId | None) -> None:
        assert self._far is not None
        entry.loading, entry.fetched_for = AdapterTier.DISK, tenant_id
        self._fetches[tenant_id] = self._fetches.get(tenant_id, 0) + 1
        self.claims_version += 1
        self._far.start_fetch(entry.uid)

    def is_fetched_again(self, entry: Entry, event: AdapterEvent) -> bool:
        """Whether what could not be read is not on the disk any more."""
        is_gone = event.tier is AdapterTier.HOST and event.is_passing and not self.is_near(entry)
        entry.num_refetches += is_gone
        return is_gone and entry.num_refetches <= _MAX_REFETCHES

    def _end_fetch(self, entry: Entry) -> None:
        left = self._fetches.pop(entry.fetched_for) - 1
        if left:
            self._fetches[entry.fetched_for] = left
        entry.fetched_for = None

    # -- what goes

    def make_way(self, plan: Plan, room: TierRoom, tenant_id: TenantId | None) -> None:
        for uid in plan.releases:
            assert tenant_id is not None
            room.entries[uid].claims[room.tier].pop(tenant_id)
            self.claims_version += 1
        for eviction in plan.evictions:
            entry = self.entries[eviction.uid]
            assert all(
                loser == tenant_id or held > share or idle_s >= room.borrow_after_s(entry)
                for loser, (held, share, idle_s) in eviction.losers.items()
                if eviction.waited_s < room.patience_s
            ), "a tenant within its share would lose what it uses"
            if room.tier is AdapterTier.DEVICE:
                for loser in eviction.losers:
                    counts = self._counts.setdefault(loser, [0, 0])
                    counts[0] += 1
                    counts[1] += loser != tenant_id
            self._evictions.append(eviction)
            self.drop(entry, room.tier)
            self.forget_if_unused(entry)

    def drop(self, entry: Entry, tier: AdapterTier) -> None:
        if tier is AdapterTier.DEVICE:
            assert not entry.in_use
            self._backend.drop_device(entry.uid)
            entry.on_device = False
        else:
            self._backend.drop_host(entry.uid)
            entry.on_host = False
        del self.rooms[tier].entries[entry.uid]
        self.drop_vain_claims(entry)
        self.version += 1
        self.claims_version += 1

    def check_invariants(self) -> None:
        for tier, room in self.rooms.items():
            assert room.used_bytes <= room.budget_bytes, f"over the {tier.name} tier's budget"
            assert room.entries == {uid: e for uid, e in self.entries.items() if e.uses(tier)}
            assert self._loads[tier] == sum(e.loading is tier for e in self.entries.values())
            assert self._loads[tier] <= self._max_loads[tier]
        fetched = [entry.fetched_for for entry in self.entries.values() if entry.loading is AdapterTier.DISK]
        assert {tenant: fetched.count(tenant) for tenant in fetched} == self._fetches
        assert len(fetched) <= self._fetch_limits.all
        assert all(count <= self._fetch_limits.of_tenant for count in self._fetches.values())
        for entry in self.entries.values():
            assert not entry.is_unused
            assert entry.loading is not AdapterTier.DISK or not (entry.on_host or entry.on_device)
            assert not entry.users or entry.on_device, "in use, but not on the device"
            assert entry.loading is not AdapterTier.DEVICE or (entry.on_host and not entry.on_device)
            assert entry.loading is not AdapterTier.HOST or not entry.on_host
            if not entry.waiters and not entry.pinned_by:
                assert entry.uses(AdapterTier.DEVICE) or not entry.claims[AdapterTier.DEVICE], "a claim on nothing"
