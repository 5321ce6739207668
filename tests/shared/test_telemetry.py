from __future__ import annotations

import asyncio
import json
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from manylora_shared.errors import Code, NotFound
from manylora_shared.telemetry import Attribute, MetricName, SpanName, Telemetry, exporters, request_attributes, source
from manylora_shared.telemetry.traceparent import trace_id_of
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_over_three_services() -> None:
    router, scheduler, worker = (Telemetry.recording(name) for name in ("router", "scheduler", "worker"))
    common = request_attributes(tenant="acme", qos_class="standard", adapter="support", adapter_version="ab12")
    with router.span(SpanName.REQUEST, parent=PARENT, attributes=common, server=True) as root:
        queued = scheduler.span(SpanName.QUEUE, parent=root.traceparent, attributes=common)
        queued.end()
        with worker.span(SpanName.EXECUTE, parent=root.traceparent, attributes=common) as execute:
            worker.span(SpanName.PREFILL, parent=execute.traceparent, attributes=common).end()
    spans = [span for t in (router, scheduler, worker) for span in t.recorded()]
    by_name = {span["name"]: span for span in spans}
    assert {span["trace_id"] for span in spans} == {trace_id_of(PARENT)}
    assert by_name[SpanName.REQUEST]["parent_id"] == PARENT.split("-")[2]
    assert by_name[SpanName.QUEUE]["parent_id"] == by_name[SpanName.REQUEST]["span_id"]
    assert by_name[SpanName.PREFILL]["parent_id"] == by_name[SpanName.EXECUTE]["span_id"]
    assert [span["service"] for span in spans] == ["manylora-router", "manylora-scheduler", *["manylora-worker"] * 2]
    for span in spans:
        assert span["attributes"] == {
            Attribute.TENANT_ID: "acme",
            Attribute.QOS_CLASS: "standard",
            Attribute.ADAPTER_ID: "support",
            Attribute.ADAPTER_VERSION: "ab12",
        }


def test_explicit_times_tell_of_the_past() -> None:
    telemetry = Telemetry.recording("router")
    telemetry.span(SpanName.QUEUE_WAIT, start_ns=1_000).end(5_000)
    (span,) = telemetry.recorded()
    assert (span["start_ns"], span["end_ns"]) == (1_000, 5_000)
    before = time.time_ns()
    assert before <= telemetry.now_ns() <= time.time_ns()


@pytest.mark.parametrize(
    "parent",
    [
        "",
        None,
        "nonsense",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    ],
)
def test_without_a_good_parent_a_trace_begins(parent: str | None) -> None:
    telemetry = Telemetry.recording("router")
    telemetry.span(SpanName.REQUEST, parent=parent).end()
    (span,) = telemetry.recorded()
    assert span["parent_id"] is None
    assert trace_id_of(parent or "") == ""


def test_later_versions_of_the_header_may_say_more() -> None:
    telemetry = Telemetry.recording("router")
    telemetry.span(SpanName.REQUEST, parent="cc" + PARENT[2:] + "-what-comes").end()
    assert telemetry.recorded()[0]["trace_id"] == trace_id_of(PARENT)


def test_a_caller_that_does_not_sample_is_respected() -> None:
    telemetry = Telemetry.recording("router")
    with telemetry.span(SpanName.REQUEST, parent=PARENT[:-2] + "00") as span:
        assert span.traceparent.endswith("-00")
        assert trace_id_of(span.traceparent) == trace_id_of(PARENT)
    assert telemetry.recorded() == []


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (NotFound("adapter x"), "NOT_FOUND: adapter x", "NOT_FOUND"),
        (asyncio.CancelledError(), "CANCELLED", "CANCELLED"),
        (KeyError("secret text"), "INTERNAL: KeyError", "INTERNAL"),
        (GeneratorExit(), "CANCELLED", "CANCELLED"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_sets_the_status(error: BaseException, message: str, kind: str) -> None:
    telemetry = Telemetry.recording("router")
    with pytest.raises(type(error)), telemetry.span(SpanName.REQUEST):
        raise error
    (span,) = telemetry.recorded()
    assert span["status"] == {"code": "ERROR", "message": message}
    assert span["attributes"][Attribute.ERROR_TYPE] == kind


def test_status_is_ok_on_exit_unless_it_was_set() -> None:
    telemetry = Telemetry.recording("router")
    with telemetry.span(SpanName.REQUEST):
        pass
    with telemetry.span(SpanName.REQUEST) as late:
        late.fail(Code.DEADLINE_EXCEEDED)
    telemetry.span(SpanName.REQUEST).end()
    assert [span["status"]["code"] for span in telemetry.recorded()] == ["OK", "ERROR", "UNSET"]


def test_a_span_ends_once() -> None:
    telemetry = Telemetry.recording("router")
    span = telemetry.span(SpanName.STREAM)
    span.event("first token", {Attribute.TTFT_MS: 3.5})
    span.end()
    span.set(Attribute.OUTCOME, "late")
    span.set_all({Attribute.OUTCOME: "late"})
    span.event("late")
    span.ok()
    span.end()
    (found,) = telemetry.recorded()
    assert found["attributes"] == {}
    assert [event["name"] for event in found["events"]] == ["first token"]


def test_disabled_hands_on_the_parent_and_knows_no_time() -> None:
    telemetry = Telemetry.disabled()
    assert not telemetry.enabled
    assert telemetry.now_ns() == 0
    with telemetry.span(SpanName.REQUEST, parent=PARENT) as span:
        span.set(Attribute.OUTCOME, "x")
        span.fail(Code.INTERNAL)
        assert span.traceparent == PARENT
    assert telemetry.span(SpanName.REQUEST).traceparent == ""
    telemetry.shutdown()


def test_there_is_no_global_state() -> None:
    provider = trace.get_tracer_provider()
    Telemetry.recording("router").span(SpanName.REQUEST).end()
    assert trace.get_tracer_provider() is provider
    assert not trace.get_current_span().get_span_context().is_valid


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


def test_names_are_unique() -> None:
    for names in (SpanName, Attribute):
        values = [value for name, value in vars(names).items() if not name.startswith("_")]
        assert len(values) == len(set(values))


def test_metrics_are_kept_by_name_and_attributes() -> None:
    telemetry = Telemetry.recording("scheduler")
    assert telemetry.has_metrics
    telemetry.gauge(MetricName.OVERLOAD_LEVEL, 5)
    telemetry.gauge(MetricName.OVERLOAD_LEVEL, 7)
    for amount in (2, 3):
        telemetry.count(MetricName.OVERLOAD_GIVEN_UP, amount, {Attribute.STAGE: "queue"})
    telemetry.count(MetricName.OVERLOAD_GIVEN_UP, 1, {Attribute.STAGE: "router"})
    assert telemetry.recorded_metrics() == {
        (MetricName.OVERLOAD_LEVEL, frozenset()): 7,
        (MetricName.OVERLOAD_GIVEN_UP, frozenset({(Attribute.STAGE, "queue")})): 5,
        (MetricName.OVERLOAD_GIVEN_UP, frozenset({(Attribute.STAGE, "router")})): 1,
    }
    telemetry.shutdown()
    telemetry.gauge(MetricName.OVERLOAD_LEVEL, 9)
    telemetry.shutdown()


def test_disabled_metrics_do_nothing() -> None:
    telemetry = Telemetry.disabled()
    assert not telemetry.has_metrics
    telemetry.gauge(MetricName.OVERLOAD_LEVEL, 5)
    telemetry.count(MetricName.OVERLOAD_GIVEN_UP, 5)
