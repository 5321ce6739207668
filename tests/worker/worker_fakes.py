"""A worker over the fake engine, in this process, and its callers: a router and a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from manylora.v1 import common_pb2, status_pb2, worker_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.peers import PeerTransport
from manylora_shared.errors import RpcError
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.base import Channel, Stream, Transport, methods_of
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner, FakeValidator
from manylora_sim.loop_runtime import LoopRuntime
from manylora_sim.network import MemoryNetwork
from manylora_sim.peers import SIMULATED
from manylora_sim.store import MemoryStoreServer
from manylora_sim.worker import FakeWorkerConfig
from manylora_worker.app import WorkerApp
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.engine import engine_limits, prefix_options
from manylora_worker.hosting.runtime import Mailbox, Runtime, ThreadRuntime
from manylora_worker.kinds.api import AdapterTier, EngineRequest, Sampling, StepBatch
from manylora_worker.models.parts import ModelInfo

METHODS = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])
EXECUTE, STOP_CHOICE, END_REQUEST = METHODS["Execute"], METHODS["StopChoice"], METHODS["EndRequest"]
VALIDATE, CONTROL = METHODS["ValidateAdapter"], METHODS["Control"]
MODEL = ModelInfo(
    "tiny", "digest", "none", vocab_size=259, max_context_tokens=8192, eos_token_ids=(0,), kv_block_bytes=1 << 18
)
UID = AdapterUid("ab" * 32)
OTHER_UID = AdapterUid("cd" * 32)


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds, for some seconds at most."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def config(**changes: Any) -> FakeWorkerConfig:
    settings: dict[str, Any] = {
        "worker_id": "w",
        "sequence_slots": 8,
        "max_batch_tokens": 64,
        "prefill_chunk_tokens": 32,
        "num_blocks": 4096,
        "max_frames_per_s": 1000,
        "drain_s": 0.5,
    }
    return FakeWorkerConfig(**(settings | changes))


@dataclass
class Engine:
    """A runtime and what is under it."""

    runtime: Runtime
    mailbox: Mailbox
    """Of a thread's runtime."""
    core: EngineCore
    runner: FakeRunner
    backend: FakeAdapterBackend

    def assert_empty(self) -> None:
        stats = self.core.stats()
        assert (stats.requests, stats.sequences, stats.running_sequences) == (0, 0, 0)
        assert stats.blocks_free == stats.blocks_total
        assert not self.runtime.view.running
        assert not self.runner.faults
        self.core.check_invariants()


def make_engine(
    settings: WorkerConfig,
    *,
    threaded: bool = False,
    step_s: float = 0.001,
    load_s: float = 0.0,
    error_of: Callable[[AdapterUid, AdapterTier], str | None] = lambda uid, tier: None,
    eos_token_id: int | None = None,
    model: ModelInfo = MODEL,
) -> Engine:
    def pace(batch: StepBatch) -> None:
        time.sleep(step_s)

    clock = time.monotonic if threaded else lambda: asyncio.get_running_loop().time()
    runner = FakeRunner(
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_context_tokens,
        eos_token_id=eos_token_id,
        pace=pace if threaded and step_s else None,
        num_host_blocks=settings.host_kv_bytes // model.kv_block_bytes,
        block_copy_s=1e-9,
        copy_polls=1,
    )
    backend = FakeAdapterBackend(clock, load_s=lambda uid, tier: load_s, error_of=error_of)
    limits = engine_limits(settings)
    core = EngineCore(runner, backend, limits, prefix_options(settings, model, secret=bytes(32)))
    runner.tenant_of = core.tenant_of
    runner.adapters_on_device = lambda: backend.on_device
    runtime: Runtime
    mailbox = Mailbox()
    if threaded:
        runtime = ThreadRuntime(core, backend, model, mailbox, max_requests=limits.max_requests)
    else:
        loop_runtime = LoopRuntime(core, backend, model, max_requests=limits.max_requests, step_s=lambda batch: step_s)
        backend.when_due = lambda due: asyncio.get_running_loop().call_at(due, loop_runtime.wake)
        runtime = loop_runtime
    return Engine(runtime, mailbox, core, runner, backend)


@dataclass
class Worker:
    app: WorkerApp
    engine: Engine
    channel: Channel
    transport: Transport
    store: MemoryStoreServer

    def execute(self, message: worker_pb2.ExecuteRequest, *, metadata: dict[str, str] | None = None) -> Stream:
        return self.channel.stream(EXECUTE, message, metadata=metadata)

    def control(self) -> Stream:
        return self.channel.stream(CONTROL)


@contextlib.asynccontextmanager
async def running_worker(
    *,
    settings: WorkerConfig | None = None,
    transport: Transport | None = None,
    engine: Engine | None = None,
    telemetry: Telemetry | None = None,
    validate: FakeValidator | None = None,
    policies: Mapping[str, bytes] | None = None,
    store: MemoryStoreServer | None = None,
    **engine_options: Any,
) -> AsyncIterator[Worker]:
    """A started worker, tenants' policies in its store; at the end it is stopped, and nothing may be left in it."""
    settings = settings or config()
    engine = engine or make_engine(settings, **engine_options)
    rng = random.Random(1)
    store = store or MemoryStoreServer(rng)
    for tenant, text in (policies or {}).items():
        await store.client().put(keys.tenant(tenant), text)
    transport = transport or MemoryNetwork(rng).transport("worker")
    app = WorkerApp(
        settings,
        transport=transport,
        store=store.client(),
        runtime=engine.runtime,
        validate=validate or FakeValidator(),
        telemetry=telemetry or Telemetry.disabled(),
        rng=rng,
        peer_secret=SIMULATED,
        started_unix_s=0.0,
    )
    await app.start()
    transport = PeerTransport(transport, SIMULATED)
    channel = transport.connect(app.address)
    try:
        yield Worker(app, engine, channel, transport, store)
    finally:
        await channel.close()
        await app.stop()
        if engine.runtime.view.failure is None:
            engine.assert_empty()
        assert engine.backend.is_closed


def message(request_id: str = "r1", **changes: Any) -> worker_pb2.ExecuteRequest:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "epoch": 1,
        "tenant_id": "acme",
        "qos_class": common_pb2.QOS_CLASS_STANDARD,
        "prompt_token_ids": [5, 6, 7],
        "max_tokens": 8,
        "sampling": common_pb2.SamplingParams(seed=3),
        "n": 1,
    }
    return worker_pb2.ExecuteRequest(**(fields | changes))


def request(request_id: str = "r1", **changes: Any) -> EngineRequest:
    fields: dict[str, Any] = {
        "request_id": RequestId(request_id),
        "tenant_id": TenantId("acme"),
        "qos_class": QosClass.STANDARD,
        "adapter_uid": None,
        "prompt_token_ids": (5, 6, 7),
        "max_tokens": 8,
        "sampling": Sampling(seed=3),
    }
    return EngineRequest(**(fields | changes))


@dataclass
class Result:
    """What an Execute stream brought, its numbering checked."""

    tokens: dict[int, list[int]]
    finish: dict[int, int]
    stop_token_ids: dict[int, int]
    finished: worker_pb2.ExecuteFinished
    token_frames: int


async def collect(stream: Stream, emitted: Mapping[int, int] | None = None) -> Result:
    """`emitted`: tokens by choice that it goes on behind."""
    tokens: dict[int, list[int]] = {}
    finish: dict[int, int] = {}
    stops: dict[int, int] = {}
    finished: worker_pb2.ExecuteFinished | None = None
    number = 0
    token_frames = 0
    while (frame := await stream.read()) is not None:
        assert finished is None, "a frame after the last"
        assert frame.frame == number
        number += 1
        event = frame.WhichOneof("event")
        assert (event == "started") == (frame.frame == 0)
        if event == "tokens":
            token_frames += 1
            for choice in frame.tokens.choices:
                assert choice.choice not in finish
                known = tokens.setdefault(choice.choice, [])
                assert choice.first_position == len(known) + (emitted or {}).get(choice.choice, 0)
                known += choice.token_ids
                if choice.finish_reason:
                    finish[choice.choice] = choice.finish_reason
                if choice.HasField("stop_token_id"):
                    stops[choice.choice] = choice.stop_token_id
        elif event == "finished":
            finished = frame.finished
    assert finished is not None
    return Result(tokens, finish, stops, finished, token_frames)


async def collect_rest(stream: Stream) -> dict[int, int]:
    """How many tokens a stream that was begun still brings, for each of up to two choices."""
    counts: dict[int, int] = {0: 0, 1: 0}
    while (frame := await stream.read()) is not None:
        for choice in frame.tokens.choices:
            counts[choice.choice] += len(choice.token_ids)
    return counts


async def refused(call: Awaitable[Any]) -> RpcError:
    with pytest.raises(RpcError) as error:
        await call
    return error.value


class Scheduler:
    """Reads one Control stream and folds its reports."""

    def __init__(self, worker: Worker) -> None:
        self.stream = worker.control()
        self.reports: list[worker_pb2.ControlReport] = []
        self.running: dict[str, int] = {}
        self.adapters: dict[str, int] = {}
        self.flows: dict[tuple[str, int], tuple[int, int]] = {}
        self.kv_blocks: dict[str, int] = {}
        self.setbacks: dict[str, status_pb2.TenantSetbacks] = {}
        self.times: list[float] = []

    async def hello(self, epoch: int) -> None:
        await self.send(hello=worker_pb2.ControlHello(epoch=epoch, scheduler_id="s"))

    async def send(self, **command: Any) -> None:
        await self.stream.write(worker_pb2.ControlCommand(**command))

    async def read(self) -> worker_pb2.ControlReport:
        report: worker_pb2.ControlReport = await self.stream.read()
        self.times.append(asyncio.get_running_loop().time())
        self.reports.append(report)
        if report.snapshot:
            self.running.clear()
            self.adapters.clear()
        for started in report.started:
            self.running[started.request_id] = started.sequences
        for request_id in report.finished_request_ids:
            del self.running[request_id]
        for adapter in report.adapters:
            if adapter.tier:
                self.adapters[adapter.adapter_uid] = adapter.tier
            else:
                del self.adapters[adapter.adapter_uid]
        for tenant in report.tenants:
            self.kv_blocks[tenant.tenant_id] = tenant.kv_blocks
        for setbacks in report.setbacks:
            self.setbacks[setbacks.tenant_id] = setbacks
        for flow in report.flows:
            self.flows[flow.tenant_id, flow.qos_class] = (flow.prompt_tokens, flow.output_tokens)
        return report

    async def read_until(self, condition: Callable[[worker_pb2.ControlReport], bool]) -> worker_pb2.ControlReport:
        async with asyncio.timeout(60):
            while True:
                report = await self.read()
                if condition(report):
                    return report
