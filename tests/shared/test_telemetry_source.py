"""Telemetry as a service holds it: traces over services, metrics, and nothing where it is disabled."""

from __future__ import annotations

from manylora_shared.errors import Code
from manylora_shared.telemetry import Attribute, Metrics, SpanName, Telemetry, request_attributes
from manylora_shared.telemetry.traceparent import trace_id_of
from opentelemetry import trace

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


def test_metrics_are_kept_by_name_and_attributes() -> None:
    telemetry = Telemetry.recording("scheduler")
    assert telemetry.has_metrics
    telemetry.gauge(Metrics.OVERLOAD_LEVEL, 5)
    telemetry.gauge(Metrics.OVERLOAD_LEVEL, 7)
    for amount in (2, 3):
        telemetry.count(Metrics.OVERLOAD_GIVEN_UP, amount, {Attribute.STAGE: "queue"})
    telemetry.count(Metrics.OVERLOAD_GIVEN_UP, 1, {Attribute.STAGE: "router"})
    assert telemetry.recorded_metrics() == {
        (Metrics.OVERLOAD_LEVEL, frozenset()): 7,
        (Metrics.OVERLOAD_GIVEN_UP, frozenset({(Attribute.STAGE, "queue")})): 5,
        (Metrics.OVERLOAD_GIVEN_UP, frozenset({(Attribute.STAGE, "router")})): 1,
    }
    telemetry.shutdown()
    telemetry.gauge(Metrics.OVERLOAD_LEVEL, 9)
    telemetry.shutdown()


def test_disabled_metrics_do_nothing() -> None:
    telemetry = Telemetry.disabled()
    assert not telemetry.has_metrics
    telemetry.gauge(Metrics.OVERLOAD_LEVEL, 5)
    telemetry.count(Metrics.OVERLOAD_GIVEN_UP, 5)
