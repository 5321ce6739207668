"""A worker whose engine hangs, under load: its answers go on elsewhere, as do all others, and nothing is left."""

from __future__ import annotations

import asyncio

from manylora.v1 import common_pb2
from manylora_sim.loop import run
from manylora_worker.app import WorkerApp

from tests.sim import validate
from tests.sim.cluster import Cluster
from tests.sim.traffic import Traffic

HANGS_AT_S = 5.0
STALL_S = 10.0
"""A worker's default."""
CALLS = 50
SEED = 5


def test_a_hung_engine_is_a_lost_worker() -> None:
    async def main() -> Traffic:
        cluster = Cluster(SEED)
        await cluster.start()
        traffic = Traffic(cluster, SEED)
        watching = asyncio.create_task(cluster.watch(), name="watch")
        process = cluster.processes["worker1"]

        async def hang() -> None:
            await asyncio.sleep(HANGS_AT_S)
            assert isinstance(process.app, WorkerApp)
            runtime = process.app._runtime
            runtime._step_s = lambda batch: 1e6  # type: ignore[attr-defined]
            assert process.main is not None
            began_s = cluster.loop.time()
            await asyncio.wait([process.main])
            assert cluster.loop.time() - began_s < STALL_S + 2
            assert "stood still" in str(process.main.exception())
            await cluster.stop(process)
            cluster.launch(process)

        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run(15.0, calls=CALLS))
            group.create_task(hang())
        await cluster.all_up()
        await traffic.all_ended(30.0)
        await traffic.run(5.0, calls=CALLS)
        await traffic.all_ended(30.0)
        validate.check_calls(cluster, traffic.calls)
        await asyncio.sleep(12.0)
        assert not watching.done(), watching.exception()
        watching.cancel()
        validate.check_at_rest(cluster)
        return traffic

    calls = run(main(), seed=SEED, limit_s=300).result.calls
    finished = [c.finished for c in calls if c.finished is not None]
    assert sum(each.usage.resumed for each in finished) > 0, "what it held went on elsewhere"
    assert common_pb2.OUTCOME_WORKER_LOST not in [each.outcome for each in finished]
    served = {c.finished.worker_id for c in calls[CALLS:] if c.finished is not None}
    assert "worker1" in served, "it has started again"
