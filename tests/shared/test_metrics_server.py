"""`/metrics`, as Prometheus reads it."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.telemetry.metrics_server import MetricsServer
from prometheus_client.parser import text_string_to_metric_families

FLOW = {Attribute.TENANT_ID: "acme", Attribute.QOS_CLASS: "batch"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def read(address: str, path: str = "/metrics", accept: str = "") -> tuple[str, str]:
    request = urllib.request.Request(f"http://{address}{path}", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode(), answer.headers["content-type"]


def test_both_formats_have_vllms_names_and_openmetrics_has_examples() -> None:
    telemetry = Telemetry.recording("worker")
    server = MetricsServer(telemetry, "127.0.0.1:0", None)
    try:
        telemetry.count(Metrics.REQUESTS, 2, FLOW)
        telemetry.histogram(Metrics.TTFT, 0.3, FLOW, traceparent=PARENT)
        telemetry.gauge(Metrics.VLLM_RUNNING, 3, {Attribute.ENGINE: "0", Attribute.MODEL: "m"})
        text, kind = read(server.address)
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["inference_requests"].samples[0].labels == {"tenant": "acme", "class": "batch"}
        assert families["vllm:num_requests_running"].samples[0].value == 3
        assert families["manylora_preemptions"].samples[0].value == 0, "counters begin at zero"
        text, kind = read(server.address, accept="application/openmetrics-text;version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in text
        assert '# {trace_id="0af7651916cd43dd8448eb211c80319c"} 0.3' in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(server.address, "/")
    finally:
        server.close()
