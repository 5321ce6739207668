"""One admitted request on its way through the scheduler and a worker, as the frames that its caller reads.

Owns the request's grant, its Execute stream and its frame numbers; the text is its Choices'. Nothing runs beside the
caller: frames are made when the caller asks for them (`advance`), so a caller that does not read holds up nothing but
its own stream. States:

    waiting --grant--> starting --first frame--> streaming --> ended (`error` says how, None: completed)
       ^-----------------|  the worker was never reached: its grant is given back, and the request queued again

Every grant is closed exactly once, and a request that was queued has exactly one Finished frame, whatever happens; a
request that the scheduler refuses has no frame at all. Tokens are handed out only as far as the request's lease of its
tenant's quota covers them; where the lease does not grow the request ends there, and what it used is settled exactly
once. A caller that goes away calls `close`, which ends everything.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from manylora.v1 import common_pb2, inference_pb2, scheduler_pb2, worker_pb2
from manylora_shared.errors import (
    AdapterFailed,
    Code,
    DeadlineExceeded,
    InternalError,
    ManyloraError,
    QuotaExceeded,
    QuotaExhausted,
    RpcError,
    SlowReader,
    WorkerLost,
)
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.logs import fields
from manylora_shared.telemetry import Attribute, Span, SpanName, Telemetry, request_attributes
from manylora_shared.transport.base import Channel, Stream, methods_of

from manylora_router.admission import ADAPTER_KEY, CLASS_KEY, TENANT_KEY, TRACEPARENT_KEY, Adapter
from manylora_router.channels import WorkerChannels
from manylora_router.choices import Choices
from manylora_router.guard import Fault
from manylora_router.scheduler_client import Grant, Lease, SchedulerClient
from manylora_router.text import Detokenizer, StopStrings

_LOG = logging.getLogger(__name__)
_METHODS = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])
EXECUTE = _METHODS["Execute"]
STOP_CHOICE = _METHODS["StopChoice"]
VALIDATE_ADAPTER = _METHODS["ValidateAdapter"]

MAX_ATTEMPTS = 5
"""Grants that a request may use up on workers that it does not reach."""
_MIN_RETRY_S = 0.02
_MAX_RETRY_S = 0.5
_STOP_CHOICE_TIMEOUT_S = 2.0
LEASE_WAIT_S = 10.0
"""How long a stream whose lease is used up waits for the scheduler's answer: longer than a change of leaders takes."""
_MIN_LEFT_TOKENS = 16
"""More is asked for once so little of a lease is left: an answer takes less than a stream takes for these."""
_FIGURES_TIMEOUT_S = 1.0
"""For a worker to end a request of which every choice has met its end here: a round trip and the rest of a step."""

_NOT_REACHED = (
    Code.UNAVAILABLE,
    Code.CANCELLED,
    Code.RESOURCE_EXHAUSTED,
    Code.FAILED_PRECONDITION,
    Code.ABORTED,
)
"""Before the first frame these say that the worker does not run the request: gone, stopping, full, or under a newer
leader. Nothing was given out, so another worker may have it."""
_OUR_FAULT = (Code.INTERNAL, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.DATA_LOSS)

QOS = {
    QosClass.INTERACTIVE: common_pb2.QOS_CLASS_INTERACTIVE,
    QosClass.STANDARD: common_pb2.QOS_CLASS_STANDARD,
    QosClass.BATCH: common_pb2.QOS_CLASS_BATCH,
}


@dataclass(frozen=True)
class Job:
    """An admitted request: everything that does not change while it runs."""

    request_id: str
    tenant_id: TenantId
    qos_class: QosClass
    priority: int
    adapter: Adapter | None
    prompt_token_ids: Sequence[int]
    max_tokens: int
    n: int
    sampling: common_pb2.SamplingParams
    """With its seed."""
    stop: StopStrings | None
    stop_token_ids: Sequence[int]
    received_at: float
    """By the event loop's clock, as is the deadline."""
    deadline: float | None
    traceparent: str
    can_stream: bool = True
    """False: the caller gets all frames once the request has ended."""
    degraded: inference_pb2.Degraded | None = None
    """What overload took from it, with `max_tokens` as it is in force."""

    def attributes(self) -> dict[str, str | bool | int | float]:
        """What every span of the request carries."""
        return request_attributes(
            tenant=self.tenant_id,
            qos_class=self.qos_class.value,
            adapter=self.adapter.name if self.adapter else "",
            adapter_version=self.adapter.uid if self.adapter else "",
            request_id=self.request_id,
        )


@dataclass
class _Measured:
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    worker: worker_pb2.ExecuteFinished = field(default_factory=worker_pb2.ExecuteFinished)


class Execution:
    """See the module's docstring. Used by one task: `advance` until `ended`, then `close`, always."""

    def __init__(
        self,
        job: Job,
        *,
        scheduler: SchedulerClient,
        channels: WorkerChannels,
        detokenizers: Sequence[Detokenizer],
        telemetry: Telemetry,
        rng: random.Random,
    ) -> None:
        """
        Args:
            job: the request.
            scheduler: gives grants.
            channels: to the workers.
            detokenizers: a fresh one for each choice.
            telemetry: for the spans of waiting and streaming.
            rng: for the pauses between attempts.
        """
        self.job = job
        self.ended = False
        self.error: ManyloraError | None = None
        self.outcome = common_pb2.OUTCOME_UNSPECIFIED
        self._scheduler = scheduler
        self._channels = channels
        self._telemetry = telemetry
        self._rng = rng
        self._choices = Choices(detokenizers, job.stop)
        self._measured = _Measured()
        self._next_frame = 0
        self._next_worker_frame = 0
        self._grant: Grant | None = None
        self._channel: Channel | None = None
        self._stream: Stream | None = None
        self._span: Span | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_expired = False
        self._is_queued = False
        self._rest: worker_pb2.ExecuteResponse | None = None
        """What the lease did not cover of the worker's last message."""
        self._was_held_up = False
        """The stream waited for its lease, and so did not read from the worker."""
        self._is_started = False
        """A worker has begun it."""
        self._stopping: list[asyncio.Task[None]] = []
        self.worker_id = ""
        """The worker that has begun it; it stays after the end."""
        self._is_worker_gone = False
        """The stream broke off while the worker ran it."""

    @property
    def fault(self) -> Fault:
        """What its end says of what it asked for."""
        if self.outcome == common_pb2.OUTCOME_COMPLETED:
            return Fault.NONE
        match self.error:
            case AdapterFailed():
                return Fault.ADAPTER
            case WorkerLost() if self._is_worker_gone:
                return Fault.WORKER_LOST
            case InternalError():
                return Fault.INTERNAL
            case _:
                return Fault.NO_VERDICT

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token of a choice after its first, by the worker's clock; None where nobody can say."""
        intervals = self.completion_tokens / self.job.n - 1
        decode_ms = self._measured.worker.decode_ms
        is_known = self.outcome == common_pb2.OUTCOME_COMPLETED and decode_ms > 0.0 and intervals > 0
        return decode_ms / intervals if is_known else None

    @property
    def used_tokens(self) -> int:
        """What the tenant's quota is charged: the prompt once a worker has begun, and the tokens handed out."""
        return len(self.job.prompt_token_ids) * self._is_started + self.completion_tokens

    @property
    def was_queued(self) -> bool:
        """False: the scheduler refused the request, or was not asked yet."""
        return self._is_queued

    @property
    def completion_tokens(self) -> int:
        return self._choices.num_tokens

    @property
    def ttft_ms(self) -> float:
        return self._measured.ttft_ms

    async def advance(self) -> list[inference_pb2.GenerateResponse]:
        """The next frames, at least one unless the request ended."""
        assert not self.ended
        try:
            frames = await self._next()
            while not frames and not self.ended:
                frames = await self._next()
            return frames
        except ManyloraError as e:
            return self.fail(e)

    def fail(self, error: ManyloraError) -> list[inference_pb2.GenerateResponse]:
        """Ends the request with an error: the frames that tell it, none where it was never queued."""
        self.error = error
        if not self._is_queued:
            self._end()
            return []
        return self._finish(_outcome_of(error))

    def close(self) -> None:
        """Ends everything that still runs for the request. Idempotent."""
        if not self.ended:
            self.outcome = common_pb2.OUTCOME_CANCELLED
            if self._span is not None:
                self._span.fail(Code.CANCELLED)
        self._end()

    async def _next(self) -> list[inference_pb2.GenerateResponse]:
        if self._stream is None:
            return self._on_message(await self._start())
        if self._choices.are_cut_short:
            await self._hear_figures()
            return self._finish(common_pb2.OUTCOME_COMPLETED)
        return self._on_message(await self._covered())

    # Waiting and starting

    async def _start(self) -> worker_pb2.ExecuteResponse:
        """The worker's first message, from whichever worker gives one."""
        attempt = 0
        while True:
            attempt += 1
            grant = await self._wait_for_grant(attempt)
            self._grant = grant
            self.job = job_of_grant(self.job, grant)
            self._measured.queue_ms += grant.queue_ms
            self._open_stream(grant, attempt)
            try:
                return await self._read()
            except RpcError as e:
                if e.code not in _NOT_REACHED:
                    raise InternalError(f"worker {grant.worker_id} failed: {e.message}") from e
                self._leave_worker(reached_worker=False, error=e)
                if e.breaches:  # the tenant's own bounds: it is refused everywhere, and nothing was begun
                    self._is_queued = False
                    raise QuotaExceeded(e.message, breaches=e.breaches) from e
                if attempt >= MAX_ATTEMPTS:
                    message = f"worker {grant.worker_id} was lost, after {attempt} attempts on workers: {e.message}"
                    raise WorkerLost(message, retry_after_s=1.0) from e
                _LOG.info(
                    "worker not reached, queued again",
                    extra=fields(request=self.job.request_id, worker=grant.worker_id, attempt=attempt, error=str(e)),
                )
                pause_s = min(_MIN_RETRY_S * 2**attempt, _MAX_RETRY_S)
                async with self._within_deadline():
                    await asyncio.sleep(pause_s * (0.5 + self._rng.random()))

    async def _wait_for_grant(self, attempt: int) -> Grant:
        job = self.job
        span = self._telemetry.span(SpanName.QUEUE_WAIT, parent=job.traceparent, attributes=job.attributes())
        with span:
            span.set(Attribute.ATTEMPT, attempt)
            request = scheduler_pb2.Enqueue(
                request_id=job.request_id,
                tenant_id=job.tenant_id,
                qos_class=QOS[job.qos_class],
                priority=job.priority,
                adapter_uid=job.adapter.uid if job.adapter else "",
                adapter_id=job.adapter.name if job.adapter else "",
                prompt_tokens=len(job.prompt_token_ids),
                max_new_tokens=job.max_tokens * job.n,
                sequences=job.n,
                traceparent=span.traceparent,
            )
            self._is_queued = True
            try:
                async with self._within_deadline():
                    return await self._scheduler.grant(request, job.deadline)
            except DeadlineExceeded:
                raise
            except ManyloraError:
                self._is_queued = False  # refused: a status alone
                raise

    def _within_deadline(self) -> _Deadline:
        return _Deadline(self.job.deadline)

    def _open_stream(self, grant: Grant, attempt: int) -> None:
        job = self.job
        attributes = job.attributes() | {Attribute.WORKER_ID: grant.worker_id, Attribute.ATTEMPT: attempt}
        self._span = self._telemetry.span(SpanName.STREAM, parent=job.traceparent, attributes=attributes)
        metadata = {TENANT_KEY: job.tenant_id, CLASS_KEY: job.qos_class.value}
        if job.adapter is not None:
            metadata[ADAPTER_KEY] = job.adapter.name
        if self._span.traceparent:
            metadata[TRACEPARENT_KEY] = self._span.traceparent
        request = worker_pb2.ExecuteRequest(
            request_id=job.request_id,
            epoch=grant.epoch,
            tenant_id=job.tenant_id,
            qos_class=QOS[job.qos_class],
            adapter_uid=job.adapter.uid if job.adapter else "",
            prompt_token_ids=job.prompt_token_ids,
            max_tokens=job.max_tokens,
            sampling=job.sampling,
            stop_token_ids=job.stop_token_ids,
            n=job.n,
        )
        self._channel = self._channels.acquire(grant.worker_address)
        self._stream = self._channel.stream(EXECUTE, request, metadata=metadata)
        if job.deadline is not None:
            self._expiry = asyncio.get_running_loop().call_at(job.deadline, self._expire, self._stream)

    def _expire(self, stream: Stream) -> None:
        self._is_expired = True
        stream.cancel()

    def _leave_worker(self, *, reached_worker: bool, error: ManyloraError | None) -> None:
        """Ends the stream, if there is one, and gives the grant back, if there is one."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for task in self._stopping:
            task.cancel()
        self._stopping.clear()
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
        if self._grant is not None:
            if self._channel is not None:
                self._channels.release(self._grant.worker_address)
                self._channel = None
            self._grant = None
            self._scheduler.close_grant(self.job.request_id, reached_worker=reached_worker)
        if self._span is not None:
            self._span.set(Attribute.OUTPUT_TOKENS, self.completion_tokens)
            if error is not None:
                self._span.fail_with(error)
            elif self.outcome == common_pb2.OUTCOME_COMPLETED:
                self._span.ok()
            self._span.end()
            self._span = None

    # Streaming

    async def _read(self) -> worker_pb2.ExecuteResponse:
        """The worker's next message. Raises RpcError before the first frame, and what it means after it."""
        stream, grant = self._stream, self._grant
        assert stream is not None
        assert grant is not None
        try:
            message: worker_pb2.ExecuteResponse | None = await stream.read()
        except RpcError as e:
            if self._is_expired:
                raise _deadline_exceeded() from e
            if self._next_worker_frame == 0:
                raise
            if e.code in _OUR_FAULT:
                raise InternalError(f"worker {grant.worker_id} failed: {e.message}") from e
            self._is_worker_gone = True
            raise WorkerLost(f"worker {grant.worker_id} was lost while the request ran: {e.message}") from e
        if message is None:
            self._is_worker_gone = True
            raise WorkerLost(f"worker {grant.worker_id} ended the stream before the request was finished")
        if message.frame != self._next_worker_frame:
            raise InternalError(
                f"worker {grant.worker_id} sent frame {message.frame}, not {self._next_worker_frame}: output was lost"
            )
        self._next_worker_frame += 1
        self.worker_id = grant.worker_id
        return message

    async def _covered(self) -> worker_pb2.ExecuteResponse:
        """The worker's next message, as far as the lease covers its tokens; what it does not cover is the next one's.

        Raises:
            QuotaExhausted: the lease is used up, and does not grow soon, or nobody says whether it does.
        """
        message = self._rest if self._rest is not None else await self._read()
        self._rest = None
        lease = self._scheduler.lease(self.job.request_id)
        if lease.tokens is None:
            return message
        coming = sum(len(choice.token_ids) for choice in message.tokens.choices if self._choices.goes_on(choice.choice))
        if not coming:
            return message
        if lease.tokens <= self.used_tokens:
            await self._wait_for_tokens(lease)
            if lease.tokens is None:
                return message  # the quota was taken away meanwhile
        left = lease.tokens - self.used_tokens
        if coming > left:
            message, self._rest = _split(message, left, self._choices.goes_on)
        most = len(self.job.prompt_token_ids) + self.job.max_tokens * self.job.n
        if lease.tokens < most and left - coming < _MIN_LEFT_TOKENS:
            self._scheduler.want_more(self.job.request_id)
        return message

    async def _wait_for_tokens(self, lease: Lease) -> None:
        """Until the lease holds more than was used. Raises QuotaExhausted."""
        self._was_held_up = True
        has_asked = False
        while lease.tokens is not None and lease.tokens <= self.used_tokens:
            if has_asked and lease.refusal is not None:
                raise lease.refusal
            self._scheduler.want_more(self.job.request_id)
            has_asked = True
            try:
                async with self._within_deadline(), asyncio.timeout(LEASE_WAIT_S):
                    await lease.changed.wait()
            except TimeoutError:
                text = "the scheduler did not say whether the tenant's quota has more tokens"
                raise QuotaExhausted(text, retry_after_s=1.0) from None

    async def _hear_figures(self) -> None:
        """After the last stop string: what the worker measured, which comes with its last message.

        The caller has all of the text by now. A worker that does not end its stream in time, or fails, changes nothing
        about the answer; its figures are missing then.
        """
        try:
            async with asyncio.timeout(_FIGURES_TIMEOUT_S):
                message = await self._read()
                while message.WhichOneof("event") != "finished":
                    message = await self._read()
        except (ManyloraError, TimeoutError) as e:
            _LOG.warning(
                "a stopped request ends without its worker's figures",
                extra=fields(request=self.job.request_id, error=str(e)),
            )
        else:
            self._measured.worker = message.finished

    def _on_message(self, message: worker_pb2.ExecuteResponse) -> list[inference_pb2.GenerateResponse]:
        match message.WhichOneof("event"):
            case "tokens":
                return self._on_tokens(message.tokens)
            case "started":
                self._is_started = True
                return [self._frame(started=self._started())]
            case "finished":
                return self._on_finished(message.finished)
            case _:
                raise InternalError("a frame of the worker has no event that this router knows")

    def _started(self) -> inference_pb2.Started:
        job = self.job
        return inference_pb2.Started(
            request_id=job.request_id,
            adapter_version=job.adapter.uid if job.adapter else "",
            seed=job.sampling.seed,
            prompt_tokens=len(job.prompt_token_ids),
            degraded=job.degraded,
        )

    def _on_tokens(self, chunk: worker_pb2.TokenChunk) -> list[inference_pb2.GenerateResponse]:
        taken = self._choices.take(chunk)
        for index in taken.stopped:
            self._stop_choice(index)
        frames = [self._frame(delta=delta) for delta in taken.deltas]
        if frames and self._measured.ttft_ms == 0.0:
            self._measured.ttft_ms = self._elapsed_ms()
        return frames

    def _stop_choice(self, index: int) -> None:
        """Tells the worker that a choice is over, beside the stream."""
        channel = self._channel
        assert channel is not None

        async def tell() -> None:
            request = worker_pb2.StopChoiceRequest(request_id=self.job.request_id, choice=index)
            try:
                await channel.call(STOP_CHOICE, request, timeout=_STOP_CHOICE_TIMEOUT_S)
            except RpcError as e:
                # Costs the worker the rest of the choice, and the caller nothing.
                _LOG.warning("StopChoice failed", extra=fields(request=self.job.request_id, error=str(e)))

        self._stopping.append(asyncio.create_task(tell(), name="stop-choice"))

    def _on_finished(self, finished: worker_pb2.ExecuteFinished) -> list[inference_pb2.GenerateResponse]:
        self._measured.worker = finished
        assert self._grant is not None
        worker_id = self._grant.worker_id
        match finished.outcome:
            case common_pb2.OUTCOME_COMPLETED:
                if not self._choices.have_ended:
                    raise InternalError(f"worker {worker_id} finished the request before all of its choices")
                return self._finish(common_pb2.OUTCOME_COMPLETED)
            case common_pb2.OUTCOME_ADAPTER_FAILED:
                name = self.job.adapter.name if self.job.adapter else ""
                raise AdapterFailed(f"adapter {name!r} could not be loaded: {finished.message}")
            case common_pb2.OUTCOME_SLOW_READER if self._was_held_up:
                raise QuotaExhausted(
                    "the tenant's quota gave tokens more slowly than they were made", retry_after_s=1.0
                )
            case common_pb2.OUTCOME_SLOW_READER:
                raise SlowReader(finished.message or "the stream was not read fast enough")
            case common_pb2.OUTCOME_DEADLINE_EXCEEDED:
                raise _deadline_exceeded()
            case common_pb2.OUTCOME_CANCELLED | common_pb2.OUTCOME_WORKER_LOST:
                raise WorkerLost(f"worker {worker_id} gave the request up: {finished.message or 'it is stopping'}")
            case _:
                raise InternalError(f"worker {worker_id} failed: {finished.message or 'internal error'}")

    # Ending

    def _finish(self, outcome: common_pb2.Outcome) -> list[inference_pb2.GenerateResponse]:
        """The last frames: text that was held back, and the terminal one."""
        frames = [self._frame(delta=delta) for delta in self._choices.rest()]
        measured = self._measured
        finished = inference_pb2.Finished(
            outcome=outcome,
            choices=self._choices.ends(),
            usage=common_pb2.Usage(
                prompt_tokens=self.used_tokens - self.completion_tokens,
                completion_tokens=self.completion_tokens,
                cached_prompt_tokens=measured.worker.cached_prompt_tokens,
            ),
            timings=common_pb2.Timings(
                queue_ms=measured.queue_ms,
                ttft_ms=measured.ttft_ms,
                total_ms=self._elapsed_ms(),
                adapter_wait_ms=measured.worker.adapter_wait_ms,
                prefill_ms=measured.worker.prefill_ms,
                decode_ms=measured.worker.decode_ms,
            ),
            worker_id=self._grant.worker_id if self._grant is not None else "",
            degraded=self.job.degraded,
        )
        frames.append(self._frame(finished=finished))
        self.outcome = outcome
        self._end()
        return frames

    def _end(self) -> None:
        self.ended = True
        self._leave_worker(reached_worker=True, error=self.error)
        self._scheduler.settle(self.job.request_id, self.used_tokens)

    def _elapsed_ms(self) -> float:
        return (asyncio.get_running_loop().time() - self.job.received_at) * 1000

    def _frame(
        self,
        *,
        started: inference_pb2.Started | None = None,
        delta: inference_pb2.Delta | None = None,
        finished: inference_pb2.Finished | None = None,
    ) -> inference_pb2.GenerateResponse:
        number = self._next_frame
        self._next_frame = number + 1
        return inference_pb2.GenerateResponse(frame=number, started=started, delta=delta, finished=finished)


def job_of_grant(job: Job, grant: Grant) -> Job:
    """The request as it was granted: with less output than was asked for, where overload makes it so."""
    cap = grant.max_output_tokens
    if cap is None or cap >= job.max_tokens:
        return job
    asked = job.degraded.asked_max_tokens if job.degraded is not None else job.max_tokens
    degraded = inference_pb2.Degraded(max_tokens=cap, asked_max_tokens=asked, overload_level=grant.overload_level)
    return replace(job, max_tokens=cap, degraded=degraded)


def _split(
    message: worker_pb2.ExecuteResponse, tokens: int, goes_on: Callable[[int], bool]
) -> tuple[worker_pb2.ExecuteResponse, worker_pb2.ExecuteResponse]:
    """A message's first tokens of choices that go on, and the rest; ends of choices stay behind their last token."""
    head, rest = worker_pb2.ExecuteResponse(frame=message.frame), worker_pb2.ExecuteResponse(frame=message.frame)
    for part in message.tokens.choices:
        if not goes_on(part.choice):
            continue
        taken = min(tokens, len(part.token_ids))
        tokens -= taken
        if taken == len(part.token_ids):
            head.tokens.choices.append(part)
            continue
        if taken:
            head.tokens.choices.add(
                choice=part.choice,
                first_position=part.first_position,
                token_ids=part.token_ids[:taken],
                logprobs=part.logprobs[:taken],
            )
        behind = rest.tokens.choices.add()
        behind.CopyFrom(part)
        behind.first_position = part.first_position + taken
        del behind.token_ids[:taken]
        del behind.logprobs[:taken]
    return head, rest


class _Deadline:
    """`async with`: raises DeadlineExceeded at a time of the event loop's clock; None: never."""

    def __init__(self, deadline: float | None) -> None:
        self._timeout = asyncio.timeout_at(deadline)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self._timeout.__aexit__(kind, error, None)
        except TimeoutError:
            raise _deadline_exceeded() from None


def _deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed")


def _outcome_of(error: ManyloraError) -> common_pb2.Outcome:
    match error:
        case DeadlineExceeded():
            return common_pb2.OUTCOME_DEADLINE_EXCEEDED
        case WorkerLost():
            return common_pb2.OUTCOME_WORKER_LOST
        case AdapterFailed():
            return common_pb2.OUTCOME_ADAPTER_FAILED
        case SlowReader():
            return common_pb2.OUTCOME_SLOW_READER
        case QuotaExhausted():
            return common_pb2.OUTCOME_QUOTA_EXHAUSTED
        case _:
            return common_pb2.OUTCOME_INTERNAL
