"""Between protobuf messages and the core's plain data. Owns no state."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

from manylora.v1 import admin_pb2, scheduler_pb2, worker_pb2
from manylora_shared.composition import key_problem
from manylora_shared.errors import InvalidRequest, QuotaBreach
from manylora_shared.ids import (
    DEFAULT_POOL,
    AdapterUid,
    Composition,
    QosClass,
    RequestId,
    RouterId,
    TenantId,
    digest_of,
    name_problem,
)
from manylora_shared.tenancy.key_limits import KeyLimits, limit_problems
from manylora_shared.tenancy.overload import OverloadView, rung_of
from manylora_shared.wire import QOS_CLASSES, QOS_NUMBERS

from manylora_scheduler.core.core import Core
from manylora_scheduler.core.core_view import FlowView
from manylora_scheduler.core.events import (
    HeldLease,
    RoutersRefused,
    SendGrant,
    SendLease,
    SendLeaseRefusal,
    SendRefusal,
)
from manylora_scheduler.core.reports import (
    FlowLoad,
    FlowTokens,
    Owner,
    Residency,
    StartedRequest,
    ToldOwner,
    WorkerReport,
)
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.core.worker_view import WorkerView
from manylora_scheduler.gates.dedication_plan import Advice
from manylora_scheduler.gates.neighbours import Noisy
from manylora_scheduler.gates.overload import OverloadState
from manylora_scheduler.gates.quota import QuotaView
from manylora_scheduler.serving.told import Told

MAX_ID_LENGTH = 256
MAX_SEQUENCES = 1024
MAX_WORKER_TENANTS = 32  # by name in a worker's status
_KEPT_FLOWS = 16_384  # each report names the same ones again

_RESIDENCIES = {
    worker_pb2.ADAPTER_TIER_HOST: Residency.HOST,
    worker_pb2.ADAPTER_TIER_DEVICE: Residency.DEVICE,
}


@functools.lru_cache(maxsize=_KEPT_FLOWS)
def flow_key(tenant_id: str, qos_class: int) -> FlowKey:
    """No class, and one of a later version, counts as STANDARD."""
    return FlowKey(TenantId(tenant_id), QOS_CLASSES.get(qos_class, QosClass.STANDARD))


def _check_id(field: str, value: str) -> None:
    """Raises InvalidRequest."""
    if not 1 <= len(value) <= MAX_ID_LENGTH:
        raise InvalidRequest.of(field, f"must have 1 to {MAX_ID_LENGTH} characters")


def _check_tenant(field: str, value: str) -> None:
    """Workers refuse a tenant of another name. Raises InvalidRequest."""
    if problem := name_problem(value):
        raise InvalidRequest.of(field, problem)


def queued_request(
    message: scheduler_pb2.Enqueue, router_id: RouterId, *, now: float, enqueued_ns: int
) -> QueuedRequest:
    """Raises InvalidRequest. `now` by the event loop's clock, `enqueued_ns` in unix time."""
    _check_id("request_id", message.request_id)
    _check_tenant("tenant_id", message.tenant_id)
    if message.adapter_uid and (problem := key_problem(message.adapter_uid)) is not None:
        raise InvalidRequest.of("adapter_uid", problem)
    if message.sequences > MAX_SEQUENCES:
        raise InvalidRequest.of("sequences", f"must be at most {MAX_SEQUENCES}")
    pool = _pool_of(message)
    deadline = None
    if message.HasField("timeout_s"):
        if math.isnan(message.timeout_s):
            raise InvalidRequest.of("timeout_s", "is not a number")
        deadline = now + max(0.0, message.timeout_s)
    return QueuedRequest(
        request_id=RequestId(message.request_id),
        router_id=router_id,
        flow=flow_key(message.tenant_id, message.qos_class),
        prompt_tokens=message.prompt_tokens,
        max_new_tokens=message.max_new_tokens,
        sequences=max(1, message.sequences),
        priority=message.priority,
        adapter_uid=Composition(message.adapter_uid) if message.adapter_uid else None,
        adapter_id=message.adapter_id,
        deadline=deadline if deadline != math.inf else None,
        is_resumed=message.resumed,
        traceparent=message.traceparent,
        enqueued_ns=enqueued_ns,
        pool=pool,
        limits=_limits_of(message),
        adapter_rank=message.adapter_rank,
    )


def _limits_of(message: scheduler_pb2.Enqueue) -> KeyLimits | None:
    """Raises InvalidRequest."""
    if not message.HasField("key"):
        return None
    key = message.key
    _check_id("key.key_id", key.key_id)
    limits = {name: getattr(key, name) for name in ("requests_per_min", "tokens_per_min", "concurrency")}
    if violations := limit_problems(**limits):
        raise InvalidRequest.of_all(violations)
    return KeyLimits(key.key_id, **limits)


def _pool_of(message: scheduler_pb2.Enqueue | scheduler_pb2.Refused) -> str:
    """Raises InvalidRequest."""
    pool = message.pool or DEFAULT_POOL
    if pool != DEFAULT_POOL and (problem := name_problem(pool)):
        raise InvalidRequest.of("pool", problem)
    return pool


def _told_owner(message: worker_pb2.Dedication) -> ToldOwner:
    owner = Owner(AdapterUid(message.adapter_uid), TenantId(message.tenant_id)) if message.adapter_uid else None
    return ToldOwner(owner, message.is_ready, message.problem)


def worker_report(message: worker_pb2.ControlReport) -> WorkerReport:
    flows: dict[FlowKey, FlowTokens] = {}
    loads: dict[FlowKey, FlowLoad] = {}
    for each in message.flows:
        flow = flow_key(each.tenant_id, each.qos_class)
        # As FlowTokens(...) and FlowLoad(...), without a Python call: these are made for each flow of each report.
        flows[flow] = tuple.__new__(FlowTokens, (each.prompt_tokens, each.output_tokens))
        load = each.slotted_sequences, each.ready_sequences, each.held_sequences
        loads[flow] = tuple.__new__(FlowLoad, load)
    return WorkerReport(
        owner=_told_owner(message.dedication) if message.HasField("dedication") else None,
        snapshot=message.snapshot,
        sequence_slots=message.sequence_slots,
        running_sequences=message.running_sequences,
        kv_blocks_total=message.kv_blocks_total,
        kv_blocks_free=message.kv_blocks_free,
        block_size=message.block_size,
        draining=message.draining,
        adapters={AdapterUid(a.adapter_uid): _RESIDENCIES.get(a.tier, Residency.ABSENT) for a in message.adapters},
        started=tuple(
            StartedRequest(RequestId(r.request_id), flow_key(r.tenant_id, r.qos_class), r.sequences)
            for r in message.started
        ),
        finished=tuple(RequestId(request_id) for request_id in message.finished_request_ids),
        flows=flows,
        max_sequences=message.max_sequences,
        loads=loads,
        tenants={TenantId(each.tenant_id): each.kv_blocks for each in message.tenants},
    )


def grant_message(grant: SendGrant, epoch: int) -> scheduler_pb2.ScheduleResponse:
    return scheduler_pb2.ScheduleResponse(
        grant=scheduler_pb2.Grant(
            request_id=grant.request.request_id,
            worker_id=grant.worker_id,
            worker_address=grant.worker_address,
            epoch=epoch,
            queue_ms=1000 * grant.queue_s,
            max_output_tokens=grant.max_output_tokens,
            overload_level=grant.overload_level,
        )
    )


def refusal_message(refusal: SendRefusal) -> scheduler_pb2.ScheduleResponse:
    return scheduler_pb2.ScheduleResponse(
        refusal=scheduler_pb2.Refusal(
            request_id=refusal.request.request_id,
            code=int(refusal.code),
            message=refusal.message,
            retry_after_s=refusal.retry_after_s,
            breaches=[_breach(breach) for breach in refusal.breaches],
        )
    )


def held_lease(message: scheduler_pb2.HeldLease) -> HeldLease:
    """Raises InvalidRequest."""
    _check_id("hello.leases.request_id", message.request_id)
    _check_tenant("hello.leases.tenant_id", message.tenant_id)
    return HeldLease(
        request_id=RequestId(message.request_id),
        flow=flow_key(message.tenant_id, message.qos_class),
        tokens=message.tokens if message.HasField("tokens") else None,
        max_tokens=message.max_tokens,
    )


def lease_message(lease: SendLease | SendLeaseRefusal) -> scheduler_pb2.ScheduleResponse:
    if isinstance(lease, SendLease):
        message = scheduler_pb2.Lease(request_id=lease.request_id, tokens=lease.tokens)
        for level in lease.levels:
            message.levels.add(quota=level.quota, limit=level.limit, left=level.left, full_in_s=level.full_in_s)
        return scheduler_pb2.ScheduleResponse(lease=message)
    return scheduler_pb2.ScheduleResponse(
        lease_refused=scheduler_pb2.LeaseRefused(
            request_id=lease.request_id,
            message=lease.message,
            retry_after_s=lease.retry_after_s,
            breaches=[_breach(breach) for breach in lease.breaches],
        )
    )


def overload_message(view: OverloadView, pool: str) -> scheduler_pb2.ScheduleResponse:
    overload = scheduler_pb2.Overload(
        level=view.level, limit_shares=_finite(view.limit), crowded=view.is_crowded, pool=pool
    )
    for tenant_id, tenant in view.tenants.items():
        interactive, standard, batch = tenant.tops
        overload.tenants.add(
            tenant_id=tenant_id,
            level=tenant.level,
            interactive_shares=interactive,
            standard_shares=standard,
            batch_shares=batch,
            limit_shares=_finite(tenant.limit),
        )
    return scheduler_pb2.ScheduleResponse(overload=overload)


def _finite(limit: float) -> float | None:
    return limit if math.isfinite(limit) else None


def refused_flows(message: scheduler_pb2.Refused) -> RoutersRefused:
    """Raises InvalidRequest."""
    for flow in message.flows:
        _check_tenant("refused.flows.tenant_id", flow.tenant_id)
    flows = tuple((flow_key(f.tenant_id, f.qos_class), f.requests) for f in message.flows)
    return RoutersRefused(flows, _pool_of(message))


def overload_status(state: OverloadState) -> admin_pb2.OverloadStatus:
    targets_ms = {
        QosClass.INTERACTIVE: 1000 * state.targets.interactive_s,
        QosClass.STANDARD: 1000 * state.targets.standard_s,
    }
    view = state.view
    return admin_pb2.OverloadStatus(
        level=view.level,
        rung=rung_of(view.level).value,
        classes=[
            admin_pb2.ClassOverload(
                qos_class=QOS_NUMBERS[qos_class],
                late_part=state.late_parts[qos_class],
                target_ms=targets_ms.get(qos_class),
                refused_by_routers=counts.refused_by_routers,
                refused=counts.refused,
                shed=counts.shed,
                capped=counts.capped,
            )
            for qos_class, counts in state.counts.items()
        ],
        tenants=[
            admin_pb2.TenantOverloadStatus(
                tenant_id=tenant_id,
                level=tenant.level,
                rung=rung_of(tenant.level).value,
                demand_shares=state.demand[tenant_id],
            )
            for tenant_id, tenant in view.tenants.items()
            if tenant.level or state.demand[tenant_id] > 1.0
        ],
    )


def pool_status(pool: str, core: Core, state: OverloadState) -> admin_pb2.PoolStatus:
    return admin_pb2.PoolStatus(
        pool=pool,
        workers=sum(worker.serving or worker.serves_owner for worker in core.workers),
        queued=core.num_queued,
        running=core.num_granted,
        overload=overload_status(state),
    )


def advice_message(advice: Advice) -> admin_pb2.MergeAdvice:
    use = advice.use
    return admin_pb2.MergeAdvice(
        pool=use.pool,
        tenant_id=use.tenant_id,
        adapter_version=digest_of(use.adapter_uid),
        requests_part=use.share,
        workers=advice.workers,
        pool_workers=advice.pool_workers,
    )


def neighbour_status(noisy: Noisy) -> admin_pb2.NoisyNeighbour:
    return admin_pb2.NoisyNeighbour(
        kind=noisy.kind, tenant_id=noisy.tenant_id, worker_id=noisy.worker_id, evidence=dict(noisy.evidence)
    )


def quota_status(view: QuotaView) -> admin_pb2.QuotaStatus:
    return admin_pb2.QuotaStatus(
        tenant_id=view.flow.tenant_id,
        qos_class=QOS_NUMBERS[view.flow.qos_class],
        requests=view.requests,
        leased_tokens=view.leased_tokens,
        settled_tokens=view.settled_tokens,
        level_tokens=view.level_tokens,
    )


def _breach(breach: QuotaBreach) -> scheduler_pb2.QuotaBreach:
    return scheduler_pb2.QuotaBreach(
        quota=breach.quota,
        tenant_id=breach.tenant_id,
        limit=breach.limit,
        description=breach.description,
        capacity=breach.capacity,
    )


def flow_status(view: FlowView, pool: str) -> admin_pb2.FlowStatus:
    return admin_pb2.FlowStatus(
        tenant_id=view.flow.tenant_id,
        qos_class=QOS_NUMBERS[view.flow.qos_class],
        queued=view.queued,
        running=view.running,
        oldest_wait_s=view.oldest_wait_s,
        served_cost=view.served_cost,
        weight=view.weight,
        debt_cost=view.debt_cost,
        pool=pool,
    )


def kv_statuses(workers: Iterable[tuple[Mapping[TenantId, int], int]]) -> list[admin_pb2.TenantKv]:
    """
    Args:
        workers: the KV blocks that tenants hold on each, and the bytes of one.
    """
    found: dict[TenantId, admin_pb2.TenantKv] = {}
    for tenants, block_bytes in workers:
        for tenant_id, blocks in tenants.items():
            status = found.setdefault(tenant_id, admin_pb2.TenantKv(tenant_id=tenant_id))
            status.device_bytes += blocks * block_bytes
            status.most_bytes = max(status.most_bytes, blocks * block_bytes)
    return [found[tenant_id] for tenant_id in sorted(found)]


def worker_status(view: WorkerView, told: Told, kv_blocks: Mapping[TenantId, int], pool: str) -> admin_pb2.WorkerStatus:
    """kv_blocks: by tenant."""
    tiers, owner = list(view.adapters.values()), view.owner
    return admin_pb2.WorkerStatus(
        worker_id=view.worker_id,
        address=view.address,
        device=view.device,
        connected=view.connected,
        draining=view.draining,
        sequence_slots=view.sequence_slots,
        running=view.running_sequences,
        kv_blocks_total=view.kv_blocks_total,
        kv_blocks_free=view.kv_blocks_free,
        adapters_on_device=tiers.count(Residency.DEVICE),
        adapters_on_host=len(tiers),
        counters=told.counters,
        kv_block_bytes=told.kv_block_bytes,
        tenants=_worker_tenants(told, kv_blocks),
        pool=pool,
        dedicated_tenant=owner.tenant_id if owner is not None else "",
        dedicated_version=digest_of(owner.adapter_uid) if owner is not None else "",
        is_changing=view.connected and not (view.is_everybodys or view.serves_owner or view.draining),
        merge_problem=view.merge_problem,
    )


def _worker_tenants(told: Told, kv_blocks: Mapping[TenantId, int]) -> list[admin_pb2.WorkerTenant]:
    found = [
        admin_pb2.WorkerTenant(
            tenant_id=tenant_id,
            kv_bytes=kv_blocks.get(TenantId(tenant_id), 0) * told.kv_block_bytes,
            adapter_bytes=told.adapters[tenant_id].device_bytes if tenant_id in told.adapters else 0,
        )
        for tenant_id in kv_blocks.keys() | told.adapters.keys()
    ]
    found.sort(key=lambda each: (-each.kv_bytes - each.adapter_bytes, each.tenant_id))
    others = found[MAX_WORKER_TENANTS:]
    if others:
        kv_bytes, adapter_bytes = sum(each.kv_bytes for each in others), sum(each.adapter_bytes for each in others)
        found[MAX_WORKER_TENANTS:] = [admin_pb2.WorkerTenant(kv_bytes=kv_bytes, adapter_bytes=adapter_bytes)]
    return found
