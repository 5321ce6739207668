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
        demand.came(FlowKey(TenantId(f"t{number}"), BATCH), 100.0, 0.0)
    demand.was_granted(100.0, 0.0)
    for tick in range(1, 30_001):  # long enough for the sums to be projected to new moments
        now = tick / 4
        demand.came(FlowKey(TenantId("steady"), STANDARD), 50.0, now)
        if not tick % 100:
            demand.weigh(now)
            demand.check_invariants()
    assert list(demand.tenants()) == [TenantId("steady")]
    # 200 in a second over a window of ten; what was granted is long forgotten.
    assert demand.tops(TenantId("steady"))[1] == pytest.approx(1.0, rel=0.05)
