"""The scheduler's spans of a request, told when it leaves the queue: its time there, and the choice of its worker."""

from __future__ import annotations

from manylora_shared.composition import content_of
from manylora_shared.errors import Code
from manylora_shared.telemetry import Attribute, Attributes, Span, SpanName, Telemetry, request_attributes

from manylora_scheduler.core.events import SendGrant
from manylora_scheduler.core.request import QueuedRequest


class QueueSpans:
    def __init__(self, telemetry: Telemetry, scheduler_id: str, epoch: int) -> None:
        self._telemetry = telemetry
        self._scheduler_id = scheduler_id
        self._epoch = epoch

    def granted(self, grant: SendGrant, began_ns: int, num_queued: int) -> None:
        """began_ns: when its worker began to be chosen; unix time."""
        if not self._telemetry.enabled or grant.repeated:
            return
        request = grant.request
        waiting = self._waiting(request, {Attribute.ATTEMPT: grant.attempt, Attribute.QUEUE_DEPTH: num_queued})
        placing = self._telemetry.span(
            SpanName.PLACEMENT,
            parent=waiting.traceparent,
            attributes={
                **_attributes(request),
                Attribute.WORKER_ID: grant.worker_id,
                Attribute.ADAPTER_RESIDENT: grant.adapter_resident,
                Attribute.SCHEDULER_ID: self._scheduler_id,
                Attribute.SCHEDULER_EPOCH: self._epoch,
            },
            start_ns=began_ns,
        )
        placing.ok()
        placing.end()
        waiting.ok()
        waiting.end()

    def ended(self, request: QueuedRequest, code: Code, message: str) -> None:
        if not self._telemetry.enabled:
            return
        span = self._waiting(request, {})
        span.fail(code, message)
        span.end()

    def _waiting(self, request: QueuedRequest, more: Attributes) -> Span:
        return self._telemetry.span(
            SpanName.QUEUE,
            parent=request.traceparent,
            attributes={**_attributes(request), **more},
            start_ns=request.enqueued_ns,
            server=True,
        )


def _attributes(request: QueuedRequest) -> Attributes:
    return request_attributes(
        tenant=request.flow.tenant_id,
        qos_class=request.flow.qos_class,
        adapter=request.adapter_id,
        adapter_version=content_of(request.adapter_uid) if request.adapter_uid else "",
        request_id=request.request_id,
    )
