"""Which adapter is where, who uses it, and what is loaded or evicted next.

Owns the residency of every adapter (disk, host, device), the byte budgets of host and device, the references that
requests hold, the tenants' pins, and the queue of what waits for an adapter. Written by EngineCore alone, on the
engine's thread; an AdapterBackend does the loads beside it. Knows uids, tenants and sizes, never tensors. `now` is the
caller's, in seconds.

    DISK --start_host_load--> HOST --start_device_load--> DEVICE
         <----drop_host-----       <-----drop_device----        (a DEVICE adapter may have lost its host copy)

A request *holds* an adapter from `acquire` to `release`. It either uses it (the adapter is on the device and stays
there) or waits. A tenant *pins* an adapter by its policy: it is brought to the device without a request and stays.

- One load an adapter at a time, however many wait for it.
- Loads begin in turns (turns.py): next is the tenant that has had the fewest bytes loaded by weight since it began to
  wait; a tenant's own in the order of coming. So whoever asks for a thousand cold adapters waits for them, not its
  neighbours.
- Room is made by evicting what nobody uses, by the tenants' shares (room.py).
- Where no room can be made, a tenant's first in the queue is *blocked*. Its own tenant's other requests may overtake
  it, by using a resident adapter or one that fits into what is free, `max_overtakes` times in all; from then on they
  queue behind it. Where it is its tenant's due and others hold too much, that holds for tenants above their shares
  too; for one that is within its share it never does. So the uses that stand in its way run out.
- A failed load fails exactly the requests that wait for it; the next acquire tries again. A pin's is tried again by
  `set_pins`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.pins import Pin, PinBook, PinState
from manylora_worker.adapters.room import Entry, Eviction, Plan, Standing, TierRoom
from manylora_worker.adapters.turns import Turns
from manylora_worker.engine.api import AdapterBackend, AdapterEvent, AdapterTier

_KNOWN_SIZES = 4096
"""Sizes remembered of adapters that are on disk only."""
LOOK_AGAIN_S = 0.1
"""How soon room that only time has made is found, where nothing else has changed."""
_State = tuple[int, int, int, int]
_PREFETCH_QUEUE = 64
"""Prefetches not yet begun; when another comes, one of the tenant with most of them is forgotten."""


@dataclass(frozen=True)
class AdapterCacheLimits:
    host_bytes: int
    device_bytes: int
    host_loads: int = 8
    """Loads from disk at the same time."""
    device_loads: int = 8
    max_overtakes: int = 32
    borrow_after_s: float = 30.0
    """What was not used for so long may go for whoever needs room, shares aside."""
    borrow_copy_after_s: float = 1.0
    """The same, on the device, for what the host has a copy of: it is back in milliseconds, a hundredth of this."""
    patience_s: float = 1.0
    """After so long without room, a tenant that has nothing else may take what nobody uses, shares aside."""

    def __post_init__(self) -> None:
        if min(self.host_bytes, self.device_bytes, self.host_loads, self.device_loads) < 1 or self.max_overtakes < 0:
            raise ValueError("adapter budgets and loads must be at least 1")


@dataclass(frozen=True)
class AdapterFailure:
    """A load that failed, and the requests that waited for it."""

    uid: AdapterUid
    message: str
    holders: Sequence[RequestId]


class CacheUpdate(NamedTuple):
    ready: Sequence[RequestId]
    """Waiting before, using it now."""
    failed: Sequence[AdapterFailure]
    evictions: Sequence[Eviction]


class TenantAdapters(NamedTuple):
    """What a tenant has of the cache. An adapter that several tenants use counts in full for each."""

    device_bytes: int = 0
    host_bytes: int = 0
    evictions: int = 0
    """Of its adapters from the device, since the engine's start."""
    displaced: int = 0
    """Of these, for another tenant's adapter."""
    pins: tuple[PinState, ...] = ()


_NOTHING = CacheUpdate((), (), ())


@dataclass
class _Blocked:
    """The first in a tenant's queue that finds no room."""

    entry: Entry
    overtakes: int
    is_due: bool
    """It is within the tenant's share: others have to make way."""


class AdapterCache:
    """
    Args:
        weight_of: a tenant's weight, at least 1. After a change, `weights_changed`.
    """

    def __init__(
        self,
        backend: AdapterBackend,
        limits: AdapterCacheLimits,
        weight_of: Callable[[TenantId], int] = lambda tenant_id: 1,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._weight_of = weight_of
        self._entries: dict[AdapterUid, Entry] = {}
        self._holds: dict[RequestId, tuple[TenantId, AdapterUid]] = {}
        self._host, self._device = (
            TierRoom(
                tier,
                budget,
                weight_of,
                borrow_after_s=limits.borrow_after_s,
                borrow_copy_after_s=limits.borrow_copy_after_s,
                patience_s=limits.patience_s,
            )
            for tier, budget in ((AdapterTier.HOST, limits.host_bytes), (AdapterTier.DEVICE, limits.device_bytes))
        )
        self._turns = Turns(weight_of)
        self._loads = {AdapterTier.HOST: 0, AdapterTier.DEVICE: 0}
        self._prefetches: dict[AdapterUid, TenantId | None] = {}
        self._known_bytes: dict[AdapterUid, int] = {}
        self._blocked: dict[TenantId, _Blocked] = {}
        self._refused: dict[TenantId, tuple[_State, int]] = {}
        """Where there was no room on the device for a tenant's turn, and for which size."""
        self._idle_version = 0
        """Grows whenever an adapter is no longer in use."""
        self._pins = PinBook(limits.device_bytes, weight_of)
        self._evictions: list[Eviction] = []
        """Since the last pump."""
        self._counts: dict[TenantId, list[int]] = {}
        """[evictions, displaced], both cumulative."""
        self._standings: dict[AdapterTier, tuple[tuple[int, int], Standing]] = {}
        """As found last, with the versions of what went into it."""
        self._tick = 0
        self._version = 0
        self._tenants_version = 0
        self._settled: tuple[_State, int] | None = None
        """The versions before and after the last pump, where these were the same, and its time in LOOK_AGAIN_S."""

    @property
    def version(self) -> int:
        """Grows with each change of residency."""
        return self._version

    @property
    def tenants_version(self) -> int:
        """Grows with each change of `tenants`."""
        return self._tenants_version

    @property
    def num_loading(self) -> int:
        return sum(self._loads.values())

    @property
    def num_holders(self) -> int:
        return len(self._holds)

    @property
    def has_work(self) -> bool:
        """Whether `pump` may have something to do: loads to hear of, requests, pins or prefetches that wait."""
        return bool(self._turns or self._prefetches or self.num_loading or self._pins.is_due)

    @property
    def is_settled(self) -> bool:
        """Whether another `pump` finds nothing new, unless a load ends, or LOOK_AGAIN_S have passed."""
        return self._settled is not None and self._settled[0] == self._state() and not self._pins.is_due

    @property
    def host_bytes(self) -> int:
        return self._host.used_bytes

    @property
    def device_bytes(self) -> int:
        return self._device.used_bytes

    def tiers(self) -> Mapping[AdapterUid, AdapterTier]:
        """The best tier of every adapter that is off the disk."""
        return {
            uid: AdapterTier.DEVICE if e.on_device else AdapterTier.HOST
            for uid, e in self._entries.items()
            if e.on_device or e.on_host
        }

    def tenants(self) -> dict[TenantId, TenantAdapters]:
        """Of all tenants that have, had or pin adapters."""
        device, host = self._device.held(), self._host.held()
        everybody = dict.fromkeys((*device, *host, *self._counts, *self._pins.tenants))
        found: dict[TenantId, TenantAdapters] = {}
        for tenant in everybody:
            evictions, displaced = self._counts.get(tenant, (0, 0))
            pins = self._pins.states(tenant, functools.partial(self._is_pinned, tenant))
            found[tenant] = TenantAdapters(device.get(tenant, 0), host.get(tenant, 0), evictions, displaced, pins)
        return found

    def uses(self, holder: RequestId) -> bool:
        """Whether the holder has its adapter on the device."""
        hold = self._holds.get(holder)
        return hold is not None and holder in self._entries[hold[1]].users

    def acquire(self, holder: RequestId, tenant_id: TenantId, uid: AdapterUid, now: float) -> bool:
        """Begins a holding. Returns whether it uses the adapter already; else a later `pump` names it as ready or
        failed."""
        assert holder not in self._holds, f"{holder} holds an adapter already"
        entry = self._entry(uid)
        self._holds[holder] = (tenant_id, uid)
        self._touch(entry, tenant_id, now)
        if entry.on_device and tenant_id not in entry.queued and self._may_use(tenant_id, entry):
            entry.users[holder] = None
            return True
        entry.waiters[holder] = tenant_id
        self._turns.add(tenant_id, entry)
        return False

    def release(self, holder: RequestId, now: float) -> None:
        """Ends a holding. Unknown holders are ignored: their load has failed."""
        hold = self._holds.pop(holder, None)
        if hold is None:
            return
        tenant_id, uid = hold
        entry = self._entries[uid]
        if entry.users.pop(holder, self) is not self:
            self._touch(entry, tenant_id, now)
            self._idle_version += not entry.users
        else:
            del entry.waiters[holder]
            if not self._waits(entry, tenant_id):
                self._leave_queue(entry, tenant_id)
        self._forget_if_unused(entry)

    def prefetch(self, uid: AdapterUid, tenant_id: TenantId | None) -> None:
        """Loads it as far up as there is room without waiting. Best effort: a failure is forgotten.

        Args:
            tenant_id: for whom; None: not known.
        """
        entry = self._entries.get(uid)
        if entry is not None and (entry.on_device or entry.queued):
            return
        self._prefetches.setdefault(uid, tenant_id)
        self._settled = None
        if len(self._prefetches) > _PREFETCH_QUEUE:
            counts: dict[TenantId | None, int] = {}
            for tenant in self._prefetches.values():
                counts[tenant] = counts.get(tenant, 0) + 1
            most = max(counts.values())
            forgotten = next(uid for uid, tenant in self._prefetches.items() if counts[tenant] == most)
            del self._prefetches[forgotten]
            if forgotten in self._entries:
                self._forget_if_unused(self._entries[forgotten])

    def set_pins(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        """What is pinned from the next pump on, by all tenants; loads of pins that failed are tried again.

        Args:
            largest_bytes: of the adapters that are registered: room for one is left beside all pins.
        """
        self._pins.set(pins, largest_bytes)

    def weights_changed(self) -> None:
        self._standings.clear()
        self._pins.changed()
        self._settled = None

    def pump(self, now: float) -> CacheUpdate:
        """Hears of loads that ended, hands out adapters, and starts what there is room for."""
        events = self._backend.poll()
        interval = int(now / LOOK_AGAIN_S)
        if not events and self.is_settled and self._settled is not None and self._settled[1] == interval:
            return _NOTHING
        before = self._state()
        failed: list[AdapterFailure] = []
        for event in events:
            self._take_event(event, failed, now)
        if self._pins.is_due:
            self._apply_pins(now)
        ready: list[RequestId] = []
        for tenant_id, entry in self._turns.take():
            self._advance(tenant_id, entry, ready, failed, now)
        for uid, prefetching in list(self._prefetches.items()):
            if uid in self._prefetches and self._advance_prefetch(self._entry(uid), prefetching, now):
                self._prefetches.pop(uid, None)
                self._forget_if_unused(self._entries[uid])
        evictions, self._evictions = self._evictions, []
        self._settled = (before, interval) if before == self._state() else None
        return CacheUpdate(ready, failed, evictions)

    def _state(self) -> _State:
        """Changes with all that decides on what there is to do, but time."""
        return self._tenants_version, self._turns.version, self._idle_version, len(self._prefetches)

    def check_invariants(self) -> None:
        assert self.host_bytes <= self._limits.host_bytes, "over the host budget"
        assert self.device_bytes <= self._limits.device_bytes, "over the device budget"
        for uid, entry in self._entries.items():
            self._check_entry(uid, entry)
        assert len(self._holds) == sum(len(e.users) + len(e.waiters) for e in self._entries.values())
        self._turns.check_invariants()
        waiting = [(tenant, uid) for tenant, queue in self._turns.queues.items() for uid in queue]
        assert sorted(waiting) == sorted((tenant, uid) for uid, e in self._entries.items() for tenant in e.queued)
        assert all(tenant in blocked.entry.queued for tenant, blocked in self._blocked.items())
        for room in (self._host, self._device):
            assert room.entries == {uid: e for uid, e in self._entries.items() if e.uses(room.tier)}
        assert all(n == sum(e.loading is tier for e in self._entries.values()) for tier, n in self._loads.items())
        assert self._loads[AdapterTier.HOST] <= self._limits.host_loads
        assert self._loads[AdapterTier.DEVICE] <= self._limits.device_loads

    def _check_entry(self, uid: AdapterUid, entry: Entry) -> None:
        assert not entry.users.keys() & entry.waiters.keys()
        assert not entry.users or entry.on_device, "in use, but not on the device"
        assert entry.loading is not AdapterTier.DEVICE or (entry.on_host and not entry.on_device)
        assert entry.loading is not AdapterTier.HOST or not entry.on_host
        assert entry.on_device or entry.on_host or entry.loading or entry.queued or uid in self._prefetches
        assert entry.queued.keys() == {t for t in (*entry.waiters.values(), *entry.pinned_by) if self._waits(entry, t)}
        for holder in (*entry.users, *entry.waiters):
            tenant, held = self._holds[holder]
            assert held == uid
            assert tenant in entry.claims[AdapterTier.DEVICE], "used by a tenant against which it does not count"
        for tenant in entry.pinned_by:
            assert tenant in entry.claims[AdapterTier.DEVICE]
            assert self._pins.is_due or uid in self._pins.uids_of(tenant)
        if not entry.waiters and not entry.pinned_by:
            assert entry.uses(AdapterTier.DEVICE) or not entry.claims[AdapterTier.DEVICE], "a claim on nothing"

    # -- entries and queues

    def _entry(self, uid: AdapterUid) -> Entry:
        entry = self._entries.get(uid)
        if entry is None:
            entry = self._entries[uid] = Entry(uid, size_bytes=self._known_bytes.get(uid, 0))
        return entry

    def _touch(self, entry: Entry, tenant_id: TenantId, now: float) -> None:
        """The tenant uses it, or wants to."""
        self._tick += 1
        entry.last_tick = self._tick
        for claims in entry.claims.values():
            if tenant_id not in claims:
                self._tenants_version += 1
            claims[tenant_id] = now

    def _waits(self, entry: Entry, tenant_id: TenantId) -> bool:
        """Whether a request or a pin of the tenant waits for it."""
        return tenant_id in entry.waiters.values() or (tenant_id in entry.pinned_by and not entry.on_device)

    def _leave_queue(self, entry: Entry, tenant_id: TenantId) -> None:
        if not self._turns.remove(tenant_id, entry):
            return
        entry.no_room_since.pop(tenant_id, None)
        blocked = self._blocked.get(tenant_id)
        if blocked is not None and blocked.entry is entry:
            del self._blocked[tenant_id]
        self._refused.pop(tenant_id, None)
        self._drop_vain_claims(entry)

    def _drop_vain_claims(self, entry: Entry) -> None:
        """On a tier where it is not, those alone claim it who wait for it."""
        for tier, claims in entry.claims.items():
            if not entry.uses(tier) and not entry.on_device:
                for tenant in [t for t in claims if t not in entry.queued and t not in entry.pinned_by]:
                    del claims[tenant]

    def _forget_if_unused(self, entry: Entry) -> None:
        if not (entry.on_device or entry.on_host or entry.loading or entry.queued or entry.uid in self._prefetches):
            del self._entries[entry.uid]

    def _standing(self, tier: AdapterTier, more: tuple[TenantId, int] | None = None) -> Standing:
        """
        Args:
            more: what a tenant wants besides what it waits for.
        """
        versions = self._tenants_version, self._turns.version
        known = self._standings.get(tier)
        if more is None and known is not None and known[0] == versions:
            return known[1]
        waiting: dict[TenantId, int] = {} if more is None else dict([more])
        for tenant, queue in self._turns.queues.items():
            wanted = sum(e.size_bytes for e in queue.values() if not e.uses(tier) and not e.on_device)
            waiting[tenant] = waiting.get(tenant, 0) + wanted
        floors = self._pinned_bytes() if tier is AdapterTier.DEVICE else {}
        standing = self._room(tier).standing(waiting, floors)
        if more is None:
            self._standings[tier] = versions, standing
        return standing

    # -- pins

    def _pinned_bytes(self) -> dict[TenantId, int]:
        pinned: dict[TenantId, int] = {}
        for tenant in self._pins.tenants:
            mine = [self._entries[uid] for uid in self._pins.uids_of(tenant) if self._is_pinned(tenant, uid, False)]
            if mine:
                pinned[tenant] = sum(entry.size_bytes for entry in mine)
        return pinned

    def _is_pinned(self, tenant_id: TenantId, uid: AdapterUid, on_device: bool = True) -> bool:
        """Whether the tenant pins it, and (`on_device`) it is there."""
        entry = self._entries.get(uid)
        return entry is not None and tenant_id in entry.pinned_by and (entry.on_device or not on_device)

    def _size_of(self, uid: AdapterUid) -> int:
        entry = self._entries.get(uid)
        return max(self._known_bytes.get(uid, 0), entry.size_bytes if entry is not None else 0)

    def _apply_pins(self, now: float) -> None:
        """Pins and unpins, so that what is pinned is what can be kept."""
        wanted = self._pins.resolve(self._size_of)
        for uid, entry in list(self._entries.items()):
            for tenant in [tenant for tenant in entry.pinned_by if (tenant, uid) not in wanted]:
                del entry.pinned_by[tenant]
                if not self._waits(entry, tenant):
                    self._leave_queue(entry, tenant)
                self._drop_vain_claims(entry)
            self._forget_if_unused(entry)
        for tenant, uid in wanted:
            entry = self._entry(uid)
            if tenant not in entry.pinned_by:
                entry.pinned_by[tenant] = None
                self._touch(entry, tenant, now)
                if not entry.on_device:
                    self._turns.add(tenant, entry)
        self._tenants_version += 1

    # -- who may overtake

    def _may_use(self, tenant_id: TenantId, entry: Entry, *, counts: bool = True) -> bool:
        """Whether the tenant may use an adapter past those that are blocked. Counts it as overtaking where it is."""
        if not self._blocked:
            return True
        number = entry.queued.get(tenant_id)
        standing: Standing | None = None
        passed: list[_Blocked] = []
        for tenant, blocked in self._blocked.items():
            if blocked.entry is entry or (number is not None and number < blocked.entry.queued[tenant]):
                continue
            if tenant != tenant_id:
                if not blocked.is_due:
                    continue
                if standing is None:
                    standing = self._standing(AdapterTier.DEVICE)
                more_bytes = 0 if entry.uses(AdapterTier.DEVICE) else entry.size_bytes
                if standing.is_within(tenant_id, more_bytes):
                    continue
            if blocked.overtakes >= self._limits.max_overtakes:
                return False
            passed.append(blocked)
        if counts:
            for blocked in passed:
                blocked.overtakes += 1
        return True

    def _block(self, tenant_id: TenantId, entry: Entry, standing: Standing) -> None:
        before = self._blocked.get(tenant_id)
        if before is not None and before.entry.queued[tenant_id] < entry.queued[tenant_id]:
            return
        is_due = standing.is_within(tenant_id, entry.size_bytes) or self._device.is_alone(tenant_id, entry)
        self._blocked[tenant_id] = _Blocked(entry, before.overtakes if before is not None else 0, is_due)

    # -- turns

    def _advance(
        self, tenant_id: TenantId, entry: Entry, ready: list[RequestId], failed: list[AdapterFailure], now: float
    ) -> None:
        """The next thing to do for an adapter that a tenant waits for."""
        if entry.on_device:
            self._hand_out(tenant_id, entry, ready, now)
        elif entry.loading is not None:
            return
        elif (problem := self._too_large(entry)) is not None:
            self._fail(entry, problem, failed)
        elif entry.on_host:
            self._start_device_load(tenant_id, entry, now)
        else:
            self._start_host_load(tenant_id, entry, now)

    def _hand_out(self, tenant_id: TenantId, entry: Entry, ready: list[RequestId], now: float) -> None:
        holders = [holder for holder, tenant in entry.waiters.items() if tenant == tenant_id]
        if holders and not self._may_use(tenant_id, entry):
            return
        for holder in holders:
            del entry.waiters[holder]
            entry.users[holder] = None
        ready += holders
        self._leave_queue(entry, tenant_id)
        self._touch(entry, tenant_id, now)

    def _start_device_load(self, tenant_id: TenantId, entry: Entry, now: float) -> None:
        if self._loads[AdapterTier.DEVICE] >= self._limits.device_loads:
            return
        state = self._tenants_version, self._turns.version, self._idle_version, int(now / LOOK_AGAIN_S)
        refused = self._refused.get(tenant_id)
        if refused is not None and refused[0] == state and entry.size_bytes >= refused[1]:
            return
        if not self._may_use(tenant_id, entry, counts=False):
            return
        standing = self._standing(AdapterTier.DEVICE)
        plan = self._device.plan(entry, tenant_id, entry.size_bytes, standing, now)
        if plan is None:
            entry.no_room_since.setdefault(tenant_id, now)
            self._block(tenant_id, entry, standing)
            self._refused[tenant_id] = state, entry.size_bytes
            return
        self._make_way(plan, self._device, tenant_id)
        blocked = self._blocked.get(tenant_id)
        if blocked is not None and blocked.entry is entry:
            del self._blocked[tenant_id]
        self._begin_load(entry, AdapterTier.DEVICE, tenant_id)

    def _start_host_load(self, tenant_id: TenantId, entry: Entry, now: float) -> None:
        if self._loads[AdapterTier.HOST] >= self._limits.host_loads:
            return
        plan = self._host.plan(entry, tenant_id, entry.size_bytes, self._standing(AdapterTier.HOST), now)
        if plan is None:
            entry.no_room_since.setdefault(tenant_id, now)
            return
        self._make_way(plan, self._host, tenant_id)
        self._begin_load(entry, AdapterTier.HOST, tenant_id)

    def _begin_load(self, entry: Entry, tier: AdapterTier, tenant_id: TenantId | None) -> None:
        entry.loading = tier
        entry.no_room_since.clear()
        self._loads[tier] += 1
        self._room(tier).entries[entry.uid] = entry
        self._tenants_version += 1
        if tenant_id is not None:
            self._turns.charge(tenant_id, self._cost(entry))
        if tier is AdapterTier.HOST:
            self._backend.start_host_load(entry.uid)
        else:
            self._backend.start_device_load(entry.uid)

    def _cost(self, entry: Entry) -> int:
        """Of a load, in bytes. What was never loaded counts as what was learned last."""
        if entry.size_bytes:
            return entry.size_bytes
        return next(reversed(self._known_bytes.values()), 1)

    def _advance_prefetch(self, entry: Entry, tenant_id: TenantId | None, now: float) -> bool:
        """Whether nothing is left to do for a prefetch."""
        if entry.on_device or entry.queued or self._too_large(entry) is not None:
            return True
        if entry.loading is not None:
            return False
        tier = AdapterTier.DEVICE if entry.on_host else AdapterTier.HOST
        if tier is AdapterTier.DEVICE and self._blocked:
            return True
        limit = self._limits.device_loads if tier is AdapterTier.DEVICE else self._limits.host_loads
        if self._loads[tier] >= limit:
            return tier is AdapterTier.DEVICE
        room = self._room(tier)
        standing = self._standing(tier, None if tenant_id is None else (tenant_id, entry.size_bytes))
        plan = room.plan(entry, tenant_id, entry.size_bytes, standing, now, is_prefetch=True)
        if plan is None:
            return True
        self._make_way(plan, room, tenant_id)
        if tenant_id is not None:
            entry.claims[tier][tenant_id] = now
        self._begin_load(entry, tier, None)
        return tier is AdapterTier.DEVICE

    # -- loads that end

    def _take_event(self, event: AdapterEvent, failed: list[AdapterFailure], now: float) -> None:
        entry = self._entries[event.uid]
        assert entry.loading is event.tier, f"{event.uid}: a load ended that was not asked for"
        entry.loading = None
        self._loads[event.tier] -= 1
        self._tenants_version += 1
        if event.error is not None:
            del self._room(event.tier).entries[entry.uid]
            self._fail(entry, event.error, failed)
            return
        self._version += 1
        if event.tier is AdapterTier.DEVICE:
            entry.on_device = True
            self._pins.arrived(entry.uid)
            return
        entry.on_host = True
        self._learn_size(entry, event.size_bytes)
        self._settle_host(entry, failed, now)

    def _learn_size(self, entry: Entry, size_bytes: int) -> None:
        has_changed = entry.size_bytes != size_bytes
        entry.size_bytes = size_bytes
        self._known_bytes.pop(entry.uid, None)
        self._known_bytes[entry.uid] = size_bytes
        if len(self._known_bytes) > _KNOWN_SIZES:
            del self._known_bytes[next(iter(self._known_bytes))]
        if has_changed and entry.pinned_by:
            self._pins.changed()

    def _settle_host(self, entry: Entry, failed: list[AdapterFailure], now: float) -> None:
        """A host load ended, and only now its size may be known: it stays if it fits, else it comes again later."""
        problem = self._too_large(entry)
        if problem is not None:
            self._drop(entry, self._host)
            self._fail(entry, problem, failed)
            return
        tenant_id = min(entry.queued, key=lambda tenant: entry.queued[tenant], default=None)
        if tenant_id is None:
            tenant_id = next(iter(entry.claims[AdapterTier.HOST]), None)
        is_prefetch = not entry.queued
        standing = self._standing(AdapterTier.HOST)
        plan = self._host.plan(entry, tenant_id, 0, standing, now, is_prefetch=is_prefetch)
        if plan is not None:
            self._make_way(plan, self._host, tenant_id)
        else:
            self._drop(entry, self._host)
            self._forget_if_unused(entry)

    def _too_large(self, entry: Entry) -> str | None:
        for name, budget in (("host", self._limits.host_bytes), ("device", self._limits.device_bytes)):
            if entry.size_bytes > budget:
                return f"the adapter takes {entry.size_bytes} bytes, more than the whole {name} budget of {budget}"
        if self._pins.tenants and not entry.pinned_by:
            pinned = sum(e.size_bytes for e in self._entries.values() if e.pinned_by)
            left = self._limits.device_bytes - pinned
            if entry.size_bytes > left:
                return f"the adapter takes {entry.size_bytes} bytes, and what is pinned leaves {left} on the device"
        return None

    def _fail(self, entry: Entry, message: str, failed: list[AdapterFailure]) -> None:
        holders = list(entry.waiters)
        for holder in holders:
            del self._holds[holder]
        entry.waiters.clear()
        for tenant in entry.pinned_by:
            self._pins.failed(tenant, entry.uid, message)
        entry.pinned_by.clear()
        for tenant in list(entry.queued):
            self._leave_queue(entry, tenant)
        self._drop_vain_claims(entry)
        if holders:
            failed.append(AdapterFailure(entry.uid, message, holders))
        self._prefetches.pop(entry.uid, None)
        self._forget_if_unused(entry)

    # -- what goes

    def _room(self, tier: AdapterTier) -> TierRoom:
        return self._device if tier is AdapterTier.DEVICE else self._host

    def _make_way(self, plan: Plan, room: TierRoom, tenant_id: TenantId | None) -> None:
        for uid in plan.releases:
            assert tenant_id is not None
            room.entries[uid].claims[room.tier].pop(tenant_id)
            self._tenants_version += 1
        for eviction in plan.evictions:
            entry = self._entries[eviction.uid]
            assert all(
                loser == tenant_id or held > share or idle_s >= room.borrow_after_s(entry)
                for loser, (held, share, idle_s) in eviction.losers.items()
                if eviction.waited_s < self._limits.patience_s
            ), "a tenant within its share would lose what it uses"
            if room is self._device:
                for loser in eviction.losers:
                    counts = self._counts.setdefault(loser, [0, 0])
                    counts[0] += 1
                    counts[1] += loser != tenant_id
            self._evictions.append(eviction)
            self._drop(entry, room)
            self._forget_if_unused(entry)

    def _drop(self, entry: Entry, room: TierRoom) -> None:
        if room is self._device:
            assert not entry.in_use
            self._backend.drop_device(entry.uid)
            entry.on_device = False
        else:
            self._backend.drop_host(entry.uid)
            entry.on_host = False
        del room.entries[entry.uid]
        self._drop_vain_claims(entry)
        self._version += 1
        self._tenants_version += 1
