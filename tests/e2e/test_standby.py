"""Two schedulers, two routers, two workers of a fake model: the leader is killed, and all but the routers are drained
one by one, under streams that are longer than all of it together.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from manylora.client import Client, Result, RetryPolicy, Sampling
from manylora.demo import BASE_FOLDER
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_sim.fake_runner import reference_tokens

pytestmark = pytest.mark.e2e

TENANT = "acme"
STREAMS = 16
TOKENS = 2500
NEW_EACH_S = 0.1
LOST_S, TOLD_S = 5.0, 3.0  # bounds for a busy machine; on an idle one 3 and 1
PROMPT = [5, 6, 7]
ONCE = RetryPolicy(max_attempts=1)


class Newcomers:
    """Short requests, one each `NEW_EACH_S`, over the routers in turn."""

    def __init__(self, clients: list[Client]) -> None:
        self._clients = clients
        self._asked: list[asyncio.Task[float]] = []
        self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            client = self._clients[len(self._asked) % len(self._clients)]
            self._asked.append(asyncio.create_task(self._one(client)))
            await asyncio.sleep(NEW_EACH_S)

    async def _one(self, client: Client) -> float:
        began_s = time.monotonic()
        result = await client.complete(PROMPT, max_tokens=2, ignore_eos=True, timeout_s=30)
        assert result.outcome == "completed"
        return time.monotonic() - began_s

    async def slowest_s(self) -> float:
        """Of those that were asked since the last time."""
        asked, self._asked = self._asked, []
        return max(await asyncio.gather(*asked))

    async def end(self) -> None:
        self._asking.cancel()
        await asyncio.gather(*self._asked)


def leader_of(cluster: LocalCluster, address: str) -> str:
    return next(name for name, child in cluster.children.items() if child.ready.get("address") == address)


async def whole(cluster: LocalCluster, client: Client) -> str:
    """Until two workers are there and a scheduler leads. Returns its name."""
    async with asyncio.timeout(60):
        while True:
            status = await client.status()
            if status.scheduler.reachable and [w.connected and not w.draining for w in status.workers] == [True, True]:
                return leader_of(cluster, status.scheduler.address)
            await asyncio.sleep(0.05)


async def test_streams_outlive_a_killed_leader_and_a_drain_of_all_workers(tmp_path: Path) -> None:
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name="fake",
        data=tmp_path / "data",
        workers=2,
        routers=2,
        schedulers=2,
        worker_module="manylora_sim.worker",
        worker_flags=("--fake-step-ms=10", "--sequence-slots=32"),
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as operator:
        await operator.tenants.apply(f"tenant_id: {TENANT}\n")
        clients = [Client(address, tenant=TENANT, retry=ONCE) for address in cluster.router_addresses]
        leader = await whole(cluster, operator)
        await asyncio.sleep(0.5)  # the other router hears of the tenant
        running = [
            asyncio.create_task(
                clients[seed % 2].complete(PROMPT, max_tokens=TOKENS, ignore_eos=True, sampling=Sampling(seed=seed))
            )
            for seed in range(STREAMS)
        ]
        await asyncio.sleep(1.0)
        newcomers = Newcomers(clients)
        await asyncio.sleep(1.0)
        told: dict[str, float] = {"undisturbed_s": await newcomers.slowest_s()}
        os.kill(cluster.pids[leader], signal.SIGKILL)
        await asyncio.sleep(4.0)
        told["leader_killed_s"] = await newcomers.slowest_s()
        for worker in ("worker-0", "worker-1"):
            await whole(cluster, operator)
            assert await operator.drain(worker) == "worker"
            await asyncio.sleep(1.0)
        told["workers_drained_s"] = await newcomers.slowest_s()
        leader = await whole(cluster, operator)
        assert await operator.drain(leader) == "scheduler"
        await asyncio.sleep(2.0)
        told["leader_drained_s"] = await newcomers.slowest_s()
        assert not any(task.done() for task in running), "the streams are to outlast all that"
        results: list[Result] = await asyncio.gather(*running)
        await newcomers.end()
        for client in clients:
            await client.close()
    for seed, result in enumerate(results):
        assert list(result.token_ids) == reference_tokens(PROMPT, None, seed, 0, TOKENS), seed
    assert all(result.usage.resumed for result in results), "each worker was drained once"
    print(json.dumps({"bench": "standby", **{name: round(seconds, 3) for name, seconds in told.items()}}))
    assert told["leader_killed_s"] < LOST_S
    assert told["leader_drained_s"] < TOLD_S
