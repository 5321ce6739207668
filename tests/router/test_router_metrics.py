"""The names of flows in metrics are bounded."""

from __future__ import annotations

from manylora_router.metrics import MAX_FLOWS, RouterMetrics
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.telemetry import Attribute, MetricName, Telemetry
from manylora_shared.tenancy.policy import Slo
from manylora_shared.tenancy.slo import Verdict


def test_so_many_flows_are_named_in_metrics_and_no_more() -> None:
    telemetry = Telemetry.recording("router")
    metrics, slo = RouterMetrics(telemetry), Slo(availability=0.9)
    for number in (*range(MAX_FLOWS + 3), 0):
        flow = TenantId(f"t{number}"), QosClass.BATCH
        metrics.ended(flow, Verdict.GOOD, ttft_ms=None, tpot_ms=None, slo=slo)
    good = (Attribute.VERDICT, "good")
    counts = {k[1]: v for k, v in telemetry.recorded_metrics().items() if k[0] == MetricName.SLO_REQUESTS}
    assert len(counts) == MAX_FLOWS + 1
    assert counts[frozenset({good})] == 3
    assert counts[frozenset({good, (Attribute.TENANT_ID, "t0"), (Attribute.QOS_CLASS, "batch")})] == 2
