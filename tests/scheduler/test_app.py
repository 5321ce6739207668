"""The scheduler's shell over the in-memory network and store, in virtual time; once over gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from manylora.v1 import common_pb2, scheduler_pb2, worker_pb2
from manylora_scheduler.app import SchedulerApp
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.config import ConfigError, parse
from manylora_shared.coordination import keys
from manylora_shared.coordination.memory import MemoryStoreServer
from manylora_shared.coordination.records import SchedulerRecord, WorkerRecord
from manylora_shared.errors import Code, RpcError
from manylora_shared.fair_queue import TAG_SCALE
from manylora_shared.ids import TenantId
from manylora_shared.peers import PeerSecret, PeerTransport
from manylora_shared.policy import TenantPolicy
from manylora_shared.simulation.loop import run
from manylora_shared.telemetry import Attribute, MetricName, SpanName, Telemetry
from manylora_shared.transport.base import Service, Stream, Transport, methods_of
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_shared.transport.memory import MemoryNetwork

from tests.scheduler.helpers import flow

KV_BLOCK_BYTES = 4096
_METHODS = methods_of(scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"])
_WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class ScriptedWorker:
    """Serves Control alone: says what a test tells it to, and keeps what it is told."""

    def __init__(self, worker_id: str, transport: Transport, slots: int = 2) -> None:
        self.worker_id = worker_id
        self.slots = slots
        self.epochs: list[int] = []
        self.prefetched: list[str] = []
        self.running: list[str] = []
        self.output_tokens = 0
        """Of acme's standard class, in all."""
        self.setbacks: list[worker_pb2.Setbacks] = []
        """In its snapshots."""
        self.break_streams = asyncio.Event()
        self.connected = asyncio.Event()
        self._transport = transport
        self._outboxes: list[asyncio.Queue[worker_pb2.ControlReport]] = []

    async def start(self, store: Any) -> None:
        async def unused(request: Any, call: Any) -> None:
            raise NotImplementedError

        names = [m.name for m in _WORKER.methods if m.name != "Control"]
        service = Service(_WORKER, {**dict.fromkeys(names, unused), "Control": self.control})
        self.server = await self._transport.serve("127.0.0.1:0", [service])
        record = WorkerRecord(
            worker_id=self.worker_id,
            address=self.server.address,
            device="cpu",
            model_name="m",
            model_digest="d",
            vocab_size=10,
            max_context_tokens=100,
            sequence_slots=self.slots,
            max_lora_rank=8,
        )
        await store.put(keys.worker(self.worker_id), record.to_json())

    async def control(self, requests: Any, call: Any) -> AsyncIterator[worker_pb2.ControlReport]:
        hello = await anext(aiter(requests))
        self.epochs.append(hello.hello.epoch)
        outbox: asyncio.Queue[worker_pb2.ControlReport] = asyncio.Queue()
        self._outboxes.append(outbox)
        self.connected.set()

        async def read() -> None:
            async for command in requests:
                self.prefetched.append(command.prefetch.adapter_uid)

        reader = asyncio.create_task(read())
        broken = asyncio.create_task(self.break_streams.wait())
        try:
            yield self._report(snapshot=True)
            while True:
                ready = asyncio.create_task(outbox.get())
                await asyncio.wait([ready, broken], return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    ready.cancel()
                    return
                yield ready.result()
        finally:
            for task in (reader, broken):
                task.cancel()
            self._outboxes.remove(outbox)

    def begin(self, request_id: str) -> None:
        self.running.append(request_id)
        self._send(started=[worker_pb2.RunningRequest(request_id=request_id, tenant_id="acme", sequences=1)])

    def end(self, request_id: str) -> None:
        self.running.remove(request_id)
        self._send(finished_request_ids=[request_id])

    def compute(self, tokens: int) -> None:
        self.output_tokens += tokens
        self._send()

    def _send(self, **what: Any) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(self._report(**what))

    def _report(self, *, snapshot: bool = False, **what: Any) -> worker_pb2.ControlReport:
        if snapshot:
            what["setbacks"] = self.setbacks
            what["kv_block_bytes"] = KV_BLOCK_BYTES
            what["started"] = [
                worker_pb2.RunningRequest(request_id=r, tenant_id="acme", sequences=1) for r in self.running
            ]
        counter = worker_pb2.FlowCounter(tenant_id="acme", output_tokens=self.output_tokens)
        return worker_pb2.ControlReport(
            flows=[counter] if self.output_tokens else [],
            snapshot=snapshot,
            sequence_slots=self.slots,
            running_sequences=len(self.running),
            kv_blocks_total=100,
            kv_blocks_free=100,
            block_size=16,
            **what,
        )


@dataclass
class ScriptedRouter:
    """One Schedule stream."""

    stream: Stream
    epoch: int = 0
    received: list[Any] = field(default_factory=list)
    overloads: list[Any] = field(default_factory=list)

    @classmethod
    async def connect(cls, transport: Transport, address: str, router_id: str = "r0") -> ScriptedRouter:
        router = cls(transport.connect(address).stream(_METHODS["Schedule"]))
        hello = scheduler_pb2.RouterHello(router_id=router_id)
        await router.stream.write(scheduler_pb2.ScheduleRequest(hello=hello))
        router.epoch = (await router.stream.read()).hello.epoch
        return router

    async def enqueue(self, request_id: str, **what: Any) -> None:
        sent = {"tenant_id": "acme", "prompt_tokens": 5, "max_new_tokens": 5, "sequences": 1} | what
        await self.stream.write(
            scheduler_pb2.ScheduleRequest(enqueue=scheduler_pb2.Enqueue(request_id=request_id, **sent))
        )

    async def answer(self, timeout_s: float = 5.0) -> Any:
        """The next message that is about a request."""
        async with asyncio.timeout(timeout_s):
            message = await self.stream.read()
            while message is not None and message.WhichOneof("event") == "overload":
                self.overloads.append(message.overload)
                message = await self.stream.read()
        return getattr(message, message.WhichOneof("event")) if message is not None else None


class Cluster:
    """Virtual network and store, and whatever a test starts on them."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.network = MemoryNetwork(self.rng)
        self.store_server = MemoryStoreServer(self.rng)
        self.store = self.store_server.client()
        self.apps: list[SchedulerApp] = []

    async def scheduler(self, name: str, *, telemetry: Telemetry | None = None, **config: Any) -> SchedulerApp:
        app = SchedulerApp(
            SchedulerConfig(scheduler_id=name, **config),
            transport=self.network.transport(name),
            store=self.store_server.client(),
            telemetry=telemetry or Telemetry.disabled(),
            rng=self.rng,
        )
        await app.start()
        self.apps.append(app)
        return app

    async def worker(self, name: str, slots: int = 2) -> ScriptedWorker:
        worker = ScriptedWorker(name, self.network.transport(name), slots)
        await worker.start(self.store)
        return worker

    async def router(self, app: SchedulerApp, name: str = "r0") -> ScriptedRouter:
        return await ScriptedRouter.connect(await self.peer(name), app.address, name)

    async def peer(self, name: str) -> Transport:
        """The network as one of the cluster's services has it."""
        secret = PeerSecret()
        await secret.load(self.store, self.rng.getrandbits)
        return PeerTransport(self.network.transport(name), secret)

    async def leader(self, *, other_than: SchedulerApp | None = None) -> SchedulerApp:
        async with asyncio.timeout(20):
            while True:
                for app in self.apps:
                    if app is not other_than and app.term is not None and app.term.is_leading:
                        return app
                await asyncio.sleep(0.01)


Scenario = Callable[[Cluster], Awaitable[None]]


def play(scenario: Scenario) -> None:
    """Runs a scenario in virtual time; everything that it started is stopped, and nothing may be left."""

    async def main() -> None:
        cluster = Cluster()
        await scenario(cluster)
        for app in cluster.apps:
            await app.stop()
        await asyncio.sleep(10)
        assert not cluster.store_server.leases
        names = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not [name for name in names if name.startswith(("control", "commands", "router", "leadership"))]

    run(main(), seed=1)


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
            .call(_METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
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
        stream = (await cluster.peer("r0")).connect(app.address).stream(_METHODS["Schedule"])
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


def test_a_standby_refuses_and_takes_over_with_a_higher_epoch() -> None:
    async def scenario(cluster: Cluster) -> None:
        first = await cluster.scheduler("s0")
        await cluster.leader()
        second = await cluster.scheduler("s1")
        worker = await cluster.worker("w0", slots=1)
        with pytest.raises(RpcError) as caught:
            await cluster.router(second)
        assert caught.value.code is Code.UNAVAILABLE
        assert "not the leader" in caught.value.message
        router = await cluster.router(first)
        await router.enqueue("a")
        await router.answer()
        worker.begin("a")
        await first.stop()
        cluster.apps.remove(first)
        with pytest.raises(RpcError) as caught:
            await router.answer()
        assert caught.value.code is Code.UNAVAILABLE
        assert await cluster.leader() is second
        record = await cluster.store.get(keys.SCHEDULER_LEADER)
        assert record is not None
        assert SchedulerRecord.from_json(record.value).address == second.address
        again = await cluster.router(second)
        assert again.epoch > router.epoch
        await again.enqueue("b")
        with pytest.raises(TimeoutError):
            await again.answer(1.0)  # a still runs, as the worker told the new leader
        assert worker.epochs == [router.epoch, again.epoch]

    play(scenario)


def test_a_leader_that_cannot_reach_the_store_stops_granting() -> None:
    async def scenario(cluster: Cluster) -> None:
        first = await cluster.scheduler("s0")
        await cluster.leader()
        second = await cluster.scheduler("s1")
        await cluster.worker("w0")
        router = await cluster.router(first)
        first._store.set_reachable(False)  # type: ignore[attr-defined]
        cut_at = asyncio.get_running_loop().time()
        with pytest.raises(RpcError) as caught:
            await router.answer(10.0)
        assert caught.value.code is Code.UNAVAILABLE
        assert asyncio.get_running_loop().time() - cut_at <= 2.5
        assert await cluster.leader(other_than=first) is second
        assert first.term is None or not first.term.is_leading
        first._store.set_reachable(True)  # type: ignore[attr-defined]
        await asyncio.sleep(5)
        assert first.term is None

    play(scenario)


@pytest.mark.parametrize("planned", [True, False])
def test_the_next_leader_has_the_last_ones_clock(planned: bool) -> None:
    """The store has the clock as of the last second or, where the leader was stopped, as of its end; the workers'
    counters have the rest."""

    async def scenario(cluster: Cluster) -> None:
        first = await cluster.scheduler("s0")
        await cluster.leader()
        second = await cluster.scheduler("s1")
        worker = await cluster.worker("w0", slots=1)
        router = await cluster.router(first)
        for request_id in ("a", "b", "c"):
            await router.enqueue(request_id)
        assert (await router.answer()).request_id == "a"
        worker.begin("a")
        worker.compute(1_000)
        await asyncio.sleep(2.5)
        worker.compute(500)
        await asyncio.sleep(0.1)
        assert first.term is not None
        queue = first.term.core._queue
        tag = queue.tag_of(flow())
        assert tag > 2 * 1_500 * TAG_SCALE // 2 - TAG_SCALE
        if planned:
            await first.stop()
            cluster.apps.remove(first)
        else:
            first._store.set_reachable(False)  # type: ignore[attr-defined]
        worker.output_tokens += 77  # done while nobody led
        assert await cluster.leader(other_than=first) is second
        router = await cluster.router(second)
        for request_id in ("b", "c"):
            await router.enqueue(request_id)
        await asyncio.sleep(1.0)
        assert second.term is not None
        assert not second.term.core.is_restoring
        queue = second.term.core._queue
        assert queue.tag_of(flow()) == tag + 2 * 77 * (TAG_SCALE // 2)
        assert queue.virtual_time <= queue.tag_of(flow())
        if not planned:
            first._store.set_reachable(True)  # type: ignore[attr-defined]
            await asyncio.sleep(5)
        worker.end("a")
        assert (await router.answer()).request_id == "b"

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


def test_every_request_has_its_spans() -> None:
    telemetry = Telemetry.recording("scheduler")
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0", telemetry=telemetry)
        await cluster.worker("w0")
        await cluster.leader()
        router = await cluster.router(app)
        await router.enqueue(
            "a", traceparent=parent, adapter_uid="cd" * 32, adapter_id="upper", qos_class=common_pb2.QOS_CLASS_BATCH
        )
        await router.answer()
        await router.enqueue("late", timeout_s=0.0, traceparent=parent)
        await router.answer()

    play(scenario)
    queue, placement, late = sorted(telemetry.recorded(), key=lambda s: (s["status"]["code"] == "ERROR", s["start_ns"]))
    assert [queue["name"], placement["name"], late["name"]] == [SpanName.QUEUE, SpanName.PLACEMENT, SpanName.QUEUE]
    for span in (queue, placement, late):
        assert span["trace_id"] == "0123456789abcdef0123456789abcdef"
        assert span["attributes"][Attribute.TENANT_ID] == "acme"
    for span in (queue, placement):
        assert span["attributes"][Attribute.ADAPTER_ID] == "upper"
        assert span["attributes"][Attribute.ADAPTER_VERSION] == "cd" * 32
        assert span["attributes"][Attribute.QOS_CLASS] == "batch"
    assert (queue["parent_id"], placement["parent_id"]) == ("0123456789abcdef", queue["span_id"])
    assert placement["attributes"][Attribute.WORKER_ID] == "w0"
    assert placement["attributes"][Attribute.ADAPTER_RESIDENT] is False
    assert late["attributes"]["error.type"] == "DEADLINE_EXCEEDED"


def test_tenants_adapters_are_summed_in_the_status_and_counted_in_metrics() -> None:
    telemetry = Telemetry.recording("scheduler")

    def pinned(name: str, *, on_device: bool, problem: str = "") -> worker_pb2.PinnedAdapter:
        return worker_pb2.PinnedAdapter(name=name, adapter_uid="uid", on_device=on_device, problem=problem)

    def memory(tenant: str = "acme", evictions: int = 0, **more: Any) -> worker_pb2.TenantMemory:
        return worker_pb2.TenantMemory(
            tenant_id=tenant, adapter_device_bytes=10, adapter_host_bytes=20, adapter_evictions=evictions, **more
        )

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0", telemetry=telemetry)
        first, second = await cluster.worker("w0"), await cluster.worker("w1")
        await cluster.leader()
        await asyncio.sleep(1.0)
        first._send(tenants=[memory(evictions=5, adapter_displaced=2, pins=[pinned("a", on_device=True)])])
        pins = [pinned("a", on_device=False, problem="the file is gone"), pinned("b", on_device=False)]
        second._send(tenants=[memory(evictions=1, pins=pins), memory("birch")])
        await asyncio.sleep(2.0)
        first._send(tenants=[memory(evictions=8, adapter_displaced=2, pins=[pinned("a", on_device=True)])])
        second._send(tenants=[worker_pb2.TenantMemory(tenant_id="birch")])
        await asyncio.sleep(2.0)
        channel = (await cluster.peer("status")).connect(app.address)
        answer = await channel.call(_METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
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
        kind: metrics[MetricName.ADAPTER_EVICTIONS, frozenset({(Attribute.KIND, kind)})]
        for kind in ("own", "displaced")
    }
    assert counted == {"own": 7, "displaced": 2}
    assert metrics[MetricName.UNMET_PINS, frozenset()] == 2


def test_the_kv_of_tenants_is_told_for_the_workers_whose_streams_are_up() -> None:
    def kv(tenant: str, blocks: int) -> worker_pb2.TenantMemory:
        return worker_pb2.TenantMemory(tenant_id=tenant, kv_blocks=blocks)

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        first, second = await cluster.worker("w0"), await cluster.worker("w1")
        await cluster.leader()
        channel = (await cluster.peer("status")).connect(app.address)

        async def told() -> dict[str, tuple[int, int]]:
            await asyncio.sleep(1.0)
            answer = await channel.call(_METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
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
    def setbacks(tenant: str, *counts: int) -> worker_pb2.Setbacks:
        names = ("preemptions", "swaps_out", "evictions", "recomputed_tokens")
        return worker_pb2.Setbacks(tenant_id=tenant, **dict(zip(names, counts, strict=True)))

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        first, second = await cluster.worker("w0"), await cluster.worker("w1")
        first.setbacks = [setbacks("birch", 1, 0, 0, 0)]
        await cluster.leader()
        channel = (await cluster.peer("status")).connect(app.address)

        async def told() -> dict[str, tuple[int, ...]]:
            await asyncio.sleep(1.0)
            answer = await channel.call(_METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
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
        await router.enqueue("batch", tenant_id="c", qos_class=common_pb2.QOS_CLASS_BATCH)
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
        answer = await channel.call(_METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())
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
    assert metrics[MetricName.OVERLOAD_LEVEL, frozenset()] > 48
    batch = {
        dict(attributes)[Attribute.STAGE]: value
        for (name, attributes), value in metrics.items()
        if name == MetricName.OVERLOAD_GIVEN_UP and dict(attributes)[Attribute.QOS_CLASS] == "batch"
    }
    assert batch == {"router": 7, "admission": 1, "queue": 1}


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


async def test_over_grpc() -> None:
    server = MemoryStoreServer()
    transport = GrpcTransport()
    app = SchedulerApp(
        SchedulerConfig(),
        transport=transport,
        store=server.client(),
        telemetry=Telemetry.disabled(),
        rng=random.Random(3),
    )
    await app.start()
    worker = ScriptedWorker("w0", transport, slots=64)
    await worker.start(server.client())
    secret = PeerSecret()
    await secret.load(server.client(), app._rng.getrandbits)
    channel = PeerTransport(transport, secret).connect(app.address)
    try:
        async with asyncio.timeout(10):
            assert app._election is not None
            await app._election.elected()
            await worker.connected.wait()
        router = ScriptedRouter(channel.stream(_METHODS["Schedule"]))
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


def test_who_does_not_show_the_clusters_secret_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        await cluster.leader()
        for metadata in ({}, {"x-manylora-peer": ""}, {"x-manylora-peer": "0" * 64}):
            channel = cluster.network.transport("stranger").connect(app.address)
            stream = channel.stream(_METHODS["Schedule"], metadata=metadata)
            with pytest.raises(RpcError) as error:
                await stream.read()
            assert error.value.code is Code.UNAUTHENTICATED
            request = scheduler_pb2.GetSchedulerStatusRequest()
            with pytest.raises(RpcError) as error:
                await channel.call(_METHODS["GetSchedulerStatus"], request, metadata=metadata)
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
        (["--order", "random"], "--order"),
    ],
)
def test_bad_settings_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(SchedulerConfig, flags, {})
