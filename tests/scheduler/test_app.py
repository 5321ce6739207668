"""The scheduler's shell over the in-memory network and store, in virtual time; once over gRPC."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from manylora.v1 import scheduler_pb2
from manylora_scheduler.app import SchedulerApp
from manylora_scheduler.config import SchedulerConfig
from manylora_scheduler.core.events import Tick
from manylora_shared.coordination import keys
from manylora_shared.coordination.peers import PeerTransport
from manylora_shared.errors import Code, RpcError
from manylora_shared.ids import TenantId
from manylora_shared.process import loop as service_loop
from manylora_shared.process.config import ConfigError, parse
from manylora_shared.telemetry import Telemetry
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_sim.loop import run
from manylora_sim.peers import SIMULATED
from manylora_sim.store import MemoryStoreServer

from tests.scheduler.scripted_cluster import METHODS, Cluster, ScriptedRouter, ScriptedWorker, play


def test_a_grant_goes_out_as_soon_as_room_appears() -> None:
    async def scenario(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        app = await cluster.scheduler("s0")
        worker = await cluster.worker("w0", slots=1)
        await cluster.leader()
        router = await cluster.router(app)
        assert router.epoch > 0
        await router.enqueue("a")
        grant = await router.answer()
        assert (grant.request_id, grant.worker_id, grant.epoch) == ("a", "w0", router.epoch)
        assert grant.worker_address == worker.server.address
        assert worker.epochs == [router.epoch]
        await router.enqueue("b", adapter_uid="ab" * 32)
        worker.begin("a")
        await asyncio.sleep(1.0)
        assert worker.prefetched == ["ab" * 32]
        status = (
            await (await cluster.peer("cli"))
            .connect(app.address)
            .call(METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
        )
        (flow,) = status.scheduler.flows
        assert (flow.tenant_id, flow.queued, flow.running) == ("acme", 1, 1)
        assert status.scheduler.address == app.address
        assert [(w.worker_id, w.connected, w.running) for w in status.workers] == [("w0", True, 1)]
        ended_at = loop.time()
        worker.end("a")
        grant = await router.answer()
        assert grant.request_id == "b"
        assert loop.time() - ended_at < 0.005, "two messages' way, and no waiting in between"
        assert grant.queue_ms == pytest.approx(1000, abs=20)

    play(scenario)


def test_refusals_carry_code_and_hint() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0", worker_wait_s=2.0, max_queued_per_tenant=2)
        await cluster.leader()
        router = await cluster.router(app)
        await router.enqueue("a", timeout_s=0.5)
        refusal = await router.answer()
        assert (refusal.code, refusal.HasField("retry_after_s")) == (Code.DEADLINE_EXCEEDED, False)
        for name in ("b", "c", "d"):
            await router.enqueue(name)
        refusal = await router.answer()
        assert (refusal.request_id, refusal.code) == ("d", Code.RESOURCE_EXHAUSTED)
        assert refusal.retry_after_s > 0
        refusal = await router.answer()
        assert (refusal.code, refusal.message) == (Code.UNAVAILABLE, "no worker is serving")

    play(scenario)


def test_one_bad_request_does_not_harm_the_others_of_its_router() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.worker("w0")
        await cluster.leader()
        router = await cluster.router(app)
        await router.enqueue("a", tenant_id="")
        await router.enqueue("b", timeout_s=float("nan"))
        await router.enqueue("c", sequences=100_000)
        await router.enqueue("e", adapter_uid="../etc")
        await router.enqueue("f", tenant_id="ü/../acme")
        at_faults = {"a": "tenant_id", "b": "timeout_s", "c": "sequences", "e": "adapter_uid", "f": "tenant_id"}
        for name, at_fault in at_faults.items():
            refusal = await router.answer()
            assert (refusal.request_id, refusal.code) == (name, Code.INVALID_ARGUMENT)
            assert at_fault in refusal.message
        await router.enqueue("d", timeout_s=float("inf"), qos_class=77, sequences=0)
        assert (await router.answer()).worker_id == "w0"

    play(scenario)


@pytest.mark.parametrize(
    "message",
    [
        scheduler_pb2.ScheduleRequest(),
        scheduler_pb2.ScheduleRequest(withdraw=scheduler_pb2.Withdraw(request_id="x")),
        scheduler_pb2.ScheduleRequest(hello=scheduler_pb2.RouterHello()),
        scheduler_pb2.ScheduleRequest(
            hello=scheduler_pb2.RouterHello(
                router_id="r0", leases=[scheduler_pb2.HeldLease(request_id="x", tenant_id="../acme")]
            )
        ),
    ],
    ids=["empty", "withdraw", "no name", "a lease of no tenant"],
)
def test_a_stream_begins_with_a_hello(message: scheduler_pb2.ScheduleRequest) -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.leader()
        stream = (await cluster.peer("r0")).connect(app.address).stream(METHODS["Schedule"])
        await stream.write(message)
        with pytest.raises(RpcError) as caught:
            await stream.read()
        assert caught.value.code is Code.INVALID_ARGUMENT
        router = await cluster.router(app)
        hello = scheduler_pb2.RouterHello(router_id="again")
        await router.stream.write(scheduler_pb2.ScheduleRequest(hello=hello))
        with pytest.raises(RpcError) as caught:
            await router.answer()
        assert caught.value.code is Code.INVALID_ARGUMENT

    play(scenario)


def test_a_broken_control_stream_is_dialled_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        worker = await cluster.worker("w0", slots=1)
        await cluster.leader()
        router = await cluster.router(app)
        await router.enqueue("a")
        await router.answer()
        worker.begin("a")
        await router.enqueue("b")
        await asyncio.sleep(0.1)
        worker.break_streams.set()
        worker.running.clear()
        await asyncio.sleep(0.01)
        worker.break_streams.clear()
        assert (await router.answer()).request_id == "b"
        assert len(worker.epochs) >= 2

    play(scenario)


def test_a_worker_that_leaves_gets_nothing_more() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.worker("w0")
        await cluster.leader()
        router = await cluster.router(app)
        await router.enqueue("a")
        await router.answer()
        await cluster.store.delete(keys.worker("w0"))
        await asyncio.sleep(0.1)
        assert app.debug_counters() == {"queued": 0, "granted": 0, "leases": 1, "routers": 1, "workers": 0}
        await router.enqueue("b")
        await cluster.worker("w1")
        assert (await router.answer()).worker_id == "w1"

    play(scenario)


def test_weights_come_from_the_store() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.leader()
        heavy = "tenant_id: heavy\nclasses:\n  standard:\n    weight: 900\n"
        await cluster.store.put(keys.tenant("heavy"), heavy.encode())
        await cluster.store.put(keys.tenant("broken"), b"\xff no policy")
        await cluster.store.put(keys.tenant("light"), TenantPolicy(TenantId("light")).to_yaml().encode())
        await asyncio.sleep(0.1)
        router = await cluster.router(app)
        for i in range(20):
            for tenant in ("light", "heavy", "broken"):
                await router.enqueue(f"{tenant}{i}", tenant_id=tenant)
        await asyncio.sleep(0.1)
        await cluster.worker("w0", slots=20)
        order = [(await router.answer()).request_id for _ in range(20)]
        assert sum(name.startswith("heavy") for name in order) == 18
        assert {name.rstrip("0123456789") for name in order} == {"light", "heavy", "broken"}

    play(scenario)


def test_a_workers_record_with_a_list_for_a_number_costs_no_other_worker_and_no_leader_a_policy() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.leader()
        await cluster.worker("w0", slots=4)
        policy = "tenant_id: acme\nclasses:\n  standard:\n    weight: 900\n"
        await cluster.store.put(keys.tenant("acme"), policy.encode())
        stored = await cluster.store.get(keys.worker("w0"))
        assert stored is not None
        wrong = {**json.loads(stored.value), "worker_id": "w1", "sequence_slots": [4]}
        await cluster.store.put(keys.worker("w1"), json.dumps(wrong).encode())
        await asyncio.sleep(0.1)
        await cluster.store.delete(keys.worker("w1"))
        await cluster.store.put(keys.tenant("acme"), b"tenant_id: other\n")
        await cluster.worker("w2", slots=4)
        await asyncio.sleep(0.1)
        assert app.term is not None
        assert sorted(app.term._workers) == ["w0", "w2"]
        assert app._tenants.values["acme"].in_force == policy.encode()

    play(scenario)


def test_equal_seeds_give_equal_runs() -> None:
    def once() -> str:
        async def main() -> None:
            cluster = Cluster()
            app = await cluster.scheduler("s0")
            await cluster.worker("w0")
            await cluster.leader()
            router = await cluster.router(app)
            for i in range(10):
                await router.enqueue(f"q{i}", timeout_s=3.0)
            await asyncio.sleep(5)
            await app.stop()

        return run(main(), seed=5).digest

    assert once() == once()


def app_over_grpc(server: MemoryStoreServer, transport: GrpcTransport) -> SchedulerApp:
    return SchedulerApp(
        SchedulerConfig(),
        transport=transport,
        store=server.client(),
        telemetry=Telemetry.disabled(),
        rng=random.Random(3),
        peer_secret=SIMULATED,
    )


async def test_over_grpc() -> None:
    server = MemoryStoreServer()
    transport = GrpcTransport()
    app = app_over_grpc(server, transport)
    await app.start()
    worker = ScriptedWorker("w0", transport, slots=64)
    await worker.start(server.client())
    channel = PeerTransport(transport, SIMULATED).connect(app.address)
    try:
        async with asyncio.timeout(10):
            assert app._election is not None
            await app._election.elected()
            await worker.connected.wait()
        router = ScriptedRouter(channel.stream(METHODS["Schedule"]))
        await router.stream.write(scheduler_pb2.ScheduleRequest(hello=scheduler_pb2.RouterHello(router_id="r")))
        assert (await router.stream.read()).hello.epoch == app.term.epoch
        for i in range(64):
            await router.enqueue(f"q{i}")
        assert [(await router.answer()).request_id for _ in range(64)] == [f"q{i}" for i in range(64)]
        router.stream.cancel()
    finally:
        await channel.close()
        await app.stop()
        await worker.server.stop(0)


def test_a_timer_that_is_due_at_once_on_the_services_loop() -> None:
    """Such a timer has no `when` there: the leader ended at the second event after one had been set."""

    async def main() -> None:
        server, transport = MemoryStoreServer(), GrpcTransport()
        app = app_over_grpc(server, transport)
        await app.start()
        worker = ScriptedWorker("w0", transport, slots=1)
        await worker.start(server.client())
        try:
            async with asyncio.timeout(10):
                await worker.connected.wait()
                term = app.term
                assert term is not None
                now, over = asyncio.get_running_loop().time(), asyncio.Event()
                wakeups = [now, now, now + 0.001]

                def next_wakeup() -> float | None:
                    if wakeups:
                        return wakeups.pop(0)
                    over.set()
                    return None

                term.quotas.next_wakeup = next_wakeup  # type: ignore[method-assign]
                term.post(Tick())
                term.post(Tick())
                await over.wait()  # each timer sets the next
        finally:
            await app.stop()
            await worker.server.stop(0)

    service_loop.run(main())


def test_who_does_not_show_the_clusters_secret_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.leader()
        for metadata in ({}, {"x-manylora-peer": ""}, {"x-manylora-peer": "0" * 64}):
            channel = cluster.network.transport("stranger").connect(app.address)
            stream = channel.stream(METHODS["Schedule"], metadata=metadata)
            with pytest.raises(RpcError) as error:
                await stream.read()
            assert error.value.code is Code.UNAUTHENTICATED
            request = scheduler_pb2.GetSchedulerStatusRequest()
            with pytest.raises(RpcError) as error:
                await channel.call(METHODS["GetSchedulerStatus"], request, metadata=metadata)
            assert error.value.code is Code.UNAUTHENTICATED
        assert app.term is not None
        assert app.term.num_routers == 0

    play(scenario)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--listen", "0.0.0.0"], "--listen"),
        (["--lease-ttl-s", "1"], "--lease-ttl-s"),
        (["--max-queued", "0"], "--max-queued"),
        (["--max-queued-per-tenant", "0"], "--max-queued-per-tenant"),
        (["--worker-wait-s", "-1"], "--worker-wait-s"),
        (["--order", "arrival"], "--order"),
        (["--no-overload"], "--no-overload"),
    ],
)
def test_bad_settings_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(SchedulerConfig, flags, {})


def test_a_worker_that_computes_another_model_gets_no_work_while_the_pool_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.worker("w0", slots=1)
        stray = await cluster.worker("w1", slots=8, digest="e")
        await cluster.leader()
        router = await cluster.router(app)
        for name in ("a", "b"):
            await router.enqueue(name)
        assert (await router.answer()).worker_id == "w0"
        await asyncio.sleep(1.0)
        assert stray.epochs == [], "not even dialled"
        assert app.debug_counters()["workers"] == 1
        await cluster.store.delete(keys.worker("w0"))
        assert (await router.answer()).worker_id == "w1"
        assert len(stray.epochs) == 1

    play(scenario)
    kept_out = [record for record in caplog.records if "kept out of the pool" in record.getMessage()]
    assert len(kept_out) == 1, "said once"
    assert "base model m (e), the pool's is m (d)" in kept_out[0].getMessage()
