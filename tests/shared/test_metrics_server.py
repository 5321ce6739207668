"""`/metrics`, as Prometheus reads it."""

from __future__ import annotations

import datetime
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from manylora.local import certs
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.telemetry.metrics_server import MetricsServer
from manylora_shared.transport.tls import Tls, TlsFiles
from prometheus_client.parser import text_string_to_metric_families

FLOW = {Attribute.TENANT_ID: "acme", Attribute.QOS_CLASS: "batch"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def read(address: str, path: str = "/metrics", accept: str = "", *, tls: bool = False) -> tuple[str, str]:
    request = urllib.request.Request(f"http{'s' * tls}://{address}{path}", headers={"accept": accept})
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=5, context=trusting if tls else None) as answer:
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


def test_who_holds_its_connections_keeps_nobody_from_a_scrape(tmp_path: Path) -> None:
    """Eight connections that sent a header's byte at a time were all that there are, for as long as they liked."""
    certs.make(tmp_path, [], datetime.datetime.now(datetime.UTC))
    context = Tls(TlsFiles(tmp_path / certs.CERT, tmp_path / certs.KEY)).server_context()
    for tls, sent in ((None, b"GET /metrics HTTP/1.1\r\nx-slow: "), (context, b"\x16\x03\x01\x02\x00")):
        server = MetricsServer(Telemetry.recording("worker"), "127.0.0.1:0", tls)
        host, _, port = server.address.rpartition(":")
        held = [socket.create_connection((host, int(port))) for _ in range(12)]
        try:
            for each in held:
                each.sendall(sent)
            for _ in range(3):
                read(server.address, tls=tls is not None)
        finally:
            for each in held:
                each.close()
            server.close()
