"""InferenceService: admission, then an Execution's frames, one call at a time.

Owns the set of live requests, for status and tests. Reads the directory; decides nothing itself: admission.py says what
may be queued, execution.py what becomes of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from manylora.v1 import common_pb2, inference_pb2
from manylora_shared.errors import Cancelled, InternalError, ManyloraError, Overloaded, ServiceUnavailable, Unready
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.metadata import ADAPTER_KEY, CLASS_KEY, IDEMPOTENCY_KEY, PRIORITY_KEY, TENANT_KEY, TRACEPARENT_KEY
from manylora_shared.sampling import Sampling
from manylora_shared.telemetry import Attribute, Span, SpanName, Telemetry, request_attributes
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.identity import authenticate
from manylora_shared.tenancy.overload import retry_after_s
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.tenancy.slo import SloTracker, verdict_of
from manylora_shared.transport.base import ServerCall, Service
from manylora_shared.wire import QOS_NUMBERS

from manylora_router.front.loop_turns import Turns
from manylora_router.guard import admission
from manylora_router.guard.admission import (
    Adapter,
    ChatPrompt,
    Prompt,
    RequestInput,
    TextPrompt,
    TokenPrompt,
)
from manylora_router.guard.circuits import Change
from manylora_router.guard.permits import Fault, Guard, Permit
from manylora_router.links.channels import WorkerChannels
from manylora_router.links.directory import Directory, Model
from manylora_router.links.scheduler_client import SchedulerClient
from manylora_router.metrics import RouterMetrics
from manylora_router.request.execution import Execution
from manylora_router.request.job import Job
from manylora_router.text.detokenizer import StopStrings
from manylora_router.text.service import TextService

_LOG = logging.getLogger(__name__)

DEADLINE_MARGIN_S = 0.02
"""A request ends this long before its caller's deadline (a tenth of the time at most), so that the frame that says so
can still be read."""

_CLASSES = frozenset(qos_class.value for qos_class in QosClass)


@dataclass
class RequestCounters:
    """For tests and status: cumulative since the start."""

    received: int = 0
    rejected: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class InferenceServicer:
    def __init__(
        self,
        *,
        directory: Directory,
        scheduler: SchedulerClient,
        channels: WorkerChannels,
        text: TextService,
        telemetry: Telemetry,
        rng: random.Random,
        default_max_tokens: int,
    ) -> None:
        self.counters = RequestCounters()
        self.slo = SloTracker()
        self.metrics = RouterMetrics(telemetry)
        self.guard = Guard(random=rng.random, getrandbits=rng.getrandbits)
        self._directory = directory
        self._scheduler = scheduler
        self._channels = channels
        self._text = text
        self._telemetry = telemetry
        self._rng = rng
        self._default_max_tokens = default_max_tokens
        self._live: dict[str, None] = {}
        self._turns = Turns()

    def service(self) -> Service:
        descriptor = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
        return Service(descriptor, {"Generate": self.generate, "ListModels": self.list_models})

    def live_requests(self) -> list[str]:
        """Ids of the Generate calls that run now, oldest first."""
        return list(self._live)

    async def list_models(
        self, request: inference_pb2.ListModelsRequest, call: ServerCall
    ) -> inference_pb2.ListModelsResponse:
        policy, _ = self._admit_caller(self._tenant_of(call.metadata), "")
        model = self._model()
        return inference_pb2.ListModelsResponse(
            base_model=model.name,
            max_context_tokens=model.limits.max_context_tokens,
            adapters=[record.name for record in self._directory.adapters_of(policy.tenant_id)],
        )

    async def generate(
        self, request: inference_pb2.GenerateRequest, call: ServerCall
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        received_at = asyncio.get_running_loop().time()
        metadata = call.metadata
        request_id = f"{self._rng.getrandbits(128):032x}"
        tenant, refusal = "", None
        try:
            tenant = self._tenant_of(metadata)
        except ManyloraError as e:
            refusal = e  # raised inside the request's span, which then names no tenant
        attributes = request_attributes(
            tenant=tenant[:64],
            qos_class=metadata.get(CLASS_KEY, "standard")[:64],
            adapter=metadata.get(ADAPTER_KEY, "")[:64],
            request_id=request_id,
        )
        parent = metadata.get(TRACEPARENT_KEY)
        span = self._telemetry.span(SpanName.REQUEST, parent=parent, attributes=attributes, server=True)
        self._live[request_id] = None
        self.counters.received += 1
        execution: Execution | None = None
        permit: Permit | None = None
        error: Exception | None = None
        try:
            with self._telemetry.span(
                SpanName.ADMISSION, parent=span.traceparent, attributes=attributes
            ) as admission_span:
                if refusal is not None:
                    raise refusal
                await self._take_turn(tenant, metadata)
                job = await self._admit(request, metadata, tenant, request_id, received_at, call.time_remaining(), span)
                admission_span.set(Attribute.PROMPT_TOKENS, len(job.prompt_token_ids))
                permit = self._permit(job)
            execution = Execution(
                job,
                scheduler=self._scheduler,
                channels=self._channels,
                detokenizers=[self._text.detokenizer() for _ in range(job.n)],
                telemetry=self._telemetry,
                rng=self._rng,
            )
            held: list[inference_pb2.GenerateResponse] = []
            while not execution.ended:
                frames = await self._advance(execution)
                self._watch(permit, execution)
                if not job.can_stream:
                    held += frames
                    frames = held if execution.ended else []
                for frame in frames:
                    await self._take_turn(tenant, metadata)
                    yield frame
            if execution.error is not None:
                raise execution.error
            self.counters.completed += 1
            span.ok()
        except Exception as e:
            error = e
            if isinstance(e, ManyloraError) and (execution is None or not execution.was_queued):
                self.counters.rejected += 1
            else:
                self.counters.failed += 1
            span.fail_with(e)
            raise
        except (asyncio.CancelledError, GeneratorExit) as e:
            error = Cancelled("the caller went away")
            self.counters.cancelled += 1
            span.fail_with(asyncio.CancelledError() if isinstance(e, GeneratorExit) else e)
            raise
        finally:
            del self._live[request_id]
            if execution is not None:
                execution.close()
                self._describe(span, execution)
            if permit is not None:
                fault = execution.fault if execution is not None else Fault.NO_VERDICT
                self._end_permit(permit, fault)
            self._account(tenant, metadata, received_at, error, execution)
            span.end()

    async def _take_turn(self, tenant: str, metadata: Mapping[str, str]) -> None:
        name = metadata.get(CLASS_KEY, "") or QosClass.STANDARD.value
        qos_class = QosClass(name) if name in _CLASSES else None
        policy = self._directory.policy_of(TenantId(tenant))
        weight = policy.weight(qos_class) if policy is not None and qos_class is not None else 1
        await self._turns.take((tenant, qos_class), weight)

    def _permit(self, job: Job) -> Permit:
        """Raises Quarantined and CircuitOpen."""
        uid = job.adapter.uid if job.adapter is not None else None
        return self.guard.admit(job.tenant_id, uid, job.prompt_token_ids, asyncio.get_running_loop().time())

    def _watch(self, permit: Permit, execution: Execution) -> None:
        """Tells the guard what became of a request since it was last asked."""
        if execution.worker_id and not permit.worker_id:
            self.guard.began(permit, execution.worker_id, asyncio.get_running_loop().time())
        if execution.ttft_ms and not permit.has_answered:
            self._log(self.guard.answered(permit))

    def _end_permit(self, permit: Permit, fault: Fault) -> None:
        ended = self.guard.ended(permit, fault, asyncio.get_running_loop().time())
        self._log(ended.changes)
        if ended.is_quarantined:
            more = fields(tenant=permit.tenant, adapter=permit.adapter or "", worker=permit.worker_id)
            _LOG.warning("a prompt is quarantined: workers failed again and again while they ran it", extra=more)

    def _log(self, changes: Sequence[Change]) -> None:
        for change in changes:
            tenant, adapter = change.scope[0], change.scope[1] if len(change.scope) == 2 else "all"
            more = fields(tenant=tenant, adapter=adapter or "", open_s=change.open_s)
            _LOG.warning("circuit %s", "closed" if change.open_s is None else "opened", extra=more)

    def _account(
        self,
        tenant: str,
        metadata: Mapping[str, str],
        received_at: float,
        error: Exception | None,
        execution: Execution | None,
    ) -> None:
        """Counts a request's end for its flow's objectives. One of no tenant or class is of no flow."""
        name = metadata.get(CLASS_KEY, "") or QosClass.STANDARD.value
        if tenant not in self._directory.tenants or name not in _CLASSES:
            return
        flow = TenantId(tenant), QosClass(name)
        now = asyncio.get_running_loop().time()
        slo = self._directory.slo_of(*flow)
        ttft_ms = execution.ttft_ms if execution is not None else 0.0
        verdict = verdict_of(error, given_ms=(now - received_at) * 1e3, has_answered=ttft_ms > 0.0, slo=slo)
        tpot_ms = execution.tpot_ms if execution is not None else None
        self.slo.ended(flow, verdict, now, ttft_ms=ttft_ms or None, tpot_ms=tpot_ms, slo=slo)
        self.metrics.ended(flow, verdict, ttft_ms=ttft_ms or None, tpot_ms=tpot_ms, slo=slo)

    async def _advance(self, execution: Execution) -> list[inference_pb2.GenerateResponse]:
        """The next frames. Any failure that nobody foresaw ends this one request, with its outcome."""
        try:
            return await execution.advance()
        except Exception:
            _LOG.exception("request %s failed", execution.job.request_id)
            return execution.fail(InternalError("internal error"))

    def _describe(self, span: Span, execution: Execution) -> None:
        span.set(Attribute.OUTCOME, common_pb2.Outcome.Name(execution.outcome))
        span.set(Attribute.PROMPT_TOKENS, len(execution.job.prompt_token_ids))
        span.set(Attribute.OUTPUT_TOKENS, execution.completion_tokens)
        if execution.ttft_ms:
            span.set(Attribute.TTFT_MS, execution.ttft_ms)

    def _tenant_of(self, metadata: Mapping[str, str]) -> str:
        """Raises Unauthenticated or PermissionDenied."""
        principal = authenticate(metadata, self._directory.key_of)
        return admission.tenant_of(principal, metadata.get(TENANT_KEY, ""))

    def _admit_caller(self, tenant: str, adapter: str) -> tuple[TenantPolicy, Adapter | None]:
        return admission.admit_caller(tenant, adapter, self._directory.policy_of, self._directory.uid_of)

    def _model(self) -> Model:
        model = self._directory.model
        if model is None:
            raise ServiceUnavailable("no worker has joined the cluster yet", retry_after_s=1.0)
        return model

    async def _admit(
        self,
        request: inference_pb2.GenerateRequest,
        metadata: Mapping[str, str],
        tenant: str,
        request_id: str,
        received_at: float,
        time_remaining_s: float | None,
        span: Span,
    ) -> Job:
        """The request as a job. Raises Rejected, or ServiceUnavailable while nothing is known of the model."""
        policy, adapter = self._admit_caller(tenant, metadata.get(ADAPTER_KEY, ""))
        self._check_overload(policy.tenant_id, metadata, request_id)
        if adapter is not None:
            span.set(Attribute.ADAPTER_VERSION, adapter.uid)
        model = self._model()
        given = read_request(request, metadata)
        violations = admission.check(given, model.limits)
        prompt_token_ids: Sequence[int] | None = None
        if admission.prompt_is_readable(given.prompt, violations):
            prompt_token_ids = await self._tokenize(given.prompt)
        admitted = admission.admit(
            given, prompt_token_ids, violations, policy, model.limits, default_max_tokens=self._default_max_tokens
        )
        if given.stop and not self._text.has_text:
            raise Unready("stop: this router has no tokenizer; send stop_token_ids")
        span.set(Attribute.MAX_TOKENS, admitted.max_tokens)
        deadline: float | None = None
        if time_remaining_s is not None:
            deadline = received_at + time_remaining_s - min(DEADLINE_MARGIN_S, 0.1 * max(0.0, time_remaining_s))
        return Job(
            request_id=request_id,
            tenant_id=policy.tenant_id,
            qos_class=admitted.qos_class,
            priority=admitted.priority,
            adapter=adapter,
            prompt_token_ids=admitted.prompt_token_ids,
            max_tokens=admitted.max_tokens,
            n=admitted.n,
            sampling=self._sampling(request, policy.tenant_id, given),
            stop=StopStrings(given.stop) if given.stop else None,
            stop_token_ids=_stop_token_ids(request, model),
            received_at=received_at,
            deadline=deadline,
            traceparent=span.traceparent,
            can_stream=policy.security.can_stream,
        )

    def _check_overload(self, tenant_id: TenantId, metadata: Mapping[str, str], request_id: str) -> None:
        """Raises Overloaded where requests like this one are given up now. Before the prompt is looked at: refusing
        must cost next to nothing."""
        view = self._scheduler.overload
        name = metadata.get(CLASS_KEY, "") or QosClass.STANDARD.value
        if view.is_quiet or name not in _CLASSES:
            return
        qos_class = QosClass(name)
        if not view.admits(tenant_id, qos_class, request_id):
            self._scheduler.note_refused(tenant_id, QOS_NUMBERS[qos_class])
            level = view.level_of(tenant_id)
            why = view.why_refused(tenant_id, qos_class)
            raise Overloaded(why, retry_after_s=retry_after_s(level, request_id))

    async def _tokenize(self, prompt: Prompt | None) -> Sequence[int]:
        match prompt:
            case TextPrompt(text):
                return await self._text.encode(text)
            case ChatPrompt(messages):
                return await self._text.encode_chat(messages)
            case TokenPrompt(ids):
                return ids
            case None:
                raise AssertionError("a missing prompt is not readable")

    def _sampling(
        self, request: inference_pb2.GenerateRequest, tenant_id: TenantId, given: RequestInput
    ) -> common_pb2.SamplingParams:
        """What the caller asked for, with a seed: its own, or its idempotency key's, or a drawn one."""
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        if given.sampling.seed is None:
            if given.idempotency_key:
                sampling.seed = admission.seed_of_key(tenant_id, given.idempotency_key)
            else:
                sampling.seed = self._rng.getrandbits(64)
        return sampling


def _stop_token_ids(request: inference_pb2.GenerateRequest, model: Model) -> list[int]:
    ids = dict.fromkeys(request.stop_token_ids)
    if not request.ignore_eos:
        ids.update(dict.fromkeys(model.eos_token_ids))
    return list(ids)


def read_request(request: inference_pb2.GenerateRequest, metadata: Mapping[str, str]) -> RequestInput:
    """The message and its metadata as admission's plain data."""
    prompt: Prompt | None
    match request.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(request.text)
        case "token_ids":
            prompt = TokenPrompt(request.token_ids.ids)
        case "chat":
            prompt = ChatPrompt([(m.role, m.content) for m in request.chat.messages])
        case _:
            prompt = None
    return RequestInput(
        prompt=prompt,
        max_tokens=request.max_tokens,
        sampling=Sampling.of_message(request.sampling),
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        n=request.n,
        request_class=metadata.get(CLASS_KEY, ""),
        priority=metadata.get(PRIORITY_KEY, ""),
        idempotency_key=metadata.get(IDEMPOTENCY_KEY, ""),
    )
