"""`manylora status`: each table's columns stand in one place, below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import TypeVar

from manylora_shared.tenancy.overload import LEVELS

from manylora.cli.output import Target, print_json, print_table, write
from manylora.client import (
    CircuitStatus,
    ClassOverload,
    ClusterStatus,
    EtcdSpace,
    FlowStatus,
    MergeAdvice,
    NoisyNeighbour,
    OverloadStatus,
    PinStatus,
    PoolStatus,
    QuarantineStatus,
    QuotaStatus,
    RolloutStatus,
    RouterStatus,
    SloStatus,
    TenantAdapters,
    TenantKv,
    TenantOverload,
    TenantSetbacks,
    WorkerStatus,
)

T = TypeVar("T")
Columns = tuple[tuple[str, Callable[[T], object]], ...]

_GIVES_UP = {
    "none": "nothing is given up",
    "turns": "interactive requests go first",
    "batch_admission": "new batch requests are refused",
    "batch_output": "answers of batch requests are cut short",
    "batch_queue": "waiting batch requests are given up",
    "standard": "standard requests are given up",
    "interactive": "interactive requests are given up",
}
"""What each rung of the ladder takes, beside what those before it do."""


async def show(target: Target, *, as_json: bool) -> None:
    async with target.client() as client:
        status = await client.status()
    if as_json:
        print_json(status)
    else:
        _print(status)


async def drain(target: Target, instance_id: str, *, as_json: bool) -> None:
    async with target.client() as client:
        kind = await client.drain(instance_id)
    if as_json:
        print_json({"id": instance_id, "kind": kind})
    else:
        write(f"{instance_id}: the {kind} leaves\n")


async def drop_caches(target: Target, worker_id: str, *, adapters: bool, prefixes: bool, as_json: bool) -> None:
    async with target.client() as client:
        dropped = await client.drop_caches(worker_id, adapters=adapters, prefixes=prefixes)
    if as_json:
        print_json({"worker_id": worker_id, **asdict(dropped)})
    else:
        write(f"{worker_id}: {dropped.adapters} adapters and {dropped.prefix_blocks} blocks of prefixes are dropped\n")


def _table(columns: Columns[T], items: Sequence[T], *, empty: str = "") -> None:
    if items or empty:
        print_table([name for name, _ in columns], [[read(item) for _, read in columns] for item in items], empty=empty)


def _print(status: ClusterStatus) -> None:
    scheduler = status.scheduler
    write(f"model      {status.base_model}\n")
    if status.sampling_defaults:
        told = ", ".join(f"{name} {value:g}" for name, value in status.sampling_defaults.items())
        write(f"sampling   {told}, where a request sets none (generation_config.json)\n")
    if status.routers:
        state = f"{scheduler.address}, epoch {scheduler.epoch}" if scheduler.reachable else "not reachable"
        write(f"scheduler  {state}\n")
        write(f"routers    {', '.join(_router(r) for r in status.routers)}\n")
        for router in status.routers:
            if caps := router.caps_without_effect:
                write(
                    f"budgets    {router.router_id} has no prices: quotas.monthly_spend of {caps} has no effect there\n"
                )
        if scheduler.etcd.quota_bytes:
            write(f"etcd       {_space(scheduler.etcd)}\n")
        if status.resumed:
            write(f"resumed    {status.resumed} times another worker went on with an answer\n")
        write(f"tenants    {status.tenants}, with {status.adapters} adapters\n\n")
        _table(_WORKERS, status.workers, empty="no worker is registered")
        for worker in status.workers:
            if worker.kept_out:
                write(f"{worker.worker_id} is kept out of the pool: {worker.kept_out}\n")
            if worker.merge_problem:
                write(f"{worker.worker_id} did not merge an adapter: {worker.merge_problem}\n")
        if dedicated := [_dedicated(worker) for worker in status.workers if worker.dedicated_tenant]:
            write(f"merged     {'; '.join(dedicated)}\n")
        for advice in scheduler.merge_advice:
            write(f"to merge   {_advice(advice)}\n")
    else:  # a tenant's key: machines are not its to see
        write(f"scheduler  {'' if scheduler.reachable else 'not '}reachable\n")
        write(f"adapters   {status.adapters}\n\n")
    if len(scheduler.pools) > 1:
        _table(_POOLS, scheduler.pools)
    _table(_FLOWS, scheduler.flows)
    _print_overload(scheduler.overload)
    _table(_NEIGHBOURS, scheduler.neighbours)
    _table(_KV, scheduler.kv)
    _table(_ADAPTERS, scheduler.adapters)
    unmet = [(t.tenant_id, pin) for t in scheduler.adapters for pin in t.pins if pin.on_device < pin.workers]
    _table(_UNMET_PINS, unmet)
    _table(_SETBACKS, scheduler.setbacks)
    _table(_ACCOUNTS, scheduler.quotas)
    _table(_SLOS, status.slos)
    _table(_CIRCUITS, status.circuits)
    _table(_QUARANTINES, status.quarantines)
    _table(_ROLLOUTS, status.rollouts)


def _step_requests(status: RolloutStatus) -> str:
    auto, progress = status.rollout.auto, status.rollout.progress
    if auto is None or progress is None:
        return "-"
    return f"{min(progress.canary_requests, progress.stable_requests)} of {auto.min_requests}"


def _evidence(status: RolloutStatus) -> str:
    progress = status.rollout.progress
    return f"{_number(progress.evidence)} of {progress.limit:g}" if progress is not None else "-"


def _pins_met(tenant: TenantAdapters) -> str:
    met = sum(pin.on_device == pin.workers for pin in tenant.pins)
    return f"{met} of {len(tenant.pins)}" if tenant.pins else "-"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _space(etcd: EtcdSpace) -> str:
    used = f"{_mib(etcd.used_bytes)} of {_mib(etcd.quota_bytes)}"
    return f"full ({used}): it takes no changes" if etcd.full else used


def _print_overload(overload: OverloadStatus) -> None:
    """Nothing, while nothing is given up and nothing was."""
    counted = [c for c in overload.classes if c.refused_by_routers or c.refused or c.shed or c.capped]
    if overload.level or overload.tenants:
        write(f"overload   level {overload.level} of {LEVELS}: {_gives_up(overload.rung)}\n")
    if counted or overload.level or overload.tenants:
        _table(_OVERLOAD, overload.classes)
    _table(_OVERLOADED_TENANTS, overload.tenants)


def _number(value: float) -> str:
    """Three digits, and of large numbers all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _gives_up(rung: str) -> str:
    return _GIVES_UP.get(rung, rung)  # a newer server may have others


def _router(router: RouterStatus) -> str:
    return f"{router.router_id} ({router.address}{'' if router.answered else ', not answering'})"


def _slo_target(slo: SloStatus) -> str:
    target_ms = "-" if slo.ttft_p95_target_ms is None else f"{slo.ttft_p95_target_ms} ms"
    return target_ms if slo.ttft_met is None else f"{target_ms}, {'met' if slo.ttft_met else 'missed'}"


def _ms(duration_ms: float | None) -> str:
    return "-" if duration_ms is None else f"{duration_ms:.3g} ms" if duration_ms < 100 else f"{duration_ms:.0f} ms"


def _refused(circuit: CircuitStatus) -> str:
    digests = [part[:12] for part in circuit.adapter_version.split("+")]  # several: without their weights
    adapter = f"adapter {'+'.join(digests)}" if circuit.adapter_version else "base model"
    return "whole tenant" if circuit.whole_tenant else adapter


def state_of(worker: WorkerStatus) -> str:
    if worker.kept_out:
        return "kept out"
    if worker.connected and not worker.draining and worker.is_changing:
        return "changing"
    return "draining" if worker.draining else "connected" if worker.connected else "not connected"


def _advice(advice: MergeAdvice) -> str:
    fills = f"fills {advice.workers} of its {advice.pool_workers} workers by itself"
    name = f"{advice.tenant_id}/{advice.adapter or '?'}"
    return f"{name} has {advice.requests_part:.0%} of pool {advice.pool}'s requests and {fills}: see adapters.dedicated"


def _dedicated(worker: WorkerStatus) -> str:
    of = f"{worker.dedicated_tenant}/{worker.dedicated_adapter or '?'} ({worker.dedicated_version[:12]})"
    return f"{worker.worker_id} {of}{', changing' if worker.is_changing else ''}"


def _found(worker: WorkerStatus) -> str:
    counts = {tier: getattr(worker, f"adapters_found_{tier}") for tier in ("device", "host", "disk", "store")}
    asked = sum(counts.values())
    return ", ".join(f"{tier} {100 * count / asked:.3g} %" for tier, count in counts.items() if count) or "-"


def _cold_starts(worker: WorkerStatus) -> str:
    told = []
    for tier in ("host", "disk", "store"):
        count, seconds = getattr(worker, f"cold_starts_{tier}"), getattr(worker, f"cold_{tier}_s")
        told += [f"{tier} {_ms(1e3 * seconds / count)}"] if count else []
    return ", ".join(told) or "-"


_WORKERS: Columns[WorkerStatus] = (
    ("worker", lambda w: w.worker_id),
    ("address", lambda w: w.address),
    ("device", lambda w: w.device),
    ("pool", lambda w: w.pool),
    ("state", state_of),
    ("running", lambda w: f"{w.running}/{w.sequence_slots}"),
    ("KV blocks free", lambda w: f"{w.kv_blocks_free}/{w.kv_blocks_total}"),
    ("adapters", lambda w: f"{w.adapters_on_device} device, {w.adapters_on_host} host"),
    ("found on", _found),
    ("mean cold start", _cold_starts),
    ("tokens", lambda w: w.generated_tokens),
)
_POOLS: Columns[PoolStatus] = (
    ("pool", lambda p: p.pool),
    ("base model", lambda p: p.base_model or "no worker yet"),
    ("workers", lambda p: p.workers),
    ("queued", lambda p: p.queued),
    ("running", lambda p: p.running),
    ("overload", lambda p: f"level {p.overload.level}"),
)
_FLOWS: Columns[FlowStatus] = (
    ("tenant", lambda f: f.tenant_id),
    ("class", lambda f: f.qos_class),
    ("pool", lambda f: f.pool),
    ("queued", lambda f: f.queued),
    ("running", lambda f: f.running),
    ("oldest wait", lambda f: f"{f.oldest_wait_s:.1f} s"),
    ("weighted tokens served", lambda f: f.served_cost),
)
_OVERLOAD: Columns[ClassOverload] = (
    ("class", lambda c: c.qos_class),
    ("late", lambda c: "-" if c.late_part is None else f"{100 * c.late_part:.0f} %"),
    ("target", lambda c: "half the deadline" if c.target_ms is None else f"{c.target_ms:.0f} ms"),
    ("refused", lambda c: c.refused_by_routers + c.refused),
    ("shed from queue", lambda c: c.shed),
    ("output capped", lambda c: c.capped),
)
_OVERLOADED_TENANTS: Columns[TenantOverload] = (
    ("tenant above its share", lambda t: t.tenant_id),
    ("asks for, in shares", lambda t: f"{t.demand_shares:.2g}"),
    ("own level", lambda t: t.level),
    ("what it gives up", lambda t: _gives_up(t.rung)),
)
_NEIGHBOURS: Columns[NoisyNeighbour] = (
    ("noisy tenant", lambda n: n.tenant_id),
    ("how", lambda n: n.kind),
    ("worker", lambda n: n.worker_id or "all"),
    ("evidence", lambda n: ", ".join(f"{name} {_number(value)}" for name, value in n.evidence.items())),
)
_KV: Columns[TenantKv] = (
    ("tenant's KV", lambda kv: kv.tenant_id),
    ("on devices", lambda kv: _mib(kv.device_bytes)),
    ("most on one", lambda kv: _mib(kv.most_bytes)),
)
_ADAPTERS: Columns[TenantAdapters] = (
    ("tenant's adapters", lambda t: t.tenant_id),
    ("on devices", lambda t: _mib(t.device_bytes)),
    ("on hosts", lambda t: _mib(t.host_bytes)),
    ("evicted", lambda t: t.evictions),
    ("of these for others", lambda t: t.displaced),
    ("pins kept", _pins_met),
)
_UNMET_PINS: Columns[tuple[str, PinStatus]] = (
    ("tenant", lambda each: each[0]),
    ("pinned adapter", lambda each: each[1].name),
    ("workers", lambda each: f"{each[1].on_device} of {each[1].workers}"),
    ("why not on all", lambda each: each[1].problem or "being loaded"),
)
_SETBACKS: Columns[TenantSetbacks] = (
    ("tenant's sequences", lambda s: s.tenant_id),
    *((f.name.replace("_", " "), attrgetter(f.name)) for f in fields(TenantSetbacks)[1:]),
)
_ACCOUNTS: Columns[QuotaStatus] = (
    ("tenant", lambda q: q.tenant_id),
    ("class", lambda q: q.qos_class),
    ("requests now", lambda q: q.requests),
    ("leased tokens", lambda q: q.leased_tokens),
    ("settled tokens", lambda q: q.settled_tokens),
    ("left in the bucket", lambda q: "no bucket" if q.level_tokens is None else q.level_tokens),
)
_SLOS: Columns[SloStatus] = (
    ("tenant", lambda s: s.tenant_id),
    ("class", lambda s: s.qos_class),
    ("TTFT p50", lambda s: _ms(s.ttft_p50_ms)),
    ("p95", lambda s: _ms(s.ttft_p95_ms)),
    ("target", _slo_target),
    ("per token p50", lambda s: _ms(s.tpot_p50_ms)),
    ("p95", lambda s: _ms(s.tpot_p95_ms)),
    ("requests", lambda s: f"{s.requests}, {s.failed} failed"),
    ("available", lambda s: f"{100 * s.availability:.3f} %"),
    ("target", lambda s: "-" if s.availability_target is None else f"{100 * s.availability_target:g} %"),
    ("budget left", lambda s: "-" if s.error_budget is None else f"{100 * s.error_budget:.0f} %"),
)
_CIRCUITS: Columns[CircuitStatus] = (
    ("tenant", lambda c: c.tenant_id),
    ("refused", _refused),
    ("router", lambda c: c.router_id or "-"),
    ("state", lambda c: "half-open" if c.half_open else "open"),
    ("try again in", lambda c: f"{c.retry_after_s:.1f} s"),
)
_ROLLOUTS: Columns[RolloutStatus] = (
    ("tenant", lambda r: r.tenant_id),
    ("rollout", lambda r: f"{r.name}@{r.rollout.to} beside {r.in_force}"),
    ("share", lambda r: f"{r.rollout.percent} % by {r.rollout.sticky}"),
    ("steps", lambda r: " > ".join(map(str, r.rollout.auto.steps)) if r.rollout.auto is not None else "by hand"),
    ("requests in this step", _step_requests),
    ("evidence against it", _evidence),
)
_QUARANTINES: Columns[QuarantineStatus] = (
    ("tenant", lambda q: q.tenant_id),
    ("quarantined prompts", lambda q: q.prompts),
    ("router", lambda q: q.router_id or "-"),
    ("for another", lambda q: f"{q.longest_s:.0f} s"),
)
