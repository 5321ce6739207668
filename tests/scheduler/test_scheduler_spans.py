"""A request's spans in the scheduler: its time in the queue, and the choice of its worker."""

from __future__ import annotations

from manylora.v1 import common_pb2
from manylora_shared.telemetry import Attribute, SpanName, Telemetry

from tests.scheduler.scripted_cluster import Cluster, play


def test_every_request_has_its_spans() -> None:
    telemetry = Telemetry.recording("scheduler")
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"

    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0", telemetry=telemetry)
        await cluster.worker("w0")
        await cluster.leader()
        router = await cluster.router(app)
        await router.enqueue(
            "a", traceparent=parent, adapter_uid="cd" * 32, adapter_id="upper", qos_class=common_pb2.QOS_CLASS_BATCH
        )
        await router.answer()
        await router.enqueue("late", timeout_s=0.0, traceparent=parent)
        await router.answer()

    play(scenario)
    queue, placement, late = sorted(telemetry.recorded(), key=lambda s: (s["status"]["code"] == "ERROR", s["start_ns"]))
    assert [queue["name"], placement["name"], late["name"]] == [SpanName.QUEUE, SpanName.PLACEMENT, SpanName.QUEUE]
    for span in (queue, placement, late):
        assert span["trace_id"] == "0123456789abcdef0123456789abcdef"
        assert span["attributes"][Attribute.TENANT_ID] == "acme"
    for span in (queue, placement):
        assert span["attributes"][Attribute.ADAPTER_ID] == "upper"
        assert span["attributes"][Attribute.ADAPTER_VERSION] == "cd" * 32
        assert span["attributes"][Attribute.QOS_CLASS] == "batch"
    assert (queue["parent_id"], placement["parent_id"]) == ("0123456789abcdef", queue["span_id"])
    assert placement["attributes"][Attribute.WORKER_ID] == "w0"
    assert placement["attributes"][Attribute.ADAPTER_RESIDENT] is False
    assert late["attributes"]["error.type"] == "DEADLINE_EXCEEDED"
