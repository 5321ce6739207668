"""WorkerService: requests of routers, commands of the scheduler, all on the event loop.

Owns the fencing epoch, whether the worker drains, and the one Control session. The runtime owns what runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from manylora.v1 import worker_pb2
from manylora_shared.composition import content_of, uids_of
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import InvalidRequest, NotFound, ServiceUnavailable, Unready, WorkerLost
from manylora_shared.ids import AdapterKey, AdapterUid, RequestId, TenantId, is_uid, name_problem
from manylora_shared.metadata import ADAPTER_KEY
from manylora_shared.telemetry import Telemetry
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import ServerCall, Service

from manylora_worker.constraints.compiler import ConstraintCompiler
from manylora_worker.hosting.output_stream import EndKind, OutputStream, StreamEnd
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.kinds.api import AdapterTier, EngineRequest
from manylora_worker.serving.adapter_trial import AdapterTrial
from manylora_worker.serving.control import ControlSession
from manylora_worker.serving.dedication import Dedication
from manylora_worker.serving.metrics import WorkerMetrics
from manylora_worker.serving.spans import ExecuteSpans
from manylora_worker.serving.wire import (
    TIERS,
    coverage_message,
    dedication_owner,
    engine_request,
    execute_finished,
    tokens_frame,
)
from manylora_worker.weights.adapter_check import AdapterValidator

_LOG = logging.getLogger(__name__)
_MAX_FLUSH_S = 0.15  # however many streams there are, each gets seven frames a second
_STARTED_S = 0.02  # so long the first frame (the request has begun) waits for first tokens to travel with
_DROPPING_S = 4.0  # for the engine to come to a boundary between two steps
_COMING_S = 1.0  # for a request that is not here: its Execute may be on its way
_MAX_PATH_CHARS = 1024


# Fencing: a Control stream's epoch is the greatest so far or it is refused; it ends the session before it. An Execute
# whose grant is of a lower epoch is refused. Execute itself never raises the epoch.
#
# The errors before an Execute's first frame mean that nothing was begun: InvalidRequest (a field), QuotaExceeded (more
# KV memory than its tenant can ever have; no worker would take it), AlreadyExists (the id runs), Unready (an older
# epoch), Overloaded (too many requests), ServiceUnavailable (draining, or a failed engine). After the first frame all
# ends with a `finished` frame; cancelling the call frees its work at the next token boundary.
# Where the engine has failed, a stream ends with WorkerLost at any time, as where the whole process does.
class WorkerServicer:
    def __init__(
        self,
        runtime: Runtime,
        validator: AdapterValidator,
        telemetry: Telemetry,
        *,
        worker_id: str,
        sequence_slots: int,
        parked_sequences: int,
        frames_per_s: int,
        metrics: WorkerMetrics,
        leave: Callable[[], None],
        constraints: ConstraintCompiler | None = None,
    ) -> None:
        """frames_per_s: over all streams; faster ones are gathered. A request's first token never waits."""
        self._runtime = runtime
        self._constraints = constraints
        self._frames_per_s = frames_per_s
        self._validator = validator
        self._trial = AdapterTrial(runtime, validator)
        self._telemetry = telemetry
        self._metrics = metrics
        self._worker_id = worker_id
        self._leave = leave
        self._sequence_slots = sequence_slots
        self._parked_sequences = parked_sequences
        self._epoch = 0
        self._is_draining = False
        self._executing: dict[RequestId, None] = {}
        self._dedication = Dedication(runtime, worker_id, self.hand_over)
        self._dedication.changed = self._dedication_changed
        self._session: ControlSession | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        runtime.view.subscribe(self)
        runtime.view.when_failed(lambda message: self.drain())

    def service(self) -> Service:
        return Service(
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
            {
                "Execute": self.execute,
                "StopChoice": self.stop_choice,
                "EndRequest": self.end_request,
                "ValidateAdapter": self.validate_adapter,
                "LeavePool": self.leave_pool,
                "DropCaches": self.drop_caches,
                "Control": self.control,
            },
        )

    def drain(self) -> None:
        """Takes no further request; the running ones go on."""
        self._is_draining = True
        if self._session is not None:
            self._session.draining()

    def hand_over(self) -> None:
        """Ends what routers run here, at its next token, for other workers to go on with."""
        for request_id in self._executing:
            self._runtime.abort(request_id)

    def close(self) -> None:
        self._dedication.close()

    def _dedication_changed(self) -> None:
        if self._session is not None:
            self._session.dedication_changed()

    async def wait_quiet(self) -> None:
        await self._quiet.wait()

    def end_control(self) -> None:
        if self._session is not None:
            self._session.close(ServiceUnavailable(f"worker {self._worker_id} has stopped"))

    # -- EngineListener

    def request_started(self, request: EngineRequest) -> None:
        self._quiet.clear()
        if self._session is not None:
            self._session.started(request)

    def request_ended(self, request_id: RequestId) -> None:
        if not self._runtime.view.running:
            self._quiet.set()
        if self._session is not None:
            self._session.ended(request_id)

    def engine_changed(self) -> None:
        if self._session is not None:
            self._session.engine_changed()

    # -- handlers

    def _tier_of(self, key: AdapterKey) -> AdapterTier | None:
        """The lowest of its parts; None: one is on no tier yet."""
        tiers = [self._runtime.view.adapters.get(uid) for uid in uids_of(key)]
        return None if None in tiers else min(tier for tier in tiers if tier is not None)

    async def execute(
        self, message: worker_pb2.ExecuteRequest, call: ServerCall
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        request = engine_request(message, self._runtime.model)
        if message.HasField("constraint"):
            request = await self._constrained(request, Constraint.of_message(message.constraint))
        if message.epoch < self._epoch:
            raise Unready(f"the grant is of epoch {message.epoch}, the scheduler's is {self._epoch}")
        if self._is_draining:
            raise ServiceUnavailable(f"worker {self._worker_id} is draining")
        with ExecuteSpans(
            self._telemetry, request, call.metadata, worker_id=self._worker_id, now_s=self._runtime.now()
        ) as spans:
            stream = self._runtime.submit(request)
            self._executing[request.request_id] = None
            try:
                self._metrics.comes(request, call.metadata.get(ADAPTER_KEY, ""))
                found = self._tier_of(request.adapter_uid) if request.adapter_uid else None
                await stream.has_something(_STARTED_S)
                started = worker_pb2.ExecuteStarted(adapter=TIERS[found] if found is not None else None)
                yield worker_pb2.ExecuteResponse(frame=0, started=started)
                frame = 1
                end: StreamEnd | None = None
                while end is None:
                    batch = await stream.read(interval_s=self._flush_interval_s())
                    end = batch.end
                    if end is not None:
                        spans.end(end)
                        self._metrics.ended(request, end)
                        self._log_failure(request, end, spans.traceparent)
                    tokens = tokens_frame(frame, batch.outputs)
                    if tokens is not None:
                        now = self._runtime.now()
                        spans.count(batch.outputs, now)
                        self._metrics.told(request, batch.outputs, now)
                        yield tokens
                        frame += 1
                if end.kind is EndKind.ENGINE_FAILED:
                    raise WorkerLost(end.message)
                yield worker_pb2.ExecuteResponse(frame=frame, finished=self._finished(end))
            finally:
                self._metrics.left(request)
                del self._executing[request.request_id]
                self._let_go(stream)

    def _finished(self, end: StreamEnd) -> worker_pb2.ExecuteFinished:
        return execute_finished(end, self._runtime.model.kv_block_bytes)

    def _log_failure(self, request: EngineRequest, end: StreamEnd, traceparent: str) -> None:
        if end.kind not in (EndKind.COMPLETED, EndKind.ABORTED):
            more = fields(
                request=request.request_id,
                tenant=request.tenant_id,
                adapter_version=content_of(request.adapter_uid) if request.adapter_uid else None,
                outcome=end.kind.value,
                error=end.message,
                traceparent=traceparent,
            )
            _LOG.warning("a request failed", extra=more)

    async def _constrained(self, request: EngineRequest, constraint: Constraint) -> EngineRequest:
        """Raises InvalidRequest, or Unready where this model has no text."""
        if violations := constraint.violations():
            raise InvalidRequest.of_all(violations)
        if self._constraints is None:
            raise Unready("constraint: this worker's model has no text")
        compiled = await asyncio.wrap_future(self._constraints.compile(request.tenant_id, constraint))
        stops = request.stop_token_ids | frozenset(compiled.end_token_ids)
        return replace(request, constraint=compiled, stop_token_ids=stops)

    async def stop_choice(
        self, message: worker_pb2.StopChoiceRequest, call: ServerCall
    ) -> worker_pb2.StopChoiceResponse:
        """A request that has ended already is no error."""
        stream = self._runtime.view.running.get(RequestId(message.request_id))
        if stream is not None:
            if message.choice >= stream.request.n:
                raise InvalidRequest.of("choice", f"the request has {stream.request.n} choices")
            self._runtime.stop_choice(stream.request.request_id, message.choice)
        return worker_pb2.StopChoiceResponse()

    async def end_request(
        self, message: worker_pb2.EndRequestRequest, call: ServerCall
    ) -> worker_pb2.EndRequestResponse:
        request_id, view = RequestId(message.request_id), self._runtime.view
        stream = view.running.get(request_id)
        if stream is not None:
            self._runtime.abort(request_id)
        try:
            async with asyncio.timeout(_COMING_S if stream is None else None):
                end = await view.end_of(request_id)
        except TimeoutError:
            raise NotFound(f"request_id: {request_id[:_MAX_PATH_CHARS]!r} is not known here") from None
        if end.request_end is None:
            raise WorkerLost(end.message)
        return worker_pb2.EndRequestResponse(finished=self._finished(end))

    async def leave_pool(self, message: worker_pb2.LeavePoolRequest, call: ServerCall) -> worker_pb2.LeavePoolResponse:
        self.drain()
        self._leave()
        return worker_pb2.LeavePoolResponse()

    async def drop_caches(
        self, message: worker_pb2.DropCachesRequest, call: ServerCall
    ) -> worker_pb2.DropCachesResponse:
        dropping = self._runtime.drop_caches(adapters=message.adapters, prefixes=message.prefixes)
        try:
            async with asyncio.timeout(_DROPPING_S):
                adapters, blocks = await asyncio.wrap_future(dropping)
        except TimeoutError:
            raise ServiceUnavailable(f"the engine of worker {self._worker_id} does not answer") from None
        _LOG.info("caches were dropped", extra=fields(adapters=adapters, prefix_blocks=blocks))
        return worker_pb2.DropCachesResponse(adapters=adapters, prefix_blocks=blocks)

    async def validate_adapter(
        self, message: worker_pb2.ValidateAdapterRequest, call: ServerCall
    ) -> worker_pb2.ValidateAdapterResponse:
        if not 0 < len(message.path) <= _MAX_PATH_CHARS:
            raise InvalidRequest.of("path", f"must be 1 to {_MAX_PATH_CHARS} characters")
        if problem := name_problem(message.tenant_id):
            raise InvalidRequest.of("tenant_id", problem)
        if not is_uid(message.adapter_uid):
            raise InvalidRequest.of("adapter_uid", "is no adapter's")
        if self._is_draining:
            raise ServiceUnavailable(f"worker {self._worker_id} is draining")
        report = await self._validator.validate(message.path, AdapterUid(message.adapter_uid))
        found, was_tried = list(report.problems), not report.problems
        if was_tried:
            tried = await self._trial.problem(
                message.path, TenantId(message.tenant_id), AdapterUid(message.adapter_uid)
            )
            found = [] if tried is None else [tried]
        if found:
            problems = [worker_pb2.AdapterProblem(field=p.field, description=p.description) for p in found]
            return worker_pb2.ValidateAdapterResponse(problems=problems, was_tried=was_tried)
        return worker_pb2.ValidateAdapterResponse(
            max_lora_rank=report.max_lora_rank,
            size_bytes=report.size_bytes,
            target_modules=report.target_modules,
            coverage=coverage_message(report.coverage),
            rope=report.rope,
            max_context_tokens=report.max_context_tokens,
            goes_alone=report.goes_alone,
        )

    async def control(
        self, commands: AsyncIterator[worker_pb2.ControlCommand], call: ServerCall
    ) -> AsyncIterator[worker_pb2.ControlReport]:
        hello = await anext(commands, None)
        if hello is None or hello.WhichOneof("command") != "hello":
            raise InvalidRequest.of("hello", "must come first")
        session = self._begin_session(hello.hello.epoch)
        reader = asyncio.create_task(self._obey(commands, session), name="control-commands")
        try:
            while (report := await session.next_report()) is not None:
                yield report
        finally:
            if self._session is session:
                self._session = None
            reader.cancel()
            await asyncio.wait([reader])
        reader.result()

    def _begin_session(self, epoch: int) -> ControlSession:
        if epoch < self._epoch:
            raise Unready(f"epoch {epoch} is over: the scheduler's is {self._epoch}")
        if self._session is not None:
            self._session.close(Unready(f"another stream of epoch {epoch} has taken over"))
        self._epoch = epoch
        self._session = ControlSession(
            self._runtime.view,
            sequence_slots=self._sequence_slots,
            parked_sequences=self._parked_sequences,
            kv_block_bytes=self._runtime.model.kv_block_bytes,
            dedicated=lambda: self._dedication.state,
        )
        if self._is_draining:
            self._session.draining()
        return self._session

    async def _obey(self, commands: AsyncIterator[worker_pb2.ControlCommand], session: ControlSession) -> None:
        """Ends the session with what was wrong with a command, or when the scheduler sends no more."""
        try:
            async for command in commands:
                match command.WhichOneof("command"):
                    case "prefetch":
                        if not is_uid(command.prefetch.adapter_uid):
                            raise InvalidRequest.of("prefetch.adapter_uid", "is no adapter's")
                        tenant_id = TenantId(command.prefetch.tenant_id) or None
                        self._runtime.prefetch(AdapterUid(command.prefetch.adapter_uid), tenant_id)
                    case "drain":
                        self.drain()
                    case "dedicate":
                        self._dedication.set(dedication_owner(command.dedicate))
                    case _:
                        raise InvalidRequest.of(
                            "command", "must be a prefetch, a drain or a dedication after the hello"
                        )
        except InvalidRequest as error:
            session.close(error)
        finally:
            session.close(None)

    def _flush_interval_s(self) -> float:
        """Least time between two frames of one stream."""
        return min(len(self._runtime.view.running) / self._frames_per_s, _MAX_FLUSH_S)

    def _let_go(self, stream: OutputStream) -> None:
        if not stream.is_ended:
            self._runtime.abort(stream.request.request_id)
