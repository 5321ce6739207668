"""What the client gives and takes: plain frozen dataclasses, read off the messages of `manylora.v1`.

Pure data: no gRPC, no asyncio. Names and units are those of the protos; enums become their lower-case names without the
prefix (`OUTCOME_COMPLETED` -> "completed"), an unset one the empty string.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from manylora_shared.errors import FieldViolation, QuotaBreach, RpcError

from manylora.v1 import admin_pb2, common_pb2, inference_pb2

__all__ = ["FieldViolation", "QuotaBreach"]


class RequestFailed(Exception):
    """A request that ended with a status other than OK.

    Attributes:
        code: the status's name, e.g. "NOT_FOUND".
        violations: the fields at fault, where fields are.
        retry_after_s: when trying again may help; None where it cannot.
        breaches: the quotas at fault, where quotas are.
        result: what a stream had delivered when it failed; None where nothing was.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        violations: Iterable[FieldViolation] = (),
        retry_after_s: float | None = None,
        breaches: Iterable[QuotaBreach] = (),
        result: Result | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.breaches = tuple(breaches)
        self.result = result

    @classmethod
    def of(cls, error: RpcError, result: Result | None = None) -> RequestFailed:
        return cls(
            error.code.name,
            error.message,
            violations=error.violations,
            retry_after_s=error.retry_after_s,
            breaches=error.breaches,
            result=result,
        )

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "violations": [dataclasses.asdict(v) for v in self.violations],
        }
        if self.breaches:
            told["quotas"] = [dataclasses.asdict(b) for b in self.breaches]
            told["retry_after_s"] = self.retry_after_s
        return told


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. None leaves a parameter to its default (common.proto); the router checks the values."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def to_message(self) -> common_pb2.SamplingParams:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return common_pb2.SamplingParams(**{k: v for k, v in values.items() if v is not None})


@dataclass(frozen=True)
class PositionLogprobs:
    """At one output position: the sampled token's log-probability, and (token id, log-probability) of the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    adapter_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True)
class Degraded:
    """What overload took from a request that is served all the same."""

    max_tokens: int
    """In force, per choice."""
    asked_max_tokens: int
    overload_level: int


@dataclass(frozen=True)
class Started:
    """The first event: a worker has begun."""

    request_id: str
    adapter_version: str
    seed: int
    prompt_tokens: int
    degraded: Degraded | None = None


@dataclass(frozen=True)
class Delta:
    """New output of one choice."""

    choice: int
    first_position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True)
class ChoiceEnd:
    choice: int
    finish_reason: str
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Finished:
    """The last event of every admitted request."""

    outcome: str
    choices: tuple[ChoiceEnd, ...]
    usage: Usage
    timings: Timings
    worker_id: str
    degraded: Degraded | None = None


Event = Started | Delta | Finished


@dataclass(frozen=True)
class Choice:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True)
class Result:
    """A whole answer. `text`, `token_ids` and `finish_reason` are those of the first choice."""

    request_id: str
    adapter_version: str
    seed: int
    outcome: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    worker_id: str
    degraded: Degraded | None = None
    """None: the answer is what was asked for."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    def to_json(self) -> dict[str, Any]:
        """The object that `manylora generate --json` ends with; `choices` only where there are several."""
        answer: dict[str, Any] = {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "outcome": self.outcome,
            "usage": dataclasses.asdict(self.usage),
            "adapter_version": self.adapter_version,
            "seed": self.seed,
            "worker_id": self.worker_id,
            "timings": dataclasses.asdict(self.timings),
        }
        if self.degraded is not None:
            answer["degraded"] = dataclasses.asdict(self.degraded)
        if len(self.choices) > 1:
            answer["choices"] = [dataclasses.asdict(c) for c in self.choices]
        return answer


class Collector:
    """Events in, Result out. Complete once a Finished was added; before, `result()` is what has come so far."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._texts: dict[int, list[str]] = {0: []}
        self._token_ids: dict[int, list[int]] = {0: []}
        self._logprobs: dict[int, list[PositionLogprobs]] = {0: []}

    @property
    def is_empty(self) -> bool:
        return self._started is None and self._finished is None

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Finished):
            self._finished = event
        else:
            self._texts.setdefault(event.choice, []).append(event.text)
            self._token_ids.setdefault(event.choice, []).extend(event.token_ids)
            self._logprobs.setdefault(event.choice, []).extend(event.logprobs)

    def result(self) -> Result:
        started = self._started or Started("", "", 0, 0)
        finished = self._finished or Finished("", (), Usage(), Timings(), "")
        ends = {end.choice: end for end in finished.choices}
        return Result(
            request_id=started.request_id,
            adapter_version=started.adapter_version,
            seed=started.seed,
            outcome=finished.outcome,
            choices=tuple(self._choice(i, ends.get(i)) for i in sorted(set(self._texts) | set(ends))),
            usage=finished.usage,
            timings=finished.timings,
            worker_id=finished.worker_id,
            degraded=finished.degraded or started.degraded,
        )

    def _choice(self, index: int, end: ChoiceEnd | None) -> Choice:
        return Choice(
            text="".join(self._texts.get(index, [])),
            token_ids=tuple(self._token_ids.get(index, [])),
            finish_reason=end.finish_reason if end else "",
            stop_string=end.stop_string if end else None,
            stop_token_id=end.stop_token_id if end else None,
            logprobs=tuple(self._logprobs.get(index, [])),
        )


@dataclass(frozen=True)
class Models:
    base_model: str
    max_context_tokens: int
    adapters: tuple[str, ...]


@dataclass(frozen=True)
class TenantInfo:
    tenant_id: str
    policy_yaml: str
    version: int
    adapters: int


@dataclass(frozen=True)
class PolicyChange:
    """A tenant's policy as it stands and as a document would have it, both in canonical form."""

    tenant_id: str
    version: int
    """Of what stands; 0: there is no such tenant."""
    previous_policy_yaml: str
    policy_yaml: str

    @property
    def is_empty(self) -> bool:
        return self.previous_policy_yaml == self.policy_yaml


@dataclass(frozen=True)
class KeyInfo:
    """What is known of an API key: all but the key."""

    key_id: str
    tenant_id: str
    scopes: tuple[str, ...]
    name: str
    created_unix_s: float
    revoked_unix_s: float
    """0: in force."""


@dataclass(frozen=True)
class AdapterInfo:
    tenant_id: str
    name: str
    version: str
    max_lora_rank: int
    size_bytes: int
    target_modules: tuple[str, ...]
    created_unix_s: float


@dataclass(frozen=True)
class FlowStatus:
    tenant_id: str
    qos_class: str
    queued: int
    running: int
    oldest_wait_s: float
    served_cost: int


@dataclass(frozen=True)
class QuotaStatus:
    """A flow's account since the scheduler's term began, in prompt and output tokens."""

    tenant_id: str
    qos_class: str
    requests: int
    leased_tokens: int
    settled_tokens: int
    level_tokens: int | None
    """What the token bucket holds; None: there is none."""


@dataclass(frozen=True)
class ClassOverload:
    """Counts are since the scheduler's term began."""

    qos_class: str
    late_part: float | None
    """Part of requests of tenants within their share that wait longer than the target; None: there were none."""
    target_ms: float | None
    """None: half of each request's own deadline."""
    refused_by_routers: int
    refused: int
    shed: int
    capped: int


@dataclass(frozen=True)
class TenantOverload:
    tenant_id: str
    level: int
    """Its own; the cluster's counts where it is higher."""
    rung: str
    demand_shares: float


@dataclass(frozen=True)
class OverloadStatus:
    """What is given up for want of capacity (docs/POLICY.md, Overload)."""

    level: int
    """Of the cluster: 0 (nothing) to 128."""
    rung: str
    classes: tuple[ClassOverload, ...]
    tenants: tuple[TenantOverload, ...]


@dataclass(frozen=True)
class NoisyNeighbour:
    """A tenant that others suffer from, or may soon; reported, and nothing else follows from it."""

    kind: str
    tenant_id: str
    worker_id: str
    """Empty: on all."""
    evidence: Mapping[str, float]


@dataclass(frozen=True)
class PinStatus:
    """An adapter that a tenant's policy pins."""

    name: str
    adapter_version: str
    """Empty: no adapter has this name."""
    workers: int
    on_device: int
    """Of these workers."""
    problem: str
    """Why a worker does not keep it on its device; empty: all do, or load it now."""


@dataclass(frozen=True)
class TenantAdapters:
    """A tenant's part of the workers' adapter memory. What several tenants use counts in full for each."""

    tenant_id: str
    device_bytes: int
    host_bytes: int
    evictions: int
    """Of its adapters from devices, since the workers' starts."""
    displaced: int
    """Of these, for another tenant's adapter."""
    pins: tuple[PinStatus, ...]


@dataclass(frozen=True)
class SchedulerStatus:
    reachable: bool
    address: str
    epoch: int
    flows: tuple[FlowStatus, ...]
    quotas: tuple[QuotaStatus, ...]
    overload: OverloadStatus
    neighbours: tuple[NoisyNeighbour, ...]
    adapters: tuple[TenantAdapters, ...]


@dataclass(frozen=True)
class WorkerStatus:
    worker_id: str
    address: str
    device: str
    connected: bool
    draining: bool
    sequence_slots: int
    running: int
    kv_blocks_total: int
    kv_blocks_free: int
    adapters_on_device: int
    adapters_on_host: int
    generated_tokens: int


@dataclass(frozen=True)
class SloStatus:
    """How well a flow was served, over all routers that answered: latencies of the last five minutes, availability of
    the last hour. What was not measured, or has no target, is None."""

    tenant_id: str
    qos_class: str
    requests: int
    """That count for availability: not those that the caller got wrong, cancelled or had no quota for."""
    failed: int
    availability: float
    availability_target: float | None
    error_budget: float | None
    """What is left of the failures that the target permits: 1 all, 0 none, below 0 overspent."""
    measured: int
    """Requests with a first token."""
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None
    ttft_p95_target_ms: int | None
    ttft_met: bool | None
    tpot_p50_ms: float | None
    """Mean time per output token of a choice after its first."""
    tpot_p95_ms: float | None


@dataclass(frozen=True)
class CircuitStatus:
    """A router refuses requests that kept failing: an adapter's, or all of a tenant's."""

    tenant_id: str
    whole_tenant: bool
    adapter_version: str
    """Empty: the base model, or the whole tenant."""
    router_id: str
    half_open: bool
    """A request is let through to try."""
    retry_after_s: float
    openings: int
    """In a row."""


@dataclass(frozen=True)
class RouterStatus:
    router_id: str
    address: str
    answered: bool
    """What it counted is in the sums."""


@dataclass(frozen=True)
class ClusterStatus:
    base_model: str
    scheduler: SchedulerStatus
    workers: tuple[WorkerStatus, ...]
    routers: tuple[RouterStatus, ...]
    tenants: int
    adapters: int
    slos: tuple[SloStatus, ...]
    circuits: tuple[CircuitStatus, ...]
    quarantined_prompts: int


def tenant_from(message: admin_pb2.TenantInfo) -> TenantInfo:
    return _scalars(TenantInfo, message)


def adapter_from(message: admin_pb2.AdapterInfo) -> AdapterInfo:
    return _scalars(AdapterInfo, message, target_modules=tuple(message.target_modules))


def models_from(message: inference_pb2.ListModelsResponse) -> Models:
    return _scalars(Models, message, adapters=tuple(message.adapters))


def status_from(message: admin_pb2.GetStatusResponse) -> ClusterStatus:
    flows = tuple(
        _scalars(FlowStatus, f, qos_class=_enum_name(common_pb2.QosClass.DESCRIPTOR, f.qos_class, "QOS_CLASS_"))
        for f in message.scheduler.flows
    )
    quotas = tuple(
        _scalars(
            QuotaStatus,
            q,
            qos_class=_enum_name(common_pb2.QosClass.DESCRIPTOR, q.qos_class, "QOS_CLASS_"),
            level_tokens=q.level_tokens if q.HasField("level_tokens") else None,
        )
        for q in message.scheduler.quotas
    )
    return _scalars(
        ClusterStatus,
        message,
        scheduler=_scalars(
            SchedulerStatus,
            message.scheduler,
            flows=flows,
            quotas=quotas,
            overload=_overload_from(message.scheduler.overload),
            neighbours=tuple(
                _scalars(NoisyNeighbour, n, evidence=dict(sorted(n.evidence.items())))
                for n in message.scheduler.neighbours
            ),
            adapters=tuple(
                _scalars(TenantAdapters, a, pins=tuple(_scalars(PinStatus, pin) for pin in a.pins))
                for a in message.scheduler.adapters
            ),
        ),
        workers=tuple(_scalars(WorkerStatus, w) for w in message.workers),
        routers=tuple(_scalars(RouterStatus, r) for r in message.routers),
        slos=tuple(_slo_from(s) for s in message.slos),
        circuits=tuple(_scalars(CircuitStatus, c) for c in message.circuits),
    )


def _overload_from(message: admin_pb2.OverloadStatus) -> OverloadStatus:
    classes = tuple(
        _scalars(
            ClassOverload,
            c,
            qos_class=_enum_name(common_pb2.QosClass.DESCRIPTOR, c.qos_class, "QOS_CLASS_"),
            late_part=c.late_part if c.HasField("late_part") else None,
            target_ms=c.target_ms if c.HasField("target_ms") else None,
        )
        for c in message.classes
    )
    tenants = tuple(_scalars(TenantOverload, tenant) for tenant in message.tenants)
    return _scalars(OverloadStatus, message, classes=classes, tenants=tenants)


def _degraded_from(message: inference_pb2.Started | inference_pb2.Finished) -> Degraded | None:
    return _scalars(Degraded, message.degraded) if message.HasField("degraded") else None


def _slo_from(message: admin_pb2.SloStatus) -> SloStatus:
    given = {
        field.name: getattr(message, field.name) if message.HasField(field.name) else None
        for field in message.DESCRIPTOR.fields
        if field.has_presence
    }
    qos_class = _enum_name(common_pb2.QosClass.DESCRIPTOR, message.qos_class, "QOS_CLASS_")
    return _scalars(SloStatus, message, qos_class=qos_class, **given)


def change_from(message: admin_pb2.ApplyTenantResponse) -> PolicyChange:
    return _scalars(PolicyChange, message)


def key_from(message: admin_pb2.KeyInfo) -> KeyInfo:
    return _scalars(KeyInfo, message, scopes=tuple(message.scopes))


def event_from(message: inference_pb2.GenerateResponse) -> Event | None:
    """None for an event that this client does not know (a newer server's)."""
    kind = message.WhichOneof("event")
    if kind == "started":
        return _scalars(Started, message.started, degraded=_degraded_from(message.started))
    if kind == "delta":
        delta = message.delta
        return _scalars(
            Delta, delta, token_ids=tuple(delta.token_ids), logprobs=tuple(_logprobs(p) for p in delta.logprobs)
        )
    if kind == "finished":
        finished = message.finished
        return Finished(
            outcome=_enum_name(common_pb2.Outcome.DESCRIPTOR, finished.outcome, "OUTCOME_"),
            choices=tuple(_choice_end(c) for c in finished.choices),
            usage=_scalars(Usage, finished.usage),
            timings=_scalars(Timings, finished.timings),
            worker_id=finished.worker_id,
            degraded=_degraded_from(finished),
        )
    return None


def _enum_name(enum: EnumDescriptor, number: int, prefix: str) -> str:
    """Numbers that this client does not know (a newer server's) stay readable as themselves."""
    value = enum.values_by_number.get(number)
    short = value.name.removeprefix(prefix).lower() if value else str(number)
    return "" if short == "unspecified" else short


def _choice_end(message: inference_pb2.ChoiceEnd) -> ChoiceEnd:
    return ChoiceEnd(
        choice=message.choice,
        finish_reason=_enum_name(common_pb2.FinishReason.DESCRIPTOR, message.finish_reason, "FINISH_REASON_"),
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def _logprobs(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(message.logprob, tuple((t.token_id, t.logprob) for t in message.top))


T = TypeVar("T")


def _scalars(kind: type[T], message: Message, **others: Any) -> T:
    """`kind` with the message's fields of the same names, and `others`."""
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: others[name] if name in others else getattr(message, name) for name in names})
