"""`/metrics`: prometheus-client's instruments of the registry's metrics, and their text."""

from __future__ import annotations

import functools
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from manylora_shared.telemetry.names import Attributes
from manylora_shared.telemetry.registry import ALL, LABELS, OTHER, Metric

# By its own negotiation prometheus-client turns the colons of vLLM's names into underscores, though both formats have
# them (client_python #1177).
_AS_THEY_ARE = "allow-utf-8"
_OPENMETRICS = "application/openmetrics-text"
_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a further series of each counter


class Exposition:
    """Thread-safe. service: whose counters without labels begin at zero."""

    def __init__(self, service: str) -> None:
        self._registry = CollectorRegistry()
        self._instruments: dict[Metric, Any] = {}
        for metric in ALL:
            if metric.service == service and metric.kind == "counter" and not metric.labels:
                self._instrument(metric)

    def gauge(self, metric: Metric, value: float, attributes: Attributes | None) -> None:
        self._child(metric, attributes).set(value)

    def count(self, metric: Metric, amount: float, attributes: Attributes | None) -> None:
        self._child(metric, attributes).inc(amount)

    def histogram(self, metric: Metric, value: float, attributes: Attributes | None, trace_id: str) -> None:
        self._child(metric, attributes).observe(value, {"trace_id": trace_id} if trace_id else None)

    def forget(self, metric: Metric, attributes: Attributes) -> None:
        if metric in self._instruments:
            self._instruments[metric].remove_by_labels({LABELS[name]: str(each) for name, each in attributes.items()})

    def clear(self, metric: Metric) -> None:
        if metric in self._instruments:
            if metric.labels:
                self._instruments[metric].clear()
            else:
                self._registry.unregister(self._instruments.pop(metric))

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """And its content type. Only OpenMetrics has exemplars. Takes long where there are many series."""
        if _OPENMETRICS in accept:
            told = openmetrics.generate_latest(self._registry, escaping=_AS_THEY_ARE)  # type: ignore[no-untyped-call]
            return told, f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
        return generate_latest(self._registry, escaping=_AS_THEY_ARE), CONTENT_TYPE_PLAIN_0_0_4

    def _child(self, metric: Metric, attributes: Attributes | None) -> Any:
        instrument = self._instruments.get(metric) or self._instrument(metric)
        if not metric.labels:
            return instrument
        given = attributes or {}
        return instrument.labels(*[str(given.get(name, OTHER)) for name in metric.labels])

    def _instrument(self, metric: Metric) -> Any:
        kind = _KINDS[metric.kind]
        build = functools.partial(kind, buckets=metric.buckets) if metric.kind == "histogram" else kind
        made = build(metric.name, metric.help, [LABELS[name] for name in metric.labels], registry=self._registry)
        self._instruments[metric] = made
        return made
