"""The table of metrics."""

from __future__ import annotations

import re

from manylora_shared.telemetry import Attribute
from manylora_shared.telemetry.registry import ALL, LABELS


def test_names_are_unique_and_prometheus_takes_them() -> None:
    for names in ([m.name for m in ALL], [m.otlp for m in ALL if m.otlp], list(LABELS.values())):
        assert len(names) == len(set(names))
    for metric in ALL:
        assert re.fullmatch(r"[a-z_:][a-z0-9_:]*", metric.name)
        assert not metric.name.endswith("_total")
        assert set(metric.labels) <= set(LABELS)
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert not (metric.otlp and "manylora.tenant.id" in metric.labels) or metric.otlp.startswith("manylora.slo."), (
            "over OTLP a tenant's series never ends"
        )


def test_only_who_bounds_names_has_metrics_with_names() -> None:
    """Routers and workers name those that are used most; each has a test with ten thousand tenants."""
    named = {Attribute.TENANT_ID, Attribute.ADAPTER_ID, Attribute.RUNNING_ADAPTERS, Attribute.WAITING_ADAPTERS}
    assert {metric.service for metric in ALL if named & set(metric.labels)} == {"router", "worker"}
