"""One admitted request on its way through the scheduler and a worker, as the frames that its caller reads.

    waiting --grant--> starting --first frame--> streaming --> ended (`error` says how)
       ^-----------------|--------------------------|  its worker was never reached, is lost, or hands it over

Frames are made when the caller asks: one that does not read holds up its own stream alone. Every grant is closed once,
use is settled once, and a request that was queued has exactly one Finished frame; one that is refused has no frame.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import (
    AdapterFailed,
    AdapterUnavailable,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    ManyloraError,
    QuotaExceeded,
    QuotaExhausted,
    RpcError,
    SlowReader,
    WorkerLost,
)
from manylora_shared.telemetry import Attribute, SpanName, Telemetry
from manylora_shared.telemetry.logs import fields

from manylora_router.guard.permits import Fault
from manylora_router.ledger.rows import Rows
from manylora_router.links.channels import WorkerChannels
from manylora_router.links.scheduler_client import SchedulerClient
from manylora_router.links.wire import Grant
from manylora_router.request.choices import Choices
from manylora_router.request.deadline import Deadline, deadline_exceeded
from manylora_router.request.frames import Delta, Finished, Frame, Started
from manylora_router.request.job import Job
from manylora_router.request.losses import Losses
from manylora_router.request.metering import End, Meter
from manylora_router.request.reckoning import Reckonings
from manylora_router.request.token_lease import TokenLease
from manylora_router.request.worker_stream import LOST_RETRY_S, NOT_REACHED, WorkerStream
from manylora_router.text.detokenizer import Detokenizer

_LOG = logging.getLogger(__name__)
MAX_ATTEMPTS = 5  # on workers that it does not reach
_MIN_RETRY_S = 0.02
_MAX_RETRY_S = 0.5
_FOUND = {worker_pb2.ADAPTER_TIER_DEVICE: "device", worker_pb2.ADAPTER_TIER_HOST: "host"}
_FIGURES_TIMEOUT_S = 1.0  # after the last stop string, for the worker's end: a round trip and the rest of a step


@dataclass
class _Measured:
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    worker: worker_pb2.ExecuteFinished = field(default_factory=worker_pb2.ExecuteFinished)
    has_word: bool = False  # `worker` is the worker's


class Execution:
    """Used by one task: `advance` until `ended`, then `close`, always."""

    def __init__(
        self,
        job: Job,
        *,
        scheduler: SchedulerClient,
        channels: WorkerChannels,
        reckonings: Reckonings,
        detokenizers: Sequence[Detokenizer],
        let_resume: Callable[[WorkerLost, bool], None],
        rows: Rows,
        telemetry: Telemetry,
        rng: random.Random,
    ) -> None:
        """`detokenizers`: a fresh one for each choice. `let_resume` gets what befell a worker, and whether it was lost
        (else it stops in order), and raises what is to end the request, if another worker is not to go on with it.
        """
        self.job = job
        self.ended = False
        self.error: ManyloraError | None = None
        self.outcome = common_pb2.OUTCOME_UNSPECIFIED
        self._scheduler = scheduler
        self._channels = channels
        self._reckonings = reckonings
        self._let_resume = let_resume
        self._telemetry = telemetry
        self._rng = rng
        self._choices = Choices(detokenizers, job.stop, job.sampling.min_tokens, job.stop_tokens)
        self._measured = _Measured()
        self._next_frame = 0
        self._num_scored = 0  # of the prompt's tokens
        self._num_scored_again = 0  # that the worker will tell once more
        self._has_started = False
        self._losses = Losses()
        self._head: Sequence[Delta] = ()
        self._untold: list[Frame] = []  # each thing in a frame of its own, without a number
        self._lease = TokenLease(job, self._choices, scheduler)
        self._meter = Meter(rows, job, self._choices, self._lease)
        self._lease.when_settled = self._meter.close
        self._grant: Grant | None = None
        self._stream: WorkerStream | None = None
        self._is_queued = False
        self.worker_id = ""  # that has begun it, and after the end
        self.attempts = 0
        self.granted_at: float | None = None  # for the worker that began it first; by the event loop's clock
        self.started_at: float | None = None
        self.adapter_found = ""  # where its adapter's weights were when the worker had it: device, host, store
        self._is_worker_gone = False
        if job.delivered is not None:
            self._take_over(job.delivered, job.charged_tokens)

    @property
    def fault(self) -> Fault:
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
        """Milliseconds per token of a choice after its first, by the worker's clock; None where nobody can say."""
        intervals = self.completion_tokens / self.job.n - 1
        decode_ms = self._measured.worker.decode_ms
        is_known = self.outcome == common_pb2.OUTCOME_COMPLETED and decode_ms > 0.0 and intervals > 0
        is_known = is_known and not self.job.is_resumed
        return decode_ms / intervals if is_known else None

    @property
    def was_queued(self) -> bool:
        """False: refused, or not asked for yet."""
        return self._is_queued

    @property
    def completion_tokens(self) -> int:
        return self._choices.num_tokens

    @property
    def cached_prompt_tokens(self) -> int:
        return self._lease.cached_prompt_tokens

    @property
    def is_paused(self) -> bool:
        return self._losses.is_paused

    @property
    def pauses_s(self) -> Sequence[float]:
        """Of each time that another worker went on, until its first token."""
        return self._losses.pauses_s

    @property
    def adapter_wait_ms(self) -> float:
        """Of the time to its first token, as the worker tells at the end."""
        return self._measured.worker.adapter_wait_ms

    @property
    def is_cut(self) -> bool:
        """A choice ended at its length."""
        return any(end.finish_reason == common_pb2.FINISH_REASON_LENGTH for end in self._choices.ends())

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Of the choices that ended by themselves, as OpenAI calls them."""
        names = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
        ends = self._choices.ends()
        return tuple(names[end.finish_reason] for end in ends if end.finish_reason in names)

    @property
    def word(self) -> worker_pb2.ExecuteFinished:
        """The worker's last one; empty until then."""
        return self._measured.worker

    @property
    def queue_ms(self) -> float:
        return self._measured.queue_ms

    @property
    def ttft_ms(self) -> float:
        return self._measured.ttft_ms

    async def advance(self) -> list[Frame]:
        """At least one, unless the request ended."""
        assert not self.ended
        try:
            while not self.ended and (not self._untold or self._goes_with_next):
                self._untold += await self._next()
        except ManyloraError as e:
            return self.fail(e)
        return self._take_frames()

    def fail(self, error: ManyloraError) -> list[Frame]:
        """The frames that tell it, none where the request was never queued."""
        self.error = error
        if self._is_queued:
            self._untold += self._finish(_outcome_of(error))
        else:
            self._end(error)
        return self._take_frames()

    def hand_over(self, error: ManyloraError) -> list[Frame]:
        """Ends it here for its caller to go on elsewhere behind these frames. They have no Finished, and what is behind
        them is not charged. Whoever was told nothing begins anew, and its prompt is charged there.
        """
        if not self.has_told and not self._untold:
            self._lease.forgive()
        self.error = error
        self.outcome = common_pb2.OUTCOME_CANCELLED
        self._lease.hand_over()
        self._end(error)
        return self._take_frames()

    @property
    def has_told(self) -> bool:
        return self._next_frame > 0

    def forgive(self) -> None:
        """It is charged nothing: nothing of it was handed out, and nobody wants it any more."""
        self._lease.forgive()

    def close(self) -> None:
        """Idempotent."""
        if self.ended:
            return
        self.outcome = common_pb2.OUTCOME_CANCELLED
        self._end(Cancelled(""))

    def _take_over(self, delivered: Sequence[tuple[Sequence[int], int]], charged_tokens: int) -> None:
        """Raises InvalidRequest."""
        self._head = self._choices.go_on(delivered, self.job.max_tokens)
        self._lease.taken_over(charged_tokens)
        self._meter.taken_over()
        self.job = self.job.resumed(self._choices.emitted())
        now = asyncio.get_running_loop().time()
        self._losses.pause("its router was lost", self.completion_tokens, now)

    async def _next(self) -> list[Frame]:
        try:
            if self._stream is None:
                if self._choices.have_ended:  # another router's caller lacks the end alone
                    self._lease.begin()
                    self._losses.go_on(asyncio.get_running_loop().time())
                    return [*self._begin(), *self._finish(common_pb2.OUTCOME_COMPLETED)]
                return self._on_message(await self._start())
            if self._choices.are_cut_short:
                await self._hear_figures(self._stream)
                return self._finish(common_pb2.OUTCOME_COMPLETED)
            return self._on_message(await self._lease.cover(self._stream.read, self.job.most_tokens))
        except WorkerLost as lost:
            if self._stream is None:
                raise
            if self._choices.have_ended:  # what is missing is the worker's word alone
                return self._finish(common_pb2.OUTCOME_COMPLETED)
            self._resume(self._stream, lost)
            return []

    def _resume(self, stream: WorkerStream, lost: WorkerLost) -> None:
        is_lost = stream.is_worker_gone
        self._losses.add(lost, is_lost=is_lost, num_tokens=self.completion_tokens)
        self._let_resume(lost, is_lost)
        more = fields(
            request=self.job.request_id,
            worker=self.worker_id,
            tokens=self.completion_tokens,
            error=lost.message,
            traceparent=self.job.traceparent,
        )
        _LOG.info("a request is to go on at another worker", extra=more)
        self._leave_worker(reached_worker=not is_lost, is_unavailable=is_lost, error=lost)
        self.worker_id, self._is_worker_gone = "", False
        self._measured.has_word, self._measured.worker = False, worker_pb2.ExecuteFinished()
        self._num_scored_again = self._num_scored
        self._lease.resumed()
        self._meter.resumed()
        self.job = self.job.resumed(self._choices.emitted())
        self._losses.pause(lost.message, self.completion_tokens, asyncio.get_running_loop().time())

    # Waiting and starting

    async def _start(self) -> worker_pb2.ExecuteResponse:
        attempt = 0
        if not self.job.is_resumed:
            self._meter.check_room()
        while True:
            attempt += 1
            self.attempts += 1
            grant = await self._wait_for_grant(attempt)
            self._grant = grant
            self._note_grant()
            self._meter.granted()
            self.job = self.job.as_granted(grant)
            self._measured.queue_ms += grant.queue_ms
            self._stream = WorkerStream(self.job, grant, attempt, channels=self._channels, telemetry=self._telemetry)
            try:
                first = await self._stream.read()
                self.worker_id = grant.worker_id
                if self.started_at is None:
                    self.started_at = asyncio.get_running_loop().time()
                return first
            except RpcError as e:
                if e.code not in NOT_REACHED:
                    raise InternalError(f"worker {grant.worker_id} failed: {e.message}") from e
                self._leave_worker(reached_worker=False, is_unavailable=not e.breaches, error=e)
                # the tenant's own bounds: it is refused everywhere, and nothing was begun
                if e.breaches and not self.job.is_resumed:
                    self._is_queued = False
                    raise QuotaExceeded(e.message, breaches=e.breaches) from e
                if attempt >= MAX_ATTEMPTS:
                    message = f"worker {grant.worker_id} was lost, after {attempt} attempts on workers: {e.message}"
                    raise WorkerLost(message, retry_after_s=LOST_RETRY_S) from e
                _LOG.info(
                    "worker not reached, queued again",
                    extra=fields(
                        request=self.job.request_id,
                        worker=grant.worker_id,
                        attempt=attempt,
                        error=str(e),
                        traceparent=self.job.traceparent,
                    ),
                )
                pause_s = min(_MIN_RETRY_S * 2**attempt, _MAX_RETRY_S)
                async with Deadline(self.job.deadline):
                    await asyncio.sleep(pause_s * (0.5 + self._rng.random()))

    def _note_grant(self) -> None:
        if self.started_at is None:
            self.granted_at = asyncio.get_running_loop().time()

    async def _wait_for_grant(self, attempt: int) -> Grant:
        job = self.job
        span = self._telemetry.span(SpanName.QUEUE_WAIT, parent=job.traceparent, attributes=job.attributes())
        with span:
            span.set(Attribute.ATTEMPT, attempt)
            request = job.enqueue(span.traceparent)
            self._is_queued = True
            try:
                async with Deadline(self.job.deadline):
                    return await self._scheduler.grant(request, job.deadline)
            except DeadlineExceeded:
                raise
            except ManyloraError as e:
                if job.is_resumed:
                    message = f"{self._losses.why}; no other worker goes on with it: {e.message}"
                    raise WorkerLost(message, retry_after_s=LOST_RETRY_S) from e
                self._is_queued = False  # refused: a status alone
                raise

    def _leave_worker(self, *, reached_worker: bool, is_unavailable: bool = False, error: ManyloraError | None) -> None:
        if self._stream is not None:
            is_completed = self.outcome == common_pb2.OUTCOME_COMPLETED
            self._stream.close(output_tokens=self.completion_tokens, error=error, is_completed=is_completed)
            self._is_worker_gone = self._stream.is_worker_gone
            self._stream = None
        if self._grant is not None:
            self._grant = None
            self._scheduler.close_grant(
                self.job.request_id, reached_worker=reached_worker, is_unavailable=is_unavailable
            )

    # Streaming

    async def _hear_figures(self, stream: WorkerStream) -> None:
        """What the worker measured comes with its last message. If that is late, the answer stands without it."""
        try:
            async with asyncio.timeout(_FIGURES_TIMEOUT_S):
                message = await stream.read()
                while message.WhichOneof("event") != "finished":
                    message = await stream.read()
        except (ManyloraError, TimeoutError) as e:
            _LOG.warning(
                "a stopped request ends without its worker's figures",
                extra=fields(request=self.job.request_id, error=str(e), traceparent=self.job.traceparent),
            )
        else:
            self._hear_word(message.finished)

    def _on_message(self, message: worker_pb2.ExecuteResponse) -> list[Frame]:
        match message.WhichOneof("event"):
            case "tokens":
                return self._on_tokens(message.tokens)
            case "started":
                self._lease.begin()
                if self._has_started:
                    return []
                self._has_started = True
                if self.job.adapter is not None:
                    self.adapter_found = _FOUND.get(message.started.adapter, "store")
                return self._begin()
            case "finished":
                return self._on_finished(message.finished)
            case _:
                raise InternalError("a frame of the worker has no event that this router knows")

    def _begin(self) -> list[Frame]:
        return [Frame(started=self._started()), *self._choices.late()]

    def _started(self) -> Started:
        job = self.job
        assert job.sampling.seed is not None, "intake draws one"
        return Started(
            request_id=job.request_id,
            adapter=job.adapter.reference if job.adapter else "",
            adapter_version=job.adapter.digest if job.adapter else "",
            seed=job.sampling.seed,
            prompt_token_ids=job.prompt_token_ids,
            degraded=job.degraded,
            head=self._head,
            levels=self._scheduler.lease(job.request_id).levels if self._is_queued else (),
        )

    def _on_tokens(self, chunk: worker_pb2.TokenChunk) -> list[Frame]:
        scored: list[Frame] = []
        if chunk.prompt_logprobs:
            again = min(self._num_scored_again, len(chunk.prompt_logprobs))
            self._num_scored_again -= again
            if told := chunk.prompt_logprobs[again:]:
                self._num_scored += len(told)
                scored.append(Frame(prompt_logprobs=told))
        if chunk.choices:
            self._losses.go_on(asyncio.get_running_loop().time())
        if chunk.choices and self._num_scored < self.job.num_scored:
            raise InternalError(f"the worker told {self._num_scored} of the prompt's {self.job.num_scored} positions")
        taken = self._choices.take(chunk)
        for index in taken.stopped:
            assert self._stream is not None
            self._stream.stop_choice(index)
        if taken.deltas and self._measured.ttft_ms == 0.0:
            self._measured.ttft_ms = self._elapsed_ms()
        return scored + taken.deltas

    def _on_finished(self, finished: worker_pb2.ExecuteFinished) -> list[Frame]:
        self._hear_word(finished)
        assert self._grant is not None
        worker_id = self._grant.worker_id
        match finished.outcome:
            case common_pb2.OUTCOME_COMPLETED:
                if not self._choices.have_ended:
                    raise InternalError(f"worker {worker_id} finished the request before all of its choices")
                return self._finish(common_pb2.OUTCOME_COMPLETED)
            case common_pb2.OUTCOME_ADAPTER_FAILED:
                name = self.job.adapter.name if self.job.adapter else ""
                raise AdapterFailed(f"adapter {name!r} failed: {finished.message}")
            case common_pb2.OUTCOME_ADAPTER_UNAVAILABLE:
                name = self.job.adapter.name if self.job.adapter else ""
                raise AdapterUnavailable(
                    f"adapter {name!r} cannot be loaded now: {finished.message}", retry_after_s=1.0
                )
            case common_pb2.OUTCOME_SLOW_READER if self._lease.was_held_up:
                raise QuotaExhausted(
                    "the tenant's quota gave tokens more slowly than they were made", retry_after_s=1.0
                )
            case common_pb2.OUTCOME_SLOW_READER:
                raise SlowReader(finished.message or "the stream was not read fast enough")
            case common_pb2.OUTCOME_DEADLINE_EXCEEDED:
                raise deadline_exceeded()
            case common_pb2.OUTCOME_CANCELLED | common_pb2.OUTCOME_WORKER_LOST:
                message = f"worker {worker_id} gave the request up: {finished.message or 'it is stopping'}"
                raise WorkerLost(message, retry_after_s=LOST_RETRY_S)
            case _:
                raise InternalError(f"worker {worker_id} failed: {finished.message or 'internal error'}")

    # Ending

    def _finish(self, outcome: common_pb2.Outcome) -> list[Frame]:
        untold = self._choices.rest()
        measured = self._measured
        finished = Finished(
            outcome=outcome,
            choices=self._choices.ends(),
            usage=common_pb2.Usage(
                prompt_tokens=self._lease.used_prompt_tokens,
                completion_tokens=self.completion_tokens,
                cached_prompt_tokens=self._lease.cached_prompt_tokens,
                resumed=len(self._losses.pauses_s),
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
        untold.append(Frame(finished=finished))
        self.outcome = outcome
        self._end(self.error)
        return untold

    def _hear_word(self, finished: worker_pb2.ExecuteFinished) -> None:
        self._measured.worker, self._measured.has_word = finished, True
        is_whole = finished.outcome == common_pb2.OUTCOME_COMPLETED or self._lease.was_held_up
        (self._lease.ended if is_whole else self._lease.cut_short)(finished)

    def _end(self, error: ManyloraError | None) -> None:
        self.ended = True
        if self._is_queued or self._meter.is_open:
            self._meter.ended(self._end_of(error))
        is_over = self.outcome in (common_pb2.OUTCOME_COMPLETED, common_pb2.OUTCOME_QUOTA_EXHAUSTED)
        stream = self._stream
        if stream is None or is_over or self._measured.has_word or stream.is_worker_gone:
            self._leave_worker(reached_worker=True, error=error)
            self._lease.settle()
        else:
            self._reckonings.begin(self.job.request_id, stream.address, self._lease)
            self._leave_worker(reached_worker=True, error=error)

    def _end_of(self, error: ManyloraError | None) -> End:
        name = common_pb2.Outcome.Name(self.outcome).removeprefix("OUTCOME_").lower()
        return End(
            outcome=error.label if error is not None and name == "unspecified" else name,
            queue_ms=self._measured.queue_ms,
            ttft_ms=self._measured.ttft_ms,
            duration_ms=self._elapsed_ms(),
            worker_id=self.worker_id,
            adapter_found=self.adapter_found,
            is_degraded=self.job.degraded is not None,
        )

    def _elapsed_ms(self) -> float:
        return (asyncio.get_running_loop().time() - self.job.received_at) * 1000

    # Frames

    @property
    def _goes_with_next(self) -> bool:
        """First tokens go with the beginning, and the end with the last tokens, where they are there already: a message
        costs more than what is in it."""
        is_begun_alone = len(self._untold) == 1 and self._untold[0].started is not None
        is_end_next = self._choices.have_ended and not self._choices.are_cut_short
        is_there = self._stream is not None and self._stream.has_message
        return is_there and (is_begun_alone or is_end_next) and self._lease.has_tokens

    def _take_frames(self) -> list[Frame]:
        frames: list[Frame] = []
        for event in self._untold:
            if frames and (event.finished is not None or frames[-1].delta is None):
                frames[-1].merge(event)
            else:
                frames.append(event)
        for number, frame in enumerate(frames, self._next_frame):
            frame.number = number
        self._next_frame += len(frames)
        self._untold = []
        return frames


def _outcome_of(error: ManyloraError) -> common_pb2.Outcome:
    match error:
        case DeadlineExceeded():
            return common_pb2.OUTCOME_DEADLINE_EXCEEDED
        case WorkerLost():
            return common_pb2.OUTCOME_WORKER_LOST
        case AdapterFailed():
            return common_pb2.OUTCOME_ADAPTER_FAILED
        case AdapterUnavailable():
            return common_pb2.OUTCOME_ADAPTER_UNAVAILABLE
        case SlowReader():
            return common_pb2.OUTCOME_SLOW_READER
        case QuotaExhausted():
            return common_pb2.OUTCOME_QUOTA_EXHAUSTED
        case _:
            return common_pb2.OUTCOME_INTERNAL
