"""What a router's metrics say. Owns whose names stand in them: each costs the reader series."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from manylora_shared.ids import QosClass
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.telemetry.registry import OTHER
from manylora_shared.tenancy.policy import Slo
from manylora_shared.tenancy.slo import Flow, Verdict
from manylora_shared.tenancy.top_names import TopNames

from manylora_router.guard.admission import Adapter
from manylora_router.guard.circuits import CircuitState
from manylora_router.guard.trials import Outcome

MAX_FLOWS = 1_000  # with a target; the rest is counted in one series without a tenant
MAX_TENANTS = 32  # by use; the rest is `other`
MAX_ROLLOUTS = 32  # whose versions have series; the others are `other`
RECORD_S = 5.0  # between two looks at what is now
COMPLETED = "completed"

_BY_TENANT = (
    Metrics.REQUESTS,
    Metrics.OUTCOMES,
    Metrics.REJECTIONS,
    Metrics.PROMPT_TOKENS,
    Metrics.CACHED_TOKENS,
    Metrics.COMPLETION_TOKENS,
    Metrics.TTFT,
    Metrics.TPOT,
    Metrics.INTER_TOKEN,
    Metrics.E2E,
    Metrics.QUEUE_WAIT,
    Metrics.RESUMES,
    Metrics.RESUME_PAUSE,
)

_BY_VERSION = (Metrics.ROLLOUT_REQUESTS, Metrics.ROLLOUT_TTFT, Metrics.ROLLOUT_TPOT, Metrics.FEEDBACK)


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    """tenant: empty where it is not known. Times are seconds; None: it did not come so far."""

    tenant: str
    qos_class: QosClass | None
    outcome: str  # COMPLETED or an error's label
    is_rejected: bool
    total_s: float
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    pauses_s: Sequence[float] = ()  # until another worker went on
    genai: Mapping[str, str]  # operation and model
    traceparent: str = ""

    @property
    def cost(self) -> int:
        return 1 + self.prompt_tokens + self.completion_tokens


class RouterMetrics:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._named: set[Flow] = set()
        self._rollouts: dict[str, None] = {}  # that have series, by `tenant/name`
        self._tenants: TopNames[str] = TopNames(MAX_TENANTS)
        self._told_rows = (0, 0)  # of the ledger: lost and dropped ones

    @property
    def has_readers(self) -> bool:
        return self._telemetry.has_metrics

    def request_ended(self, request: EndedRequest, now: float) -> None:
        telemetry = self._telemetry
        if not telemetry.has_metrics:
            return
        for tenant in self._tenants.rank(now):
            telemetry.forget(_BY_TENANT, {Attribute.TENANT_ID: tenant})
        if request.tenant:
            self._tenants.used(request.tenant, request.cost)
        labels = self._flow_labels(request.tenant, request.qos_class)
        telemetry.count(Metrics.REQUESTS, 1, labels)
        telemetry.count(Metrics.OUTCOMES, 1, {**labels, Attribute.OUTCOME: request.outcome})
        if request.is_rejected:
            telemetry.count(Metrics.REJECTIONS, 1, {**labels, Attribute.REASON: request.outcome})
            return
        telemetry.count(Metrics.PROMPT_TOKENS, request.prompt_tokens, labels)
        telemetry.count(Metrics.CACHED_TOKENS, request.cached_tokens, labels)
        telemetry.count(Metrics.COMPLETION_TOKENS, request.completion_tokens, labels)
        if request.pauses_s:
            telemetry.count(Metrics.RESUMES, len(request.pauses_s), labels)
        for pause_s in request.pauses_s:
            telemetry.histogram(Metrics.RESUME_PAUSE, pause_s, labels, traceparent=request.traceparent)
        for metric, genai, seconds in (
            (Metrics.QUEUE_WAIT, None, request.queue_s),
            (Metrics.TTFT, Metrics.GENAI_TTFT, request.ttft_s),
            (Metrics.TPOT, Metrics.GENAI_TPOT, request.tpot_s),
            (Metrics.E2E, Metrics.GENAI_DURATION, request.total_s),
        ):
            if seconds is None:
                continue
            telemetry.histogram(metric, seconds, labels, traceparent=request.traceparent)
            if genai is not None:
                failed = {} if request.outcome == COMPLETED else {Attribute.ERROR_TYPE: request.outcome}
                telemetry.histogram(genai, seconds, {**request.genai, **failed})

    def tokens_came(self, flow: Flow, seconds_each: float) -> None:
        """A frame after a stream's first."""
        self._telemetry.histogram(Metrics.INTER_TOKEN, seconds_each, self._flow_labels(*flow))

    def _flow_labels(self, tenant: str, qos_class: QosClass | None) -> dict[str, str]:
        return {
            Attribute.TENANT_ID: tenant if self._tenants.is_named(tenant) else OTHER,
            Attribute.QOS_CLASS: qos_class.value if qos_class is not None else OTHER,
        }

    def ended(
        self, flow: Flow, verdict: Verdict, *, ttft_ms: float | None, tpot_ms: float | None, slo: Slo | None
    ) -> None:
        """Arguments as for SloTracker.ended."""
        telemetry = self._telemetry
        if slo is None or not telemetry.has_metrics:
            return
        labels = self._labels(flow)
        if verdict is not Verdict.EXCUSED:
            telemetry.count(Metrics.SLO_REQUESTS, 1, {**labels, Attribute.VERDICT: verdict.value})
            if slo.availability is not None:
                telemetry.gauge(Metrics.SLO_AVAILABILITY_TARGET, slo.availability, labels)
        if ttft_ms is not None:
            telemetry.histogram(Metrics.SLO_TTFT, ttft_ms, labels)
            if slo.ttft_p95_ms is not None:
                in_time = "late" if ttft_ms > slo.ttft_p95_ms else "in_time"
                telemetry.count(Metrics.SLO_FIRST_TOKENS, 1, {**labels, Attribute.VERDICT: in_time})
        if tpot_ms is not None:
            telemetry.histogram(Metrics.SLO_TPOT, tpot_ms, labels)

    def tried(self, tenant: str, adapter: Adapter, outcome: Outcome) -> None:
        """A request of a version in a rollout."""
        if not self._telemetry.has_metrics:
            return
        labels = self._version_labels(tenant, adapter)
        told = "failed" if outcome.has_failed else COMPLETED
        self._telemetry.count(Metrics.ROLLOUT_REQUESTS, 1, {**labels, Attribute.OUTCOME: told})
        for metric, ms in ((Metrics.ROLLOUT_TTFT, outcome.ttft_ms), (Metrics.ROLLOUT_TPOT, outcome.tpot_ms)):
            if ms is not None:
                self._telemetry.histogram(metric, ms / 1e3, labels)

    def scored(self, tenant: str, adapter: Adapter | None, score: float) -> None:
        if self._telemetry.has_metrics:
            labels = self._version_labels(tenant, adapter) if adapter is not None and adapter.trial else {}
            self._telemetry.histogram(Metrics.FEEDBACK, score, labels)

    def rollouts_stand(self, standing: Collection[str]) -> None:
        """By `tenant/name`: the others' series go."""
        for key in [key for key in self._rollouts if key not in standing]:
            tenant, _, name = key.partition("/")
            self._telemetry.forget(_BY_VERSION, {Attribute.TENANT_ID: tenant, Attribute.ADAPTER_ID: name})
            del self._rollouts[key]

    def _version_labels(self, tenant: str, adapter: Adapter) -> dict[str, str]:
        key = f"{tenant}/{adapter.name}"
        if key not in self._rollouts:
            if len(self._rollouts) >= MAX_ROLLOUTS:
                return {}
            self._rollouts[key] = None
        return {
            Attribute.TENANT_ID: tenant,
            Attribute.ADAPTER_ID: adapter.name,
            Attribute.ADAPTER_NUMBER: str(adapter.version),
        }

    def refusing(self, circuits: Sequence[CircuitState], num_quarantined: int) -> None:
        half_open = sum(state.is_half_open for state in circuits)
        for kind, count in (("open", len(circuits) - half_open), ("half_open", half_open)):
            self._telemetry.gauge(Metrics.CIRCUITS, count, {Attribute.KIND: kind})
        self._telemetry.gauge(Metrics.QUARANTINED_PROMPTS, num_quarantined)

    def ledger(self, *, is_down: bool, is_full: bool, backlog_bytes: int, lost: int, dropped: int) -> None:
        """lost, dropped: in all."""
        self._telemetry.gauge(Metrics.LEDGER_DOWN, int(is_down))
        self._telemetry.gauge(Metrics.LEDGER_FULL, int(is_full))
        self._telemetry.gauge(Metrics.LEDGER_BACKLOG, backlog_bytes)
        told_lost, told_dropped = self._told_rows
        self._telemetry.count(Metrics.LEDGER_LOST, lost - told_lost)
        self._telemetry.count(Metrics.LEDGER_DROPPED, dropped - told_dropped)
        self._told_rows = lost, dropped

    def budgets(self, without_effect: int) -> None:
        self._telemetry.gauge(Metrics.CAPS_WITHOUT_EFFECT, without_effect)

    def standing(self, *, live: int, workers: int, has_leader: bool) -> None:
        self._telemetry.gauge(Metrics.LIVE_REQUESTS, live)
        self._telemetry.gauge(Metrics.WORKERS, workers)
        self._telemetry.gauge(Metrics.HAS_LEADER, int(has_leader))

    def _labels(self, flow: Flow) -> dict[str, str]:
        if flow not in self._named:
            if len(self._named) >= MAX_FLOWS:
                return {}
            self._named.add(flow)
        return {Attribute.TENANT_ID: flow[0], Attribute.QOS_CLASS: flow[1].value}
