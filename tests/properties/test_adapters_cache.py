"""AdapterCache over FakeAdapterBackend: budgets, pins, single loads, failures, and that everybody is served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manylora_shared.composition import Part, key_of, uids_of
from manylora_shared.ids import AdapterKey, AdapterName, AdapterUid, RequestId, TenantId
from manylora_shared.tenancy.adapter_shares import honoured_pins
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters import room as room_module
from manylora_worker.adapters.cache import (
    AdapterCache,
    AdapterCacheLimits,
    CacheUpdate,
    TenantAdapters,
)
from manylora_worker.adapters.load_order import LoadOrder
from manylora_worker.adapters.pins import NO_ROOM_TO_PIN, Pin
from manylora_worker.adapters.room import Entry, Eviction
from manylora_worker.kinds.api import AdapterTier

_SIZES = {AdapterUid(f"uid{i}"): size for i, size in enumerate([1, 1, 2, 3, 4, 6, 9, 40])}
_UIDS = st.sampled_from(sorted(_SIZES))
_KEYS = st.one_of(_UIDS, st.lists(_UIDS, min_size=2, max_size=3, unique=True).map(lambda uids: key_of(map(Part, uids))))
_TOO_LARGE = AdapterUid("uid7")
_WEIGHTS = {TenantId("a"): 1, TenantId("b"): 2, TenantId("c"): 4}
_TENANTS = st.sampled_from(sorted(_WEIGHTS))
_BORROW_AFTER_S, _BORROW_COPY_AFTER_S, _PATIENCE_S = 10.0, 6.0, 4.0
_LARGEST = 4
"""What is registered, by what the cache is told: the pins leave room for so much."""


class AdapterCacheMachine(RuleBasedStateMachine):
    @initialize(
        host=st.integers(9, 20),
        device=st.integers(9, 16),
        host_loads=st.integers(1, 3),
        device_loads=st.integers(1, 2),
        max_overtakes=st.integers(0, 3),
        load_s=st.integers(0, 3),
    )
    def start(
        self, host: int, device: int, host_loads: int, device_loads: int, max_overtakes: int, load_s: int
    ) -> None:
        self.now = 0.0
        self.broken: dict[tuple[AdapterUid, AdapterTier], None] = {}
        self.backend = FakeAdapterBackend(
            lambda: self.now,
            size_bytes=lambda uid: _SIZES[uid],
            load_s=lambda uid, tier: load_s,
            error_of=lambda uid, tier: f"{uid} is broken" if (uid, tier) in self.broken else None,
        )
        self.limits = AdapterCacheLimits(
            host, device, host_loads, device_loads, max_overtakes, _BORROW_AFTER_S, _BORROW_COPY_AFTER_S, _PATIENCE_S
        )
        self.cache = AdapterCache(self.backend, self.limits, lambda tenant: _WEIGHTS[tenant])
        self.waiting: dict[RequestId, tuple[TenantId, AdapterKey]] = {}
        self.using: dict[RequestId, tuple[TenantId, AdapterKey]] = {}
        self.pins: dict[TenantId, list[Pin]] = {}
        self.next_holder = 0

    @rule(tenant=_TENANTS, uid=_KEYS)
    def acquire(self, tenant: TenantId, uid: AdapterKey) -> None:
        self.next_holder += 1
        holder = RequestId(f"r{self.next_holder}")
        if self.cache.acquire(holder, tenant, uid, self.now):
            self.using[holder] = (tenant, uid)
        else:
            self.waiting[holder] = (tenant, uid)

    @rule(data=st.data())
    @precondition(lambda self: self.using or self.waiting)
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.using | self.waiting)))
        self.using.pop(holder, None)
        self.waiting.pop(holder, None)
        self.cache.release(holder, self.now)

    @rule(uid=_UIDS, tenant=st.one_of(st.none(), _TENANTS))
    def prefetch(self, uid: AdapterUid, tenant: TenantId | None) -> None:
        self.cache.prefetch(uid, tenant)

    @rule()
    def drop_idle(self) -> None:
        entries = self.cache._residency.entries
        wanted = {uid for uid, each in entries.items() if each.in_use or each.waiters or each.loading}
        wanted |= {uid for uid, each in entries.items() if each.is_prefetched}
        before = self.cache.tiers()
        self.cache.drop_idle()
        assert self.cache.tiers() == {uid: tier for uid, tier in before.items() if uid in wanted}

    @rule(tenant=_TENANTS, uids=st.lists(_UIDS, max_size=3, unique=True))
    def pin(self, tenant: TenantId, uids: list[AdapterUid]) -> None:
        pins = [Pin(AdapterName(uid), uid, _SIZES[uid]) for uid in uids]
        self.pins = {**self.pins, tenant: pins}
        self.cache.set_pins(self.pins, _LARGEST)

    @rule(uid=_UIDS, tier=st.sampled_from([AdapterTier.HOST, AdapterTier.DEVICE]))
    def toggle_broken(self, uid: AdapterUid, tier: AdapterTier) -> None:
        if self.broken.pop((uid, tier), self) is self:
            self.broken[(uid, tier)] = None

    @rule(seconds=st.integers(0, 2))
    def pump(self, seconds: int) -> None:
        self.now += seconds
        pinned = {pin.uid for _, pin in self._ready_pins()}
        self._take(self.cache.pump(self.now), pinned)

    @rule()
    @precondition(lambda self: self.cache.is_settled)
    def pump_what_is_settled(self) -> None:
        """The engine need not look again: it would find nothing."""
        if any(due <= self.now for due, _ in self.backend._loads.values()):
            return
        versions = self.cache._state()
        self.cache._settled = None  # so that all of it is looked at
        update = self.cache.pump(self.now)
        assert (list(update.ready), list(update.failed), list(update.evictions)) == ([], [], [])
        assert self.cache._state() == versions
        assert self.cache.is_settled

    def _ready_pins(self) -> list[tuple[TenantId, Pin]]:
        return [
            (tenant, state.pin)
            for tenant, adapters in self.cache.tenants().items()
            for state in adapters.pins
            if state.is_ready
        ]

    def _take(self, update: CacheUpdate, pinned: set[AdapterUid | None]) -> None:
        for holder in update.ready:
            tenant, uid = self.waiting.pop(holder)
            assert _TOO_LARGE not in uids_of(uid)
            assert all(self.cache._residency.entries[each].on_device for each in uids_of(uid)), "all or nothing"
            self.using[holder] = (tenant, uid)
        for failure in update.failed:
            assert failure.holders
            is_together = "bytes together" in failure.message
            is_known = "broken" in failure.message or "pinned leaves" in failure.message or is_together
            assert is_known or failure.uid == _TOO_LARGE
            for holder in failure.holders:
                assert failure.uid in uids_of(self.waiting.pop(holder)[1])
            waiting = {uid for _, uid in self.waiting.values()}
            assert is_together or failure.uid not in waiting, "a failed load fails all that wait for it"
        still_pinned = pinned & {pin.uid for pins in self.pins.values() for pin in pins}
        for eviction in update.evictions:
            check_eviction(eviction)
            on_device = eviction.tier is AdapterTier.DEVICE
            assert not (on_device and eviction.uid in still_pinned & {pin.uid for _, pin in self._ready_pins()})

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        for holder, (_, uid) in self.using.items():
            assert self.cache.uses(holder)
            assert set(uids_of(uid)) <= set(self.backend.on_device), "an adapter in use was evicted"
        for _, pin in self._ready_pins():
            assert pin.uid in self.backend.on_device, "a pinned adapter was evicted"
        tiers = self.cache.tiers()
        assert {u for u, t in tiers.items() if t is AdapterTier.DEVICE} == set(self.backend.on_device)
        assert set(tiers) == set(self.backend.on_device) | set(self.backend.on_host)
        for tenant, adapters in self.cache.tenants().items():
            mine = {uid for t, key in self.using.values() if t == tenant for uid in uids_of(key)}
            mine |= {pin.uid for t, pin in self._ready_pins() if t == tenant and pin.uid is not None}
            assert adapters.device_bytes >= sum(_SIZES[uid] for uid in mine), "what it uses counts against a tenant"
            assert adapters.device_bytes <= sum(_SIZES[uid] for uid in _SIZES)
            assert adapters.displaced <= adapters.evictions

    def teardown(self) -> None:
        """Once uses end, everybody who waits is served or told why not: no deadlock, no lost wait. So is every pin that
        fits."""
        if not hasattr(self, "cache"):
            return
        self.broken.clear()
        self.cache.set_pins(self.pins, _LARGEST)
        for _ in range(60 * (len(self.waiting) + len(self.pins) + 1)):
            self.pump(2)
            self.agrees()
            for holder in list(self.using):
                self.cache.release(holder, self.now)
                del self.using[holder]
            if not self.waiting and not self.cache.has_work:
                break
        assert not self.waiting, "somebody waits for ever"
        assert not self.cache.has_work, "a pin waits for ever"
        sizes = {tenant: [_SIZES[uid] for pin in pins if (uid := pin.uid)] for tenant, pins in self.pins.items()}
        honoured = honoured_pins(sizes, _WEIGHTS, self.limits.device_bytes, _LARGEST)
        for tenant, pins in self.pins.items():
            states = self.cache.tenants()[tenant].pins
            assert [state.is_ready for state in states] == honoured[tenant]
            assert [bool(state.problem) for state in states] == [not each for each in honoured[tenant]]
            assert [state.pin for state in states] == pins
        assert self.cache.num_holders == 0


def check_eviction(eviction: Eviction) -> None:
    """No tenant within its share loses what it uses to one above: not by the numbers by which it was decided."""
    assert not (eviction.has_copy and eviction.tier is AdapterTier.HOST)
    after_s = _BORROW_COPY_AFTER_S if eviction.has_copy else _BORROW_AFTER_S
    for loser, (held, share, idle_s) in eviction.losers.items():
        if loser != eviction.winner and eviction.waited_s < _PATIENCE_S:
            assert held > share or idle_s >= after_s, f"{loser} was within its share: {eviction}"


TestAdapterCache = pytest.mark.long(AdapterCacheMachine.TestCase)
TestAdapterCache.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)


def _cache(
    device: int, *, host: int = 100, max_overtakes: int = 32, broken: dict[str, str] | None = None
) -> tuple[AdapterCache, FakeAdapterBackend]:
    errors = broken if broken is not None else {}
    backend = FakeAdapterBackend(
        lambda: 0.0, size_bytes=lambda uid: int(uid[-1]), error_of=lambda uid, tier: errors.get(uid)
    )
    return AdapterCache(backend, AdapterCacheLimits(host, device, max_overtakes=max_overtakes)), backend


def _pump(cache: AdapterCache) -> list[RequestId]:
    ready: list[RequestId] = []
    for _ in range(4):
        ready += cache.pump(0.0).ready
    return ready


T = TenantId("t")
A2, B2, C2, D4 = (AdapterUid(u) for u in ("a2", "b2", "c2", "d4"))


def _ids(*names: str) -> list[RequestId]:
    return [RequestId(name) for name in names]


def test_one_load_serves_all_that_wait() -> None:
    cache, backend = _cache(4)
    for name in ("r1", "r2", "r3"):
        assert not cache.acquire(RequestId(name), T, A2, 0.0)
    cache.pump(0.0)
    assert cache.num_loading == 1
    assert _pump(cache) == _ids("r1", "r2", "r3")
    assert list(backend.on_device) == [A2]


def test_eviction_takes_what_was_idle_longest_and_never_what_is_used() -> None:
    cache, backend = _cache(4)
    for name, uid in (("r1", A2), ("r2", B2)):
        cache.acquire(RequestId(name), T, uid, 0.0)
    assert _pump(cache) == _ids("r1", "r2")
    cache.acquire(RequestId("r3"), T, C2, 0.0)
    assert _pump(cache) == []
    cache.release(RequestId("r2"), 0.0)
    assert _pump(cache) == ["r3"]
    assert sorted(backend.on_device) == [A2, C2]
    assert cache.tiers()[B2] is AdapterTier.HOST


def test_eviction_weighs_idle_time_by_bytes() -> None:
    cache, backend = _cache(6)
    cache.acquire(RequestId("small"), T, A2, 0.0)
    _pump(cache)
    cache.acquire(RequestId("large"), T, D4, 0.0)
    _pump(cache)
    cache.release(RequestId("small"), 0.0)
    cache.release(RequestId("large"), 0.0)
    for name in ("x", "y", "z"):
        cache.acquire(RequestId(name), T, A2, 0.0)
        cache.release(RequestId(name), 0.0)
    cache.acquire(RequestId("next"), T, B2, 0.0)
    assert _pump(cache) == ["next"]
    assert sorted(backend.on_device) == [A2, B2]


def test_a_failed_load_fails_who_waits_and_can_be_tried_again() -> None:
    broken = {"a2": "its digest is wrong"}
    cache, _ = _cache(4, broken=broken)
    cache.acquire(RequestId("r1"), T, A2, 0.0)
    cache.acquire(RequestId("r2"), T, B2, 0.0)
    cache.pump(0.0)
    update = cache.pump(0.0)
    assert [(f.uid, f.message, list(f.holders)) for f in update.failed] == [(A2, "its digest is wrong", ["r1"])]
    cache.release(RequestId("r1"), 0.0)
    assert _pump(cache) == ["r2"]
    broken.clear()
    cache.acquire(RequestId("r3"), T, A2, 0.0)
    assert _pump(cache) == ["r3"]


def test_an_adapter_larger_than_the_device_fails_clearly() -> None:
    cache, backend = _cache(3)
    cache.acquire(RequestId("r1"), T, D4, 0.0)
    cache.pump(0.0)
    (failure,) = cache.pump(0.0).failed
    assert failure.message == "the adapter takes 4 bytes, more than the whole device budget of 3"
    assert not backend.on_host
    cache.acquire(RequestId("r2"), T, D4, 0.0)
    (failure,) = cache.pump(0.0).failed
    assert failure.holders == ["r2"]
    assert not cache.has_work


def test_a_blocked_adapter_is_overtaken_a_bounded_number_of_times() -> None:
    cache, _ = _cache(4, max_overtakes=3)
    cache.acquire(RequestId("a"), T, A2, 0.0)
    cache.acquire(RequestId("b"), T, B2, 0.0)
    assert _pump(cache) == _ids("a", "b")
    cache.acquire(RequestId("d"), T, D4, 0.0)
    assert _pump(cache) == []
    overtaking = 0
    held = _ids("a", "b")
    for i in range(20):
        holder = RequestId(f"next{i}")
        if not cache.acquire(holder, T, (A2, B2)[i % 2], 0.0):
            break
        overtaking += 1
        held.append(holder)
        cache.release(held.pop(0), 0.0)
        assert _pump(cache) == []
    assert overtaking == 3
    for holder in held:
        cache.release(holder, 0.0)
    assert _pump(cache) == ["d"]
    cache.release(RequestId("d"), 0.0)
    assert _pump(cache) == [f"next{overtaking}"]


def test_adapters_that_fit_into_what_is_free_overtake_a_bounded_number_of_times_too() -> None:
    cache, backend = _cache(5, max_overtakes=3)
    cache.acquire(RequestId("holds"), T, A2, 0.0)
    _pump(cache)
    cache.acquire(RequestId("blocked"), T, D4, 0.0)
    _pump(cache)
    served = []
    for i in range(8):
        cache.acquire(RequestId(f"r{i}"), T, AdapterUid(f"other{i}-1"), 0.0)
        served += _pump(cache)
        cache.release(RequestId(f"r{i}"), 0.0)
    assert served == _ids("r0", "r1", "r2")
    assert AdapterUid("other7-1") not in backend.on_device, "not even loaded"
    cache.release(RequestId("holds"), 0.0)
    assert _pump(cache) == ["blocked"]


def test_prefetch_goes_up_to_the_device_and_evicts_nothing_that_is_used() -> None:
    cache, backend = _cache(4)
    cache.prefetch(A2, T)
    _pump(cache)
    assert list(backend.on_device) == [A2]
    assert cache.acquire(RequestId("r1"), T, A2, 0.0)
    cache.acquire(RequestId("r2"), T, B2, 0.0)
    _pump(cache)
    cache.prefetch(C2, T)
    _pump(cache)
    assert sorted(backend.on_device) == [A2, B2]
    assert C2 in backend.on_host
    assert not cache.has_work


def test_the_host_keeps_its_budget() -> None:
    cache, backend = _cache(2, host=4)
    for i, uid in enumerate((A2, B2, C2, A2)):
        cache.acquire(RequestId(f"r{i}"), T, uid, 0.0)
        assert _pump(cache) == [f"r{i}"]
        cache.release(RequestId(f"r{i}"), 0.0)
        assert cache.host_bytes <= 4
        cache.check_invariants()
    assert list(backend.on_device) == [A2]


def test_who_has_one_of_two_parts_makes_way_for_an_older_one_that_fills_host_and_device() -> None:
    now = 0.0
    backend = FakeAdapterBackend(lambda: now, size_bytes=lambda uid: int(uid[-1]))
    cache = AdapterCache(backend, AdapterCacheLimits(9, 9, host_loads=1, device_loads=1, max_overtakes=0))
    big, small, other = (AdapterUid(uid) for uid in ("x9", "y1", "z1"))
    for name, key in (("first", small), ("all", big), ("parts", key_of(map(Part, (small, other))))):
        cache.acquire(RequestId(name), T, key, now)
    served = []
    for _ in range(100):
        now += 0.1
        for holder in cache.pump(now).ready:
            served.append(holder)
            cache.release(holder, now)
    assert sorted(served) == _ids("all", "first", "parts")


# -- tenants beside one another

A, B, C = (TenantId(name) for name in "abc")


class Rig:
    """A cache whose adapters are all of one size, `cold` ones of any number; weights 1 but for `weights`."""

    def __init__(
        self,
        device: int,
        *,
        host: int = 100,
        weights: dict[TenantId, int] | None = None,
        size: int = 1,
        host_loads: int = 8,
        max_overtakes: int = 32,
        load_s: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.broken: dict[AdapterUid, None] = {}
        self.backend = FakeAdapterBackend(
            lambda: self.now,
            size_bytes=lambda uid: size,
            load_s=lambda uid, tier: load_s,
            error_of=lambda uid, tier: "the file is gone" if uid in self.broken else None,
        )
        limits = AdapterCacheLimits(host, device, host_loads=host_loads, max_overtakes=max_overtakes)
        self.cache = AdapterCache(self.backend, limits, lambda tenant: (weights or {}).get(tenant, 1))
        self.size = size
        self.serial = 0
        self.evictions: list[Eviction] = []

    def ask(self, tenant: TenantId, uid: str) -> RequestId:
        self.serial += 1
        holder = RequestId(f"{tenant}{self.serial}")
        self.cache.acquire(holder, tenant, AdapterUid(uid), self.now)
        return holder

    def pump(self, times: int = 4) -> list[RequestId]:
        ready: list[RequestId] = []
        for _ in range(times):
            self.now += 0.001
            update = self.cache.pump(self.now)
            self.cache.check_invariants()
            self.evictions += update.evictions
            ready += update.ready
        return ready

    def end(self, *holders: RequestId) -> None:
        for holder in holders:
            self.cache.release(holder, self.now)

    def use(self, tenant: TenantId, uid: str) -> None:
        """A short request."""
        holder = self.ask(tenant, uid)
        if not self.cache.uses(holder):
            assert holder in self.pump()
        self.end(holder)

    def pin(self, largest: int = 1, **pins: str) -> None:
        """Space-separated uids by tenant."""
        self.cache.set_pins(
            {
                TenantId(tenant): [Pin(AdapterName(uid), AdapterUid(uid), self.size) for uid in uids.split()]
                for tenant, uids in pins.items()
            },
            largest,
        )

    def problems(self, tenant: TenantId) -> list[str]:
        return [state.problem for state in self.cache.tenants()[tenant].pins if not state.is_ready]


def cycling_beside_a_pair() -> None:
    """One tenant uses two adapters now and then, another each of a thousand in turn."""
    rig = Rig(8, host=16)
    for i in range(1000):
        if i % 20 == 0:
            rig.use(B, "b0")
            rig.use(B, "b1")
        rig.use(A, f"a{i}")
        if i >= 20:
            assert {"b0", "b1"} <= set(rig.backend.on_device), "the pair was evicted"
    tenants = rig.cache.tenants()
    assert tenants[A].evictions >= 1000 - 8
    assert (tenants[B].device_bytes, tenants[B].evictions, tenants[B].displaced) == (2, 0, 0)
    assert tenants[A].device_bytes == 6, "what the other does not want is borrowed"


def test_who_cycles_a_thousand_adapters_evicts_its_own() -> None:
    cycling_beside_a_pair()


def pinned_beside_a_flood() -> None:
    rig = Rig(6, host=8)
    rig.pin(b="b0 b1")
    rig.pump()
    assert {"b0", "b1"} <= set(rig.backend.on_device), "without a request"
    for i in range(20):
        rig.now += 60.0  # nobody has used the pinned ones for long
        asked = [rig.ask(A, f"a{i}-{j}") for j in range(5)]
        ready = rig.pump()
        assert {"b0", "b1"} <= set(rig.backend.on_device), "a pinned adapter was evicted"
        assert len(ready) == 4, "the rest is everybody's"
        rig.end(*asked)


def test_a_pin_stays_though_nobody_uses_it() -> None:
    pinned_beside_a_flood()


def flood_of_cold_adapters() -> None:
    """The other's one cold adapter waits for the loads that have begun, and one more at most."""
    rig = Rig(300, host=300, load_s=0.01, host_loads=2)
    for i in range(200):
        rig.ask(A, f"a{i}")
    rig.pump(1)
    late = rig.ask(B, "b0")
    waited = 0
    while late not in rig.pump(1):
        rig.now += 0.01
        waited += 1
    assert waited <= 4, f"it waited for {waited} rounds of loads"


def test_a_flood_of_cold_adapters_does_not_stand_before_anothers() -> None:
    flood_of_cold_adapters()


def share_of_a_newcomer() -> None:
    rig = Rig(8)
    for i in range(8):
        rig.use(A, f"a{i}")
    for i in range(4):
        rig.use(B, f"b{i}")
    assert [rig.cache.tenants()[tenant].device_bytes for tenant in (A, B)] == [4, 4]
    rig.use(B, "b4")
    assert [rig.cache.tenants()[tenant].device_bytes for tenant in (A, B)] == [4, 4], "its own goes above its share"
    assert len(rig.evictions) == 5
    for eviction in rig.evictions:
        check_eviction(eviction)


def test_a_newcomer_gets_its_share_of_what_was_borrowed_and_no_more() -> None:
    share_of_a_newcomer()


def overtaking_by_one_within_its_share() -> None:
    """Who is within its share is not stopped by a blocked adapter of another; who is above it is."""
    rig = Rig(6, max_overtakes=3)
    for i in range(5):
        rig.ask(A, f"a{i}")
    rig.ask(B, "b0")
    assert len(rig.pump()) == 6
    blocked = rig.ask(C, "c0")
    assert rig.pump() == []
    for _ in range(10):
        assert rig.cache.uses(rig.ask(B, "b0")), "it was held up for another's adapter"
    passed = [rig.cache.uses(rig.ask(A, "a0")) for _ in range(10)]
    assert passed == [True] * 3 + [False] * 7
    assert not rig.cache.uses(blocked)


def test_overtaking_is_bounded_for_those_above_their_share() -> None:
    overtaking_by_one_within_its_share()


def _oldest_first(order: LoadOrder) -> list[tuple[TenantId, Entry]]:
    waiting = [(entry.queued[tenant], tenant, entry) for tenant, q in order.queues.items() for entry in q.values()]
    return [(tenant, entry) for _, tenant, entry in sorted(waiting, key=lambda each: each[0])]


def _evict_by_idle_time(search: room_module._Search) -> None:
    search._evict_if(lambda entry: True)


@pytest.mark.parametrize(
    ("scenario", "target", "name", "mutant"),
    [
        (cycling_beside_a_pair, room_module._Search, "unclaimed", _evict_by_idle_time),
        (share_of_a_newcomer, room_module, "max_min", lambda wants, *rest: dict.fromkeys(wants, 0)),
        (share_of_a_newcomer, room_module, "max_min", lambda wants, *rest: dict(wants)),
        (pinned_beside_a_flood, Entry, "in_use", property(lambda entry: bool(entry.users))),
        (flood_of_cold_adapters, LoadOrder, "take", _oldest_first),
        (overtaking_by_one_within_its_share, room_module.Standing, "is_within", lambda *args: True),
        (overtaking_by_one_within_its_share, room_module.Standing, "is_within", lambda *args: False),
    ],
    ids=[
        "eviction over all tenants alike",
        "nobody has a share",
        "everybody's share is all that it wants",
        "pins are evicted",
        "loads begin oldest first",
        "nobody waits behind a blocked adapter",
        "those within their share wait too",
    ],
)
def test_each_mutant_fails(
    scenario: Callable[[], None], target: object, name: str, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, name, mutant)
        with pytest.raises(AssertionError):
            scenario()


# -- pins


def test_pins_beyond_what_the_worker_can_keep_are_told_and_not_kept() -> None:
    rig = Rig(6)
    rig.pin(largest=2, a="a0 a1 a2 a3", b="b0")
    rig.pump()
    assert set(rig.backend.on_device) == {"a0", "a1", "a2", "b0"}
    assert rig.problems(A) == [NO_ROOM_TO_PIN]
    assert rig.problems(B) == []
    rig.pin(largest=2, a="a3 a0")
    rig.pump()
    assert {"a3", "a0"} <= set(rig.backend.on_device)
    assert rig.problems(A) == []


def test_a_pin_moves_with_its_name_and_ends_with_the_policy() -> None:
    rig = Rig(3)
    rig.pin(a="old")
    rig.pump()
    rig.pin(a="new")
    rig.pump()
    rig.now += 60.0
    holders = [rig.ask(B, f"b{i}") for i in range(2)]
    assert rig.pump() == holders
    assert set(rig.backend.on_device) == {"new", "b0", "b1"}, "the old one is like any other now"
    rig.end(*holders)
    rig.pin()
    rig.pump()
    rig.now += 60.0
    holders = [rig.ask(B, f"b{i}") for i in range(10, 13)]
    assert rig.pump() == holders
    assert "new" not in rig.backend.on_device


def test_a_pin_that_does_not_load_is_told_and_tried_again() -> None:
    rig = Rig(4)
    rig.broken[AdapterUid("a0")] = None
    rig.pin(a="a0 a1")
    rig.pump()
    assert rig.problems(A) == ["the file is gone"]
    assert not rig.cache.has_work
    rig.pin(a="a0 a1")
    assert rig.problems(A) == ["the file is gone"], "while it is tried again too"
    rig.pump()
    rig.broken.clear()
    rig.use(A, "a0")
    assert rig.problems(A) == [], "a request has brought it, and it stays"
    rig.broken[AdapterUid("a2")] = None
    rig.pin(a="a2")
    rig.pump()
    rig.broken.clear()
    rig.pin(a="a2")
    rig.pump()
    assert rig.problems(A) == []
    assert "a2" in rig.backend.on_device


def test_an_unknown_name_is_told() -> None:
    rig = Rig(4)
    rig.cache.set_pins({A: [Pin(AdapterName("later"), None)]}, 1)
    rig.pump()
    assert rig.problems(A) == ["no adapter has this name"]


def test_a_request_for_what_the_pins_leave_no_room_for_fails() -> None:
    rig = Rig(3)
    rig.pin(largest=0, a="a0 a1 a2")
    rig.pump()
    rig.ask(B, "b0")
    rig.cache.pump(1.0)
    (failure,) = rig.cache.pump(1.0).failed
    assert failure.message == "the adapter takes 1 bytes, and what is pinned leaves 0 on the device"


# -- what tenants share


def test_what_two_tenants_use_counts_in_full_for_both_and_stays_while_one_is_within_its_share() -> None:
    rig = Rig(4)
    rig.use(A, "both")
    assert not rig.cache.uses(rig.ask(B, "never")), "B has asked for nothing yet"
    rig.end(RequestId("b2"))
    rig.use(B, "both")
    for i in range(10):
        rig.use(A, f"a{i}")
    tenants = rig.cache.tenants()
    assert "both" in rig.backend.on_device
    assert tenants[B] == TenantAdapters(1, 1), "nothing that A did has changed what B has"
    assert tenants[A].device_bytes == 3, "it no longer counts against A"


@pytest.mark.parametrize(("host", "after_s"), [(100, 1.0), (1, 30.0)], ids=["copied", "nowhere else"])
def test_what_was_not_used_for_long_is_lent(host: int, after_s: float) -> None:
    rig = Rig(2, host=host)
    rig.use(B, "b0")
    first = rig.ask(A, "a0")
    rig.pump()
    rig.now += 1.0  # A's patience, where it needs the host's one place
    rig.pump()
    assert rig.cache.uses(first)
    rig.use(B, "b0")
    assert ("b0" in rig.backend.on_host) == (host == 100)
    second = rig.ask(A, "a9")
    assert second not in rig.pump(), "B is within its share"
    rig.now += after_s - 0.1
    assert second not in rig.pump(), "it was used not long ago"
    rig.now += 0.1
    assert second in rig.pump()
    assert rig.evictions[-1].has_copy == (host == 100)
    rig.end(first, second)


def test_a_copy_that_was_lent_is_back_at_once_when_its_tenant_asks() -> None:
    """A flood of adapters takes what was idle for a second, and gives it back before its own."""
    rig = Rig(3)
    rig.use(B, "b0")
    flood = [rig.ask(A, f"a{i}") for i in range(9)]
    rig.pump()
    rig.now += 1.0
    rig.pump()
    assert "b0" not in rig.backend.on_device
    rig.end(flood[0])
    asked = rig.ask(B, "b0")
    assert asked in rig.pump(), "B is within its share, and the flood above"


def test_a_tenant_whose_share_is_all_pinned_waits_no_longer_than_its_patience_for_another_adapter() -> None:
    rig = Rig(3)
    rig.pin(a="a0")
    rig.use(B, "b0")
    rig.use(C, "c0")
    asked = rig.ask(A, "a1")
    assert rig.pump() == [], "everybody is within its share"
    rig.now += 0.5
    rig.use(B, "b0")
    assert rig.pump() == []
    rig.now += 0.6
    rig.use(B, "b0")
    assert asked in rig.pump()
    assert set(rig.backend.on_device) == {"a0", "a1", "b0"}, "what was idle longest has gone"


def test_an_adapter_larger_than_its_tenants_share_takes_nothing_that_is_used_before_its_patience_ends() -> None:
    sizes = {"large": 6, "b0": 2, "b1": 2, "b2": 2}
    now = 0.0
    backend = FakeAdapterBackend(lambda: now, size_bytes=lambda uid: sizes[uid])
    cache = AdapterCache(backend, AdapterCacheLimits(100, 8))
    for uid in ("b0", "b1"):
        cache.acquire(RequestId(uid), B, AdapterUid(uid), now)
    for _ in range(3):
        cache.pump(now)
    cache.acquire(RequestId("r"), A, AdapterUid("large"), now)
    for step in range(8):
        now = 0.1 * step
        for uid in ("b0", "b1"):
            assert step == 0 or cache.acquire(RequestId(uid), B, AdapterUid(uid), now)
            cache.release(RequestId(uid), now)
        assert cache.pump(now).ready == [], "what nobody uses at this moment was used a moment ago"
    assert {"b0", "b1"} <= set(backend.on_device)
