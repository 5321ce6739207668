"""A RouterApp on the in-memory network and store, between a scheduler and workers that do what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.v1 import admin_pb2, common_pb2, inference_pb2, scheduler_pb2, status_pb2, worker_pb2
from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_router.guard.admission import Prompt, RequestInput, TextPrompt
from manylora_router.text.service import TextService
from manylora_shared.audit.entries import Signer
from manylora_shared.audit.log import AuditLog
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord, KeyRecord, SchedulerRecord, WorkerRecord
from manylora_shared.errors import Code, RpcError
from manylora_shared.telemetry import Telemetry
from manylora_shared.tenancy.identity import bearer, new_key, split_key
from manylora_shared.tenancy.roles import TENANT_ROLES, Role
from manylora_shared.transport.base import Channel, Method, Server, ServerCall, Service, Stream, methods_of
from manylora_sim import loop as simulation
from manylora_sim.adapter_files import MemoryAdapterFiles
from manylora_sim.clock import FakeClock
from manylora_sim.documents import MemoryDocuments
from manylora_sim.fake_text import FakeText
from manylora_sim.network import MemoryNetwork, MemoryTransport
from manylora_sim.peers import SIMULATED
from manylora_sim.store import MemoryStore, MemoryStoreServer

from tests.memory_ledger import MemoryLedger

GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]
LIST_MODELS = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["ListModels"]
ADMIN = methods_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
EOS = 2
VOCAB = 259
CONTEXT = 256
ADAPTER_BYTES = 1 << 20
"""For adapters, on each worker's device."""

Script = Callable[[worker_pb2.ExecuteRequest], AsyncIterator[worker_pb2.ExecuteResponse]]


def ids_of(text: str) -> list[int]:
    return FakeText().ids(text)


def tokens(
    frame: int,
    first_position: int,
    ids: Sequence[int],
    *,
    choice: int = 0,
    finish: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED,
    stop_token_id: int | None = None,
) -> worker_pb2.ExecuteResponse:
    part = worker_pb2.ChoiceTokens(
        choice=choice,
        first_position=first_position,
        token_ids=ids,
        finish_reason=finish,
        stop_token_id=stop_token_id,
    )
    return worker_pb2.ExecuteResponse(frame=frame, tokens=worker_pb2.TokenChunk(choices=[part]))


def finished(
    frame: int,
    outcome: common_pb2.Outcome = common_pb2.OUTCOME_COMPLETED,
    message: str = "",
    *,
    cached_prompt_tokens: int = 0,
) -> worker_pb2.ExecuteResponse:
    return worker_pb2.ExecuteResponse(
        frame=frame,
        finished=worker_pb2.ExecuteFinished(
            outcome=outcome,
            message=message,
            prefill_ms=3.0,
            decode_ms=5.0,
            cached_prompt_tokens=cached_prompt_tokens,
        ),
    )


STARTED = worker_pb2.ExecuteResponse(frame=0, started=worker_pb2.ExecuteStarted())


def say(text: str, *, per_frame: int = 4, pause_s: float = 0.001, cached_prompt_tokens: int = 0) -> Script:
    """A worker that answers `text` (cut at max_tokens) and then its end-of-sequence; a prompt's logprobs are 0. It goes
    on behind what was emitted."""

    async def script(request: worker_pb2.ExecuteRequest) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield STARTED
        ids = ids_of(text)
        is_cut = len(ids) >= request.max_tokens
        ids = ids[: request.max_tokens]
        frame = 1
        if request.sampling.HasField("prompt_logprobs"):
            scored = worker_pb2.TokenChunk()
            scored.prompt_logprobs.extend(common_pb2.PositionLogprobs(rank=1) for _ in request.prompt_token_ids[1:])
            yield worker_pb2.ExecuteResponse(frame=frame, tokens=scored)
            frame += 1
        first = len(request.emitted[0].token_ids) if request.emitted else 0
        for start in range(first, len(ids), per_frame):
            await asyncio.sleep(pause_s)
            yield tokens(frame, start, ids[start : start + per_frame])
            frame += 1
        reason = common_pb2.FINISH_REASON_LENGTH if is_cut else common_pb2.FINISH_REASON_STOP
        yield tokens(frame, len(ids), [], finish=reason, stop_token_id=None if is_cut else EOS)
        yield finished(frame + 1, cached_prompt_tokens=cached_prompt_tokens)

    return script


class FakeWorker:
    """WorkerService as a script. `running` counts Execute calls that have not ended."""

    def __init__(self, worker_id: str, script: Script) -> None:
        self.worker_id = worker_id
        self.script = script
        self.executed: list[worker_pb2.ExecuteRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.stopped_choices: list[int] = []
        self.asked_ends: list[str] = []
        self.word: worker_pb2.ExecuteFinished | None = None
        """What it says of a request that was cut short; None: it does not know it."""
        self.validated: list[str] = []
        self.validation = worker_pb2.ValidateAdapterResponse(
            max_lora_rank=8, size_bytes=1000, target_modules=["q_proj", "v_proj"]
        )
        self.refuse_with: RpcError | None = None
        self.is_leaving = False
        self.dropped: list[tuple[bool, bool]] = []
        self.running = 0
        self.cancelled = 0
        self.server: Server | None = None

    def service(self) -> Service:
        async def control(
            requests: AsyncIterator[worker_pb2.ControlCommand], call: ServerCall
        ) -> AsyncIterator[worker_pb2.ControlReport]:
            raise RpcError(Code.UNIMPLEMENTED, "no control here")
            yield worker_pb2.ControlReport()

        handlers = {
            "Execute": self.execute,
            "StopChoice": self.stop_choice,
            "EndRequest": self.end_request,
            "ValidateAdapter": self.validate,
            "LeavePool": self.leave,
            "DropCaches": self.drop_caches,
            "Control": control,
        }
        return Service(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"], handlers)

    async def execute(
        self, request: worker_pb2.ExecuteRequest, call: ServerCall
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        self.executed.append(request)
        self.metadata.append(dict(call.metadata))
        if self.refuse_with is not None:
            raise self.refuse_with
        self.running += 1
        try:
            async with contextlib.aclosing(self.script(request)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def drop_caches(
        self, request: worker_pb2.DropCachesRequest, call: ServerCall
    ) -> worker_pb2.DropCachesResponse:
        self.dropped.append((request.adapters, request.prefixes))
        return worker_pb2.DropCachesResponse(adapters=int(request.adapters), prefix_blocks=7 * request.prefixes)

    async def leave(self, request: worker_pb2.LeavePoolRequest, call: ServerCall) -> worker_pb2.LeavePoolResponse:
        self.is_leaving = True
        return worker_pb2.LeavePoolResponse()

    async def stop_choice(
        self, request: worker_pb2.StopChoiceRequest, call: ServerCall
    ) -> worker_pb2.StopChoiceResponse:
        self.stopped_choices.append(request.choice)
        return worker_pb2.StopChoiceResponse()

    async def end_request(
        self, request: worker_pb2.EndRequestRequest, call: ServerCall
    ) -> worker_pb2.EndRequestResponse:
        self.asked_ends.append(request.request_id)
        if self.word is None:
            raise RpcError(Code.NOT_FOUND, "it is not known here")
        return worker_pb2.EndRequestResponse(finished=self.word)

    async def validate(
        self, request: worker_pb2.ValidateAdapterRequest, call: ServerCall
    ) -> worker_pb2.ValidateAdapterResponse:
        self.validated.append(request.path)
        if self.refuse_with is not None:
            raise self.refuse_with
        return self.validation

    def record(self, address: str) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            address=address,
            device="cpu",
            model_name="tiny",
            model_digest="0" * 64,
            vocab_size=VOCAB,
            max_context_tokens=CONTEXT,
            sequence_slots=8,
            max_lora_rank=64,
            eos_token_ids=(EOS,),
            merge_problem="",
            device_adapter_bytes=ADAPTER_BYTES,
        )


@dataclass(eq=False)
class _Line:
    outbox: asyncio.Queue[scheduler_pb2.ScheduleResponse | None] = field(default_factory=asyncio.Queue)


class FakeScheduler:
    """SchedulerService that grants every request to the next of `workers`, unless `holds`.

    Checks what a router must keep: a grant is closed once, and before the same request asks for another. Where streams
    break, messages are lost: then it is `lossy`, repeats grants that are asked for again, and checks less.
    """

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.workers: list[tuple[str, str]] = []
        self.dedicated = ("", "")
        """Of each worker: its tenant and digest."""
        self.holds = False
        self.is_leaving = False
        self.lossy = False
        self.refusal: scheduler_pb2.Refusal | None = None
        self.enqueued: list[scheduler_pb2.Enqueue] = []
        self.queued: dict[str, scheduler_pb2.Enqueue] = {}
        self.withdrawn: list[str] = []
        self.granted: dict[str, str] = {}
        self.num_grants = 0
        self.num_messages = 0
        self.closed: list[scheduler_pb2.GrantClosed] = []
        self.hellos: list[str] = []
        self.flows: list[admin_pb2.FlowStatus] = []
        self.overload = admin_pb2.OverloadStatus()
        self.neighbours: list[admin_pb2.NoisyNeighbour] = []
        self.adapters: list[status_pb2.TenantAdapters] = []
        self.setbacks: list[status_pb2.TenantSetbacks] = []
        self.lease_tokens: int | None = None
        """What the first lease of each request holds; None: no leases."""
        self.levels: list[scheduler_pb2.QuotaLevel] = []
        self.grows_by: int | None = 10
        """How an asked-for lease grows; None: it is refused."""
        self.answers_wants = True
        self.leased: dict[str, int] = {}
        self.wanted: list[str] = []
        self.settled: list[tuple[str, int]] = []
        self.held: list[list[scheduler_pb2.HeldLease]] = []
        self.refused: list[scheduler_pb2.Refused] = []
        self.trials: list[scheduler_pb2.TrialCounts] = []
        self.max_output_tokens: int | None = None
        """The cap on the output of what is granted; None: none."""
        self.server: Server | None = None
        self._lines: list[_Line] = []
        self._asked: dict[str, _Line] = {}
        """On which line each request was last enqueued."""
        self._next = 0

    def service(self) -> Service:
        return Service(
            scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
            {"Schedule": self.schedule, "GetSchedulerStatus": self.status, "Resign": self.leave},
        )

    async def leave(self, request: scheduler_pb2.ResignRequest, call: ServerCall) -> scheduler_pb2.ResignResponse:
        self.is_leaving = True
        return scheduler_pb2.ResignResponse()

    async def status(
        self, request: scheduler_pb2.GetSchedulerStatusRequest, call: ServerCall
    ) -> scheduler_pb2.GetSchedulerStatusResponse:
        return scheduler_pb2.GetSchedulerStatusResponse(
            scheduler=admin_pb2.SchedulerStatus(
                epoch=self.epoch,
                flows=self.flows,
                overload=self.overload,
                neighbours=self.neighbours,
                adapters=self.adapters,
                setbacks=self.setbacks,
            ),
            workers=[
                admin_pb2.WorkerStatus(
                    worker_id=w,
                    connected=True,
                    running=3,
                    dedicated_tenant=self.dedicated[0],
                    dedicated_version=self.dedicated[1],
                )
                for w, _ in self.workers
            ],
        )

    async def schedule(
        self, requests: AsyncIterator[scheduler_pb2.ScheduleRequest], call: ServerCall
    ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
        first = await anext(aiter(requests))
        self.hellos.append(first.hello.router_id)
        self.held.append(list(first.hello.leases))
        line = _Line()
        self._lines.append(line)
        yield scheduler_pb2.ScheduleResponse(hello=scheduler_pb2.SchedulerHello(epoch=self.epoch))
        reader = asyncio.create_task(self._read(requests, line))
        try:
            while (response := await line.outbox.get()) is not None:
                yield response
        finally:
            self._lines.remove(line)
            reader.cancel()
            await asyncio.wait([reader])
            if not reader.cancelled():
                reader.result()

    async def _read(self, requests: AsyncIterator[scheduler_pb2.ScheduleRequest], line: _Line) -> None:
        async for received in requests:
            self.num_messages += 1
            for request in received.more or (received,):
                self._take(request, line)
        line.outbox.put_nowait(None)

    def _take(self, request: scheduler_pb2.ScheduleRequest, line: _Line) -> None:
        match request.WhichOneof("event"):
            case "enqueue":
                self._enqueue(request.enqueue, line)
            case "withdraw":
                self.withdrawn.append(request.withdraw.request_id)
                self.queued.pop(request.withdraw.request_id, None)
            case "settled":
                settled = request.settled
                assert settled.request_id not in dict(self.settled), "a request is settled once"
                self.settled.append((settled.request_id, settled.tokens))
                self.leased.pop(settled.request_id, None)
            case "trial_counts":
                self.trials.append(request.trial_counts)
            case "refused":
                self.refused.append(request.refused)
            case "lease_wanted":
                self.wanted.append(request.lease_wanted.request_id)
                if self.answers_wants:
                    self.answer_want(request.lease_wanted.request_id, line)
            case "grant_closed":
                closed = request.grant_closed
                self.closed.append(closed)
                if self.lossy and self.granted.get(closed.request_id) != closed.worker_id:
                    return
                assert self.granted.pop(closed.request_id) == closed.worker_id, "a grant is closed once"

    def _enqueue(self, request: scheduler_pb2.Enqueue, line: _Line) -> None:
        self.enqueued.append(request)
        self._asked[request.request_id] = line
        if self.lossy and request.request_id in self.granted:
            worker_id = self.granted[request.request_id]
            self.send_grant(request.request_id, worker_id, dict(self.workers)[worker_id])
            return
        assert request.request_id not in self.granted, "the last grant is closed before the next is asked for"
        self.queued[request.request_id] = request
        if self.refusal is not None:
            self.queued.pop(request.request_id)
            refusal = scheduler_pb2.Refusal()
            refusal.CopyFrom(self.refusal)
            refusal.request_id = request.request_id
            line.outbox.put_nowait(scheduler_pb2.ScheduleResponse(refusal=refusal))
        elif not self.holds:
            self.grant(request.request_id)

    def answer_want(self, request_id: str, line: _Line | None = None) -> None:
        if self.grows_by is None:
            breach = scheduler_pb2.QuotaBreach(
                quota="classes.standard.token_bucket", tenant_id="acme", limit=7, description="no tokens came free"
            )
            refused = scheduler_pb2.LeaseRefused(
                request_id=request_id, message="no tokens", retry_after_s=1.5, breaches=[breach]
            )
            response = scheduler_pb2.ScheduleResponse(lease_refused=refused)
        else:
            self.leased[request_id] += self.grows_by
            lease = scheduler_pb2.Lease(request_id=request_id, tokens=self.leased[request_id])
            response = scheduler_pb2.ScheduleResponse(lease=lease)
        (line or self._lines[-1]).outbox.put_nowait(response)

    def grant(self, request_id: str) -> None:
        if self.lease_tokens is not None and request_id not in self.leased:
            self.leased[request_id] = self.lease_tokens
            lease = scheduler_pb2.Lease(request_id=request_id, tokens=self.lease_tokens, levels=self.levels)
            self._line_of(request_id).outbox.put_nowait(scheduler_pb2.ScheduleResponse(lease=lease))
        self.queued.pop(request_id)
        worker_id, address = self.workers[self._next % len(self.workers)]
        self._next += 1
        self.granted[request_id] = worker_id
        self.num_grants += 1
        self.send_grant(request_id, worker_id, address)

    def send_grant(self, request_id: str, worker_id: str, address: str) -> None:
        grant = scheduler_pb2.Grant(
            request_id=request_id, worker_id=worker_id, worker_address=address, epoch=self.epoch, queue_ms=1.5
        )
        if self.max_output_tokens is not None:
            grant.max_output_tokens, grant.overload_level = self.max_output_tokens, 40
        if self._lines:
            self._line_of(request_id).outbox.put_nowait(scheduler_pb2.ScheduleResponse(grant=grant))

    def _line_of(self, request_id: str) -> _Line:
        line = self._asked.get(request_id)
        return line if line in self._lines else self._lines[-1]

    def drop_lines(self) -> None:
        """Ends all streams, as a scheduler that lost its leadership does."""
        for line in self._lines:
            line.outbox.put_nowait(None)


@dataclass
class Answer:
    """A stream as its caller saw it."""

    frames: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    error: RpcError | None = None

    @property
    def text(self) -> str:
        return "".join(f.delta.text for f in self.frames if f.HasField("delta") and f.delta.choice == 0)

    def text_of(self, choice: int) -> str:
        return "".join(f.delta.text for f in self.frames if f.HasField("delta") and f.delta.choice == choice)

    def ids_of(self, choice: int = 0) -> list[int]:
        return [i for f in self.frames if f.HasField("delta") and f.delta.choice == choice for i in f.delta.token_ids]

    @property
    def finished(self) -> inference_pb2.Finished:
        """The terminal frame; there is exactly one and it is the last, and frames are numbered without gaps."""
        assert [f.frame for f in self.frames] == list(range(len(self.frames)))
        assert [f.HasField("finished") for f in self.frames] == [False] * (len(self.frames) - 1) + [True]
        return self.frames[-1].finished


def audit_log(folder: Path, store: MemoryStoreServer, clock: FakeClock) -> AuditLog:
    return AuditLog(
        folder,
        Signer(bytes(32)),
        store.client(),
        now_unix_s=clock.now_unix_s,
        getrandbits=random.Random(str(folder)).getrandbits,
    )


class KeyedChannel:
    """A channel whose calls present a key, unless their own metadata says who calls."""

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel = channel
        self._credentials = bearer(key)

    async def call(
        self, method: Method, request: Any, *, metadata: Mapping[str, str] | None = None, **more: Any
    ) -> Any:
        return await self._channel.call(method, request, metadata={**self._credentials, **(metadata or {})}, **more)

    def stream(
        self, method: Method, request: Any = None, *, metadata: Mapping[str, str] | None = None, **more: Any
    ) -> Stream:
        return self._channel.stream(method, request, metadata={**self._credentials, **(metadata or {})}, **more)

    async def close(self) -> None:
        await self._channel.close()


class RouterCluster:
    """One router, its store, a scheduler and two workers, and a client of the router."""

    def __init__(
        self,
        *,
        seed: int = 0,
        text: TextService | None = None,
        script: Script | None = None,
        delay_s: float | None = None,
        audit_folder: Path | None = None,
    ) -> None:
        delays = {} if delay_s is None else {"min_delay_s": delay_s, "max_delay_s": delay_s}
        self.network = MemoryNetwork(random.Random(seed), **delays)
        self.store_server = MemoryStoreServer()
        self.store: MemoryStore = self.store_server.client()
        self.files = MemoryAdapterFiles()
        self.documents = MemoryDocuments(self.files)
        self.telemetry = Telemetry.recording("router")
        self.scheduler = FakeScheduler()
        self.workers = [FakeWorker(f"worker-{i}", script or say("hello world")) for i in range(2)]
        self.clock = FakeClock()
        self.ledger = MemoryLedger(self.clock.now_unix_s)
        self.app = RouterApp(
            RouterConfig(adapter_store="unused", router_id="router-0", default_max_tokens=32),
            transport=self.network.transport("router"),
            store=self.store_server.client(),
            text=text or FakeText(),
            adapter_store=self.files,
            documents=self.documents,
            telemetry=self.telemetry,
            rng=random.Random(seed),
            peer_secret=SIMULATED,
            clock=self.clock,
            audit=audit_log(audit_folder, self.store_server, self.clock) if audit_folder is not None else None,
            open_ledger=self.ledger.opened,
        )
        self.settled: dict[str, int] = {}
        """What the router told the scheduler, whether or not that heard it."""
        settle, client = self.app.scheduler.settle, self.app.scheduler

        def note(request_id: str, tokens: int) -> None:
            if request_id in client._leases:
                self.settled[request_id] = tokens
            settle(request_id, tokens)

        client.settle = note  # type: ignore[method-assign]
        self.key_rng = random.Random(f"{seed}/keys")
        self._client: KeyedChannel | None = None

    @property
    def client(self) -> KeyedChannel:
        """Presents a key with the scopes operator and gateway."""
        assert self._client is not None
        return self._client

    async def start(self) -> None:
        await self.start_scheduler()
        for worker in self.workers:
            await self.start_worker(worker)
        await self.put_tenant("acme")
        await self.put_tenant("other")
        await self.put_adapter("acme", "upper", "a" * 64)
        await self.put_adapter("other", "secret", "b" * 64)
        key = await self.put_key(scopes=("gateway", "operator"))
        await self.app.start()
        self._client = self.caller(key)

    def caller(self, key: str) -> KeyedChannel:
        """A client of the router that presents this key; an empty one: none."""
        return KeyedChannel(self.network.transport("client").connect(self.app.address), key)

    async def put_key(self, *, tenant: str = "", scopes: Sequence[str] = ("generate",)) -> str:
        """A key that stands in the store already."""
        made = new_key(self.key_rng.getrandbits, tenant_id=tenant, scopes=scopes, name="", now_unix_s=1.0)
        await self.put_key_record(made.record)
        return made.key

    async def put_role(self, role: Role) -> str:
        """A key of it; of the tenant acme where it is a tenant's."""
        tenant = "acme" if role in TENANT_ROLES else ""
        made = new_key(self.key_rng.getrandbits, tenant_id=tenant, scopes=[], role=role, name="", now_unix_s=1.0)
        await self.put_key_record(made.record)
        return made.key

    async def put_key_record(self, record: KeyRecord) -> None:
        await self.store.put(keys.api_key(record.key_id), record.to_json())

    async def start_scheduler(self) -> None:
        transport: MemoryTransport = self.network.transport("scheduler")
        self.scheduler.server = await transport.serve("scheduler:0", [self.scheduler.service()])
        record = SchedulerRecord("scheduler-0", self.scheduler.server.address)
        await self.store.put(keys.SCHEDULER_LEADER, record.to_json())

    async def start_worker(self, worker: FakeWorker) -> None:
        transport = self.network.transport(worker.worker_id)
        worker.server = await transport.serve(f"{worker.worker_id}:0", [worker.service()])
        await self.store.put(keys.worker(worker.worker_id), worker.record(worker.server.address).to_json())
        self.scheduler.workers.append((worker.worker_id, worker.server.address))

    async def put_tenant(self, tenant_id: str, more: str = "") -> None:
        await self.store.put(keys.tenant(tenant_id), f'tenant_id: "{tenant_id}"\n{more}'.encode())

    async def put_adapter(self, tenant_id: str, name: str, uid: str) -> None:
        record = AdapterRecord(tenant_id, name, uid, 8, 1000, ("q_proj",), 1.0)
        await self.store.put(keys.adapter(tenant_id, name), record.to_json())

    def open(self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None, **metadata: str) -> Stream:
        sent = {"x-tenant-id": "acme"} | {name.replace("_", "-"): value for name, value in metadata.items()}
        return self.client.stream(GENERATE, request, timeout=timeout, metadata=sent)

    async def ask(
        self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None, **metadata: str
    ) -> Answer:
        return await read_all(self.open(request, timeout=timeout, **metadata))

    async def at_rest(self) -> None:
        """Waits until the router holds nothing; checks that each grant was closed and no worker runs anything."""
        for _ in range(2000):
            held = {k: v for k, v in self.app.debug_counters().items() if k != "channels" and v}
            open_at_scheduler = self.scheduler.granted or self.scheduler.leased
            if not held and not open_at_scheduler and not any(w.running for w in self.workers):
                break
            if not held and self.scheduler.lossy:
                self.scheduler.granted.clear()  # a scheduler forgets grants that nobody mentions
            await asyncio.sleep(0.01)
        assert not held, held
        assert self.scheduler.granted == {}
        assert self.scheduler.leased == {}
        assert [w.running for w in self.workers] == [0, 0]

    async def stop(self) -> None:
        await self.client.close()
        await self.app.stop(0.0)


async def read_all(stream: Stream, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    try:
        while (frame := await stream.read()) is not None:
            answer.frames.append(frame)
    except RpcError as e:
        answer.error = e
    return answer


async def until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Waits, looking now and then, until `condition` holds."""
    for _ in range(int(within_s / 0.001)):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


async def plain_request(cluster: RouterCluster, prompt: Prompt | None = None, **fields: Any) -> RequestInput:
    """What a front without gRPC would have read, from a gateway in acme's name."""
    key = await cluster.put_key(scopes=("gateway",))
    parts = split_key(key)
    assert parts is not None
    await until(lambda: cluster.app.directory.key_of(parts[0]) is not None)
    given = {"authorization": f"Bearer {key}", "tenant": "acme", **fields}
    return RequestInput(prompt or TextPrompt("hi"), **given)


def text_request(text: str = "hi", **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def audited_cluster(folder: Path) -> AsyncIterator[RouterCluster]:
    """Started, in real time, with an audit log in the folder: its disk is a real one."""
    cluster = RouterCluster(delay_s=0.0001, audit_folder=folder)
    await cluster.start()
    try:
        yield cluster
        await cluster.at_rest()
    finally:
        await cluster.stop()


def check_ledger(cluster: RouterCluster) -> None:
    """At rest: a row for each request that was settled, with its tokens, and no other used any."""
    settled = cluster.settled
    assert not cluster.ledger.opened_rows, "a row was opened and not closed"
    used = {row.request_id: row.settled_tokens for row in cluster.ledger.rows.values()}
    assert {each: tokens for each, tokens in used.items() if tokens} == {k: v for k, v in settled.items() if v}
    assert settled.keys() <= used.keys()


def simulate(
    test: Callable[[RouterCluster], Awaitable[None]],
    *,
    seed: int = 0,
    text: TextService | None = None,
    script: Script | None = None,
    delay_s: float | None = None,
) -> None:
    """Runs a test in virtual time, on a started cluster, and looks for leftovers behind it.

    Args:
        delay_s: of each message on its way; None: a drawn one.
    """

    async def main() -> None:
        cluster = RouterCluster(seed=seed, text=text, script=script, delay_s=delay_s)
        await cluster.start()
        try:
            await test(cluster)
            await cluster.at_rest()
            check_ledger(cluster)
        finally:
            await cluster.stop()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        names = [task.get_name() for task in left if "scheduler" in task.get_name() or "router" in task.get_name()]
        assert names == []

    simulation.run(main(), seed=seed)
