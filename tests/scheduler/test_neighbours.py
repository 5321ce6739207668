"""What noisy neighbours are noticed by."""

from __future__ import annotations

import pytest
from helpers import flow, report
from manylora_scheduler.gates.neighbours import FlowWait, Neighbours
from manylora_shared.ids import AdapterUid, QosClass, TenantId, WorkerId

INTERACTIVE, STANDARD, BATCH = QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH
WORKER = WorkerId("w0")


def memory(neighbours: Neighbours, now: float, *, free: int, **tenants: int) -> None:
    told = report(blocks=1000, free=free, snapshot=now == 0.0)
    object.__setattr__(told, "tenants", {TenantId(t): blocks for t, blocks in tenants.items()})
    neighbours.memory(WORKER, told, now)


def no_tops(tenant_id: TenantId) -> tuple[float, float, float]:
    return 0.0, 0.0, 3.0


def test_kv_growth_is_noticed_before_the_pool_is_full() -> None:
    neighbours = Neighbours()
    for second in range(8):
        memory(neighbours, float(second), free=800 - 60 * second, greedy=100 + 60 * second, calm=100)
    (found,) = neighbours.find([], no_tops, 7.0)
    assert (found.kind, found.tenant_id, found.worker_id) == ("kv_growth", "greedy", WORKER)
    assert found.evidence["growth_blocks_per_s"] == pytest.approx(60.0)
    assert found.evidence["exhausted_in_s"] == pytest.approx(380 / 60)
    for second in range(8, 25):
        memory(neighbours, float(second), free=380, greedy=520, calm=100)
    assert neighbours.find([], no_tops, 24.0) == ()
    alone = Neighbours()
    for second in range(8):
        memory(alone, float(second), free=800 - 60 * second, greedy=100 + 60 * second)
    assert alone.find([], no_tops, 7.0) == (), "there is nobody whom it could hurt"


def test_adapter_thrash_is_noticed() -> None:
    neighbours = Neighbours()
    for i in range(40):
        neighbours.granted(TenantId("cycler"), AdapterUid(f"u{i}"), False, i / 10)
        neighbours.granted(TenantId("calm"), AdapterUid("own"), i > 0, i / 10)
    (found,) = neighbours.find([], no_tops, 4.0)
    assert (found.kind, found.tenant_id) == ("adapter_thrash", "cycler")
    assert found.evidence["adapters"] == 40
    assert found.evidence["part_of_all_loads"] == pytest.approx(40 / 41)
    assert neighbours.find([], no_tops, 60.0) == ()


def test_wait_skew_is_noticed() -> None:
    waits = [
        FlowWait(flow("flood"), 500, 9.0),
        FlowWait(flow("a"), 2, 0.2),
        FlowWait(flow("b"), 1, 0.1),
        FlowWait(flow("flood", INTERACTIVE), 5, 1.0),
    ]
    (found,) = Neighbours().find(waits, no_tops, 0.0)
    assert (found.kind, found.tenant_id) == ("wait_skew", "flood")
    assert found.evidence == {
        "oldest_wait_s": 9.0,
        "others_median_wait_s": pytest.approx(0.15),
        "queued": 500.0,
        "queued_part": pytest.approx(500 / 503),
        "demand_shares": 3.0,
    }
    even = [FlowWait(flow(t), 100, 9.0) for t in "abc"]
    assert Neighbours().find(even, no_tops, 0.0) == ()
