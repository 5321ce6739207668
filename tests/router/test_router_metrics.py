"""The names of flows in metrics are bounded."""

from __future__ import annotations

from manylora_router.guard.admission import Adapter
from manylora_router.guard.trials import Outcome
from manylora_router.metrics import COMPLETED, MAX_FLOWS, MAX_ROLLOUTS, MAX_TENANTS, EndedRequest, RouterMetrics
from manylora_shared.adapter_reference import AdapterPart
from manylora_shared.ids import AdapterName, AdapterUid, QosClass, TenantId
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.tenancy.policy import Slo
from manylora_shared.tenancy.slo import Verdict


def test_so_many_flows_are_named_in_metrics_and_no_more() -> None:
    telemetry = Telemetry.recording("router")
    metrics, slo = RouterMetrics(telemetry), Slo(availability=0.9)
    for number in (*range(MAX_FLOWS + 3), 0):
        flow = TenantId(f"t{number}"), QosClass.BATCH
        metrics.ended(flow, Verdict.GOOD, ttft_ms=None, tpot_ms=None, slo=slo)
    good = (Attribute.VERDICT, "good")
    counts = {k[1]: v for k, v in telemetry.recorded_metrics().items() if k[0] == Metrics.SLO_REQUESTS}
    assert len(counts) == MAX_FLOWS + 1
    assert counts[frozenset({good})] == 3
    assert counts[frozenset({good, (Attribute.TENANT_ID, "t0"), (Attribute.QOS_CLASS, "batch")})] == 2


def series(telemetry: Telemetry) -> list[str]:
    return [line for line in telemetry.exposition()[0].decode().splitlines() if not line.startswith("#")]


def test_ten_thousand_tenants_have_bounded_series_and_none_is_lost() -> None:
    telemetry = Telemetry.recording("router")
    metrics = RouterMetrics(telemetry)
    most = 0
    for number in range(20_000):
        tenant, heavy = f"t{number % 10_000}", f"heavy{number % 5}"
        for name, tokens in ((tenant, 1), (heavy, 900)):
            ended = EndedRequest(
                tenant=name,
                qos_class=QosClass.BATCH,
                outcome=COMPLETED,
                is_rejected=False,
                total_s=1.0,
                ttft_s=0.1,
                completion_tokens=tokens,
                genai={},
            )
            metrics.request_ended(ended, now=number / 100)
            metrics.tokens_came((TenantId(name), QosClass.BATCH), 0.01)
        if number % 5_000 == 4_999:
            most = max(most, len(series(telemetry)))
    assert most < (MAX_TENANTS + 1) * 80
    requests = [line for line in series(telemetry) if line.startswith("inference_requests_total{")]
    assert len(requests) <= MAX_TENANTS + 1
    assert any('tenant="other"' in line for line in requests)
    for number in range(5):
        assert any(f'tenant="heavy{number}"' in line for line in requests), (
            "who uses most is named, though it came late"
        )


def test_a_refusal_is_counted_by_its_reason_and_tells_no_times() -> None:
    telemetry = Telemetry.recording("router")
    refused = EndedRequest(tenant="a", qos_class=None, outcome="overloaded", is_rejected=True, total_s=1.0, genai={})
    RouterMetrics(telemetry).request_ended(refused, 0.0)
    told = series(telemetry)
    assert 'request_rejections_total{class="other",reason="overloaded",tenant="a"} 1.0' in told
    assert not any("seconds" in line for line in told)


def test_versions_have_series_while_their_rollout_stands_and_so_many_of_them() -> None:
    telemetry = Telemetry.recording("router")
    metrics = RouterMetrics(telemetry)
    outcome = Outcome(has_failed=False, ttft_ms=50.0, tpot_ms=9.0)
    for number in range(MAX_ROLLOUTS + 5):
        part = AdapterPart(AdapterName(f"a{number}"), 2)
        adapter = Adapter(part.name, AdapterUid("d@acme"), (part,), "trial", is_canary=True)
        metrics.tried("acme", adapter, outcome)
        metrics.scored("acme", adapter, 1.0)
    metrics.scored("acme", None, 0.0)

    def counted(name: str) -> list[str]:
        return [line for line in series(telemetry) if line.startswith(name)]

    assert len(counted("rollout_requests_total{")) == MAX_ROLLOUTS + 1
    assert 'adapter="a0",tenant="acme",version="2"' in counted("rollout_ttft_seconds_count{")[0]
    assert counted("feedback_score_count{")[-1].endswith('{adapter="other",tenant="other",version="other"} 6.0')
    metrics.rollouts_stand(["acme/a3"])
    for name in ("rollout_requests_total{", "rollout_time_per_output_token_seconds_count{", "feedback_score_count{"):
        assert {line.split('adapter="')[1].split('"')[0] for line in counted(name)} == {"a3", "other"}
