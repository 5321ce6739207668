"""Schedulers on an in-memory network and store, in virtual time; workers and routers say what a test tells them to."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from manylora.v1 import scheduler_pb2, status_pb2, worker_pb2
from manylora_scheduler.app import SchedulerApp
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.coordination import keys
from manylora_shared.coordination.peers import PeerTransport
from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.errors import Unready
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.base import Service, Stream, Transport, methods_of
from manylora_sim.loop import run
from manylora_sim.network import MemoryNetwork
from manylora_sim.peers import SIMULATED
from manylora_sim.store import MemoryStoreServer

KV_BLOCK_BYTES = 4096
METHODS = methods_of(scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"])
_WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class ScriptedWorker:
    """Serves Control alone: says what a test tells it to, keeps what it is told, and obeys the greatest epoch."""

    def __init__(
        self, worker_id: str, transport: Transport, slots: int = 2, digest: str = "d", pool: str = "default"
    ) -> None:
        self.worker_id = worker_id
        self.digest = digest
        self.pool = pool
        self.slots = slots
        self.epochs: list[int] = []
        self.prefetched: list[str] = []
        self.dedicated: list[tuple[str, str]] = []
        """Adapter and tenant, as it was told; it obeys at once."""
        self.running: list[str] = []
        self.output_tokens = 0
        """Of acme's standard class, in all."""
        self.setbacks: list[status_pb2.TenantSetbacks] = []
        """In its snapshots."""
        self.break_streams = asyncio.Event()
        self.connected = asyncio.Event()
        self._taken_over = asyncio.Event()
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
            model_digest=self.digest,
            vocab_size=10,
            max_context_tokens=100,
            sequence_slots=self.slots,
            max_lora_rank=8,
            pool=self.pool,
            merge_problem="",
        )
        await store.put(keys.worker(self.worker_id), record.to_json())

    async def control(self, requests: Any, call: Any) -> AsyncIterator[worker_pb2.ControlReport]:
        hello = await anext(aiter(requests))
        if hello.hello.epoch < max(self.epochs, default=0):
            raise Unready("the epoch is over")
        self.epochs.append(hello.hello.epoch)
        outbox: asyncio.Queue[worker_pb2.ControlReport] = asyncio.Queue()
        self._outboxes.append(outbox)
        self.connected.set()

        async def read() -> None:
            async for command in requests:
                if command.HasField("dedicate"):
                    owner = command.dedicate
                    self.dedicated.append((owner.adapter_uid, owner.tenant_id))
                    told = worker_pb2.Dedication(
                        adapter_uid=owner.adapter_uid, tenant_id=owner.tenant_id, is_ready=True
                    )
                    self._send(dedication=told)
                else:
                    self.prefetched.append(command.prefetch.adapter_uid)

        reader = asyncio.create_task(read())
        broken = asyncio.create_task(self.break_streams.wait())
        self._taken_over.set()
        self._taken_over = asyncio.Event()
        taken = asyncio.create_task(self._taken_over.wait())
        try:
            yield self._report(snapshot=True)
            while True:
                ready = asyncio.create_task(outbox.get())
                await asyncio.wait([ready, broken, taken], return_when=asyncio.FIRST_COMPLETED)
                if taken.done():
                    ready.cancel()
                    raise Unready("another leader has taken over")
                if broken.done():
                    ready.cancel()
                    return
                yield ready.result()
        finally:
            for task in (reader, broken, taken):
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
            uid, tenant_id = self.dedicated[-1] if self.dedicated else ("", "")
            what["dedication"] = worker_pb2.Dedication(adapter_uid=uid, tenant_id=tenant_id, is_ready=True)
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
    _unread: deque[Any] = field(default_factory=deque)

    @classmethod
    async def connect(cls, transport: Transport, address: str, router_id: str = "r0") -> ScriptedRouter:
        router = cls(transport.connect(address).stream(METHODS["Schedule"]))
        hello = scheduler_pb2.RouterHello(router_id=router_id)
        await router.stream.write(scheduler_pb2.ScheduleRequest(hello=hello))
        router.epoch = (await router.stream.read()).hello.epoch
        return router

    async def enqueue(self, request_id: str, **what: Any) -> None:
        sent = {"tenant_id": "acme", "prompt_tokens": 5, "max_new_tokens": 5, "sequences": 1} | what
        await self.stream.write(
            scheduler_pb2.ScheduleRequest(enqueue=scheduler_pb2.Enqueue(request_id=request_id, **sent))
        )

    async def close(self, request_id: str) -> None:
        closed = scheduler_pb2.GrantClosed(request_id=request_id, worker_id="w0", reached_worker=True)
        await self.stream.write(scheduler_pb2.ScheduleRequest(grant_closed=closed))

    async def answer(self, timeout_s: float = 5.0) -> Any:
        """The next message that is about a request."""
        async with asyncio.timeout(timeout_s):
            message = await self._next()
            while message is not None and message.WhichOneof("event") == "overload":
                self.overloads.append(message.overload)
                message = await self._next()
        return getattr(message, message.WhichOneof("event")) if message is not None else None

    async def _next(self) -> Any:
        if not self._unread:
            received = await self.stream.read()
            if received is None:
                return None
            self._unread.extend(received.more or (received,))
        return self._unread.popleft()


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
            peer_secret=SIMULATED,
        )
        await app.start()
        self.apps.append(app)
        return app

    async def worker(self, name: str, slots: int = 2, digest: str = "d") -> ScriptedWorker:
        worker = ScriptedWorker(name, self.network.transport(name), slots, digest)
        await worker.start(self.store)
        return worker

    async def router(self, app: SchedulerApp, name: str = "r0") -> ScriptedRouter:
        return await ScriptedRouter.connect(await self.peer(name), app.address, name)

    async def peer(self, name: str) -> Transport:
        """The network as one of the cluster's services has it."""
        return PeerTransport(self.network.transport(name), SIMULATED)

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
