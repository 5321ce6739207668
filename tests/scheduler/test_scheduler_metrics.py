"""What the scheduler tells of tenants and workers: status and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from manylora.v1 import common_pb2, scheduler_pb2, status_pb2, worker_pb2
from manylora_shared.errors import Code
from manylora_shared.telemetry import Attribute, Metrics, Telemetry

from tests.scheduler.scripted_cluster import KV_BLOCK_BYTES, METHODS, Cluster, play


def test_tenants_adapters_are_summed_in_the_status_and_counted_in_metrics() -> None:
    telemetry = Telemetry.recording("scheduler")

    def pinned(name: str, *, on_device: bool, problem: str = "") -> status_pb2.PinStatus:
        return status_pb2.PinStatus(
            name=name, adapter_version="uid", workers=1, on_device=int(on_device), problem=problem
        )

    def memory(tenant: str = "acme", evictions: int = 0, **more: Any) -> status_pb2.TenantAdapters:
        return status_pb2.TenantAdapters(tenant_id=tenant, device_bytes=10, host_bytes=20, evictions=evictions, **more)

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0", telemetry=telemetry)
        first, second = await cluster.worker("w0"), await cluster.worker("w1")
        await cluster.leader()
        await asyncio.sleep(1.0)
        first._send(tenant_adapters=[memory(evictions=5, displaced=2, pins=[pinned("a", on_device=True)])])
        pins = [pinned("a", on_device=False, problem="the file is gone"), pinned("b", on_device=False)]
        second._send(tenant_adapters=[memory(evictions=1, pins=pins), memory("birch")])
        await asyncio.sleep(2.0)
        first._send(tenant_adapters=[memory(evictions=8, displaced=2, pins=[pinned("a", on_device=True)])])
        second._send(tenant_adapters=[status_pb2.TenantAdapters(tenant_id="birch")])
        await asyncio.sleep(2.0)
        channel = (await cluster.peer("status")).connect(app.address)
        answer = await channel.call(METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
        (acme,) = answer.scheduler.adapters
        assert (acme.tenant_id, acme.device_bytes, acme.host_bytes) == ("acme", 20, 40)
        assert (acme.evictions, acme.displaced) == (9, 2)
        assert [(pin.name, pin.workers, pin.on_device, pin.problem) for pin in acme.pins] == [
            ("a", 2, 1, "the file is gone"),
            ("b", 1, 0, ""),
        ]
        await channel.close()

    play(scenario)
    metrics = telemetry.recorded_metrics()
    counted = {
        kind: metrics[Metrics.ADAPTER_EVICTIONS, frozenset({(Attribute.KIND, kind)})] for kind in ("own", "displaced")
    }
    assert counted == {"own": 7, "displaced": 2}
    assert metrics[Metrics.UNMET_PINS, frozenset()] == 2
    of_pool = frozenset({(Attribute.POOL, "default")})
    assert metrics[Metrics.POOL_WORKERS, of_pool] == 2
    assert metrics[Metrics.POOL_WORKERS_WANTED, of_pool] == 2
    assert metrics[Metrics.KEPT_OUT_WORKERS, of_pool] == 0


def test_the_kv_of_tenants_is_told_for_the_workers_whose_streams_are_up() -> None:
    def kv(tenant: str, blocks: int) -> worker_pb2.TenantKvBlocks:
        return worker_pb2.TenantKvBlocks(tenant_id=tenant, kv_blocks=blocks)

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        first, second = await cluster.worker("w0"), await cluster.worker("w1")
        await cluster.leader()
        channel = (await cluster.peer("status")).connect(app.address)

        async def told() -> dict[str, tuple[int, int]]:
            await asyncio.sleep(1.0)
            answer = await channel.call(METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
            return {each.tenant_id: (each.device_bytes, each.most_bytes) for each in answer.scheduler.kv}

        assert await told() == {}
        first._send(tenants=[kv("acme", 5), kv("birch", 1)])
        second._send(tenants=[kv("acme", 2)])
        assert await told() == {"acme": (7 * KV_BLOCK_BYTES, 5 * KV_BLOCK_BYTES), "birch": (KV_BLOCK_BYTES,) * 2}
        first._send(tenants=[kv("acme", 1), kv("birch", 0)])
        assert await told() == {"acme": (3 * KV_BLOCK_BYTES, 2 * KV_BLOCK_BYTES)}
        await second.server.stop(0.0)
        assert await told() == {"acme": (KV_BLOCK_BYTES,) * 2}, "nobody vouches for the rest"
        await channel.close()

    play(scenario)


def test_what_befell_tenants_sequences_is_summed_over_the_workers_whose_streams_are_up() -> None:
    def setbacks(tenant: str, *counts: int) -> status_pb2.TenantSetbacks:
        names = ("preemptions", "swaps_out", "evictions", "recomputed_tokens")
        return status_pb2.TenantSetbacks(tenant_id=tenant, **dict(zip(names, counts, strict=True)))

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        first, second = await cluster.worker("w0"), await cluster.worker("w1")
        first.setbacks = [setbacks("birch", 1, 0, 0, 0)]
        await cluster.leader()
        channel = (await cluster.peer("status")).connect(app.address)

        async def told() -> dict[str, tuple[int, ...]]:
            await asyncio.sleep(1.0)
            answer = await channel.call(METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
            return {
                each.tenant_id: (each.preemptions, each.swaps_out, each.evictions, each.recomputed_tokens)
                for each in answer.scheduler.setbacks
            }

        assert await told() == {"birch": (1, 0, 0, 0)}, "a snapshot tells of it"
        first._send(setbacks=[setbacks("acme", 5, 1, 2, 70)])
        second._send(setbacks=[setbacks("acme", 3, 2, 1, 30)])
        assert await told() == {"acme": (8, 3, 3, 100), "birch": (1, 0, 0, 0)}
        first._send(setbacks=[setbacks("acme", 6, 1, 2, 70)])
        second._send()
        assert await told() == {"acme": (9, 3, 3, 100), "birch": (1, 0, 0, 0)}, "cumulative, and told where it grew"
        first.setbacks = []
        first.break_streams.set()
        await asyncio.sleep(0.0)
        first.break_streams.clear()
        assert await told() == {"acme": (3, 2, 1, 30)}, "it is another process now"
        await second.server.stop(0.0)
        assert await told() == {}, "nobody vouches for it"
        await channel.close()

    play(scenario)


def test_overload_is_told_to_routers_in_the_status_and_in_metrics() -> None:
    telemetry = Telemetry.recording("scheduler")

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0", telemetry=telemetry, interactive_queue_ms=100.0)
        await cluster.worker("w0", slots=1)
        await cluster.leader()
        router = await cluster.router(app)
        await router.enqueue("big", prompt_tokens=500, qos_class=common_pb2.QOS_CLASS_INTERACTIVE)
        assert (await router.answer()).request_id == "big"
        for tenant in "ab":
            await router.enqueue(tenant, tenant_id=tenant, qos_class=common_pb2.QOS_CLASS_INTERACTIVE)
        await router.enqueue("batch", tenant_id="c", prompt_tokens=500, qos_class=common_pb2.QOS_CLASS_BATCH)
        shed = await router.answer(timeout_s=60.0)
        assert (shed.request_id, shed.code) == ("batch", int(Code.RESOURCE_EXHAUSTED))
        assert shed.retry_after_s > 0
        flows = [scheduler_pb2.FlowRefusals(tenant_id="c", qos_class=common_pb2.QOS_CLASS_BATCH, requests=7)]
        await router.stream.write(scheduler_pb2.ScheduleRequest(refused=scheduler_pb2.Refused(flows=flows)))
        assert router.overloads[-1].level > 48
        late = await cluster.router(app, "r1")
        await asyncio.sleep(1.5)
        await late.enqueue("refused", tenant_id="c", qos_class=common_pb2.QOS_CLASS_BATCH)
        assert (await late.answer()).request_id == "refused"
        assert late.overloads, "a router that comes later is told at once"
        channel = (await cluster.peer("status")).connect(app.address)
        answer = await channel.call(METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
        status = answer.scheduler.overload
        assert status.level > 48
        assert status.rung in ("batch_queue", "standard", "interactive")
        interactive, standard, batch = status.classes
        assert (interactive.target_ms, standard.target_ms, batch.HasField("target_ms")) == (100.0, 2000.0, False)
        assert interactive.late_part > 0.9
        assert (batch.refused_by_routers, batch.refused, batch.shed, batch.capped) == (7, 1, 1, 0)
        await channel.close()
        await asyncio.sleep(2.5)

    play(scenario)
    metrics = telemetry.recorded_metrics()
    assert metrics[Metrics.OVERLOAD_LEVEL, frozenset()] > 48
    batch = {
        dict(attributes)[Attribute.STAGE]: value
        for (name, attributes), value in metrics.items()
        if name == Metrics.OVERLOAD_GIVEN_UP and dict(attributes)[Attribute.QOS_CLASS] == "batch"
    }
    assert batch == {"router": 7, "admission": 1, "queue": 1}
