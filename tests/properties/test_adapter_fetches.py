"""AdapterCache over a store that is far: what hangs there holds its tenant's places and no load."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from manylora_shared.ids import AdapterUid, RequestId, TenantId
from manylora_sim.fake_runner import FakeFarBackend
from manylora_worker.adapters.cache import AdapterCache, AdapterCacheLimits
from manylora_worker.adapters.residency import FetchLimits
from manylora_worker.kinds.api import AdapterTier

from tests.properties import test_adapters_cache as near

HANGS_S = 1e9


class FarCacheMachine(near.AdapterCacheMachine):
    """As a near store's, with fetches that last and fail, and a disk that loses what nobody reads."""

    backend: FakeFarBackend

    @initialize(places=st.integers(1, 3), of_tenant=st.integers(1, 2), fetch_s=st.integers(0, 3))
    def start(self, places: int, of_tenant: int, fetch_s: int) -> None:  # type: ignore[override]
        super().start(12, 10, 2, 1, 2, 1)
        self.backend = FakeFarBackend(
            lambda: self.now,
            size_bytes=lambda uid: near._SIZES[uid],
            load_s=lambda uid, tier: fetch_s if tier is AdapterTier.DISK else 1,
            error_of=lambda uid, tier: f"{uid} is broken" if (uid, tier) in self.broken else None,
        )
        self.limits = AdapterCacheLimits(12, 10, 2, 1, 2, 10.0, 6.0, 4.0, FetchLimits(places, of_tenant))
        self.cache = AdapterCache(self.backend, self.limits, lambda tenant: near._WEIGHTS[tenant])

    @rule(uid=near._UIDS)
    def break_fetch(self, uid: AdapterUid) -> None:
        if self.broken.pop((uid, AdapterTier.DISK), self) is self:
            self.broken[(uid, AdapterTier.DISK)] = None

    @rule(uid=near._UIDS)
    def leave_the_disk(self, uid: AdapterUid) -> None:
        if uid not in self.backend._loads:
            self.backend.on_disk.pop(uid, None)


TestFarCache = pytest.mark.long(FarCacheMachine.TestCase)
TestFarCache.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)

A, B = TenantId("a"), TenantId("b")


class Rig:
    """`hanging`: what is never fetched."""

    def __init__(self, hanging: str = "", **limits: int) -> None:
        self.now = 0.0
        self.errors: dict[tuple[AdapterUid, AdapterTier], str] = {}
        self.backend = FakeFarBackend(
            lambda: self.now,
            load_s=lambda uid, tier: HANGS_S if hanging and uid.startswith(hanging) else 0.0,
            error_of=lambda uid, tier: self.errors.get((uid, tier)),
        )
        self.cache = AdapterCache(self.backend, AdapterCacheLimits(100, 100, **limits))

    def ask(self, tenant: TenantId, uid: str) -> RequestId:
        holder = RequestId(f"{tenant}-{uid}")
        self.cache.acquire(holder, tenant, AdapterUid(uid), self.now)
        return holder

    def pump(self) -> list[RequestId]:
        ready: list[RequestId] = []
        for _ in range(5):
            ready += self.cache.pump(self.now).ready
            self.cache.check_invariants()
        return ready


def test_fetches_that_hang_hold_their_own_tenants_places_and_no_load() -> None:
    rig = Rig("a", host_loads=1, device_loads=1)
    for number in range(40):
        rig.ask(A, f"a{number}")
    rig.pump()
    assert rig.cache.num_loading == FetchLimits().of_tenant
    rig.backend.on_disk[AdapterUid("b0")] = None
    asked = [rig.ask(B, "b0"), rig.ask(B, "b1")]
    assert sorted(rig.pump()) == asked, "from the disk and from the store"


def test_many_tenants_whose_fetches_hang_leave_a_place_for_another() -> None:
    rig = Rig("hang")
    for tenant in range(30):
        for number in range(8):
            rig.ask(TenantId(f"t{tenant}"), f"hang{tenant}-{number}")
    rig.pump()
    assert FetchLimits().all // 2 <= rig.cache.num_loading < FetchLimits().all
    late = rig.ask(B, "b0")
    assert rig.pump() == [late]


def test_a_fetch_that_fails_in_passing_is_told_so_and_the_next_request_tries_again() -> None:
    rig = Rig()
    rig.errors[AdapterUid("a0"), AdapterTier.DISK] = "the bucket cannot be used now"
    rig.ask(A, "a0")
    rig.cache.pump(rig.now)
    (failure,) = rig.cache.pump(rig.now).failed
    assert (failure.is_passing, failure.message) == (True, "the bucket cannot be used now")
    rig.errors.clear()
    assert rig.cache.acquire(RequestId("again"), A, AdapterUid("a0"), rig.now) is False
    assert rig.pump() == ["again"]


def test_a_prefetch_leaves_the_places_to_who_asks() -> None:
    rig = Rig("hang")
    for number in range(20):
        rig.cache.prefetch(AdapterUid(f"hang{number}"), A)
    rig.pump()
    assert rig.cache.num_loading == 1
    late = rig.ask(A, "b0")
    assert rig.pump() == [late]
