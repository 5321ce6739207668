"""Which adapter is where, who uses it, and what is loaded or evicted next.

Owns the residency of every adapter (disk, host, device), the byte budgets of host and device, the references that
requests hold, and the queue of requests that wait for an adapter. Written by EngineCore alone, on the engine's thread;
an AdapterBackend does the loads beside it. Knows uids and sizes, never tensors.

    DISK --start_host_load--> HOST --start_device_load--> DEVICE
         <----drop_host-----       <-----drop_device----        (a DEVICE adapter may have lost its host copy)

A request *holds* an adapter from `acquire` to `release`. It is either pinned (the adapter is on the device and stays
there) or waiting. Waiting adapters stand in one queue, oldest first:

- One load an adapter at a time, however many wait for it.
- Room is made by evicting what nobody holds; on the device by idle time x bytes, the greatest first. An adapter that
  others wait for may be evicted only for one further ahead in the queue.
- Where too many device bytes are pinned, the first in the queue that needs some is *blocked*. Others may overtake it,
  by pinning a resident adapter or one that fits into what is free, `max_overtakes` times in all; from then on they
  queue behind it, so the pins run out and it cannot starve.
- A failed load fails exactly the requests that wait for it; the next acquire tries again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from manylora_shared.ids import AdapterUid, RequestId

from manylora_worker.engine.api import AdapterBackend, AdapterEvent, AdapterTier

_KNOWN_SIZES = 4096
"""Sizes remembered of adapters that are on disk only."""
_PREFETCH_QUEUE = 64
"""Prefetches not yet begun; the oldest is forgotten when another comes."""


@dataclass(frozen=True)
class AdapterCacheLimits:
    host_bytes: int
    device_bytes: int
    host_loads: int = 8
    """Loads from disk at the same time."""
    device_loads: int = 8
    max_overtakes: int = 32

    def __post_init__(self) -> None:
        if min(self.host_bytes, self.device_bytes, self.host_loads, self.device_loads) < 1 or self.max_overtakes < 0:
            raise ValueError("adapter budgets and loads must be at least 1")


@dataclass(frozen=True)
class AdapterFailure:
    """A load that failed, and the requests that waited for it."""

    uid: AdapterUid
    message: str
    holders: Sequence[RequestId]


@dataclass(frozen=True)
class CacheUpdate:
    ready: Sequence[RequestId]
    """Waiting before, pinned now."""
    failed: Sequence[AdapterFailure]


@dataclass
class _Entry:
    uid: AdapterUid
    size_bytes: int = 0
    """On either tier, as its first host load told; 0: not known yet."""
    on_host: bool = False
    on_device: bool = False
    loading: AdapterTier | None = None
    pins: dict[RequestId, None] = field(default_factory=dict)
    waiters: dict[RequestId, None] = field(default_factory=dict)
    last_used: int = 0

    @property
    def uses_host(self) -> bool:
        return self.on_host or self.loading is AdapterTier.HOST

    @property
    def uses_device(self) -> bool:
        return self.on_device or self.loading is AdapterTier.DEVICE


class AdapterCache:
    def __init__(self, backend: AdapterBackend, limits: AdapterCacheLimits) -> None:
        self._backend = backend
        self._limits = limits
        self._entries: dict[AdapterUid, _Entry] = {}
        self._uid_of: dict[RequestId, AdapterUid] = {}
        self._queue: dict[AdapterUid, int] = {}
        """In order, numbered."""
        self._queued = 0
        self._device: dict[AdapterUid, _Entry] = {}
        """Those that use the device."""
        self._loads = {AdapterTier.HOST: 0, AdapterTier.DEVICE: 0}
        self._prefetches: dict[AdapterUid, None] = {}
        self._known_bytes: dict[AdapterUid, int] = {}
        self._blocked: AdapterUid | None = None
        self._overtakes = 0
        self._tick = 0
        self._version = 0

    @property
    def version(self) -> int:
        """Grows with each change of residency."""
        return self._version

    @property
    def num_loading(self) -> int:
        return sum(self._loads.values())

    @property
    def num_holders(self) -> int:
        return len(self._uid_of)

    @property
    def has_work(self) -> bool:
        """Whether `pump` may have something to do: loads to hear of, requests or prefetches that wait."""
        return bool(self._queue or self._prefetches or self.num_loading)

    @property
    def host_bytes(self) -> int:
        return sum(e.size_bytes for e in self._entries.values() if e.uses_host)

    @property
    def device_bytes(self) -> int:
        return sum(e.size_bytes for e in self._device.values())

    def tiers(self) -> Mapping[AdapterUid, AdapterTier]:
        """The best tier of every adapter that is off the disk."""
        return {
            uid: AdapterTier.DEVICE if e.on_device else AdapterTier.HOST
            for uid, e in self._entries.items()
            if e.on_device or e.on_host
        }

    def is_pinned(self, holder: RequestId) -> bool:
        uid = self._uid_of.get(holder)
        return uid is not None and holder in self._entries[uid].pins

    def acquire(self, holder: RequestId, uid: AdapterUid) -> bool:
        """Begins a holding. Returns whether it is pinned already; else a later `pump` names it as ready or failed."""
        assert holder not in self._uid_of, f"{holder} holds an adapter already"
        entry = self._entry(uid)
        self._uid_of[holder] = uid
        self._touch(entry)
        if entry.on_device and uid not in self._queue and self._may_overtake():
            entry.pins[holder] = None
            return True
        entry.waiters[holder] = None
        if uid not in self._queue:
            self._queued += 1
            self._queue[uid] = self._queued
        return False

    def release(self, holder: RequestId) -> None:
        """Ends a holding, pinned or waiting. Unknown holders are ignored: their load has failed."""
        uid = self._uid_of.pop(holder, None)
        if uid is None:
            return
        entry = self._entries[uid]
        self._touch(entry)
        entry.pins.pop(holder, None)
        if holder in entry.waiters:
            del entry.waiters[holder]
            if not entry.waiters:
                self._leave_queue(entry)
        self._forget_if_unused(entry)

    def prefetch(self, uid: AdapterUid) -> None:
        """Loads it as far up as there is room without waiting. Best effort: a failure is forgotten."""
        entry = self._entries.get(uid)
        if entry is not None and (entry.on_device or entry.waiters):
            return
        self._prefetches[uid] = None
        if len(self._prefetches) > _PREFETCH_QUEUE:
            oldest = next(iter(self._prefetches))
            del self._prefetches[oldest]
            if oldest in self._entries:
                self._forget_if_unused(self._entries[oldest])

    def pump(self) -> CacheUpdate:
        """Hears of loads that ended, hands out adapters, and starts what there is room for."""
        failed: list[AdapterFailure] = []
        for event in self._backend.poll():
            self._take_event(event, failed)
        ready: list[RequestId] = []
        for uid in list(self._queue):
            self._advance(self._entries[uid], ready, failed)
        for uid in list(self._prefetches):
            if self._advance_prefetch(self._entry(uid)):
                del self._prefetches[uid]
                self._forget_if_unused(self._entries[uid])
        return CacheUpdate(ready, failed)

    def check_invariants(self) -> None:
        assert self.host_bytes <= self._limits.host_bytes, "over the host budget"
        assert self.device_bytes <= self._limits.device_bytes, "over the device budget"
        for uid, entry in self._entries.items():
            assert not entry.pins.keys() & entry.waiters.keys()
            assert not entry.pins or entry.on_device, "pinned, but not on the device"
            assert bool(entry.waiters) == (uid in self._queue)
            assert entry.loading is not AdapterTier.DEVICE or (entry.on_host and not entry.on_device)
            assert entry.loading is not AdapterTier.HOST or not entry.on_host
            assert entry.on_device or entry.on_host or entry.loading or entry.waiters or uid in self._prefetches
            for holder in (*entry.pins, *entry.waiters):
                assert self._uid_of[holder] == uid
        assert len(self._uid_of) == sum(len(e.pins) + len(e.waiters) for e in self._entries.values())
        assert self._blocked is None or self._blocked in self._queue
        assert self._device == {uid: e for uid, e in self._entries.items() if e.uses_device}
        assert all(n == sum(e.loading is tier for e in self._entries.values()) for tier, n in self._loads.items())
        assert self._loads[AdapterTier.HOST] <= self._limits.host_loads
        assert self._loads[AdapterTier.DEVICE] <= self._limits.device_loads
        assert list(self._queue.values()) == sorted(self._queue.values())

    def _entry(self, uid: AdapterUid) -> _Entry:
        entry = self._entries.get(uid)
        if entry is None:
            entry = self._entries[uid] = _Entry(uid, size_bytes=self._known_bytes.get(uid, 0))
        return entry

    def _touch(self, entry: _Entry) -> None:
        self._tick += 1
        entry.last_used = self._tick

    def _forget_if_unused(self, entry: _Entry) -> None:
        if not (entry.on_device or entry.on_host or entry.loading or entry.waiters or entry.uid in self._prefetches):
            del self._entries[entry.uid]

    def _leave_queue(self, entry: _Entry) -> None:
        del self._queue[entry.uid]
        if self._blocked == entry.uid:
            self._unblock()

    def _unblock(self) -> None:
        self._blocked = None
        self._overtakes = 0

    def _may_overtake(self) -> bool:
        """Counts an overtaking of the blocked adapter, where one is blocked."""
        if self._blocked is None:
            return True
        if self._overtakes >= self._limits.max_overtakes:
            return False
        self._overtakes += 1
        return True

    def _fail(self, entry: _Entry, message: str, failed: list[AdapterFailure]) -> None:
        holders = list(entry.waiters)
        for holder in holders:
            del self._uid_of[holder]
        entry.waiters.clear()
        if entry.uid in self._queue:
            self._leave_queue(entry)
        if holders:
            failed.append(AdapterFailure(entry.uid, message, holders))
        self._prefetches.pop(entry.uid, None)
        self._forget_if_unused(entry)

    def _take_event(self, event: AdapterEvent, failed: list[AdapterFailure]) -> None:
        entry = self._entries[event.uid]
        assert entry.loading is event.tier, f"{event.uid}: a load ended that was not asked for"
        entry.loading = None
        self._loads[event.tier] -= 1
        if event.tier is AdapterTier.DEVICE and event.error is not None:
            del self._device[entry.uid]
        if event.error is not None:
            self._fail(entry, event.error, failed)
            return
        self._version += 1
        if event.tier is AdapterTier.DEVICE:
            entry.on_device = True
            return
        entry.on_host = True
        self._learn_size(entry, event.size_bytes)
        self._settle_host(entry, failed)

    def _learn_size(self, entry: _Entry, size_bytes: int) -> None:
        entry.size_bytes = size_bytes
        self._known_bytes.pop(entry.uid, None)
        self._known_bytes[entry.uid] = size_bytes
        if len(self._known_bytes) > _KNOWN_SIZES:
            del self._known_bytes[next(iter(self._known_bytes))]

    def _settle_host(self, entry: _Entry, failed: list[AdapterFailure]) -> None:
        """A host load ended, and only now its size may be known: it stays if it fits, else it comes again later."""
        problem = self._too_large(entry)
        if problem is not None:
            self._drop_host(entry)
            self._fail(entry, problem, failed)
        elif not self._make_host_room(entry, 0):
            self._drop_host(entry)
            self._forget_if_unused(entry)

    def _too_large(self, entry: _Entry) -> str | None:
        for name, budget in (("host", self._limits.host_bytes), ("device", self._limits.device_bytes)):
            if entry.size_bytes > budget:
                return f"the adapter takes {entry.size_bytes} bytes, more than the whole {name} budget of {budget}"
        return None

    def _advance(self, entry: _Entry, ready: list[RequestId], failed: list[AdapterFailure]) -> None:
        """The next thing to do for an adapter that requests wait for."""
        if entry.on_device:
            if self._is_behind_blocked(entry) and not self._may_overtake():
                return
            ready += entry.waiters
            entry.pins |= entry.waiters
            entry.waiters.clear()
            self._leave_queue(entry)
            self._touch(entry)
        elif entry.loading is not None:
            return
        elif (problem := self._too_large(entry)) is not None:
            self._fail(entry, problem, failed)
        elif entry.on_host:
            self._start_device_load(entry)
        else:
            self._start_host_load(entry)

    def _start_device_load(self, entry: _Entry) -> None:
        overtakes = self._is_behind_blocked(entry)
        if overtakes and self._overtakes >= self._limits.max_overtakes:
            return
        if self._loads[AdapterTier.DEVICE] >= self._limits.device_loads:
            return
        if not self._make_device_room(entry, entry.size_bytes):
            if entry.waiters and not overtakes:
                self._blocked = entry.uid
            return
        if self._blocked == entry.uid:
            self._unblock()
        entry.loading = AdapterTier.DEVICE
        self._loads[AdapterTier.DEVICE] += 1
        self._device[entry.uid] = entry
        self._backend.start_device_load(entry.uid)

    def _start_host_load(self, entry: _Entry) -> None:
        if self._loads[AdapterTier.HOST] >= self._limits.host_loads:
            return
        if not self._make_host_room(entry, entry.size_bytes):
            return
        entry.loading = AdapterTier.HOST
        self._loads[AdapterTier.HOST] += 1
        self._backend.start_host_load(entry.uid)

    def _advance_prefetch(self, entry: _Entry) -> bool:
        """Whether nothing is left to do for a prefetch."""
        if entry.on_device or entry.waiters or self._too_large(entry) is not None:
            return True
        if entry.loading is not None:
            return False
        if entry.on_host:
            if self._blocked is None:
                self._touch(entry)
                self._start_device_load(entry)
            return True
        self._start_host_load(entry)
        return entry.loading is None and entry.size_bytes > 0

    def _make_device_room(self, entry: _Entry, more_bytes: int) -> bool:
        """Evicts from the device until `more_bytes` fit besides what is counted; evicts nothing if that cannot be."""
        missing = self.device_bytes + more_bytes - self._limits.device_bytes
        if missing <= 0:
            return True
        candidates = [
            e
            for e in self._device.values()
            if e is not entry and e.on_device and not e.pins and self._yields_to(e, entry)
        ]
        candidates.sort(key=lambda e: (bool(e.waiters), -(self._tick - e.last_used) * e.size_bytes, e.uid))
        victims = _enough(candidates, missing)
        for victim in victims or ():
            self._drop_device(victim)
            self._forget_if_unused(victim)
        return victims is not None

    def _make_host_room(self, entry: _Entry, more_bytes: int) -> bool:
        """As `_make_device_room`. Gives up, in this order: what nobody waits for and is nowhere else, host copies of
        adapters that are on the device, and what requests further back in the queue wait for."""
        missing = self.host_bytes + more_bytes - self._limits.host_bytes
        if missing <= 0:
            return True
        candidates = [
            e
            for e in self._entries.values()
            if e is not entry and e.on_host and e.loading is None and (e.on_device or self._yields_to(e, entry))
        ]
        candidates.sort(key=lambda e: (bool(e.waiters), e.on_device, e.last_used, e.uid))
        victims = _enough(candidates, missing)
        for victim in victims or ():
            self._drop_host(victim)
            self._forget_if_unused(victim)
        return victims is not None

    def _yields_to(self, held: _Entry, wanted: _Entry) -> bool:
        """Whether an adapter that is not pinned may make way for `wanted`."""
        return not held.waiters or (bool(wanted.waiters) and self._first_queued(held.uid, wanted.uid) == wanted.uid)

    def _is_behind_blocked(self, entry: _Entry) -> bool:
        if self._blocked is None or self._blocked == entry.uid:
            return False
        return not entry.waiters or self._first_queued(self._blocked, entry.uid) == self._blocked

    def _first_queued(self, one: AdapterUid, other: AdapterUid) -> AdapterUid:
        return one if self._queue[one] < self._queue[other] else other

    def _drop_device(self, entry: _Entry) -> None:
        assert not entry.pins
        self._backend.drop_device(entry.uid)
        entry.on_device = False
        del self._device[entry.uid]
        self._version += 1

    def _drop_host(self, entry: _Entry) -> None:
        self._backend.drop_host(entry.uid)
        entry.on_host = False
        self._version += 1


def _enough(candidates: Iterable[_Entry], missing_bytes: int) -> list[_Entry] | None:
    """The first candidates that free `missing_bytes` together; None where all of them are too few."""
    victims: list[_Entry] = []
    for entry in candidates:
        if missing_bytes <= 0:
            break
        victims.append(entry)
        missing_bytes -= entry.size_bytes
    return victims if missing_bytes <= 0 else None
