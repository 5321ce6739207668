"""The series at `/metrics`."""

from __future__ import annotations

from manylora_shared.telemetry import Attribute, Metrics, Telemetry


def test_what_is_forgotten_is_no_series_any_more() -> None:
    telemetry = Telemetry.recording("worker")
    for tenant in ("a", "b"):
        telemetry.gauge(Metrics.KV_IN_USE, 1, {Attribute.TENANT_ID: tenant})
    telemetry.forget([Metrics.KV_IN_USE, Metrics.TTFT], {Attribute.TENANT_ID: "a"})
    text = telemetry.exposition()[0].decode()
    assert 'kv_bytes_in_use{tenant="b"}' in text
    assert 'tenant="a"' not in text
    telemetry.clear(Metrics.KV_IN_USE)
    assert "kv_bytes_in_use{" not in telemetry.exposition()[0].decode()
