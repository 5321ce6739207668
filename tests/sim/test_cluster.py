"""The cluster under seeded traffic and faults: safety all the time, liveness once everything has healed.

A failing seed is shown with its faults; `pytest "tests/sim/test_cluster.py::test_chaos[seed 17]" --sim-seeds 18` is
that run again, event for event.
"""

from __future__ import annotations

import asyncio

import pytest
from manylora.v1 import common_pb2
from manylora_shared.simulation.loop import SimRun, run

from tests.sim import validate
from tests.sim.cluster import TENANTS, Cluster, adapters_of
from tests.sim.faults import Faults
from tests.sim.traffic import Traffic

CHAOS_S = 14.0
SETTLE_S = 8.0
"""After healing: time for elections, leases and reconnects, before new calls must all succeed."""
END_S = 60.0
"""Every call ends within this time after healing."""
REST_S = 12.0
"""Longer than any grant or pause is remembered."""


async def chaos(seed: int, log: list[str]) -> Traffic:
    cluster = Cluster(seed)
    await cluster.start()
    traffic = Traffic(cluster, seed)
    faults = Faults(cluster, seed)
    faults.log = log
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.run(CHAOS_S, calls=90))
        group.create_task(faults.run(CHAOS_S, faults=14))
    await faults.heal()
    await asyncio.sleep(SETTLE_S)
    for tenant in TENANTS:
        for adapter in ["", *adapters_of(tenant)]:
            call = traffic.plain(tenant)
            call.adapter = adapter
            call.is_after_heal = True
            traffic.begin(call)
    await traffic.all_ended(END_S)
    for call in traffic.calls:
        validate.check_call(call)
        if call.is_after_heal:
            assert call.finished is not None, call.describe()
            assert call.finished.outcome == common_pb2.OUTCOME_COMPLETED, call.describe()
    await asyncio.sleep(REST_S)
    validate.check_at_rest(cluster)
    for process in cluster.processes.values():
        await cluster.stop(process)
    await asyncio.sleep(5.0)
    validate.check_stopped(cluster)
    validate.check_engines(cluster)
    return traffic


def play(seed: int) -> SimRun[Traffic]:
    log: list[str] = []
    try:
        return run(chaos(seed, log), seed=seed, limit_s=600.0, max_events=2_000_000)
    except BaseException:
        print(f"seed {seed} fails; its faults:", *log, sep="\n  ")
        raise


def test_chaos(sim_seed: int) -> None:
    play(sim_seed)


@pytest.mark.parametrize("sim_seed", [3, 11])
def test_a_seed_is_one_run(sim_seed: int) -> None:
    first, second = play(sim_seed), play(sim_seed)
    assert (first.digest, first.events, first.virtual_s) == (second.digest, second.events, second.virtual_s)
    assert [c.describe() for c in first.result.calls] == [c.describe() for c in second.result.calls]


def test_without_faults_every_call_ends_as_it_should() -> None:
    async def main() -> None:
        cluster = Cluster(0)
        await cluster.start()
        traffic = Traffic(cluster, 0)
        await traffic.run(10.0, calls=200)
        await traffic.all_ended(END_S)
        outcomes: dict[int, int] = {}
        for call in traffic.calls:
            validate.check_call(call)
            if call.finished is not None:
                outcomes[call.finished.outcome] = outcomes.get(call.finished.outcome, 0) + 1
            assert (
                call.error is None
                or call.timeout_s is not None
                or call.adapter in ("broken", "unknown")
                or (call.tenant not in TENANTS)
            ), call.describe()
        assert outcomes[common_pb2.OUTCOME_COMPLETED] > 100
        assert outcomes[common_pb2.OUTCOME_DEADLINE_EXCEEDED] > 0
        await asyncio.sleep(REST_S)
        validate.check_at_rest(cluster)
        validate.check_engines(cluster)

    run(main(), seed=0, limit_s=600.0)
