"""Several pools behind one book of quotas: each has its own queue, and nothing of one is another's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_scheduler.core.core import Core, CoreLimits
from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    Event,
    GrantClosed,
    PolicyChanged,
    RouterConnected,
    RouterDisconnected,
    RoutersRefused,
    SendGrant,
    SendRefusal,
    Tick,
    Withdrawn,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.reports import FlowTokens
from manylora_scheduler.core.succession import ClockSnapshot
from manylora_scheduler.gates.overload import OverloadGate
from manylora_scheduler.gates.pools import Pools
from manylora_scheduler.serving.clock_codec import Legacy, decode, encode
from manylora_shared.coordination.pool import MAX_POOLS
from manylora_shared.errors import Code
from manylora_shared.fairness.queue_succession import FlowSnapshot, Snapshot
from manylora_shared.ids import DEFAULT_POOL, QosClass, RequestId, TenantId, WorkerId
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy

from tests.scheduler.helpers import ROUTER, flow, report, request, started

SMALL = "small"


def make(pool: str, left: ClockSnapshot | None) -> OverloadGate:
    return OverloadGate(Core(CoreLimits(), left), pool=pool)


class House:
    """Pools with a router, and their clock."""

    def __init__(self, clocks: dict[str, ClockSnapshot] | None = None) -> None:
        self.pools = Pools(make, clocks)
        self.now = 0.0
        self.do(RouterConnected(ROUTER, 1))

    def do(self, event: Event) -> list[Command]:
        commands = self.pools.apply(event, self.now)
        self.pools.check_invariants()
        return commands

    def worker(self, worker_id: str, pool: str, slots: int = 1) -> list[Command]:
        joined = self.do(WorkerJoined(WorkerId(worker_id), f"{worker_id}:1", "cpu", 4096, pool))
        return joined + self.do(WorkerReported(WorkerId(worker_id), report(snapshot=True, slots=slots)))

    def ask(self, request_id: str, pool: str, tenant: str = "acme") -> list[Command]:
        asked = dataclasses.replace(request(request_id, tenant=tenant), pool=pool)
        return self.do(Enqueued(1, asked))


def granted(commands: Iterable[Command]) -> list[tuple[str, str]]:
    return [(c.request.request_id, c.worker_id) for c in commands if isinstance(c, SendGrant)]


def test_a_request_runs_on_its_pools_workers_alone() -> None:
    house = House()
    house.worker("w0", DEFAULT_POOL)
    assert house.ask("a", SMALL) == [], "w0 is free, and of another pool"
    assert granted(house.ask("b", DEFAULT_POOL)) == [("b", "w0")], "what waits for small is not in its way"
    assert granted(house.worker("w1", SMALL)) == [("a", "w1")]
    assert (house.pools.num_queued, house.pools.num_granted) == (0, 2)


def test_what_a_flow_has_had_of_a_pool_says_nothing_of_its_turn_at_another() -> None:
    """In one queue for all, acme's work on the small pool would put it behind at the default one."""
    house = House()
    house.worker("w0", DEFAULT_POOL)
    house.worker("w1", SMALL, slots=4)
    for i in range(4):
        house.ask(f"s{i}", SMALL)
    house.ask("first", DEFAULT_POOL, tenant="other")
    house.ask("o", DEFAULT_POOL, tenant="other")
    house.ask("a", DEFAULT_POOL, tenant="acme")
    done = {flow("other"): FlowTokens(10, 10)}
    begun = report(slots=1, running=1, started=[started("first", "other")])
    house.do(WorkerReported(WorkerId("w0"), begun))
    commands = house.do(WorkerReported(WorkerId("w0"), report(slots=1, finished=["first"], flows=done)))
    assert granted(commands) == [("a", "w0")], "acme has had nothing there"


def test_ends_find_their_pool() -> None:
    house = House()
    house.worker("w0", DEFAULT_POOL)
    house.worker("w1", SMALL)
    house.ask("a", SMALL)
    house.ask("b", SMALL)
    house.ask("c", SMALL)
    house.do(Withdrawn(1, RequestId("b")))
    closed = GrantClosed(1, ROUTER, RequestId("a"), WorkerId("w1"), reached_worker=False)
    assert granted(house.do(closed)) == [("c", "w1")]
    house.do(GrantClosed(1, ROUTER, RequestId("gone"), WorkerId("w1"), reached_worker=False, is_unavailable=True))
    assert house.pools.num_queued == 0


def test_a_worker_that_comes_back_in_another_pool_leaves_its_first() -> None:
    house = House()
    house.worker("w0", DEFAULT_POOL)
    house.worker("w0", SMALL)
    assert [(pool, view.worker_id) for pool, view in house.pools.workers] == [(SMALL, "w0")]
    house.do(WorkerLeft(WorkerId("w0")))
    assert house.pools.workers == []


def test_a_pool_that_comes_later_knows_policies_and_routers() -> None:
    house = House()
    policy = TenantPolicy(TenantId("acme"), {c: ClassPolicy(7) for c in QosClass})
    house.do(PolicyChanged(TenantId("acme"), policy))
    house.do(PolicyChanged(TenantId("gone"), policy))
    house.do(PolicyChanged(TenantId("gone"), None))
    house.worker("w0", SMALL)
    gate = house.pools.gates[SMALL]
    assert gate.core.view.weight_of(flow("acme")) == 7
    assert gate.core.view.weight_of(flow("gone")) == 2
    assert granted(house.ask("a", SMALL)) == [("a", "w0")], "its router's stream is known"
    house.do(RouterDisconnected(ROUTER, 1))
    house.worker("w1", "third")
    assert house.ask("b", "third") == [], "and it is known that it went"


def test_there_are_no_more_pools_than_may_be() -> None:
    house = House()
    for i in range(MAX_POOLS - 1):
        house.ask(f"r{i}", f"p{i}")
    (refusal,) = house.ask("more", "more")
    assert isinstance(refusal, SendRefusal)
    assert refusal.code is Code.UNAVAILABLE
    assert "pool more is none of the 64" in refusal.message


def test_pools_that_nobody_uses_make_room_and_the_rest_outlasts_its_leader() -> None:
    """Names of releases, one after another."""
    house = House()
    house.worker("kept", "kept")
    house.ask("waits", "waits")
    for i in range(2 * MAX_POOLS):
        house.worker(f"w{i}", f"release-{i}")
        assert granted(house.ask(f"r{i}", f"release-{i}")) == [(f"r{i}", f"w{i}")]
        house.do(WorkerReported(WorkerId(f"w{i}"), report(slots=1, finished=[f"r{i}"])))
        house.do(WorkerLeft(WorkerId(f"w{i}")))
    assert len(house.pools.gates) == MAX_POOLS
    assert {"kept", "waits", DEFAULT_POOL, f"release-{2 * MAX_POOLS - 1}"} <= house.pools.gates.keys()
    found = decode(b"".join(encode(Legacy(house.pools.clocks(), {}))))
    assert found.clocks.keys() == house.pools.gates.keys()


def test_as_many_pools_with_workers_as_there_may_be_stand_beside_the_default_one() -> None:
    house = House()
    for i in range(MAX_POOLS):
        house.worker(f"w{i}", f"p{i}")
    clocks = decode(b"".join(encode(Legacy(house.pools.clocks(), {})))).clocks
    assert len(clocks) == MAX_POOLS + 1


def test_each_pools_clock_goes_on_under_the_next_leader() -> None:
    house = House()
    house.worker("w1", SMALL, slots=1)
    house.ask("a", SMALL)
    house.ask("b", SMALL)
    clocks = house.pools.clocks()
    assert [entry.flow for entry in clocks[SMALL].flows] == [flow("acme")]
    empty = Snapshot(5, (), (), {})
    later = House({**clocks, "empty": empty})
    assert set(later.pools.gates) == {DEFAULT_POOL, SMALL}
    assert later.pools.is_restoring
    later.now = 2.0
    later.do(Tick())
    assert not later.pools.is_restoring
    assert later.pools.gates[SMALL].core.clock_snapshot().flows == ()
    kept = Snapshot(9, (FlowSnapshot(flow("x"), 1, 3, True),), (), {})
    assert set(House({DEFAULT_POOL: empty, "kept": kept}).pools.gates) == {DEFAULT_POOL, "kept"}


def test_what_routers_refused_is_demand_of_its_pool() -> None:
    house = House()
    house.worker("w1", SMALL)
    house.do(RoutersRefused(((flow("acme"), 3),), SMALL))
    counts = {name: gate.state().counts[QosClass.STANDARD] for name, gate in house.pools.gates.items()}
    assert (counts[SMALL].refused_by_routers, counts[DEFAULT_POOL].refused_by_routers) == (3, 0)


ASKED = st.tuples(st.sampled_from([DEFAULT_POOL, SMALL, "third"]), st.sampled_from(["a", "b", "c"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(ASKED, max_size=30), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_each_pool_grants_as_if_it_were_alone(asked: list[tuple[str, str]], slots: list[int]) -> None:
    """In the same order, whatever is asked of the others: so what holds for one queue holds for each."""
    names = [DEFAULT_POOL, SMALL, "third"]
    together = House()
    for name, count in zip(names, slots, strict=True):
        together.worker(f"w-{name}", name, count)
    found = [pair for i, (pool, tenant) in enumerate(asked) for pair in granted(together.ask(f"r{i}", pool, tenant))]
    for name, count in zip(names, slots, strict=True):
        alone = House()
        alone.worker(f"w-{name}", name, count)
        mine = [(f"r{i}", tenant) for i, (pool, tenant) in enumerate(asked) if pool == name]
        expected = [pair for request_id, tenant in mine for pair in granted(alone.ask(request_id, name, tenant))]
        assert [pair for pair in found if pair[1] == f"w-{name}"] == expected


@pytest.mark.parametrize("pools", [1, 2])
def test_the_next_wakeup_is_the_first_of_all(pools: int) -> None:
    house = House()
    names = [DEFAULT_POOL, SMALL][:pools]
    for i, name in enumerate(names):
        house.now = float(i)
        house.ask(f"r{i}", name)
    wakeups = [gate.next_wakeup() for gate in house.pools.gates.values()]
    assert house.pools.next_wakeup() == min(at for at in wakeups if at is not None)
