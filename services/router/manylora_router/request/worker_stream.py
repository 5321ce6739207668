"""One Execute stream: a granted request on one worker, from its opening to its end. Used by one task.

Owns its span, the numbers of the worker's frames, and the StopChoice calls beside it.
"""

from __future__ import annotations

import asyncio
import logging

from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.errors import Code, InternalError, ManyloraError, RpcError, WorkerLost
from manylora_shared.metadata import ADAPTER_KEY, CLASS_KEY, TENANT_KEY, TRACEPARENT_KEY
from manylora_shared.telemetry import Attribute, SpanName, Telemetry
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import methods_of
from manylora_shared.wire import QOS_NUMBERS

from manylora_router.links.channels import WorkerChannels
from manylora_router.links.wire import Grant
from manylora_router.request.deadline import deadline_exceeded
from manylora_router.request.job import Job

_LOG = logging.getLogger(__name__)
_METHODS = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])
EXECUTE = _METHODS["Execute"]
STOP_CHOICE = _METHODS["StopChoice"]

_STOP_CHOICE_TIMEOUT_S = 2.0
LOST_RETRY_S = 1.0  # that callers are told to wait, whatever the way in which a worker was lost

# before the first frame: the worker is gone, stopping, full, under a newer leader, or still at an attempt whose
# connection broke; another may have the request
NOT_REACHED = (
    Code.UNAVAILABLE,
    Code.CANCELLED,
    Code.RESOURCE_EXHAUSTED,
    Code.FAILED_PRECONDITION,
    Code.ABORTED,
    Code.ALREADY_EXISTS,
)
_OUR_FAULT = (Code.INTERNAL, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.DATA_LOSS)


class WorkerStream:
    """Opens the stream when it is made; `close`, always. `attempt`: of the request on workers, from 1."""

    def __init__(self, job: Job, grant: Grant, attempt: int, *, channels: WorkerChannels, telemetry: Telemetry) -> None:
        self._request_id = job.request_id
        self._worker_id = grant.worker_id
        self.address = grant.worker_address
        self._channels = channels
        self._next_frame = 0
        self._is_expired = False
        self.is_worker_gone = False
        self._stopping: list[asyncio.Task[None]] = []
        attributes = job.attributes() | {Attribute.WORKER_ID: grant.worker_id, Attribute.ATTEMPT: attempt}
        self._span = telemetry.span(SpanName.STREAM, parent=job.traceparent, attributes=attributes)
        metadata = {TENANT_KEY: job.tenant_id, CLASS_KEY: job.qos_class.value}
        if job.adapter is not None:
            metadata[ADAPTER_KEY] = job.adapter.name
        if self._span.traceparent:
            metadata[TRACEPARENT_KEY] = self._span.traceparent
        request = worker_pb2.ExecuteRequest(
            request_id=job.request_id,
            epoch=grant.epoch,
            tenant_id=job.tenant_id,
            qos_class=QOS_NUMBERS[job.qos_class],
            adapter_uid=job.adapter.uid if job.adapter else "",
            prompt_token_ids=job.prompt_token_ids,
            max_tokens=job.max_tokens,
            sampling=common_pb2.SamplingParams(**job.sampling.given()),
            stop_token_ids=job.stop_token_ids,
            n=job.n,
            bad_sequences=[worker_pb2.TokenSequence(token_ids=ids) for ids in job.bad_sequences],
        )
        for tokens in job.emitted:
            request.emitted.add(token_ids=tokens or (), has_ended=tokens is None)
        if job.constraint is not None:
            request.constraint.CopyFrom(common_pb2.Constraint(**job.constraint.given()))
        self._channel = channels.acquire(grant.worker_address)
        try:
            self._stream = self._channel.stream(EXECUTE, request, metadata=metadata)
        except Exception as e:
            channels.release(grant.worker_address)
            self._span.fail_with(e)
            self._span.end()
            raise
        self._expiry: asyncio.TimerHandle | None = None
        if job.deadline is not None:
            self._expiry = asyncio.get_running_loop().call_at(job.deadline, self._expire)

    def _expire(self) -> None:
        self._is_expired = True
        self._stream.cancel()

    async def read(self) -> worker_pb2.ExecuteResponse:
        """Raises RpcError before the first frame, and what it means after it."""
        try:
            message: worker_pb2.ExecuteResponse | None = await self._stream.read()
        except RpcError as e:
            if self._is_expired:
                raise deadline_exceeded() from e
            if self._next_frame == 0:
                raise
            if e.code in _OUR_FAULT:
                raise InternalError(f"worker {self._worker_id} failed: {e.message}") from e
            self.is_worker_gone = True
            told = f"worker {self._worker_id} was lost while the request ran: {e.message}"
            raise WorkerLost(told, retry_after_s=LOST_RETRY_S) from e
        if message is None:
            self.is_worker_gone = True
            told = f"worker {self._worker_id} ended the stream before the request was finished"
            raise WorkerLost(told, retry_after_s=LOST_RETRY_S)
        if message.frame != self._next_frame:
            raise InternalError(
                f"worker {self._worker_id} sent frame {message.frame}, not {self._next_frame}: output was lost"
            )
        self._next_frame += 1
        return message

    @property
    def has_message(self) -> bool:
        return self._stream.has_message

    def stop_choice(self, index: int) -> None:

        async def tell() -> None:
            request = worker_pb2.StopChoiceRequest(request_id=self._request_id, choice=index)
            try:
                await self._channel.call(STOP_CHOICE, request, timeout=_STOP_CHOICE_TIMEOUT_S)
            except RpcError as e:
                # Costs the worker the rest of the choice, and the caller nothing.
                more = fields(request=self._request_id, error=str(e), traceparent=self._span.traceparent)
                _LOG.warning("StopChoice failed", extra=more)

        self._stopping.append(asyncio.create_task(tell(), name="stop-choice"))

    def close(self, *, output_tokens: int, error: ManyloraError | None, is_completed: bool) -> None:
        """Once. `output_tokens`: that the caller got; `error`: why the request ended, or goes to another worker."""
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self._stopping:
            task.cancel()
        self._stream.cancel()
        self._channels.release(self.address)
        self._span.set(Attribute.OUTPUT_TOKENS, output_tokens)
        if error is not None:
            self._span.fail_with(error)
        elif is_completed:
            self._span.ok()
        self._span.end()
