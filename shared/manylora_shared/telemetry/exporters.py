"""Where ended spans and metrics go: a receiver or a file, or memory."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

_EXPORT_TIMEOUT_S = 3
_BATCH_DELAY_MS = 500
_METRICS_INTERVAL_MS = 5000
_QUEUE_SPANS = 8192  # more are dropped
_MAX_FILE_BYTES = 256 << 20


def spans_to_receiver(endpoint: str) -> BatchSpanProcessor:
    """OTLP over gRPC, in batches."""
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=_is_plain(endpoint), timeout=_EXPORT_TIMEOUT_S)
    return _batched(exporter)


def metrics_to_receiver(endpoint: str) -> MetricReader:
    """OTLP over gRPC, every few seconds."""
    exporter = OTLPMetricExporter(endpoint=endpoint, insecure=_is_plain(endpoint), timeout=_EXPORT_TIMEOUT_S)
    return PeriodicExportingMetricReader(exporter, export_interval_millis=_METRICS_INTERVAL_MS)


def spans_to_file(path: Path) -> BatchSpanProcessor:
    """One JSON object a line, in batches."""
    return _batched(_FileExporter(path))


def _is_plain(endpoint: str) -> bool:
    return not endpoint.startswith("https://")


def _batched(exporter: SpanExporter) -> BatchSpanProcessor:
    return BatchSpanProcessor(
        exporter,
        max_queue_size=_QUEUE_SPANS,
        schedule_delay_millis=_BATCH_DELAY_MS,
        export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
    )


def _as_object(span: ReadableSpan) -> dict[str, Any]:
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
    """Each batch is one write, so that processes do not tear each other's lines. A full file becomes `.1`, and each of
    them opens the new one when it next writes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _bound(self) -> None:
        if self._is_in_place() and os.fstat(self._file).st_size < _MAX_FILE_BYTES:
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        if self._is_in_place():  # else another process was faster
            os.replace(self._path, f"{self._path}.1")
        os.close(self._file)
        self._file = self._open()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(_as_object(span), separators=(",", ":")) + "\n" for span in spans)
        self._bound()
        os.write(self._file, lines.encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class Recorder(SpanExporter):
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
