"""One Generate call, from its arrival to its account, whichever front it came through.

Owns the call's span, and what its end means to counters, service levels, metrics and the guard. Knows no wire format.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from manylora.v1 import common_pb2
from manylora_shared.constraints.constraint import ConstraintKind
from manylora_shared.errors import Cancelled, CircuitOpen, Draining, InternalError, ManyloraError, WorkerLost
from manylora_shared.ids import DEFAULT_POOL, TenantId
from manylora_shared.telemetry import Attribute, Attributes, Span, SpanName, Telemetry, request_attributes
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.policy import TenantQuotas
from manylora_shared.tenancy.slo import SloTracker, verdict_of

from manylora_router.guard.admission import Adapter, ChatPrompt, RequestInput
from manylora_router.guard.circuits import Change
from manylora_router.guard.feedback import Answer, Feedback
from manylora_router.guard.permits import Fault, Guard, Permit
from manylora_router.guard.resume_tokens import VALID_S, Begun, ResumeTokens, digest_of
from manylora_router.guard.resumes import Resumes
from manylora_router.guard.trials import Outcome, Trials
from manylora_router.history.lives import Life
from manylora_router.history.recent import Recent
from manylora_router.ledger.rows import NoRows, Rows
from manylora_router.links.channels import WorkerChannels
from manylora_router.links.directory import Directory
from manylora_router.links.scheduler_client import SchedulerClient
from manylora_router.metrics import COMPLETED, EndedRequest, RouterMetrics
from manylora_router.request.execution import Execution
from manylora_router.request.frames import Frame, Started
from manylora_router.request.job import Job
from manylora_router.request.reckoning import Reckonings
from manylora_router.request.record import Record, tokens_in
from manylora_router.request.stream_writes import StreamWrites
from manylora_router.request.tapes import KeptText, Tapes
from manylora_router.text.texts import Texts

_LOG = logging.getLogger(__name__)
_JSON = (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT)
_MAX_SEED = 1 << 63  # of an attribute
_MAX_SHOWN = 64  # characters of what was not checked, in a span


@dataclass
class CallCounters:
    received: int = 0
    rejected: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    resumed: int = 0  # how often another worker went on with an answer
    handed_over: int = 0  # whose callers were told to go on at another router


class Calls:
    """Those that run now, and what they share."""

    def __init__(
        self,
        *,
        directory: Directory,
        scheduler: SchedulerClient,
        channels: WorkerChannels,
        texts: Texts,
        telemetry: Telemetry,
        rng: random.Random,
        tokens: ResumeTokens,
        now_unix_s: Callable[[], float],
        take_text: Callable[[KeptText], None] | None = None,
        rows: Rows | None = None,
    ) -> None:
        """rows: of the usage ledger; None: there is none."""
        self.tapes = Tapes(directory.policy_of, now_unix_s, take_text)
        self.counters = CallCounters()
        self.tokens = tokens
        self.now_unix_s = now_unix_s
        self.is_draining = False
        self.hands_over = False
        self.rows = rows or NoRows()
        self.live: dict[str, Call] = {}  # by request id, oldest first
        self.slo = SloTracker()
        self.metrics = RouterMetrics(telemetry)
        self.guard = Guard(random=rng.random, getrandbits=rng.getrandbits)
        self.resumes = Resumes()
        self.trials = Trials()
        self.feedback = Feedback()
        self.directory = directory
        self.scheduler = scheduler
        self.channels = channels
        self.reckonings = Reckonings(channels)
        self.texts = texts
        self.telemetry = telemetry
        self.rng = rng
        self.recent = Recent()

    def close_step(self) -> None:
        """Of what is remembered; each STEP_S once."""
        self.recent.close_step(self.lives(), asyncio.get_running_loop().time())

    def lives(self) -> list[Life]:
        """Of those that run now."""
        records = [call.record for call in self.live.values() if call.record is not None]
        for record in records:
            record.look()
        return [record.life for record in records]

    def drain(self, *, hands_over: bool) -> None:
        """No more are taken. `hands_over`: those leave whose callers can go on elsewhere."""
        self.is_draining, self.hands_over = True, hands_over
        if hands_over:
            for call in self.live.values():
                call.interrupt()

    def open(self, request: RequestInput, tenant: str) -> Call:
        """`tenant` is empty where the caller may ask in nobody's name."""
        return Call(self, request, tenant)

    def scored(self, answer: Answer) -> None:
        """Feedback's score, as it counts."""
        assert answer.score is not None
        if answer.adapter is not None:
            self.trials.scored(answer.tenant, answer.adapter, answer.score)
        self.metrics.scored(answer.tenant, answer.adapter, answer.score)


class Call:
    """`with` it: `admission`, `begin`, then `advance` until there is nothing more. Belongs to one task."""

    def __init__(self, calls: Calls, request: RequestInput, tenant: str) -> None:
        self.request_id = request.request_id or f"{calls.rng.getrandbits(128):032x}"
        self.received_at = asyncio.get_running_loop().time()
        self._calls = calls
        self._request = request
        self._tenant = tenant
        self._attributes = request_attributes(
            tenant=tenant[:_MAX_SHOWN],
            qos_class=(request.request_class or "standard")[:_MAX_SHOWN],
            adapter=request.adapter[:_MAX_SHOWN],
            request_id=self.request_id,
        )
        self.span = calls.telemetry.span(
            SpanName.REQUEST, parent=request.traceparent, attributes=self._attributes, server=True
        )
        model = calls.directory.model
        self._genai = {
            Attribute.GENAI_PROVIDER: "manylora",
            Attribute.GENAI_OPERATION: "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion",
            Attribute.MODEL: model.name if model is not None else "",
        }
        self.writes = StreamWrites(calls.telemetry, self.span)
        self.adapter: Adapter | None = None  # once it is known; and the pool
        self.pool = DEFAULT_POOL
        self._told_at = 0.0  # its last tokens
        self._permit: Permit | None = None
        self._execution: Execution | None = None
        self._held: list[Frame] = []
        self._limit: asyncio.Timeout | None = None  # of what a resumable one waits for
        self.record: Record | None = None  # of a tenant that is known

    def __enter__(self) -> Self:
        self._calls.live[self.request_id] = self
        self._calls.counters.received += 1
        if self._tenant in self._calls.directory.tenants:
            qos_class = self._request.qos_class
            life = Life(self.request_id, self._tenant, qos_class.value if qos_class else "", self.received_at)
            self.record = Record(self._calls.recent, life)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._calls.live[self.request_id]
        self._count(error)
        execution = self._execution
        if execution is not None:
            if execution.job.is_hedge and not self.writes.has_begun and self._may_forgive(execution.job):
                execution.forgive()
            execution.close()
            self._calls.counters.resumed += len(execution.pauses_s)
            self._describe(execution)
            self.writes.tell(execution.job.attributes())
        if self._permit is not None:
            self._end_permit(self._permit, execution.fault if execution is not None else Fault.NO_VERDICT)
        self._try(error)
        outcome = _outcome_of(error)
        if self.record is not None:
            now, is_rejected = asyncio.get_running_loop().time(), self._is_rejected(error)
            self.record.ended(outcome, now, is_completed=error is None, is_rejected=is_rejected)
        self._measure(outcome, is_rejected=self._is_rejected(error))
        if error is None or (isinstance(error, Exception) and not isinstance(error, Draining)):
            self._account(error)
        else:
            self._account(Cancelled("the caller went away"))
        self.span.end()

    def admission(self) -> Span:
        """All that happens before `begin`."""
        return self._calls.telemetry.span(SpanName.ADMISSION, parent=self.span.traceparent, attributes=self._attributes)

    def goes_to(self, pool: str) -> None:
        if pool != DEFAULT_POOL:
            self.pool = pool
            self.span.set(Attribute.POOL, pool)
            model = self._calls.directory.models.get(pool)
            self._genai[Attribute.MODEL] = model.name if model is not None else ""

    def begin(self, job: Job, permit: Permit) -> None:
        calls, skips, kept = self._calls, self._request.skip_special_tokens, self._request.kept_tokens
        text = calls.texts.known(job.pool)
        self._permit = permit
        self._execution = Execution(
            job,
            scheduler=calls.scheduler,
            channels=calls.channels,
            reckonings=calls.reckonings,
            detokenizers=[text.detokenizer(job.prompt_token_ids, skips, kept) for _ in range(job.n)],
            let_resume=self._let_resume,
            rows=calls.rows,
            telemetry=calls.telemetry,
            rng=calls.rng,
        )
        if self.record is not None:
            self.record.begun(self._execution, asyncio.get_running_loop().time())

    async def advance(self) -> list[Frame]:
        """Empty: it has completed. Raises the request's error, after its last frames."""
        execution = self._execution
        assert execution is not None, "begin comes first"
        while not execution.ended:
            frames = await self._advance(execution)
            if self._permit is not None:
                self._watch(self._permit, execution)
            self._time(frames, execution)
            if frames and frames[0].started is not None and execution.job.is_resumable:
                frames[0].started = self._with_token(frames[0].started, execution.job)
            if not execution.job.can_stream:
                self._held += frames
                frames = self._held if execution.ended else []
            if frames:
                return frames
        if execution.error is not None:
            raise execution.error
        return []

    async def _advance(self, execution: Execution) -> list[Frame]:
        """What nobody foresaw ends this one request, with its outcome."""
        try:
            if not execution.job.is_resumable:
                return await execution.advance()
            return await self._advance_or_move(execution)
        except Exception:
            more = fields(request=self.request_id, traceparent=self.span.traceparent)
            _LOG.exception("what nobody foresaw ends a request", extra=more)
            return execution.fail(InternalError("internal error"))

    async def _advance_or_move(self, execution: Execution) -> list[Frame]:
        if not self._calls.hands_over:
            try:
                async with asyncio.timeout(None) as self._limit:
                    return await execution.advance()
            except TimeoutError:
                if not self._calls.hands_over:
                    raise
            finally:
                self._limit = None
        return execution.hand_over(draining())

    def interrupt(self) -> None:
        """Once this router hands over."""
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _with_token(self, started: Started, job: Job) -> Started:
        degraded = job.degraded
        begun = Begun(
            request_id=job.request_id,
            tenant_id=job.tenant_id,
            prompt=digest_of(job.prompt_token_ids),
            adapter=started.adapter,
            seed=started.seed,
            n=job.n,
            max_tokens=job.max_tokens,
            asked_max_tokens=degraded.asked_max_tokens if degraded is not None else job.max_tokens,
            overload_level=degraded.overload_level if degraded is not None else 0,
            expires_unix_s=self._calls.now_unix_s() + VALID_S,
            pool=job.pool,
        )
        return replace(started, resume_token=self._calls.tokens.seal(begun))

    def _watch(self, permit: Permit, execution: Execution) -> None:
        guard = self._calls.guard
        if execution.worker_id and not permit.worker_id:
            guard.began(permit, execution.worker_id, asyncio.get_running_loop().time())
        if execution.ttft_ms and not execution.is_paused and not permit.has_answered:
            _log(guard.answered(permit))

    def _let_resume(self, lost: WorkerLost, is_lost: bool) -> None:
        """A loss counts against the prompt and its circuits, as if its caller had called again. Raises WorkerLost."""
        calls, permit, now = self._calls, self._permit, asyncio.get_running_loop().time()
        assert permit is not None
        if not is_lost:
            calls.guard.moved(permit, now)
            return
        self._permit = None
        self._end_permit(permit, Fault.WORKER_LOST)
        policy = calls.directory.policy_of(permit.tenant)
        if not calls.resumes.take(permit.tenant, policy.quotas if policy else TenantQuotas(), now):
            raise WorkerLost(f"{lost.message}; quotas.resumes_per_s: no more for now", retry_after_s=1.0)
        try:
            again = calls.guard.admit(permit.tenant, permit.adapter, permit.prompt_token_ids, now)
        except ManyloraError as e:
            after_s = lost.retry_after_s if e.retry_after_s is None else e.retry_after_s
            message = f"{lost.message}; no other worker goes on with it: {e.message}"
            raise WorkerLost(message, retry_after_s=after_s) from e
        self._permit = again

    def _may_forgive(self, job: Job) -> bool:
        """Work in vain is the service's cost, and bounded as that of answers that are gone on with."""
        policy, now = self._calls.directory.policy_of(job.tenant_id), asyncio.get_running_loop().time()
        return self._calls.resumes.take(job.tenant_id, policy.quotas if policy else TenantQuotas(), now)

    def _time(self, frames: Sequence[Frame], execution: Execution) -> None:
        now = asyncio.get_running_loop().time()
        if self.record is not None:
            self.record.told(frames, now)
        if self._calls.metrics.has_readers and (tokens := tokens_in(frames)):
            job, before, self._told_at = execution.job, self._told_at, now
            if before:
                each_s = (self._told_at - before) * job.n / tokens
                self._calls.metrics.tokens_came((job.tenant_id, job.qos_class), each_s)

    def _end_permit(self, permit: Permit, fault: Fault) -> None:
        ended = self._calls.guard.ended(permit, fault, asyncio.get_running_loop().time())
        _log(ended.changes)
        if ended.is_quarantined:
            more = fields(tenant=permit.tenant, adapter=permit.adapter or "", worker=permit.worker_id)
            _LOG.warning("a prompt is quarantined: workers failed again and again while they ran it", extra=more)

    def _count(self, error: BaseException | None) -> None:
        counters = self._calls.counters
        if error is None:
            counters.completed += 1
            self.span.ok()
        elif isinstance(error, Draining) and self._execution is not None:
            counters.handed_over += 1
            self.span.fail_with(error)
        elif not isinstance(error, Exception):  # cancelled, or nobody reads on
            counters.cancelled += 1
            self.span.fail_with(asyncio.CancelledError())
        else:
            if self._is_rejected(error):
                counters.rejected += 1
            else:
                counters.failed += 1
                self._log_failure(error)
            self.span.fail_with(error)

    def _log_failure(self, error: Exception) -> None:
        told = error if isinstance(error, ManyloraError) else InternalError("internal error")
        adapter = self._execution.job.adapter if self._execution is not None else None
        more = fields(
            request=self.request_id,
            tenant=self._tenant,
            adapter=adapter.name if adapter is not None else "",
            worker=self._execution.worker_id if self._execution is not None else "",
            outcome=told.label,
            error=told.message,
            traceparent=self.span.traceparent,
        )
        _LOG.warning("a request failed", extra=more)

    def _try(self, error: BaseException | None) -> None:
        """For the trial of its adapter's version, and for feedback."""
        calls, execution, adapter = self._calls, self._execution, self.adapter
        tenant, now = TenantId(self._tenant), asyncio.get_running_loop().time()
        if execution is not None and execution.ttft_ms:
            calls.feedback.answered(tenant, self.request_id, adapter, now)
        if adapter is None or not adapter.trial:
            return
        fault = execution.fault if execution is not None else Fault.NO_VERDICT
        outcome = None
        if fault in (Fault.ADAPTER, Fault.INTERNAL) or isinstance(error, CircuitOpen):
            outcome = Outcome(has_failed=True)
        elif execution is not None and fault is Fault.NONE:
            policy = calls.directory.policy_of(tenant)
            outcome = Outcome(
                has_failed=False,
                is_cut=execution.is_cut,
                ttft_ms=max(0.0, execution.ttft_ms - execution.adapter_wait_ms) if execution.ttft_ms else None,
                is_warm=execution.cached_prompt_tokens > 0,
                tpot_ms=execution.tpot_ms,
                is_apart=policy is not None and adapter.parts[0].name in policy.dedicated,
            )
        if outcome is not None:
            calls.trials.ended(tenant, adapter, outcome)
            calls.metrics.tried(tenant, adapter, outcome)

    def _is_rejected(self, error: BaseException | None) -> bool:
        was_queued = self._execution is not None and self._execution.was_queued
        return isinstance(error, ManyloraError) and not was_queued

    def _measure(self, outcome: str, *, is_rejected: bool) -> None:
        calls, execution = self._calls, self._execution
        if not calls.metrics.has_readers:
            return
        now = asyncio.get_running_loop().time()
        ended = EndedRequest(
            tenant=self._tenant if self._tenant in calls.directory.tenants else "",
            qos_class=self._request.qos_class,
            outcome=outcome,
            is_rejected=is_rejected,
            total_s=now - self.received_at,
            genai=self._genai,
            traceparent=self.span.traceparent,
        )
        if execution is not None:
            tpot_ms = execution.tpot_ms
            ended = replace(
                ended,
                queue_s=execution.queue_ms / 1e3 if execution.worker_id else None,
                ttft_s=execution.ttft_ms / 1e3 or None,
                tpot_s=tpot_ms / 1e3 if tpot_ms is not None else None,
                prompt_tokens=len(execution.job.prompt_token_ids) if execution.ttft_ms else 0,
                cached_tokens=execution.cached_prompt_tokens,
                completion_tokens=execution.completion_tokens,
                pauses_s=execution.pauses_s,
            )
        calls.metrics.request_ended(ended, now)

    def _account(self, error: Exception | None) -> None:
        """For its flow's objectives. A call of no tenant or class is of no flow."""
        calls, execution, qos_class = self._calls, self._execution, self._request.qos_class
        if self._tenant not in calls.directory.tenants or qos_class is None:
            return
        flow = TenantId(self._tenant), qos_class
        now = asyncio.get_running_loop().time()
        slo = calls.directory.slo_of(*flow)
        ttft_ms = (execution.ttft_ms if execution is not None else 0.0) or None
        tpot_ms = execution.tpot_ms if execution is not None else None
        given_ms = (now - self.received_at) * 1e3
        verdict = verdict_of(error, given_ms=given_ms, has_answered=ttft_ms is not None, slo=slo)
        calls.slo.ended(flow, verdict, now, ttft_ms=ttft_ms, tpot_ms=tpot_ms, slo=slo)
        calls.metrics.ended(flow, verdict, ttft_ms=ttft_ms, tpot_ms=tpot_ms, slo=slo)

    def _describe(self, execution: Execution) -> None:
        self.span.set(Attribute.OUTCOME, common_pb2.Outcome.Name(execution.outcome))
        self.span.set(Attribute.PROMPT_TOKENS, len(execution.job.prompt_token_ids))
        self.span.set(Attribute.OUTPUT_TOKENS, execution.completion_tokens)
        if execution.ttft_ms:
            self.span.set(Attribute.TTFT_MS, execution.ttft_ms)
        self.span.set_all(self._genai_of(execution))

    def _genai_of(self, execution: Execution) -> Attributes:
        """By OpenTelemetry's conventions."""
        job, sampling, base = execution.job, execution.job.sampling, self._genai[Attribute.MODEL]
        seed = sampling.seed or 0
        is_json = job.constraint is not None and job.constraint.kind in _JSON
        return {
            **self._genai,
            Attribute.MODEL: job.adapter.name if job.adapter is not None else base,
            Attribute.GENAI_MAX_TOKENS: job.max_tokens,
            Attribute.GENAI_TEMPERATURE: sampling.temperature,
            Attribute.GENAI_TOP_P: sampling.top_p,
            Attribute.GENAI_TOP_K: sampling.top_k,
            Attribute.GENAI_PRESENCE_PENALTY: sampling.presence_penalty,
            Attribute.GENAI_FREQUENCY_PENALTY: sampling.frequency_penalty,
            Attribute.GENAI_CHOICES: job.n,
            **({Attribute.GENAI_SEED: seed} if seed < _MAX_SEED else {}),
            Attribute.GENAI_OUTPUT_TYPE: "json" if is_json else "text",
            Attribute.GENAI_RESPONSE_MODEL: job.adapter.reference if job.adapter is not None else base,
            Attribute.GENAI_FINISH_REASONS: execution.finish_reasons,
            **({Attribute.GENAI_FIRST_CHUNK_S: execution.ttft_ms / 1e3} if execution.ttft_ms else {}),
            Attribute.GENAI_RESPONSE_ID: self.request_id,
            Attribute.GENAI_INPUT_TOKENS: len(job.prompt_token_ids),
            Attribute.GENAI_OUTPUT_TOKENS: execution.completion_tokens,
            Attribute.GENAI_CACHED_TOKENS: execution.cached_prompt_tokens,
        }


def draining() -> Draining:
    return Draining("this router is stopping: ask another one", retry_after_s=0.1)


def _outcome_of(error: BaseException | None) -> str:
    """COMPLETED or an error's label."""
    match error:
        case None:
            return COMPLETED
        case ManyloraError():
            return error.label
        case Exception():
            return InternalError.label
        case _:
            return Cancelled.label


def _log(changes: Sequence[Change]) -> None:
    for change in changes:
        tenant, adapter = change.scope[0], change.scope[1] if len(change.scope) == 2 else "all"
        more = fields(tenant=tenant, adapter=adapter or "", open_s=change.open_s)
        _LOG.warning("circuit %s", "closed" if change.open_s is None else "opened", extra=more)
