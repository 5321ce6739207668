"""Where spans go: a file of lines, an OTLP receiver, a receiver that is not there."""

from __future__ import annotations

import json
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from manylora_shared.telemetry import SpanName, Telemetry, exporters, source
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


def test_a_file_holds_one_object_a_line_and_can_be_shared(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "spans.jsonl"
    first, second = Telemetry("router", instance_id="r0", trace_file=path), Telemetry("worker", trace_file=path)
    for telemetry in (first, second):
        for _ in range(100):
            telemetry.span(SpanName.STREAM).end()
        telemetry.shutdown()
        telemetry.shutdown()
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(spans) == 200
    assert spans[0].keys() == {
        *("name", "trace_id", "span_id", "parent_id", "service", "instance"),
        *("start_ns", "end_ns", "attributes", "events", "status"),
    }
    assert {span["service"] for span in spans} == {"manylora-router", "manylora-worker"}
    assert first.span(SpanName.STREAM).traceparent == ""


def test_a_full_file_is_moved_aside_by_whoever_sees_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "_MAX_FILE_BYTES", 20_000)
    path = tmp_path / "spans.jsonl"
    both = [Telemetry("router", trace_file=path), Telemetry("worker", trace_file=path)]
    for _ in range(20):
        for telemetry in both:
            for _ in range(10):
                telemetry.span(SpanName.STREAM).end()
            assert telemetry._provider is not None
            telemetry._provider.force_flush()
    for telemetry in both:
        telemetry.shutdown()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["spans.jsonl", "spans.jsonl.1"]
    for each in tmp_path.iterdir():
        assert each.stat().st_size < 30_000
        assert all(json.loads(line)["name"] == SpanName.STREAM for line in each.read_text().splitlines())


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.spans += [(service, span.name) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_an_otlp_receiver_gets_the_spans_by_shutdown() -> None:
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    telemetry = Telemetry("scheduler", otlp_endpoint=f"127.0.0.1:{port}")
    telemetry.span(SpanName.QUEUE).end()
    telemetry.shutdown()
    server.stop(None)
    assert receiver.spans == [("manylora-scheduler", SpanName.QUEUE)]


def test_a_dead_receiver_delays_the_shutdown_by_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "_EXPORT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(source, "_FLUSH_TIMEOUT_MS", 300)
    telemetry = Telemetry("scheduler", otlp_endpoint="127.0.0.1:1")
    telemetry.span(SpanName.QUEUE).end()
    started = time.monotonic()
    telemetry.shutdown()
    assert time.monotonic() - started < 2
