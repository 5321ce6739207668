"""Between protobuf messages and the router's plain data. Owns no state; requests are read by `front/`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from manylora.v1 import admin_pb2, scheduler_pb2
from manylora_shared.coordination.records import AdapterRecord, KeyRecord
from manylora_shared.errors import Code, ManyloraError, Overloaded, QuotaBreach, QuotaExceeded, QuotaExhausted, RpcError
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.adapter_line import Rollout
from manylora_shared.tenancy.overload import OverloadView, TenantView
from manylora_shared.tenancy.policy import Slo
from manylora_shared.tenancy.quota import QuotaLevel
from manylora_shared.tenancy.slo import Flow, FlowCounts, quantile_ms
from manylora_shared.tenancy.trial import LIMIT, VersionCounts
from manylora_shared.wire import QOS_CLASSES, QOS_NUMBERS

from manylora_router.guard.circuits import CircuitState


@dataclass(frozen=True)
class Grant:
    worker_id: str
    worker_address: str
    epoch: int
    queue_ms: float
    max_output_tokens: int | None = None
    """Per choice, where overload lowers what was asked for."""
    overload_level: int = 0
    """That of the cap."""


def grant_of(message: scheduler_pb2.Grant) -> Grant:
    cap = message.max_output_tokens if message.HasField("max_output_tokens") else None
    return Grant(
        message.worker_id, message.worker_address, message.epoch, message.queue_ms, cap, message.overload_level
    )


def refusal_of(message: scheduler_pb2.Refusal) -> ManyloraError:
    known = message.code in {int(code) for code in Code} and message.code != Code.OK
    code = Code(message.code) if known else Code.UNKNOWN
    retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else None
    if message.breaches:
        breaches = [_breach(breach) for breach in message.breaches]
        return QuotaExceeded(message.message, retry_after_s=retry_after_s, breaches=breaches)
    if code is Code.RESOURCE_EXHAUSTED:
        return Overloaded(message.message, retry_after_s=retry_after_s)
    return RpcError(code, message.message, retry_after_s=retry_after_s)


def lease_refusal_of(message: scheduler_pb2.LeaseRefused) -> QuotaExhausted:
    retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else None
    breaches = [_breach(breach) for breach in message.breaches]
    return QuotaExhausted(message.message, retry_after_s=retry_after_s, breaches=breaches)


def levels_of(message: scheduler_pb2.Lease) -> tuple[QuotaLevel, ...]:
    return tuple(QuotaLevel(each.quota, each.limit, each.left, each.full_in_s) for each in message.levels)


def _breach(message: scheduler_pb2.QuotaBreach) -> QuotaBreach:
    return QuotaBreach(message.quota, message.tenant_id, message.limit, message.description, message.capacity)


def overload_view(message: scheduler_pb2.Overload) -> OverloadView:
    tenants = {
        TenantId(tenant.tenant_id): TenantView(
            (tenant.interactive_shares, tenant.standard_shares, tenant.batch_shares),
            tenant.level,
            tenant.limit_shares if tenant.HasField("limit_shares") else math.inf,
        )
        for tenant in message.tenants
    }
    limit = message.limit_shares if message.HasField("limit_shares") else math.inf
    return OverloadView(message.level, limit, tenants, message.crowded)


def wanted(request_id: str) -> scheduler_pb2.ScheduleRequest:
    return scheduler_pb2.ScheduleRequest(lease_wanted=scheduler_pb2.LeaseWanted(request_id=request_id))


def held_lease(request: scheduler_pb2.Enqueue, tokens: int | None) -> scheduler_pb2.HeldLease:
    return scheduler_pb2.HeldLease(
        request_id=request.request_id,
        tenant_id=request.tenant_id,
        qos_class=request.qos_class,
        tokens=tokens,
        max_tokens=request.prompt_tokens + request.max_new_tokens,
    )


def tenant_info(
    tenant_id: str, policy_yaml: str, version: int, adapters: int, problem: str = ""
) -> admin_pb2.TenantInfo:
    return admin_pb2.TenantInfo(
        tenant_id=tenant_id, policy_yaml=policy_yaml, version=version, adapters=adapters, problem=problem
    )


def adapter_info(record: AdapterRecord) -> admin_pb2.AdapterInfo:
    return admin_pb2.AdapterInfo(
        tenant_id=record.tenant_id,
        name=record.name,
        version=record.uid,
        max_lora_rank=record.max_lora_rank,
        size_bytes=record.size_bytes,
        target_modules=record.target_modules,
        created_unix_s=record.created_unix_s,
        number=record.number,
        state=record.state,
        report=record.report,
        pool=record.pool,
        rope=record.rope,
        max_context_tokens=record.max_context_tokens,
    )


def adapter_line(record: AdapterRecord) -> admin_pb2.AdapterLine:
    line = record.line
    told = admin_pb2.AdapterLine(in_force=line.in_force.number)
    for version in line.versions:
        info = adapter_info(record.at(version))
        info.retired_unix_s = version.retired_unix_s
        told.versions.append(info)
    if (rollout := line.rollout) is not None:
        told.rollout.CopyFrom(adapter_rollout(rollout))
    told.events.extend(admin_pb2.AdapterEvent(**dataclasses.asdict(event)) for event in line.events)
    return told


def adapter_rollout(rollout: Rollout) -> admin_pb2.AdapterRollout:
    told = admin_pb2.AdapterRollout(to=rollout.to, percent=rollout.percent, sticky=rollout.sticky)
    if (plan := rollout.plan) is not None:
        told.auto.steps.extend(plan.steps)
        told.auto.min_requests, told.auto.step_limit_s = plan.min_requests, plan.step_limit_s
        told.progress.limit = LIMIT
    for progress in rollout.progress:
        told.progress.canary_requests, told.progress.stable_requests = (
            progress.canary_requests,
            progress.stable_requests,
        )
        told.progress.evidence = progress.evidence
        for each in progress.known:
            canary, stable = each.evidence.means
            told.progress.findings.add(
                name=each.name,
                canary_share=canary,
                canary_outcomes=each.evidence.first_count,
                stable_share=stable,
                stable_outcomes=each.evidence.second_count,
                evidence=each.evidence.value,
            )
    return told


def rollout_status(record: AdapterRecord) -> admin_pb2.RolloutStatus:
    """Of one that stands."""
    told = admin_pb2.RolloutStatus(tenant_id=record.tenant_id, name=record.name, in_force=record.number)
    if (rollout := record.line.rollout) is not None:
        told.rollout.CopyFrom(adapter_rollout(rollout))
    return told


def trial_counts(
    tenant_id: str, name: str, trial: str, counts: tuple[VersionCounts, VersionCounts]
) -> scheduler_pb2.TrialCounts:
    """Of canary and stable."""
    canary, stable = (scheduler_pb2.VersionCounts(**dataclasses.asdict(each)) for each in counts)
    return scheduler_pb2.TrialCounts(tenant_id=tenant_id, name=name, trial=trial, canary=canary, stable=stable)


def key_info(record: KeyRecord) -> admin_pb2.KeyInfo:
    return admin_pb2.KeyInfo(
        key_id=record.key_id,
        tenant_id=record.tenant_id,
        scopes=record.scopes,
        name=record.name,
        created_unix_s=record.created_unix_s,
        revoked_unix_s=record.revoked_unix_s,
        expires_unix_s=record.expires_unix_s,
        networks=record.networks,
        role=record.role,
        requests_per_min=record.requests_per_min,
        tokens_per_min=record.tokens_per_min,
        concurrency=record.concurrency,
    )


def circuit_status(state: CircuitState, router_id: str) -> admin_pb2.CircuitStatus:
    return admin_pb2.CircuitStatus(
        tenant_id=state.scope[0],
        whole_tenant=len(state.scope) == 1,
        adapter_version=(state.scope[1] or "") if len(state.scope) == 2 else "",
        router_id=router_id,
        half_open=state.is_half_open,
        retry_after_s=state.retry_after_s,
        openings=state.openings,
    )


def slo_counts(flow: Flow, counts: FlowCounts) -> admin_pb2.SloCounts:
    return admin_pb2.SloCounts(
        tenant_id=flow[0],
        qos_class=QOS_NUMBERS[flow[1]],
        good=counts.good,
        bad=counts.bad,
        in_time=counts.in_time,
        late=counts.late,
        ttft=counts.ttft,
        tpot=counts.tpot,
    )


def flow_counts(message: admin_pb2.SloCounts) -> tuple[Flow, FlowCounts] | None:
    """None: of a class that this version does not know."""
    qos_class = QOS_CLASSES.get(message.qos_class)
    if qos_class is None:
        return None
    ttft, tpot = dict(message.ttft), dict(message.tpot)
    counts = FlowCounts(message.good, message.bad, message.in_time, message.late, ttft, tpot)
    return (TenantId(message.tenant_id), qos_class), counts


def slo_status(flow: Flow, counts: FlowCounts, slo: Slo | None) -> admin_pb2.SloStatus:
    target = slo.availability if slo is not None else None
    return admin_pb2.SloStatus(
        tenant_id=flow[0],
        qos_class=QOS_NUMBERS[flow[1]],
        requests=counts.num_counted,
        failed=counts.bad,
        availability=counts.availability,
        availability_target=target,
        error_budget=counts.error_budget(target) if target is not None else None,
        measured=counts.num_measured,
        ttft_p50_ms=quantile_ms(counts.ttft, 0.5),
        ttft_p95_ms=quantile_ms(counts.ttft, 0.95),
        ttft_p99_ms=quantile_ms(counts.ttft, 0.99),
        ttft_p95_target_ms=slo.ttft_p95_ms if slo is not None else None,
        ttft_met=counts.is_ttft_met,
        tpot_p50_ms=quantile_ms(counts.tpot, 0.5),
        tpot_p95_ms=quantile_ms(counts.tpot, 0.95),
    )
