"""Traces: one trace a request over all services; and metrics. The only importer of OpenTelemetry; all names of spans,
attributes and metrics.

Owns the process's exporter and its queue of ended spans; nothing is global, a service is handed its `Telemetry`. Spans
know nothing of the running task or context: a parent is always given, as the W3C `traceparent` text that also travels
between services. So a span may start in one task and end in another, and may be told afterwards, with explicit times
(`start_ns`, `end_ns`; unix time).

    common = request_attributes(tenant=..., qos_class=..., adapter=...)
    with telemetry.span(SpanName.REQUEST, parent=metadata.get("traceparent"), attributes=common) as span:
        waiting = telemetry.span(SpanName.QUEUE_WAIT, parent=span.traceparent, attributes=common)
        ...
        waiting.end()

A disabled telemetry costs next to nothing, reads no clock and draws no randomness; its spans hand on their parent's
traceparent. Spans never carry text of prompts or answers, nor token ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Counter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricReader,
    NumberDataPoint,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from manylora_shared.errors import Code, ManyloraError

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]


class SpanName:
    """Span names."""

    REQUEST = "manylora.request"
    """Router: from the call to its terminal frame; the root of the trace, or a child of the caller's span."""
    ADMISSION = "manylora.admission"
    """Router: tenant, adapter and fields checked, prompt tokenized."""
    QUEUE_WAIT = "manylora.queue_wait"
    """Router: from enqueue to grant."""
    STREAM = "manylora.stream"
    """Router: from the call of the worker to its last frame."""
    QUEUE = "manylora.queue"
    """Scheduler: the request's time in its flow's queue."""
    PLACEMENT = "manylora.placement"
    """Scheduler: the choice of the worker."""
    EXECUTE = "manylora.execute"
    """Worker: the whole of its part."""
    ADAPTER_LOAD = "manylora.adapter_load"
    """Worker: the wait for the adapter's weights to be on the device."""
    PREFILL = "manylora.prefill"
    DECODE = "manylora.decode"


class MetricName:
    """Metric names. None has a tenant among its attributes: who it was stands in the status."""

    OVERLOAD_LEVEL = "manylora.overload.level"
    """Scheduler, gauge: what the cluster gives up, 0 (nothing) to 128."""
    OVERLOAD_TENANTS = "manylora.overload.tenants"
    """Scheduler, gauge: tenants that give up requests of their own, beyond that level."""
    OVERLOAD_GIVEN_UP = "manylora.overload.given_up"
    """Scheduler, counter by QOS_CLASS and STAGE: requests that were refused, shed or capped."""
    NOISY_NEIGHBOURS = "manylora.noisy_neighbours"
    """Scheduler, gauge by KIND: tenants that a detector reports."""
    PREEMPTIONS = "manylora.preemptions"
    """Worker, counter: sequences that gave up their slot to others at a unit's end."""
    KV_EVICTIONS = "manylora.kv.evictions"
    """Worker, counter: sequences that lost their blocks and are computed again."""
    KV_SWAPS = "manylora.kv.swaps"
    """Worker, counter by DIRECTION: sequences whose KV went to host memory, and came back."""
    KV_SWAPPED_BYTES = "manylora.kv.swapped_bytes"
    """Worker, counter by DIRECTION: what was copied for that."""
    KV_HOST_BYTES = "manylora.kv.host_bytes"
    """Worker, gauge: KV in host memory."""
    ADAPTER_EVICTIONS = "manylora.adapter_evictions"
    """Scheduler, counter by KIND: adapters that left a worker's device for want of room, for their own tenant's (own)
    or for another's (displaced)."""
    UNMET_PINS = "manylora.unmet_pins"
    """Scheduler, gauge: pins that are not on a connected worker's device, summed over the workers."""


class Attribute:
    """Attribute names. TENANT_ID, QOS_CLASS and ADAPTER_ID are on every span."""

    TENANT_ID = "manylora.tenant.id"
    QOS_CLASS = "manylora.class"
    ADAPTER_ID = "manylora.adapter.id"
    """The adapter's name in its tenant's namespace; empty: the base model."""
    ADAPTER_VERSION = "manylora.adapter.version"
    """The adapter's content uid."""
    ADAPTER_RESIDENT = "manylora.adapter.resident"
    """Whether the chosen worker had the adapter's weights already."""
    REQUEST_ID = "manylora.request.id"
    ROUTER_ID = "manylora.router.id"
    SCHEDULER_ID = "manylora.scheduler.id"
    SCHEDULER_EPOCH = "manylora.scheduler.epoch"
    WORKER_ID = "manylora.worker.id"
    ATTEMPT = "manylora.attempt"
    """Which attempt to run the request this is, from 1."""
    OUTCOME = "manylora.outcome"
    PROMPT_TOKENS = "manylora.prompt_tokens"
    OUTPUT_TOKENS = "manylora.output_tokens"
    MAX_TOKENS = "manylora.max_tokens"
    QUEUE_DEPTH = "manylora.queue.depth"
    TTFT_MS = "manylora.ttft_ms"
    STAGE = "manylora.stage"
    """Of OVERLOAD_GIVEN_UP: router, admission, queue or output."""
    KIND = "manylora.kind"
    """Of NOISY_NEIGHBOURS: the detector."""
    DIRECTION = "manylora.direction"
    """Of KV_SWAPS and KV_SWAPPED_BYTES: out or in."""
    KV_SWAPPED = "manylora.kv.swapped"
    """How often the KV of one of the request's sequences went to host memory."""
    KV_EVICTED = "manylora.kv.evicted"
    """How often one of them lost its blocks and was computed again."""
    ERROR_TYPE = "error.type"
    """The gRPC status name of a span that failed."""


def request_attributes(
    *, tenant: str, qos_class: str, adapter: str, adapter_version: str = "", request_id: str = ""
) -> dict[str, AttributeValue]:
    """What every span of a request carries; empty optional values are left out."""
    found: dict[str, AttributeValue] = {
        Attribute.TENANT_ID: tenant,
        Attribute.QOS_CLASS: qos_class,
        Attribute.ADAPTER_ID: adapter,
    }
    if adapter_version:
        found[Attribute.ADAPTER_VERSION] = adapter_version
    if request_id:
        found[Attribute.REQUEST_ID] = request_id
    return found


class Span(Protocol):
    """One span. As a context manager it ends on exit, failed where an exception passes; else call `end`.

    Ends once; calls after that do nothing.
    """

    @property
    def traceparent(self) -> str:
        """The W3C traceparent for children, here and in other services; while disabled the parent's, or empty."""

    def set(self, name: str, value: AttributeValue) -> None: ...

    def set_all(self, values: Attributes) -> None: ...

    def event(self, name: str, values: Attributes | None = None) -> None: ...

    def ok(self) -> None:
        """The work succeeded."""

    def fail(self, code: Code, message: str = "") -> None:
        """The work ended with `code`; CANCELLED and DEADLINE_EXCEEDED count as failures here."""

    def fail_with(self, error: BaseException) -> None:
        """As `fail`, with the code of a ManyloraError, CANCELLED for a cancelled task, INTERNAL for all else."""

    def end(self, end_ns: int | None = None) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Telemetry:
    """A process's source of spans. Thread-safe."""

    def __init__(
        self, service: str, *, instance_id: str = "", otlp_endpoint: str = "", trace_file: Path | str = ""
    ) -> None:
        """
        Args:
            service: `router`, `scheduler` or `worker`; the resource's service.name is `manylora-<service>`.
            instance_id: the resource's service.instance.id.
            otlp_endpoint: an OTLP gRPC receiver: `host:port` or `http://host:port` (plain), `https://host:port` (TLS).
            trace_file: a file to append spans to, one JSON object a line; several processes may share it.

        With neither endpoint nor file, telemetry is disabled.
        """
        processors: list[BatchSpanProcessor | SimpleSpanProcessor] = []
        reader: MetricReader | None = None
        if otlp_endpoint:
            metrics = OTLPMetricExporter(
                endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
            )
            reader = PeriodicExportingMetricReader(metrics, export_interval_millis=_METRICS_INTERVAL_MS)
            exporter = OTLPSpanExporter(
                endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
            )
            processors.append(_batch(exporter))
        if trace_file:
            processors.append(_batch(_FileExporter(Path(trace_file))))
        self._start(service, instance_id, processors, reader)
        self._recorder: _Recorder | None = None

    @classmethod
    def disabled(cls) -> Telemetry:
        return cls("disabled")

    @classmethod
    def recording(cls, service: str, *, instance_id: str = "") -> Telemetry:
        """Keeps ended spans and metrics in memory, for tests: `recorded()`, `recorded_metrics()`."""
        telemetry = cls.__new__(cls)
        telemetry._recorder = _Recorder()
        telemetry._start(service, instance_id, [SimpleSpanProcessor(telemetry._recorder)], InMemoryMetricReader())
        return telemetry

    def _start(
        self,
        service: str,
        instance_id: str,
        processors: Sequence[BatchSpanProcessor | SimpleSpanProcessor],
        reader: MetricReader | None,
    ) -> None:
        self._provider: TracerProvider | None = None
        self._meters: MeterProvider | None = None
        self._reader = reader
        self._gauges: dict[str, Any] = {}  # the API's type of synchronous gauges has no public name
        self._counters: dict[str, Counter] = {}
        if not processors:
            return
        resource = {"service.name": f"manylora-{service}", "service.namespace": "manylora"}
        if instance_id:
            resource["service.instance.id"] = instance_id
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON), resource=Resource(resource), shutdown_on_exit=False
        )
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("manylora")
        if reader is not None:
            self._meters = MeterProvider([reader], resource=Resource(resource), shutdown_on_exit=False)
            self._meter = self._meters.get_meter("manylora")

    @property
    def enabled(self) -> bool:
        return self._provider is not None

    def now_ns(self) -> int:
        """Unix time for a later `start_ns` or `end_ns`; 0 while disabled, which `span` and `end` do not read then."""
        return time.time_ns() if self._provider is not None else 0

    def span(
        self,
        name: str,
        *,
        parent: str | None = None,
        attributes: Attributes | None = None,
        start_ns: int | None = None,
        server: bool = False,
    ) -> Span:
        """Starts a span.

        Args:
            name: a SpanName.
            parent: a traceparent; None, empty or malformed starts a new trace.
            attributes: as `request_attributes` gives them, and more.
            start_ns: when it really began; default: now.
            server: whether it answers a call from another process (the span kind SERVER).
        """
        if self._provider is None:
            return _NullSpan(parent or "")
        started = self._tracer.start_span(
            name,
            context=_context_of(parent),
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=start_ns,
            record_exception=False,
            set_status_on_exception=False,
        )
        return _LiveSpan(started)

    @property
    def has_metrics(self) -> bool:
        """Whether anybody reads them."""
        return self._meters is not None

    def gauge(self, name: str, value: float, attributes: Attributes | None = None) -> None:
        """What a metric is now.

        Args:
            name: a MetricName.
            attributes: few distinct ones: each combination is kept as long as the process lives.
        """
        if self._meters is not None:
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(value, attributes)

    def count(self, name: str, amount: int, attributes: Attributes | None = None) -> None:
        """Adds to a counter; arguments as for `gauge`."""
        if self._meters is not None:
            if name not in self._counters:
                self._counters[name] = self._meter.create_counter(name)
            self._counters[name].add(amount, attributes)

    def recorded_metrics(self) -> dict[tuple[str, frozenset[tuple[str, AttributeValue]]], float]:
        """The metrics of a `recording` telemetry as they stand, by name and attributes."""
        assert isinstance(self._reader, InMemoryMetricReader), "this telemetry does not record"
        data = self._reader.get_metrics_data()
        found: dict[tuple[str, frozenset[tuple[str, AttributeValue]]], float] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        attributes: Any = dict(point.attributes or {})
                        assert isinstance(point, NumberDataPoint)
                        found[metric.name, frozenset(attributes.items())] = point.value
        return found

    def recorded(self) -> list[dict[str, Any]]:
        """The ended spans of a `recording` telemetry, as the objects that a trace file holds."""
        assert self._recorder is not None, "this telemetry does not record"
        return self._recorder.taken()

    def shutdown(self) -> None:
        """Exports what is queued and stops; blocks for some seconds at most. Safe to call again."""
        provider, self._provider = self._provider, None
        meters, self._meters = self._meters, None
        if meters is not None:
            meters.shutdown(timeout_millis=_FLUSH_TIMEOUT_MS)
        if provider is not None:
            provider.force_flush(_FLUSH_TIMEOUT_MS)
            provider.shutdown()


_EXPORT_TIMEOUT_S = 3
_FLUSH_TIMEOUT_MS = 3000
_BATCH_DELAY_MS = 500
_METRICS_INTERVAL_MS = 5000
_QUEUE_SPANS = 8192
"""Ended spans waiting for export; more are dropped."""


class _NullSpan:
    """The span of a disabled telemetry."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def set(self, name: str, value: AttributeValue) -> None:
        pass

    def set_all(self, values: Attributes) -> None:
        pass

    def event(self, name: str, values: Attributes | None = None) -> None:
        pass

    def ok(self) -> None:
        pass

    def fail(self, code: Code, message: str = "") -> None:
        pass

    def fail_with(self, error: BaseException) -> None:
        pass

    def end(self, end_ns: int | None = None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class _LiveSpan:
    """A span of the SDK, which itself ignores what comes after its end."""

    __slots__ = ("_ended", "_span", "_status_set")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._status_set = False
        self._ended = False

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set(self, name: str, value: AttributeValue) -> None:
        if not self._ended:
            self._span.set_attribute(name, value)

    def set_all(self, values: Attributes) -> None:
        if not self._ended:
            self._span.set_attributes(dict(values))

    def event(self, name: str, values: Attributes | None = None) -> None:
        if not self._ended:
            self._span.add_event(name, values)

    def ok(self) -> None:
        self._set_status(Status(StatusCode.OK))

    def fail(self, code: Code, message: str = "") -> None:
        self.set(Attribute.ERROR_TYPE, code.name)
        self._set_status(Status(StatusCode.ERROR, f"{code.name}: {message}" if message else code.name))

    def fail_with(self, error: BaseException) -> None:
        if isinstance(error, ManyloraError):
            self.fail(error.code, error.message)
        elif isinstance(error, asyncio.CancelledError):
            self.fail(Code.CANCELLED)
        else:
            self.fail(Code.INTERNAL, type(error).__name__)

    def _set_status(self, status: Status) -> None:
        if not self._ended:
            self._status_set = True
            self._span.set_status(status)

    def end(self, end_ns: int | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._span.end(end_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._status_set:
            if error is None:
                self.ok()
            elif not isinstance(error, GeneratorExit):
                self.fail_with(error)
            else:
                self.fail(Code.CANCELLED)
        self.end()


_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)


def trace_id_of(traceparent: str) -> str:
    """The trace id (32 hex digits) in a traceparent; empty where there is none or it is malformed."""
    parts = _split(traceparent)
    return f"{parts[0]:032x}" if parts is not None else ""


def _split(traceparent: str) -> tuple[int, int, int] | None:
    """Trace id, span id and flags, by W3C Trace Context 1, section 3.2."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"] is not None):
        return None
    trace_id, span_id = int(match["trace"], 16), int(match["span"], 16)
    return (trace_id, span_id, int(match["flags"], 16)) if trace_id and span_id else None


def _context_of(traceparent: str | None) -> Context:
    parts = _split(traceparent) if traceparent else None
    if parts is None:
        return Context()
    trace_id, span_id, flags = parts
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())


def _batch(exporter: SpanExporter) -> BatchSpanProcessor:
    return BatchSpanProcessor(
        exporter,
        max_queue_size=_QUEUE_SPANS,
        schedule_delay_millis=_BATCH_DELAY_MS,
        export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
    )


def _as_object(span: ReadableSpan) -> dict[str, Any]:
    """A span as a trace file holds it."""
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent is not None else None,
        "service": span.resource.attributes.get("service.name", ""),
        "instance": span.resource.attributes.get("service.instance.id", ""),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": e.name, "time_ns": e.timestamp, "attributes": dict(e.attributes or {})} for e in span.events
        ],
        "status": {"code": span.status.status_code.name, "message": span.status.description or ""},
    }


class _FileExporter(SpanExporter):
    """Appends spans to a file, one JSON object a line.

    Each batch is one write, so that processes do not tear each other's lines.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(_as_object(span), separators=(",", ":")) + "\n" for span in spans)
        os.write(self._file, lines.encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class _Recorder(SpanExporter):
    """Keeps ended spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[dict[str, Any]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._ended += [_as_object(span) for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def taken(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._ended)
