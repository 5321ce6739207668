"""AdapterCache over FakeAdapterBackend: budgets, pins, single loads, failures, and that everybody is served."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manylora_shared.ids import AdapterUid, RequestId
from manylora_worker.adapters.cache import AdapterCache, AdapterCacheLimits, CacheUpdate
from manylora_worker.engine.api import AdapterTier
from manylora_worker.engine.fake_runner import FakeAdapterBackend

_SIZES = {AdapterUid(f"uid{i}"): size for i, size in enumerate([1, 1, 2, 3, 4, 6, 9, 40])}
_UIDS = st.sampled_from(sorted(_SIZES))
_TOO_LARGE = AdapterUid("uid7")


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
        limits = AdapterCacheLimits(host, device, host_loads, device_loads, max_overtakes)
        self.cache = AdapterCache(self.backend, limits)
        self.waiting: dict[RequestId, AdapterUid] = {}
        self.pinned: dict[RequestId, AdapterUid] = {}
        self.next_holder = 0

    @rule(uid=_UIDS)
    def acquire(self, uid: AdapterUid) -> None:
        self.next_holder += 1
        holder = RequestId(f"r{self.next_holder}")
        if self.cache.acquire(holder, uid):
            self.pinned[holder] = uid
        else:
            self.waiting[holder] = uid

    @rule(data=st.data())
    @precondition(lambda self: self.pinned or self.waiting)
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.pinned | self.waiting)))
        self.pinned.pop(holder, None)
        self.waiting.pop(holder, None)
        self.cache.release(holder)

    @rule(uid=_UIDS)
    def prefetch(self, uid: AdapterUid) -> None:
        self.cache.prefetch(uid)

    @rule(uid=_UIDS, tier=st.sampled_from([AdapterTier.HOST, AdapterTier.DEVICE]))
    def toggle_broken(self, uid: AdapterUid, tier: AdapterTier) -> None:
        if self.broken.pop((uid, tier), self) is self:
            self.broken[(uid, tier)] = None

    @rule(seconds=st.integers(0, 2))
    def pump(self, seconds: int) -> None:
        self.now += seconds
        self._take(self.cache.pump())

    def _take(self, update: CacheUpdate) -> None:
        for holder in update.ready:
            uid = self.waiting.pop(holder)
            assert uid != _TOO_LARGE
            self.pinned[holder] = uid
        for failure in update.failed:
            assert failure.holders
            assert "broken" in failure.message or failure.uid == _TOO_LARGE
            for holder in failure.holders:
                assert self.waiting.pop(holder) == failure.uid
            assert failure.uid not in self.waiting.values(), "a failed load fails all that wait for it"

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        for holder, uid in self.pinned.items():
            assert self.cache.is_pinned(holder)
            assert uid in self.backend.on_device, "a pinned adapter was evicted"
        tiers = self.cache.tiers()
        assert {u for u, t in tiers.items() if t is AdapterTier.DEVICE} == set(self.backend.on_device)
        assert set(tiers) == set(self.backend.on_device) | set(self.backend.on_host)

    def teardown(self) -> None:
        """Once pins are given back, everybody who waits is served or told why not: no deadlock, no lost wait."""
        if not hasattr(self, "cache"):
            return
        for _ in range(40 * (len(self.waiting) + 1)):
            if not self.waiting:
                break
            for holder in list(self.pinned):
                self.cache.release(holder)
                del self.pinned[holder]
            self.pump(2)
            self.agrees()
        assert not self.waiting, "somebody waits for ever"
        for holder in self.pinned:
            self.cache.release(holder)
        assert self.cache.num_holders == 0


TestAdapterCache = AdapterCacheMachine.TestCase
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
        ready += cache.pump().ready
    return ready


A2, B2, C2, D4 = (AdapterUid(u) for u in ("a2", "b2", "c2", "d4"))


def _ids(*names: str) -> list[RequestId]:
    return [RequestId(name) for name in names]


def test_one_load_serves_all_that_wait() -> None:
    cache, backend = _cache(4)
    for name in ("r1", "r2", "r3"):
        assert not cache.acquire(RequestId(name), A2)
    cache.pump()
    assert cache.num_loading == 1
    assert _pump(cache) == _ids("r1", "r2", "r3")
    assert list(backend.on_device) == [A2]


def test_eviction_takes_what_was_idle_longest_and_never_what_is_pinned() -> None:
    cache, backend = _cache(4)
    for name, uid in (("r1", A2), ("r2", B2)):
        cache.acquire(RequestId(name), uid)
    assert _pump(cache) == _ids("r1", "r2")
    cache.acquire(RequestId("r3"), C2)
    assert _pump(cache) == []
    cache.release(RequestId("r2"))
    assert _pump(cache) == ["r3"]
    assert sorted(backend.on_device) == [A2, C2]
    assert cache.tiers()[B2] is AdapterTier.HOST


def test_eviction_weighs_idle_time_by_bytes() -> None:
    cache, backend = _cache(6)
    cache.acquire(RequestId("small"), A2)
    _pump(cache)
    cache.acquire(RequestId("large"), D4)
    _pump(cache)
    cache.release(RequestId("small"))
    cache.release(RequestId("large"))
    for name in ("x", "y", "z"):
        cache.acquire(RequestId(name), A2)
        cache.release(RequestId(name))
    cache.acquire(RequestId("next"), B2)
    assert _pump(cache) == ["next"]
    assert sorted(backend.on_device) == [A2, B2]


def test_a_failed_load_fails_who_waits_and_can_be_tried_again() -> None:
    broken = {"a2": "its digest is wrong"}
    cache, _ = _cache(4, broken=broken)
    cache.acquire(RequestId("r1"), A2)
    cache.acquire(RequestId("r2"), B2)
    cache.pump()
    update = cache.pump()
    assert [(f.uid, f.message, list(f.holders)) for f in update.failed] == [(A2, "its digest is wrong", ["r1"])]
    cache.release(RequestId("r1"))
    assert _pump(cache) == ["r2"]
    broken.clear()
    cache.acquire(RequestId("r3"), A2)
    assert _pump(cache) == ["r3"]


def test_an_adapter_larger_than_the_device_fails_clearly() -> None:
    cache, backend = _cache(3)
    cache.acquire(RequestId("r1"), D4)
    cache.pump()
    (failure,) = cache.pump().failed
    assert failure.message == "the adapter takes 4 bytes, more than the whole device budget of 3"
    assert not backend.on_host
    cache.acquire(RequestId("r2"), D4)
    (failure,) = cache.pump().failed
    assert failure.holders == ["r2"]
    assert not cache.has_work


def test_a_blocked_adapter_is_overtaken_a_bounded_number_of_times() -> None:
    cache, _ = _cache(4, max_overtakes=3)
    cache.acquire(RequestId("a"), A2)
    cache.acquire(RequestId("b"), B2)
    assert _pump(cache) == _ids("a", "b")
    cache.acquire(RequestId("d"), D4)
    assert _pump(cache) == []
    overtaking = 0
    held = _ids("a", "b")
    for i in range(20):
        holder = RequestId(f"next{i}")
        if not cache.acquire(holder, (A2, B2)[i % 2]):
            break
        overtaking += 1
        held.append(holder)
        cache.release(held.pop(0))
        assert _pump(cache) == []
    assert overtaking == 3
    for holder in held:
        cache.release(holder)
    assert _pump(cache) == ["d"]
    cache.release(RequestId("d"))
    assert _pump(cache) == [f"next{overtaking}"]


def test_adapters_that_fit_into_what_is_free_overtake_a_bounded_number_of_times_too() -> None:
    cache, backend = _cache(5, max_overtakes=3)
    cache.acquire(RequestId("holds"), A2)
    _pump(cache)
    cache.acquire(RequestId("blocked"), D4)
    _pump(cache)
    served = []
    for i in range(8):
        cache.acquire(RequestId(f"r{i}"), AdapterUid(f"other{i}-1"))
        served += _pump(cache)
        cache.release(RequestId(f"r{i}"))
    assert served == _ids("r0", "r1", "r2")
    assert AdapterUid("other7-1") not in backend.on_device, "not even loaded"
    cache.release(RequestId("holds"))
    assert _pump(cache) == ["blocked"]


def test_prefetch_goes_up_to_the_device_and_evicts_nothing_that_is_used() -> None:
    cache, backend = _cache(4)
    cache.prefetch(A2)
    _pump(cache)
    assert list(backend.on_device) == [A2]
    assert cache.acquire(RequestId("r1"), A2)
    cache.acquire(RequestId("r2"), B2)
    _pump(cache)
    cache.prefetch(C2)
    _pump(cache)
    assert sorted(backend.on_device) == [A2, B2]
    assert C2 in backend.on_host
    assert not cache.has_work


def test_the_host_keeps_its_budget() -> None:
    cache, backend = _cache(2, host=4)
    for i, uid in enumerate((A2, B2, C2, A2)):
        cache.acquire(RequestId(f"r{i}"), uid)
        assert _pump(cache) == [f"r{i}"]
        cache.release(RequestId(f"r{i}"))
        assert cache.host_bytes <= 4
        cache.check_invariants()
    assert list(backend.on_device) == [A2]
