"""The whole cluster beyond its capacity: routers refuse early, no stream is hurt, and it is over with the load."""

from __future__ import annotations

import asyncio

from manylora.v1 import common_pb2
from manylora_router.app import RouterApp
from manylora_sim.loop import run

from tests.sim import validate
from tests.sim.cluster import TENANTS, Cluster
from tests.sim.traffic import Call, Traffic

FLOOD_S = 15.0
CALLS_PER_S = 60
"""Some three times what three workers with five slots do."""


async def flooded(seed: int) -> Traffic:
    cluster = Cluster(seed)
    await cluster.start()
    await asyncio.sleep(1.0)
    traffic = Traffic(cluster, seed)
    watching = asyncio.create_task(cluster.watch(), name="watch")
    for i in range(int(FLOOD_S * CALLS_PER_S)):
        call = traffic.plain(list(TENANTS)[i % len(TENANTS)])
        call.n, call.is_greedy, call.timeout_s = 1, False, 10.0
        call.qos_class = ("interactive", "standard", "batch")[i // len(TENANTS) % 3]
        traffic.begin(call)
        await asyncio.sleep(1.0 / CALLS_PER_S)
    refused = sum(p.app.scheduler.counters.refused for p in cluster.processes.values() if isinstance(p.app, RouterApp))
    assert refused > 100, "routers refuse by what the scheduler told them"
    await traffic.all_ended(60.0)
    await asyncio.sleep(10.0)
    (leader,) = cluster.leaders()
    assert leader.term is not None
    assert leader.term.overload.view.is_quiet, "it is over"
    for process in cluster.processes.values():
        if isinstance(process.app, RouterApp):
            assert process.app.scheduler.overload("default").is_quiet
    after = [traffic.plain(tenant) for tenant in TENANTS]
    for call in after:
        call.qos_class = "batch"
        traffic.begin(call)
    await traffic.all_ended(60.0)
    assert all(call.error is None for call in after), [call.describe() for call in after]
    validate.check_calls(cluster, traffic.calls)
    assert not watching.done(), watching.exception()
    watching.cancel()
    await asyncio.sleep(12.0)
    validate.check_at_rest(cluster)
    return traffic


def ended_well(calls: list[Call], qos_class: str) -> float:
    mine = [call for call in calls if call.qos_class == qos_class]
    done = [c for c in mine if c.finished is not None and c.finished.outcome == common_pb2.OUTCOME_COMPLETED]
    return len(done) / len(mine)


def test_a_flood_of_all_classes() -> None:
    traffic = run(flooded(2), seed=2, limit_s=600.0, max_events=5_000_000).result
    calls = traffic.calls[: int(FLOOD_S * CALLS_PER_S)]
    refused = [call for call in calls if call.is_overloaded]
    assert all(call.error is not None and call.error.retry_after_s is not None for call in refused)
    degraded = [c for c in calls if c.frames and c.frames[0].started.HasField("degraded")]
    assert all(call.qos_class == "batch" for call in degraded)
    shares = {qos_class: ended_well(calls, qos_class) for qos_class in ("interactive", "standard", "batch")}
    print(shares, len(refused), len(degraded))
    assert shares["interactive"] > shares["standard"] > shares["batch"]
