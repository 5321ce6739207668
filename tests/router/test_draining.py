"""Who is told to leave or to drop its caches, by whom, and how."""

from __future__ import annotations

import asyncio

import pytest
from manylora_shared.coordination.records import SchedulerMember
from manylora_shared.errors import RpcError
from router_fakes import RouterCluster, simulate, until
from test_router_identity import call


def test_each_kind_of_service_is_told() -> None:
    async def test(cluster: RouterCluster) -> None:
        assert (await call(cluster.client, "Drain", id="worker-1")).kind == "worker"
        assert [worker.is_leaving for worker in cluster.workers] == [False, True]
        assert (await call(cluster.client, "Drain", id="scheduler-0")).kind == "scheduler"
        assert cluster.scheduler.is_leaving
        assert cluster.scheduler.server is not None
        standby = SchedulerMember("scheduler-1", cluster.scheduler.server.address)
        await cluster.store.put(standby.key, standby.to_json())
        cluster.scheduler.is_leaving = False
        assert (await call(cluster.client, "Drain", id="scheduler-1")).kind == "scheduler"
        assert cluster.scheduler.is_leaving, "one that stands by"
        leaving = asyncio.create_task(cluster.app.told_to_leave())
        assert (await call(cluster.client, "Drain", id="router-0")).kind == "router"
        await leaving

    simulate(test)


def test_only_operators_tell_and_only_who_is_there() -> None:
    async def test(cluster: RouterCluster) -> None:
        with pytest.raises(RpcError, match="no worker, router or scheduler is called 'worker-9'"):
            await call(cluster.client, "Drain", id="worker-9")
        channel = cluster.caller(await cluster.put_key(tenant="acme", scopes=("admin",)))
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        with pytest.raises(RpcError, match="PERMISSION_DENIED"):
            await call(channel, "Drain", id="worker-1")
        assert not any(worker.is_leaving for worker in cluster.workers)

    simulate(test)


def test_a_worker_is_told_to_drop_its_caches() -> None:
    async def test(cluster: RouterCluster) -> None:
        dropped = await call(cluster.client, "DropWorkerCaches", worker_id="worker-1", prefixes=True)
        assert (dropped.adapters, dropped.prefix_blocks) == (0, 7)
        assert [worker.dropped for worker in cluster.workers] == [[], [(False, True)]]
        with pytest.raises(RpcError, match="neither adapters nor prefixes"):
            await call(cluster.client, "DropWorkerCaches", worker_id="worker-1")
        with pytest.raises(RpcError, match="no worker of the pool is called 'worker-9'"):
            await call(cluster.client, "DropWorkerCaches", worker_id="worker-9", adapters=True)
        channel = cluster.caller(await cluster.put_key(tenant="acme", scopes=("admin",)))
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        with pytest.raises(RpcError, match="PERMISSION_DENIED"):
            await call(channel, "DropWorkerCaches", worker_id="worker-1", adapters=True)
        assert len(cluster.workers[1].dropped) == 1

    simulate(test)
