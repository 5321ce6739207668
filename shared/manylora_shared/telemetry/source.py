"""Telemetry: the process's exporters, and what spans and metrics are made with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.metrics import Counter, Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, MetricReader, NumberDataPoint
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind

from manylora_shared.telemetry.exporters import Recorder, metrics_to_receiver, spans_to_file, spans_to_receiver
from manylora_shared.telemetry.exposition import Exposition
from manylora_shared.telemetry.names import Attributes, AttributeValue
from manylora_shared.telemetry.registry import ALL, Metric
from manylora_shared.telemetry.spans import LiveSpan, NullSpan, Span, context_of
from manylora_shared.telemetry.traceparent import trace_id_of

_FLUSH_TIMEOUT_MS = 3000
_BY_OTLP = {metric.otlp: metric for metric in ALL if metric.otlp}


class Telemetry:
    """Thread-safe."""

    def __init__(
        self,
        service: str,
        *,
        instance_id: str = "",
        otlp_endpoint: str = "",
        trace_file: Path | str = "",
        has_exposition: bool = False,
    ) -> None:
        """service: `router`, `scheduler` or `worker`. otlp_endpoint: `host:port` or `http://host:port` (plain),
        `https://host:port` (TLS). trace_file: to append spans to; several processes may share it. has_exposition:
        whether there is a `/metrics`. With none of these, telemetry is disabled.
        """
        processors: list[BatchSpanProcessor | SimpleSpanProcessor] = []
        reader: MetricReader | None = None
        if otlp_endpoint:
            processors.append(spans_to_receiver(otlp_endpoint))
            reader = metrics_to_receiver(otlp_endpoint)
        if trace_file:
            processors.append(spans_to_file(Path(trace_file)))
        self._start(service, instance_id, processors, reader)
        self._exposition = Exposition(service) if has_exposition else None
        self._recorder: Recorder | None = None

    @classmethod
    def disabled(cls) -> Telemetry:
        return cls("disabled")

    @classmethod
    def recording(cls, service: str, *, instance_id: str = "") -> Telemetry:
        """For tests: `recorded()`, `recorded_metrics()`."""
        telemetry = cls.__new__(cls)
        telemetry._recorder = Recorder()
        telemetry._exposition = Exposition(service)
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
        self._histograms: dict[str, Histogram] = {}
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
        """For a later `start_ns` or `end_ns`; 0 while disabled."""
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
        """Args:
        parent: a traceparent; None, empty or malformed starts a new trace.
        start_ns: when it really began; default: now.
        server: whether it answers a call from another process (the span kind SERVER).
        """
        if self._provider is None:
            return NullSpan(parent or "")
        started = self._tracer.start_span(
            name,
            context=context_of(parent),
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=start_ns,
            record_exception=False,
            set_status_on_exception=False,
        )
        return LiveSpan(started)

    @property
    def has_metrics(self) -> bool:
        return self._meters is not None or self._exposition is not None

    def gauge(self, metric: Metric, value: float, attributes: Attributes | None = None) -> None:
        # Over OTLP each combination of attributes is kept as long as the process lives.
        if self._exposition is not None:
            self._exposition.gauge(metric, value, attributes)
        if (name := self._sent_as(metric)) is not None:
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name, metric.unit, metric.help)
            self._gauges[name].set(value, attributes)

    def count(self, metric: Metric, amount: int, attributes: Attributes | None = None) -> None:
        if self._exposition is not None:
            self._exposition.count(metric, amount, attributes)
        if (name := self._sent_as(metric)) is not None:
            if name not in self._counters:
                self._counters[name] = self._meter.create_counter(name, metric.unit, metric.help)
            self._counters[name].add(amount, attributes)

    def histogram(
        self, metric: Metric, value: float, attributes: Attributes | None = None, *, traceparent: str = ""
    ) -> None:
        """traceparent: of the request, which `/metrics` names as an example."""
        if self._exposition is not None:
            self._exposition.histogram(metric, value, attributes, trace_id_of(traceparent) if self.enabled else "")
        if (name := self._sent_as(metric)) is not None:
            if name not in self._histograms:
                self._histograms[name] = self._meter.create_histogram(
                    name, metric.unit, metric.help, explicit_bucket_boundaries_advisory=metric.buckets
                )
            self._histograms[name].record(value, attributes)

    def forget(self, metrics: Iterable[Metric], attributes: Attributes) -> None:
        """Their series with these attributes, at `/metrics`."""
        if self._exposition is not None:
            for metric in metrics:
                self._exposition.forget(metric, attributes)

    def clear(self, metric: Metric) -> None:
        """All its series, at `/metrics`."""
        if self._exposition is not None:
            self._exposition.clear(metric)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """`/metrics` and its content type, by the Accept header. Takes long where there are many series."""
        assert self._exposition is not None, "has_exposition was not asked for"
        return self._exposition.text(accept)

    def _sent_as(self, metric: Metric) -> str | None:
        return metric.otlp if self._meters is not None and metric.otlp else None

    def recorded_metrics(self) -> dict[tuple[Metric, frozenset[tuple[str, AttributeValue]]], float]:
        """What OTLP would have, by attributes; of a histogram its sum."""
        assert isinstance(self._reader, InMemoryMetricReader), "this telemetry does not record"
        data = self._reader.get_metrics_data()
        found: dict[tuple[Metric, frozenset[tuple[str, AttributeValue]]], float] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        attributes: Any = dict(point.attributes or {})
                        assert isinstance(point, NumberDataPoint | HistogramDataPoint)
                        value = point.value if isinstance(point, NumberDataPoint) else point.sum
                        found[_BY_OTLP[metric.name], frozenset(attributes.items())] = value
        return found

    def recorded(self) -> list[dict[str, Any]]:
        """As the objects of a trace file."""
        assert self._recorder is not None, "this telemetry does not record"
        return self._recorder.taken()

    def shutdown(self) -> None:
        """Exports what is queued; blocks for some seconds at most."""
        provider, self._provider = self._provider, None
        meters, self._meters = self._meters, None
        if meters is not None:
            meters.shutdown(timeout_millis=_FLUSH_TIMEOUT_MS)
        if provider is not None:
            provider.force_flush(_FLUSH_TIMEOUT_MS)
            provider.shutdown()
