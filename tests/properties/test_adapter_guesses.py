"""Guesses of what is asked for next: never at the cost of what is asked for, used, or hot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeFarBackend, FakeRunner
from manylora_worker.adapters.cache import GUESSES_PER_S, AdapterCache, AdapterCacheLimits
from manylora_worker.adapters.tier_counts import FARTHER
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import AdapterTier, EngineRequest, Sampling
from manylora_worker.planning.step_planner import PlannerLimits

A, B = TenantId("a"), TenantId("b")


class Rig:
    def __init__(self, host: int = 4, load_s: float = 0.0) -> None:
        self.now = 100.0
        self.backend = FakeFarBackend(lambda: self.now, load_s=lambda uid, tier: load_s)
        self.cache = AdapterCache(self.backend, AdapterCacheLimits(host, 2))

    def use(self, uid: str, tenant: TenantId = A) -> None:
        holder = RequestId(f"r{self.now}-{uid}")
        ready = self.cache.acquire(holder, tenant, AdapterUid(uid), self.now)
        for _ in range(10):
            ready = ready or holder in self.cache.pump(self.now).ready
        assert ready
        self.cache.release(holder, self.now)

    def guess(self, uid: str, tenant: TenantId = A) -> None:
        self.cache.guess(AdapterUid(uid), tenant, self.now)
        self.pump()

    def pump(self) -> None:
        for _ in range(5):
            self.cache.pump(self.now)
            self.cache.check_invariants()

    def wait(self, seconds: float = 1 / GUESSES_PER_S) -> None:
        self.now += seconds
        self.pump()

    @property
    def on_host(self) -> set[str]:
        return set(self.backend.on_host)


def test_a_guess_goes_to_the_host_where_there_is_room() -> None:
    rig = Rig()
    rig.guess("x")
    assert (rig.on_host, list(rig.backend.on_device)) == ({"x"}, [])
    assert not rig.cache.has_work
    rig.use("x")
    assert rig.cache.found.adapters_found_host == 1


def test_it_takes_the_place_of_what_is_long_idle_and_of_nothing_hotter() -> None:
    rig = Rig(host=2)
    rig.use("old")
    rig.wait(20.0)
    rig.use("hot")
    rig.guess("x")
    assert rig.on_host == {"old", "hot"}, "both were used of late"
    rig.wait(15.0)
    rig.guess("x")
    assert rig.on_host == {"x", "hot"}


def test_their_rate_and_number_are_bounded() -> None:
    rig = Rig(host=100, load_s=1000.0)
    for number in range(10):
        rig.guess(f"a{number}")
    assert rig.cache.num_loading == 1, "one a moment"
    for number in range(10):
        rig.wait()
        rig.guess(f"b{number}")
    assert rig.cache.num_loading == 1, "one at a time of a tenant"
    rig.guess("c", B)
    assert rig.cache.num_loading == 2


def test_while_somebody_waits_for_a_load_a_guess_waits_and_is_given_up() -> None:
    rig = Rig(host=100, load_s=2.0)
    rig.cache.acquire(RequestId("r"), B, AdapterUid("asked"), rig.now)
    rig.guess("x")
    assert rig.cache.num_loading == 1
    rig.wait(2.0)
    rig.wait(2.0)
    assert rig.cache.num_loading == 1, "the other's is on its way to the device"
    rig.wait(2.0)
    assert "x" not in rig.on_host
    assert not rig.cache.has_work, "it is too late for it"


@pytest.mark.parametrize(("guesses", "found"), [(False, "disk"), (True, "host")])
def test_a_habit_finds_its_next_adapter_on_the_host(guesses: bool, found: str) -> None:
    """A tenant asks for two adapters in turn, each gone from memory by the next time: others' work came between."""
    now = 0.0
    backend = FakeFarBackend(lambda: now, load_s=lambda uid, tier: 0.01)
    limits = EngineLimits(PlannerLimits(16, 8, 4), AdapterCacheLimits(2, 1), max_requests=64, guesses=guesses)
    core = EngineCore(FakeRunner(num_blocks=64, block_size=4), backend, limits)
    names = iter(range(10_000))

    def ask(tenant: TenantId, uid: str) -> None:
        nonlocal now
        request_id = RequestId(f"r{next(names)}")
        core.add(EngineRequest(request_id, tenant, QosClass.BATCH, AdapterUid(uid), (1, 2, 3), 2, Sampling()), now)
        while core.has_work():
            now += 0.01
            core.step(now)

    for _ in range(6):
        for uid in ("x", "y"):
            ask(A, uid)
            now += 1.0
        now += 60.0
        for number in range(3):
            ask(B, f"other{number}")
            now += 40.0
    before = core.stats()
    ask(A, "x")
    now += 1.0
    ask(A, "y")
    after = core.stats()
    counts = {
        tier: getattr(after, f"adapters_found_{tier}") - getattr(before, f"adapters_found_{tier}") for tier in FARTHER
    }
    assert counts[found] >= 1, counts
    assert (counts["host"] > 0) == guesses


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "guess", "wait"]), st.integers(0, 7), st.sampled_from([A, B])), max_size=80
    )
)
def test_nothing_that_was_used_of_late_leaves_the_host_for_a_guess(steps: list[tuple[str, int, TenantId]]) -> None:
    rig = Rig(host=3)
    used: dict[str, float] = {}
    for kind, number, tenant in steps:
        uid = f"u{number}"
        if kind == "use":
            rig.use(uid, tenant)
            used[uid] = rig.now
        elif kind == "guess":
            before = rig.on_host
            on_device = {each for each, tier in rig.cache.tiers().items() if tier is AdapterTier.DEVICE}
            rig.guess(uid, tenant)
            for gone in before - rig.on_host - on_device:
                assert rig.now - used.get(gone, 0.0) >= 30.0, f"{gone} was used of late"
        else:
            rig.wait(float(number))
