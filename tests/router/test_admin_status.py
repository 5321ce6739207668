"""The status: all of it for operators, and for a tenant its own alone."""

from __future__ import annotations

import asyncio
from typing import Any

from manylora.v1 import admin_pb2, status_pb2
from manylora_router.links.moments import MOMENT_S
from router_fakes import (
    RouterCluster,
    simulate,
    until,
)
from test_admin_adapters import GOOD, header, upload
from test_admin_adapters import call as admin
from test_router_identity import call


def test_a_tenant_sees_its_own_status_alone() -> None:
    async def test(cluster: RouterCluster) -> None:
        channel = cluster.caller(await cluster.put_key(tenant="acme"))
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        cluster.scheduler.flows = [
            admin_pb2.FlowStatus(tenant_id="acme", queued=1),
            admin_pb2.FlowStatus(tenant_id="other", queued=7),
        ]
        cluster.scheduler.overload = admin_pb2.OverloadStatus(
            level=70,
            rung="standard",
            classes=[admin_pb2.ClassOverload(refused=5)],
            tenants=[
                admin_pb2.TenantOverloadStatus(tenant_id="acme", level=3),
                admin_pb2.TenantOverloadStatus(tenant_id="other", level=100),
            ],
        )
        cluster.scheduler.neighbours = [admin_pb2.NoisyNeighbour(kind="wait_skew", tenant_id="acme")]
        cluster.scheduler.adapters = [
            status_pb2.TenantAdapters(
                tenant_id=tenant,
                device_bytes=5,
                evictions=4,
                displaced=3,
                pins=[status_pb2.PinStatus(name="upper", workers=3, on_device=on_device) for on_device in (3, 2)],
            )
            for tenant in ("acme", "other")
        ]
        cluster.scheduler.setbacks = [
            status_pb2.TenantSetbacks(tenant_id=tenant, preemptions=2) for tenant in ("acme", "other")
        ]
        mine = await call(channel, "GetStatus")
        (adapters,) = mine.scheduler.adapters
        assert (adapters.tenant_id, adapters.device_bytes, adapters.evictions) == ("acme", 5, 4)
        assert adapters.displaced == 0, "that others were there is not its own"
        assert [(pin.workers, pin.on_device) for pin in adapters.pins] == [(1, 1), (1, 0)], "nor how many workers"
        overload = mine.scheduler.overload
        assert (overload.level, overload.rung, list(overload.classes)) == (70, "standard", [])
        assert [(t.tenant_id, t.level) for t in overload.tenants] == [("acme", 3)]
        assert list(mine.scheduler.neighbours) == []
        assert list(mine.scheduler.setbacks) == [], "they tell of the others before it"
        assert [(f.tenant_id, f.queued) for f in mine.scheduler.flows] == [("acme", 1)]
        assert (mine.tenants, mine.adapters) == (1, 1)
        assert (list(mine.workers), list(mine.routers), mine.scheduler.address) == ([], [], "")
        whole = await call(cluster.client, "GetStatus")
        assert len(whole.scheduler.flows) == len(whole.scheduler.overload.tenants) == 2
        assert len(whole.scheduler.neighbours) == 1
        assert [(s.tenant_id, s.preemptions) for s in whole.scheduler.setbacks] == [("acme", 2), ("other", 2)]
        assert [(a.displaced, a.pins[1].workers, a.pins[1].on_device) for a in whole.scheduler.adapters] == [
            (3, 3, 2)
        ] * 2
        assert len(whole.workers) == 2

    simulate(test)


def test_who_asks_in_the_same_moment_shares_one_look_at_the_cluster() -> None:
    async def test(cluster: RouterCluster) -> None:
        channels = [cluster.client, *[cluster.caller(await cluster.put_key(tenant=t)) for t in ("acme", "other")]]
        await until(lambda: len(cluster.app.directory.api_keys) == 3)
        asked = local = 0
        status, levels = cluster.app._status._scheduler_status, cluster.app._status._levels.local

        async def ask() -> Any:
            nonlocal asked
            asked += 1
            return await status()

        def count(tenant_id: str) -> Any:
            nonlocal local
            local += 1
            return levels(tenant_id)

        cluster.app._status._scheduler_status = ask  # type: ignore[method-assign]
        cluster.app._status._levels.local = count  # type: ignore[method-assign]
        cluster.scheduler.flows = [admin_pb2.FlowStatus(tenant_id=t, queued=1) for t in ("acme", "other")]
        for moment in range(1, 4):
            gone = asyncio.ensure_future(call(channels[0], "GetStatus"))
            await asyncio.sleep(0)
            gone.cancel()
            for more in ({}, {"local_only": True}):
                answers = await asyncio.gather(*(call(c, "GetStatus", **more) for c in channels for _ in range(16)))
                seen = [[f.tenant_id for f in answer.scheduler.flows] for answer in answers]
                if not more:
                    assert seen == [["acme", "other"]] * 16 + [["acme"]] * 16 + [["other"]] * 16
            assert asked == moment
            assert local == 6 * moment, "once for each of those who see other things, in two ways"
            await asyncio.sleep(2 * MOMENT_S)
        assert not cluster.app._status.moments.asked

    simulate(test)


def test_a_merged_worker_is_named_by_what_the_policy_dedicates() -> None:
    """And not by another name of the same content."""

    async def test(cluster: RouterCluster) -> None:
        for name in ("copy", "kept", "lower"):
            digest = (await upload(cluster, header(name), *GOOD)).adapter.version
        await admin(cluster, "ApplyTenant", policy_yaml="tenant_id: acme\nadapters: {dedicated: {kept: 1}}\n")
        cluster.scheduler.dedicated = ("acme", digest)
        await until(lambda: bool(cluster.app.directory.dedicating()))
        shown = (await admin(cluster, "GetStatus")).workers
        assert {worker.dedicated_adapter for worker in shown} == {"kept"}

    simulate(test)
