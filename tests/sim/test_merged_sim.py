"""Workers that become one tenant's and everybody's again, under traffic and faults: every text is its adapter's, calls
end, and nobody is left without a worker.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from manylora_shared.ids import AdapterName
from manylora_sim.loop import run

from tests.sim import validate
from tests.sim.cluster import TENANTS, Cluster, adapters_of
from tests.sim.faults import Faults
from tests.sim.traffic import Traffic

CHAOS_S, CALLS, FAULTS = 14.0, 60, 6
SETTLE_S, END_S, REST_S = 8.0, 60.0, 12.0
SEEDS = 3


class Operator:
    """Asks for dedicated workers, and takes it back."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"{seed}/operator")
        self.merges = 0
        """Seen."""

    async def ask(self, tenant: str, *names: str) -> None:
        store = self._cluster.store_server.client()
        policy = replace(self._cluster.policies[tenant], dedicated={AdapterName(name): 1 for name in names})
        await self._cluster.put_policy(store, policy)
        await store.close()

    async def run(self, duration_s: float) -> None:
        began = self._cluster.loop.time()
        while self._cluster.loop.time() < began + duration_s:
            tenant = self._rng.choice(["acme", "bolt"])
            names = self._rng.sample(adapters_of(tenant), self._rng.choice([0, 1, 1, 2]))
            if self._cluster.store_server.is_up:
                await self.ask(tenant, *names)
            await asyncio.sleep(self._rng.uniform(0.5, 5.0))

    async def watch(self) -> None:
        before: list[object] = []
        while True:
            now = [engine.core._merging.merged for engine in self._cluster.engines]
            self.merges += sum(each is not None and each not in before[i : i + 1] for i, each in enumerate(now))
            before = list(now)
            await asyncio.sleep(0.05)

    async def until(self, merged: int) -> None:
        async with asyncio.timeout(END_S):
            while True:
                found = [engine.core._merging for engine in self._cluster.engines_up()]
                views = [worker for app in self._cluster.leaders() for worker in app.term.core.workers]
                ready = [view for view in views if view.serves_owner or view.is_everybodys]
                if sum(each.merged is not None for each in found) == merged and len(ready) == len(found) == 3:
                    return
                await asyncio.sleep(0.05)


async def chaos(seed: int, log: list[str]) -> int:
    cluster = Cluster(seed)
    await cluster.start()
    traffic, faults, operator = Traffic(cluster, seed), Faults(cluster, seed), Operator(cluster, seed)
    faults.log = log
    watching = [asyncio.create_task(each) for each in (cluster.watch(), operator.watch())]
    await operator.ask("acme", "acme-0")
    await operator.until(1)
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.run(CHAOS_S, calls=CALLS))
        group.create_task(faults.run(CHAOS_S, faults=FAULTS))
        group.create_task(operator.run(CHAOS_S))
    await faults.heal()
    await operator.ask("acme", "acme-0")
    await operator.ask("bolt", "bolt-1")
    await asyncio.sleep(SETTLE_S)
    for tenant in TENANTS:
        for adapter in ("", *adapters_of(tenant)):
            call = traffic.plain(tenant)
            call.adapter, call.is_after_heal = adapter, True
            traffic.begin(call)
    await traffic.all_ended(END_S)
    await operator.until(2)
    for tenant in ("acme", "bolt"):
        await operator.ask(tenant)
    await operator.until(0)
    validate.check_calls(cluster, traffic.calls)
    await asyncio.sleep(REST_S)
    for task in watching:
        assert not task.done(), task.exception()
        task.cancel()
    validate.check_at_rest(cluster)
    for process in cluster.processes.values():
        await cluster.stop(process)
    await asyncio.sleep(5.0)
    validate.check_stopped(cluster)
    validate.check_engines(cluster)
    return operator.merges


@pytest.mark.parametrize("seed", range(SEEDS))
def test_dedicated_workers_come_and_go(seed: int) -> None:
    log: list[str] = []
    try:
        merges = run(chaos(seed, log), seed=seed).result
    except BaseException as error:
        error.add_note("\n".join(log))
        raise
    assert merges >= 3
