"""Traces and metrics: the only importer of OpenTelemetry. Owns the process's exporter; nothing is global."""

# Spans know nothing of the running task: a parent is given as the W3C `traceparent` that also travels between services,
# so a span may start in one task and end in another, or be told afterwards with explicit times (unix, ns). A disabled
# telemetry reads no clock and draws no randomness; its spans hand on their parent's traceparent. Spans never carry text
# of prompts or answers, nor token ids.

from manylora_shared.telemetry.names import Attribute, Attributes, SpanName, request_attributes
from manylora_shared.telemetry.registry import Metric, Metrics
from manylora_shared.telemetry.source import Telemetry
from manylora_shared.telemetry.spans import Span

__all__ = ["Attribute", "Attributes", "Metric", "Metrics", "Span", "SpanName", "Telemetry", "request_attributes"]
