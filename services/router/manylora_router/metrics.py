"""What a router's metrics say. Owns the names of flows: each costs the receiver a series for this process's life."""

from __future__ import annotations

from collections.abc import Sequence

from manylora_shared.telemetry import Attribute, MetricName, Telemetry
from manylora_shared.tenancy.policy import Slo
from manylora_shared.tenancy.slo import Flow, Verdict

from manylora_router.guard.circuits import CircuitState

MAX_FLOWS = 1_000  # the rest is counted in one series without a tenant
RECORD_S = 5.0  # between two looks at circuits and quarantined prompts


class RouterMetrics:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._named: set[Flow] = set()

    @property
    def has_readers(self) -> bool:
        return self._telemetry.has_metrics

    def ended(
        self, flow: Flow, verdict: Verdict, *, ttft_ms: float | None, tpot_ms: float | None, slo: Slo | None
    ) -> None:
        """Arguments as for SloTracker.ended."""
        telemetry = self._telemetry
        if slo is None or not telemetry.has_metrics:
            return
        labels = self._labels(flow)
        if verdict is not Verdict.EXCUSED:
            telemetry.count(MetricName.SLO_REQUESTS, 1, {**labels, Attribute.VERDICT: verdict.value})
            if slo.availability is not None:
                telemetry.gauge(MetricName.SLO_AVAILABILITY_TARGET, slo.availability, labels)
        if ttft_ms is not None:
            telemetry.histogram(MetricName.SLO_TTFT, ttft_ms, labels)
            if slo.ttft_p95_ms is not None:
                in_time = "late" if ttft_ms > slo.ttft_p95_ms else "in_time"
                telemetry.count(MetricName.SLO_FIRST_TOKENS, 1, {**labels, Attribute.VERDICT: in_time})
        if tpot_ms is not None:
            telemetry.histogram(MetricName.SLO_TPOT, tpot_ms, labels)

    def refusing(self, circuits: Sequence[CircuitState], num_quarantined: int) -> None:
        half_open = sum(state.is_half_open for state in circuits)
        for kind, count in (("open", len(circuits) - half_open), ("half_open", half_open)):
            self._telemetry.gauge(MetricName.CIRCUITS, count, {Attribute.KIND: kind})
        self._telemetry.gauge(MetricName.QUARANTINED_PROMPTS, num_quarantined)

    def _labels(self, flow: Flow) -> dict[str, str]:
        if flow not in self._named:
            if len(self._named) >= MAX_FLOWS:
                return {}
            self._named.add(flow)
        return {Attribute.TENANT_ID: flow[0], Attribute.QOS_CLASS: flow[1].value}
