"""Which adapter a request waits for or uses, and what is loaded next for whom. EngineCore alone writes it.

A request *holds* an adapter from `acquire` to `release`. A policy's *pin* keeps one on the device without a request. A
failed load fails the requests that wait for it, and no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manylora_shared.composition import uids_of
from manylora_shared.ids import AdapterKey, AdapterUid, RequestId, TenantId

from manylora_worker.adapters.load_order import LoadOrder
from manylora_worker.adapters.loading import LOOK_AGAIN_S, Loading, Versions
from manylora_worker.adapters.overtaking import Overtaking
from manylora_worker.adapters.pins import Pin, PinBook, PinState
from manylora_worker.adapters.residency import FetchLimits, Residency
from manylora_worker.adapters.room import Entry, Eviction, Plan, TierRoom
from manylora_worker.adapters.standings import Standings
from manylora_worker.adapters.tier_counts import FARTHER, Found, FoundCounts
from manylora_worker.adapters.use_meter import UseMeter
from manylora_worker.kinds.api import AdapterBackend, AdapterEvent, AdapterTier

_State = tuple[Versions, int]
GUESSES_PER_S = 4.0
_GUESS_S = 5.0  # how long a guess waits until nobody waits for a load
_PREFETCH_QUEUE = 64  # not yet begun; when another comes, one of the tenant with most of them is forgotten


@dataclass(frozen=True)
class AdapterCacheLimits:
    host_bytes: int
    device_bytes: int
    host_loads: int = 8  # from disk at the same time
    device_loads: int = 8
    max_overtakes: int = 32
    borrow_after_s: float = 30.0  # what was not used for so long may go for whoever needs room, shares aside
    borrow_copy_after_s: float = 1.0  # the same, on the device, where the host has a copy: it is back in milliseconds
    patience_s: float = 1.0  # then a tenant that has nothing else may take what nobody uses, shares aside
    fetches: FetchLimits = field(default_factory=FetchLimits)

    def __post_init__(self) -> None:
        if min(self.host_bytes, self.device_bytes, self.host_loads, self.device_loads) < 1 or self.max_overtakes < 0:
            raise ValueError("adapter budgets and loads must be at least 1")


@dataclass(frozen=True)
class AdapterFailure:
    uid: AdapterUid
    message: str
    holders: Sequence[RequestId]
    is_passing: bool = False  # it is the store's or this machine's fault: another try may succeed


@dataclass(eq=False)
class Hold:
    """What a request holds: all of it is on the device before the request uses any."""

    tenant_id: TenantId
    uids: tuple[AdapterUid, ...]
    missing: dict[AdapterUid, None]
    since: float
    found: str  # the farthest tier on which one was
    asked_at: float
    is_back: bool = False  # it has given its parts back, for an older one that found no room


class CacheUpdate(NamedTuple):
    ready: Sequence[RequestId]  # waiting before, using it now
    failed: Sequence[AdapterFailure]
    evictions: Sequence[Eviction]


class TenantAdapters(NamedTuple):
    """What several tenants use counts in full for each."""

    device_bytes: int = 0
    host_bytes: int = 0
    evictions: int = 0  # of its adapters from the device, since the engine's start
    displaced: int = 0  # of these, for another tenant's adapter
    pins: tuple[PinState, ...] = ()


_NOTHING = CacheUpdate((), (), ())


class AdapterCache:
    """weight_of: at least 1. `now`: seconds."""

    def __init__(
        self,
        backend: AdapterBackend,
        limits: AdapterCacheLimits,
        weight_of: Callable[[TenantId], int] = lambda tenant_id: 1,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._holds: dict[RequestId, Hold] = {}
        self._composed: dict[RequestId, Hold] = {}  # of several adapters, and waiting: oldest first
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
        self._residency = Residency(
            backend,
            {AdapterTier.HOST: self._host, AdapterTier.DEVICE: self._device},
            {AdapterTier.HOST: limits.host_loads, AdapterTier.DEVICE: limits.device_loads},
            limits.fetches,
        )
        self._order = LoadOrder(weight_of)
        self._pins = PinBook(limits.device_bytes, weight_of)
        self._meter = UseMeter()
        self._standings = Standings(self._residency, self._order, self._pins)
        self._overtaking = Overtaking(
            self._device, lambda: self._standings.of(AdapterTier.DEVICE), limits.max_overtakes
        )
        self._loading = Loading(self._residency, self._standings, self._order, self._overtaking)
        self._prefetches: dict[AdapterUid, TenantId | None] = {}
        self.prefetches_ended = 0  # loaded or given up
        self._guess_at = float("-inf")  # not before
        self._found = FoundCounts()
        # the versions around the last pump, where these were the same, and its time in LOOK_AGAIN_S
        self._settled: tuple[_State, int] | None = None

    @property
    def version(self) -> int:
        """Grows with each change of residency."""
        return self._residency.version

    @property
    def tenants_version(self) -> int:
        """Grows with each change of `tenants`."""
        return self._standings.claims_version

    @property
    def num_loading(self) -> int:
        return self._residency.num_loading

    @property
    def num_holders(self) -> int:
        return len(self._holds)

    @property
    def has_work(self) -> bool:
        """Whether anything waits for `pump`."""
        return bool(self._order or self._prefetches or self.num_loading or self._pins.is_due or self._composed)

    @property
    def is_settled(self) -> bool:
        """Another `pump` finds nothing new, unless a load ends or LOOK_AGAIN_S have passed."""
        return self._settled is not None and self._settled[0] == self._state() and not self._pins.is_due

    @property
    def host_bytes(self) -> int:
        return self._host.used_bytes

    @property
    def device_bytes(self) -> int:
        return self._device.used_bytes

    @property
    def found(self) -> Found:
        return self._found.counts

    def tiers(self) -> Mapping[AdapterUid, AdapterTier]:
        """The best tier of each that is off the disk."""
        return self._residency.tiers()

    def tenants(self) -> dict[TenantId, TenantAdapters]:
        device, host, evicted = self._device.held(), self._host.held(), self._residency.evicted()
        everybody = dict.fromkeys((*device, *host, *evicted, *self._pins.tenants))
        found: dict[TenantId, TenantAdapters] = {}
        for tenant in everybody:
            evictions, displaced = evicted.get(tenant, (0, 0))
            pins = self._pins.states(tenant, functools.partial(self._is_pinned, tenant))
            found[tenant] = TenantAdapters(device.get(tenant, 0), host.get(tenant, 0), evictions, displaced, pins)
        return found

    def uses(self, holder: RequestId) -> bool:
        hold = self._holds.get(holder)
        return hold is not None and not hold.missing

    def acquire(self, holder: RequestId, tenant_id: TenantId, key: AdapterKey, now: float) -> bool:
        """Whether it uses all of its adapters already; else a later `pump` names it."""
        assert holder not in self._holds, f"{holder} holds an adapter already"
        uids = uids_of(key)
        tiers = [self._residency.found(uid) for uid in uids]
        for tier in tiers:
            self._found.found(tier)
        farthest = max(tiers, key=FARTHER.index)
        hold = self._holds[holder] = Hold(tenant_id, uids, dict.fromkeys(uids), now, farthest, now)
        self._collect(holder, hold, now)
        if hold.missing and len(hold.uids) > 1:
            self._composed[holder] = hold
        if not hold.missing:
            self._begin_use(holder, now)
        return not hold.missing

    def release(self, holder: RequestId, now: float) -> float:
        """Returns its byte-seconds of the device. Unknown holders are ignored: their load has failed."""
        used = self._meter.end(holder, now)
        hold = self._holds.pop(holder, None)
        if hold is not None:
            self._composed.pop(holder, None)
            self._let_go(holder, hold, now)
        return used

    def _begin_use(self, holder: RequestId, now: float) -> None:
        uids = self._holds[holder].uids
        self._meter.begin(holder, {uid: self._residency.size_of(uid) for uid in uids}, now)

    def _collect(self, holder: RequestId, hold: Hold, now: float) -> None:
        for uid in hold.uids:
            entry = self._residency.entry(uid)
            self._residency.touch(entry, hold.tenant_id, now)
            is_free = entry.on_device and hold.tenant_id not in entry.queued
            if is_free and self._overtaking.is_allowed(hold.tenant_id, entry):
                entry.users[holder] = None
                del hold.missing[uid]
            else:
                entry.waiters[holder] = hold.tenant_id
                self._order.add(hold.tenant_id, entry)

    def _let_go(self, holder: RequestId, hold: Hold, now: float) -> None:
        for uid in hold.uids:
            entry = self._residency.entries.get(uid)
            if entry is None:
                continue
            if holder in entry.users:
                self._residency.end_use(entry, holder, hold.tenant_id, now)
            elif entry.waiters.pop(holder, None) is not None and not self._waits(entry, hold.tenant_id):
                self._leave_queue(entry, hold.tenant_id)
            self._residency.forget_if_unused(entry)

    @property
    def is_short(self) -> bool:
        """Somebody waits for room on the device."""
        return bool(self._overtaking)

    def set_device_bytes(self, wanted_bytes: int, now: float) -> int:
        """The device's budget from now on: as near to `wanted_bytes` as what is in use allows. Returns it."""
        room = self._device
        before, room.budget_bytes = room.budget_bytes, wanted_bytes
        if wanted_bytes == before:
            return before
        self.weights_changed()  # shares are of the budget
        over_bytes = room.used_bytes - wanted_bytes
        if over_bytes > 0:
            evictions = room.give_way(over_bytes, self._standings.of(AdapterTier.DEVICE), now)
            self._residency.make_way(Plan(evictions), room, None)
        room.budget_bytes = max(wanted_bytes, room.used_bytes)
        self._residency.claims_version += 1
        return room.budget_bytes

    def prefetch(self, uid: AdapterUid, tenant_id: TenantId | None) -> None:
        """As far up as there is room without waiting; forgets a failure."""
        entry = self._residency.entries.get(uid)
        if entry is not None and (entry.on_device or entry.queued):
            self.prefetches_ended += 1
            return
        self.prefetches_ended += uid in self._prefetches
        self._prefetches.setdefault(uid, tenant_id)
        entry = self._residency.entry(uid)
        entry.is_prefetched, entry.is_guess = True, False
        self._settled = None
        if len(self._prefetches) > _PREFETCH_QUEUE:
            counts: dict[TenantId | None, int] = {}
            for tenant in self._prefetches.values():
                counts[tenant] = counts.get(tenant, 0) + 1
            most = max(counts.values())
            forgotten = next(uid for uid, tenant in self._prefetches.items() if counts[tenant] == most)
            self._end_prefetch(self._residency.entries[forgotten])

    def drop_idle(self) -> int:
        """Off device and host goes what nobody uses, waits for or pins. Returns how many adapters."""
        entries = list(self._residency.entries.values())
        idle = [e for e in entries if not (e.in_use or e.waiters or e.queued or e.loading or e.is_prefetched)]
        for entry in idle:
            for tier in (AdapterTier.DEVICE, AdapterTier.HOST):
                if entry.is_on(tier):
                    self._residency.drop(entry, tier)
            self._residency.forget_if_unused(entry)
        self._settled = None
        return len(idle)

    def guess(self, uid: AdapterUid, tenant_id: TenantId, now: float) -> None:
        """To the host, where nobody has asked for it yet: into room that is free or long idle, as soon as nobody waits
        for a load. One at a time of a tenant, and GUESSES_PER_S of all.
        """
        entries = self._residency.entries
        if uid in entries or now < self._guess_at:
            return
        if any(entries[each].is_guess for each, tenant in self._prefetches.items() if tenant == tenant_id):
            return
        self._guess_at = now + 1 / GUESSES_PER_S
        self._prefetches[uid] = tenant_id
        entry = self._residency.entry(uid)
        entry.is_prefetched = entry.is_guess = True
        entry.guessed_at = now
        self._settled = None

    def set_pins(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        """Tries failed loads again. largest_bytes: of registered adapters; room for one stays beside all pins."""
        self._pins.set(pins, largest_bytes)

    def weights_changed(self) -> None:
        self._standings.clear()
        self._pins.changed()
        self._settled = None

    def pump(self, now: float) -> CacheUpdate:
        """Hears of ended loads, hands out adapters, starts what there is room for."""
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
        for tenant_id, entry in self._order.take():
            self._advance(tenant_id, entry, ready, failed, now)
        for uid, prefetching in list(self._prefetches.items()):
            if uid in self._prefetches and self._advance_prefetch(self._residency.entries[uid], prefetching, now):
                self._end_prefetch(self._residency.entries[uid])
        if self._composed:
            self._settle_composed(ready, failed, now)
        for holder in ready:
            self._begin_use(holder, now)
        self._settled = (before, interval) if before == self._state() else None
        return CacheUpdate(ready, failed, self._residency.take_evictions())

    def _state(self) -> _State:
        """Changes with all that `pump` goes by, except time."""
        return self._loading.versions, len(self._prefetches)

    def check_invariants(self) -> None:
        for part in (self._residency, self._order, self._overtaking, self._meter):
            part.check_invariants()
        entries = self._residency.entries
        for uid, entry in entries.items():
            self._check_entry(uid, entry)
        held = sum(len(hold.uids) for hold in self._holds.values() if not hold.is_back)
        assert held == sum(len(e.users) + len(e.waiters) for e in entries.values())
        waiting_for_several = {r for r, hold in self._holds.items() if hold.missing and len(hold.uids) > 1}
        assert self._composed.keys() == waiting_for_several
        waiting = [(tenant, uid) for tenant, queue in self._order.queues.items() for uid in queue]
        assert sorted(waiting) == sorted((tenant, uid) for uid, e in entries.items() for tenant in e.queued)

    def _check_entry(self, uid: AdapterUid, entry: Entry) -> None:
        assert not entry.users.keys() & entry.waiters.keys()
        assert entry.is_prefetched == (uid in self._prefetches)
        assert entry.queued.keys() == {t for t in (*entry.waiters.values(), *entry.pinned_by) if self._waits(entry, t)}
        for holder in (*entry.users, *entry.waiters):
            hold = self._holds[holder]
            tenant = hold.tenant_id
            assert uid in hold.uids
            assert (uid in hold.missing) == (holder in entry.waiters)
            assert tenant in entry.claims[AdapterTier.DEVICE], "used by a tenant against which it does not count"
        for tenant in entry.pinned_by:
            assert tenant in entry.claims[AdapterTier.DEVICE]
            assert self._pins.is_due or uid in self._pins.uids_of(tenant)

    # -- queues

    def _waits(self, entry: Entry, tenant_id: TenantId) -> bool:
        return tenant_id in entry.waiters.values() or (tenant_id in entry.pinned_by and not entry.on_device)

    def _leave_queue(self, entry: Entry, tenant_id: TenantId) -> None:
        if not self._order.remove(tenant_id, entry):
            return
        self._loading.left_queue(entry, tenant_id)
        self._residency.drop_vain_claims(entry)

    # -- pins

    def _is_pinned(self, tenant_id: TenantId, uid: AdapterUid) -> bool:
        entry = self._residency.entries.get(uid)
        return entry is not None and tenant_id in entry.pinned_by and entry.on_device

    def _apply_pins(self, now: float) -> None:
        wanted = self._pins.resolve(self._residency.size_of)
        for uid, entry in list(self._residency.entries.items()):
            for tenant in [tenant for tenant in entry.pinned_by if (tenant, uid) not in wanted]:
                del entry.pinned_by[tenant]
                if not self._waits(entry, tenant):
                    self._leave_queue(entry, tenant)
                self._residency.drop_vain_claims(entry)
            self._residency.forget_if_unused(entry)
        for tenant, uid in wanted:
            entry = self._residency.entry(uid)
            if tenant not in entry.pinned_by:
                entry.pinned_by[tenant] = None
                self._residency.touch(entry, tenant, now)
                if not entry.on_device:
                    self._order.add(tenant, entry)

    # -- turns

    def _advance(
        self, tenant_id: TenantId, entry: Entry, ready: list[RequestId], failed: list[AdapterFailure], now: float
    ) -> None:
        if entry.on_device:
            self._hand_out(tenant_id, entry, ready, now)
        elif entry.loading is not None:
            return
        elif (problem := self._too_large(entry)) is not None:
            self._fail(entry, problem, failed, now)
        elif entry.on_host:
            self._loading.to_device(entry, tenant_id, now)
        elif not self._residency.is_near(entry):
            self._loading.fetch(entry, tenant_id)
        else:
            self._loading.to_host(entry, tenant_id, now)

    def _hand_out(self, tenant_id: TenantId, entry: Entry, ready: list[RequestId], now: float) -> None:
        holders = [holder for holder, tenant in entry.waiters.items() if tenant == tenant_id]
        if holders and not self._overtaking.is_allowed(tenant_id, entry):
            return
        for holder in holders:
            del entry.waiters[holder]
            entry.users[holder] = None
            hold = self._holds[holder]
            del hold.missing[entry.uid]
            if not hold.missing:
                self._composed.pop(holder, None)
                self._is_ready(holder, hold, ready, now)
        self._leave_queue(entry, tenant_id)
        self._residency.touch(entry, tenant_id, now)

    def _is_ready(self, holder: RequestId, hold: Hold, ready: list[RequestId], now: float) -> None:
        self._found.waited(hold.found, now - hold.asked_at)
        ready.append(holder)

    def _advance_prefetch(self, entry: Entry, tenant_id: TenantId | None, now: float) -> bool:
        """Whether nothing is left to do."""
        if entry.on_device or entry.queued or self._too_large(entry) is not None:
            return True
        if entry.is_guess:
            if entry.on_host or (entry.loading is None and now - entry.guessed_at > _GUESS_S):
                return True
            if self._order:
                return False
        return entry.loading is None and self._loading.prefetch(entry, tenant_id, now)

    def _end_prefetch(self, entry: Entry) -> None:
        if self._prefetches.pop(entry.uid, self) is not self:
            self.prefetches_ended += 1
        entry.is_prefetched = entry.is_guess = False
        self._residency.forget_if_unused(entry)

    # -- several adapters for one request

    def _settle_composed(self, ready: list[RequestId], failed: list[AdapterFailure], now: float) -> None:
        # Who has some of its parts and finds no room for the rest could wait for another in the same plight for ever.
        # So it gives them back, and collects them again when it is the oldest that waits for several; the oldest itself
        # gives them back once, when the others have, for those who wait for one adapter.
        is_oldest = True
        for holder, hold in list(self._composed.items()):
            if (problem := self._too_large_together(hold)) is not None:
                del self._holds[holder], self._composed[holder]
                self._let_go(holder, hold, now)
                failed.append(AdapterFailure(hold.uids[0], problem, [holder]))
                continue
            if hold.is_back:
                if is_oldest:
                    hold.is_back, hold.since = False, now
                    self._collect(holder, hold, now)
                    if not hold.missing:
                        del self._composed[holder]
                        self._is_ready(holder, hold, ready, now)
            elif self._is_stuck(hold, now) and (not is_oldest or now - hold.since >= 2 * self._limits.patience_s):
                self._give_back(holder, hold, now)
            is_oldest = False

    def _give_back(self, holder: RequestId, hold: Hold, now: float) -> None:
        """For who finds room then: what nobody else of the tenant uses is no longer claimed by it."""
        self._let_go(holder, hold, now)
        hold.missing, hold.is_back = dict.fromkeys(hold.uids), True
        for uid in hold.uids:
            entry = self._residency.entries.get(uid)
            if entry is not None and not self._concerns(entry, hold.tenant_id):
                self._residency.drop_claims(entry, hold.tenant_id)

    def _concerns(self, entry: Entry, tenant_id: TenantId) -> bool:
        used = any(self._holds[user].tenant_id == tenant_id for user in entry.users)
        return used or tenant_id in entry.pinned_by or tenant_id in entry.waiters.values()

    def _is_stuck(self, hold: Hold, now: float) -> bool:
        if now - hold.since < self._limits.patience_s or len(hold.missing) == len(hold.uids):
            return False
        entries = [self._residency.entries[uid] for uid in hold.missing]
        return any(
            entry.loading is None and (entry.on_host or entry.on_device or hold.tenant_id in entry.no_room_since)
            for entry in entries
        )

    def _too_large_together(self, hold: Hold) -> str | None:
        size_bytes = sum(self._residency.size_of(uid) for uid in hold.uids)
        others = [e for e in self._residency.entries.values() if e.pinned_by and e.uid not in hold.uids]
        left = self._limits.device_bytes - sum(entry.size_bytes for entry in others)
        return None if size_bytes <= left else f"its adapters take {size_bytes} bytes together; the device has {left}"

    # -- loads that end

    def _take_event(self, event: AdapterEvent, failed: list[AdapterFailure], now: float) -> None:
        entry = self._residency.end_load(event)
        if event.error is not None:
            if not self._residency.is_fetched_again(entry, event):
                self._fail(entry, event.error, failed, now, is_passing=event.is_passing)
            else:
                self._residency.forget_if_unused(entry)
        elif event.tier is AdapterTier.DISK:
            self._residency.forget_if_unused(entry)
        elif event.tier is AdapterTier.DEVICE:
            self._pins.arrived(entry.uid)
        else:
            if self._residency.learn_size(entry, event.size_bytes) and entry.pinned_by:
                self._pins.changed()
            if (problem := self._too_large(entry)) is not None:
                self._residency.drop(entry, AdapterTier.HOST)
                self._fail(entry, problem, failed, now)
            else:
                self._loading.settle_on_host(entry, now)

    def _too_large(self, entry: Entry) -> str | None:
        for name, budget in (("host", self._limits.host_bytes), ("device", self._limits.device_bytes)):
            if entry.size_bytes > budget:
                return f"the adapter takes {entry.size_bytes} bytes, more than the whole {name} budget of {budget}"
        if self._pins.tenants and not entry.pinned_by:
            pinned = sum(e.size_bytes for e in self._residency.entries.values() if e.pinned_by)
            left = self._limits.device_bytes - pinned
            if entry.size_bytes > left:
                return f"the adapter takes {entry.size_bytes} bytes, and what is pinned leaves {left} on the device"
        return None

    def _fail(
        self, entry: Entry, message: str, failed: list[AdapterFailure], now: float, *, is_passing: bool = False
    ) -> None:
        holders = list(entry.waiters)
        entry.waiters.clear()
        for holder in holders:
            hold = self._holds.pop(holder)
            self._composed.pop(holder, None)
            if len(hold.uids) > 1:
                self._let_go(holder, hold, now)
        for tenant in entry.pinned_by:
            self._pins.failed(tenant, entry.uid, message)
        entry.pinned_by.clear()
        for tenant in list(entry.queued):
            self._leave_queue(entry, tenant)
        self._residency.drop_vain_claims(entry)
        if holders:
            failed.append(AdapterFailure(entry.uid, message, holders, is_passing))
        self._end_prefetch(entry)
