"""What tenants ask for, as it fades."""

from __future__ import annotations

import pytest
from manylora_scheduler.core.request import FlowKey
from manylora_scheduler.gates.demand import Demand
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.overload import (
    STACK,
)

INTERACTIVE, STANDARD, BATCH = STACK


def test_demand_fades_and_is_forgotten() -> None:
    demand = Demand(lambda flow: 1)
    for number in range(300):
        demand.was_refused(FlowKey(TenantId(f"t{number}"), BATCH), 1, 0.0)
    demand.was_granted(100.0, 0.0)
    for tick in range(1, 30_001):  # long enough for the sums to be projected to new moments
        now = tick / 4
        demand.came(FlowKey(TenantId("steady"), STANDARD), 50.0, now)
        demand.left(FlowKey(TenantId("steady"), STANDARD), 50.0, now, is_granted=False)
        if not tick % 100:
            demand.weigh(now)
            demand.check_invariants()
    assert list(demand.tenants()) == [TenantId("steady")]
    # 200 in a second over a window of ten; what was granted is long forgotten.
    assert demand.tops(TenantId("steady"))[1] == pytest.approx(1.0, rel=0.05)


def test_what_is_queued_does_not_fade() -> None:
    demand, flow, other = (
        Demand(lambda flow: 1),
        FlowKey(TenantId("patient"), STANDARD),
        FlowKey(TenantId("b"), STANDARD),
    )
    for _ in range(100):
        demand.came(flow, 100.0, 0.0)
    for tick in range(20_000):  # the sums are projected to new moments meanwhile
        now = tick / 2
        demand.came(other, 50.0, now)
        demand.left(other, 50.0, now, is_granted=True)
    demand.weigh(now)
    demand.check_invariants()
    # 1,000 of the other's in ten seconds is all that is done; half of it is a share.
    assert demand.tops(TenantId("b"))[1] == pytest.approx(1000 / 550, rel=0.05)
    assert demand.tops(TenantId("patient"))[1] == pytest.approx(10_000 / 550, rel=0.05)
    for _ in range(100):
        demand.left(flow, 100.0, now, is_granted=False)
    demand.weigh(now + 100.0)
    demand.check_invariants()
    assert demand.tops(TenantId("patient"))[1] < 1.0, "it fades from when it left"


def test_what_runs_counts_by_the_work_that_is_done_for_it() -> None:
    demand, flow, other = Demand(lambda flow: 1), FlowKey(TenantId("long"), STANDARD), FlowKey(TenantId("b"), STANDARD)
    demand.came(flow, 1000.0, 0.0)
    demand.left(flow, 1000.0, 0.0, is_granted=True)
    for tick in range(600):
        demand.was_done(flow, 90.0, tick / 10)
        demand.was_done(other, 10.0, tick / 10)
    demand.weigh(60.0)
    demand.check_invariants()
    assert demand.tops(TenantId("long"))[1] == pytest.approx(9 * demand.tops(TenantId("b"))[1], rel=0.05)


def test_what_was_granted_and_is_not_done_is_nothing_that_the_cluster_can_do() -> None:
    demand, long, other = Demand(lambda flow: 1), FlowKey(TenantId("long"), STANDARD), FlowKey(TenantId("b"), STANDARD)
    for tick in range(200):
        now = tick / 10
        demand.was_done(other, 10.0, now)
        if now >= 10.0:
            demand.was_done(long, 90.0, now)
        if now == 10.0:
            demand.came(long, 100_000.0, now)
            demand.left(long, 100_000.0, now, is_granted=True)
            demand.weigh(now)
            assert demand.tops(TenantId("long"))[1] > 3.0
        demand.weigh(now)
    # It has the cluster to itself but for a tenth: 90,000 a window are no part of what is done in one, 10,000.
    assert demand.tops(TenantId("long"))[1] > 3.0
    assert demand.tops(TenantId("b"))[1] < 1.0


def test_a_cluster_that_begins_to_be_used_is_not_thought_as_slow_as_it_was_idle() -> None:
    demand, steady, new = Demand(lambda flow: 1), FlowKey(TenantId("b"), STANDARD), FlowKey(TenantId("new"), STANDARD)
    for tick in range(1020):
        now = tick / 10
        demand.was_done(steady, 20.0, now)
        if now >= 100.0:
            demand.was_done(new, 80.0, now)
            demand.came(new, 1000.0, now)
        demand.weigh(now)
    # The newcomer asks for ten times what there is; two seconds of it tell how much that is.
    assert demand.tops(TenantId("b"))[1] < 1.0
    assert demand.tops(TenantId("new"))[1] > 3.0
