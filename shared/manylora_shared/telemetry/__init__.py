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

from manylora_shared.telemetry.names import Attribute, Attributes, MetricName, SpanName, request_attributes
from manylora_shared.telemetry.source import Telemetry
from manylora_shared.telemetry.spans import Span

__all__ = ["Attribute", "Attributes", "MetricName", "Span", "SpanName", "Telemetry", "request_attributes"]
