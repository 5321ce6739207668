"""The messages of `manylora.v1` as the client's own data. Enums become their lower-case names without the prefix
(`OUTCOME_COMPLETED` -> "completed"), an unset one the empty string.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from manylora.client.answers import (
    ChoiceEnd,
    Degraded,
    Delta,
    Event,
    Finished,
    PositionLogprobs,
    PromptLogprobs,
    Started,
    Timings,
    Usage,
)
from manylora.client.cluster import (
    AdapterEvent,
    AdapterInfo,
    AdapterLine,
    AdapterRollout,
    AutoRollout,
    CircuitStatus,
    ClassOverload,
    ClusterStatus,
    EtcdSpace,
    FlowStatus,
    KeyInfo,
    LiftedQuarantine,
    MergeAdvice,
    Models,
    NoisyNeighbour,
    OverloadStatus,
    PinStatus,
    PolicyChange,
    PoolModel,
    PoolStatus,
    QuarantineStatus,
    QuotaStatus,
    RolloutFinding,
    RolloutProgress,
    RolloutStatus,
    RouterStatus,
    SamplesInfo,
    SchedulerStatus,
    SloStatus,
    TenantAdapters,
    TenantInfo,
    TenantKv,
    TenantOverload,
    TenantSetbacks,
    WorkerStatus,
)
from manylora.v1 import admin_pb2, common_pb2, inference_pb2


def tenant_from(message: admin_pb2.TenantInfo) -> TenantInfo:
    return _scalars(TenantInfo, message)


def adapter_from(message: admin_pb2.AdapterInfo) -> AdapterInfo:
    return _scalars(AdapterInfo, message, target_modules=tuple(message.target_modules))


def samples_from(message: admin_pb2.SamplesInfo) -> SamplesInfo:
    return _scalars(SamplesInfo, message)


def line_from(message: admin_pb2.AdapterLine) -> AdapterLine:
    return AdapterLine(
        versions=tuple(adapter_from(each) for each in message.versions),
        in_force=message.in_force,
        rollout=_rollout_from(message.rollout) if message.HasField("rollout") else None,
        events=tuple(_scalars(AdapterEvent, each) for each in message.events),
    )


def _rollout_from(message: admin_pb2.AdapterRollout) -> AdapterRollout:
    progress = message.progress
    findings = tuple(_scalars(RolloutFinding, each) for each in progress.findings)
    return _scalars(
        AdapterRollout,
        message,
        auto=_scalars(AutoRollout, message.auto, steps=tuple(message.auto.steps)) if message.HasField("auto") else None,
        progress=_scalars(RolloutProgress, progress, findings=findings) if message.HasField("progress") else None,
    )


def models_from(message: inference_pb2.ListModelsResponse) -> Models:
    defaults = _sampling_defaults(message.sampling_defaults)
    pools = tuple(_scalars(PoolModel, pool) for pool in message.pools)
    return _scalars(Models, message, adapters=tuple(message.adapters), sampling_defaults=defaults, pools=pools)


def _sampling_defaults(message: common_pb2.SamplingParams) -> dict[str, float]:
    # as written: the wire has single precision
    return {field.name: float(f"{value:.6g}") for field, value in message.ListFields()}


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
            etcd=_scalars(EtcdSpace, message.scheduler.etcd),
            pools=tuple(_scalars(PoolStatus, p, overload=_overload_from(p.overload)) for p in message.scheduler.pools),
            kv=tuple(_scalars(TenantKv, kv) for kv in message.scheduler.kv),
            adapters=tuple(
                _scalars(TenantAdapters, a, pins=tuple(_scalars(PinStatus, pin) for pin in a.pins))
                for a in message.scheduler.adapters
            ),
            setbacks=tuple(_scalars(TenantSetbacks, s) for s in message.scheduler.setbacks),
            merge_advice=tuple(_scalars(MergeAdvice, a) for a in message.scheduler.merge_advice),
        ),
        workers=tuple(_scalars(WorkerStatus, w, **_fields(w.counters)) for w in message.workers),
        routers=tuple(_scalars(RouterStatus, r) for r in message.routers),
        slos=tuple(_slo_from(s) for s in message.slos),
        circuits=tuple(_scalars(CircuitStatus, c) for c in message.circuits),
        quarantines=tuple(_scalars(QuarantineStatus, q) for q in message.quarantines),
        rollouts=tuple(_scalars(RolloutStatus, r, rollout=_rollout_from(r.rollout)) for r in message.rollouts),
        sampling_defaults=_sampling_defaults(message.sampling_defaults),
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


def lifted_from(message: admin_pb2.LiftQuarantineResponse) -> LiftedQuarantine:
    return _scalars(LiftedQuarantine, message, missed_router_ids=tuple(message.missed_router_ids))


def change_from(message: admin_pb2.ApplyTenantResponse) -> PolicyChange:
    return _scalars(PolicyChange, message)


def key_from(message: admin_pb2.KeyInfo) -> KeyInfo:
    return _scalars(KeyInfo, message, scopes=tuple(message.scopes), networks=tuple(message.networks))


def events_from(message: inference_pb2.GenerateResponse) -> list[Event]:
    """In order; nothing where this client does not know the frame (a newer server's)."""
    events: list[Event] = []
    if message.HasField("started"):
        events.append(_scalars(Started, message.started, degraded=_degraded_from(message.started)))
    if message.prompt_logprobs:
        events.append(PromptLogprobs(tuple(_logprobs(p) for p in message.prompt_logprobs)))
    if message.HasField("delta"):
        delta = message.delta
        logprobs = tuple(_logprobs(p) for p in delta.logprobs)
        events.append(_scalars(Delta, delta, token_ids=tuple(delta.token_ids), logprobs=logprobs))
    if message.HasField("finished"):
        finished = message.finished
        events.append(
            Finished(
                outcome=_enum_name(common_pb2.Outcome.DESCRIPTOR, finished.outcome, "OUTCOME_"),
                choices=tuple(_choice_end(c) for c in finished.choices),
                usage=_scalars(Usage, finished.usage),
                timings=_scalars(Timings, finished.timings),
                worker_id=finished.worker_id,
                degraded=_degraded_from(finished),
            )
        )
    return events


def _enum_name(enum: EnumDescriptor, number: int, prefix: str) -> str:
    """Unknown numbers (a newer server's) stay readable as themselves."""
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
    return PositionLogprobs(message.logprob, tuple((t.token_id, t.logprob) for t in message.top), message.rank)


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


T = TypeVar("T")


def _scalars(kind: type[T], message: Message, **others: Any) -> T:
    """`kind` with the message's fields of the same names, and `others`."""
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: others[name] if name in others else getattr(message, name) for name in names})
