"""`manylora status`."""

from __future__ import annotations

from manylora_shared.tenancy.overload import LEVELS

from manylora.cli.output import Target, print_json, print_table, write
from manylora.client import (
    CircuitStatus,
    ClassOverload,
    ClusterStatus,
    OverloadStatus,
    QuotaStatus,
    RouterStatus,
    SloStatus,
    TenantAdapters,
    WorkerStatus,
)

_SLO_COLUMNS = (
    *("tenant", "class", "TTFT p50", "p95", "target", "per token p50", "p95"),
    *("requests", "available", "target", "budget left"),
)
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
_OVERLOAD_COLUMNS = ("class", "late", "target", "refused", "shed from queue", "output capped")
_SETBACK_COLUMNS = ("tenant's sequences", "preempted", "swapped to hosts", "evicted", "tokens computed again")
_ACCOUNT_COLUMNS = ("tenant", "class", "requests now", "leased tokens", "settled tokens", "left in the bucket")
_CIRCUIT_COLUMNS = ("tenant", "refused", "router", "state", "try again in")


async def show(target: Target, *, as_json: bool) -> None:
    async with target.client() as client:
        status = await client.status()
    if as_json:
        print_json(status)
    else:
        _print(status)


def _print(status: ClusterStatus) -> None:
    scheduler = status.scheduler
    write(f"model      {status.base_model}\n")
    if status.routers:
        state = f"{scheduler.address}, epoch {scheduler.epoch}" if scheduler.reachable else "not reachable"
        write(f"scheduler  {state}\n")
        write(f"routers    {', '.join(_router(r) for r in status.routers)}\n")
        write(f"tenants    {status.tenants}, with {status.adapters} adapters\n\n")
        columns = ("worker", "address", "device", "state", "running", "KV blocks free", "adapters", "tokens")
        print_table(columns, [_worker_row(w) for w in status.workers], empty="no worker is registered")
    else:  # a tenant's key: machines are not its to see
        write(f"scheduler  {'' if scheduler.reachable else 'not '}reachable\n")
        write(f"adapters   {status.adapters}\n\n")
    if scheduler.flows:
        flows = [
            (f.tenant_id, f.qos_class, f.queued, f.running, f"{f.oldest_wait_s:.1f} s", f.served_cost)
            for f in scheduler.flows
        ]
        print_table(("tenant", "class", "queued", "running", "oldest wait", "weighted tokens served"), flows, empty="")

    _print_overload(scheduler.overload)
    if scheduler.neighbours:
        neighbours = [
            (n.tenant_id, n.kind, n.worker_id or "all", ", ".join(f"{k} {_number(v)}" for k, v in n.evidence.items()))
            for n in scheduler.neighbours
        ]
        print_table(("noisy tenant", "how", "worker", "evidence"), neighbours, empty="")

    if scheduler.kv:
        kv = [(each.tenant_id, _mib(each.device_bytes), _mib(each.most_bytes)) for each in scheduler.kv]
        print_table(("tenant's KV", "on devices", "most on one"), kv, empty="")

    _print_adapters(scheduler.adapters)
    if scheduler.setbacks:
        setbacks = [
            (s.tenant_id, s.preemptions, s.swaps_out, s.evictions, s.recomputed_tokens) for s in scheduler.setbacks
        ]
        print_table(_SETBACK_COLUMNS, setbacks, empty="")

    if scheduler.quotas:
        print_table(_ACCOUNT_COLUMNS, [_account_row(q) for q in scheduler.quotas], empty="")

    if status.slos:
        print_table(_SLO_COLUMNS, [_slo_row(s) for s in status.slos], empty="")
    if status.circuits:
        print_table(_CIRCUIT_COLUMNS, [_circuit_row(c) for c in status.circuits], empty="")
    if status.quarantines:
        quarantined = [(q.tenant_id, q.prompts, q.router_id or "-", f"{q.longest_s:.0f} s") for q in status.quarantines]
        print_table(("tenant", "quarantined prompts", "router", "for another"), quarantined, empty="")


def _print_adapters(tenants: tuple[TenantAdapters, ...]) -> None:
    """What tenants have of the workers' adapter memory, and how their pins stand."""
    if tenants:
        rows = [
            (t.tenant_id, _mib(t.device_bytes), _mib(t.host_bytes), t.evictions, t.displaced, _pins_met(t))
            for t in tenants
        ]
        columns = ("tenant's adapters", "on devices", "on hosts", "evicted", "of these for others", "pins kept")
        print_table(columns, rows, empty="")
    unmet = [(t.tenant_id, pin) for t in tenants for pin in t.pins if pin.on_device < pin.workers]
    if unmet:
        missing = [
            (tenant_id, pin.name, f"{pin.on_device} of {pin.workers}", pin.problem or "being loaded")
            for tenant_id, pin in unmet
        ]
        print_table(("tenant", "pinned adapter", "workers", "why not on all"), missing, empty="")


def _pins_met(tenant: TenantAdapters) -> str:
    met = sum(pin.on_device == pin.workers for pin in tenant.pins)
    return f"{met} of {len(tenant.pins)}" if tenant.pins else "-"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _print_overload(overload: OverloadStatus) -> None:
    """Nothing, while nothing is given up and nothing was."""
    counted = [c for c in overload.classes if c.refused_by_routers or c.refused or c.shed or c.capped]
    if overload.level or overload.tenants:
        write(f"overload   level {overload.level} of {LEVELS}: {_gives_up(overload.rung)}\n")
    if counted or (overload.classes and (overload.level or overload.tenants)):
        print_table(_OVERLOAD_COLUMNS, [_class_row(c) for c in overload.classes], empty="")
    if overload.tenants:
        tenants = [(t.tenant_id, f"{t.demand_shares:.2g}", t.level, _gives_up(t.rung)) for t in overload.tenants]
        print_table(
            ("tenant above its share", "asks for, in shares", "own level", "what it gives up"), tenants, empty=""
        )


def _number(value: float) -> str:
    """Three digits, and of large numbers all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _gives_up(rung: str) -> str:
    return _GIVES_UP.get(rung, rung)  # a newer server may have others


def _class_row(c: ClassOverload) -> tuple[object, ...]:
    return (
        c.qos_class,
        "-" if c.late_part is None else f"{100 * c.late_part:.0f} %",
        "half the deadline" if c.target_ms is None else f"{c.target_ms:.0f} ms",
        c.refused_by_routers + c.refused,
        c.shed,
        c.capped,
    )


def _account_row(quota: QuotaStatus) -> tuple[object, ...]:
    left = "no bucket" if quota.level_tokens is None else quota.level_tokens
    return (quota.tenant_id, quota.qos_class, quota.requests, quota.leased_tokens, quota.settled_tokens, left)


def _router(router: RouterStatus) -> str:
    return f"{router.router_id} ({router.address}{'' if router.answered else ', not answering'})"


def _slo_row(slo: SloStatus) -> tuple[object, ...]:
    target_ms = "-" if slo.ttft_p95_target_ms is None else f"{slo.ttft_p95_target_ms} ms"
    if slo.ttft_met is not None:
        target_ms += ", met" if slo.ttft_met else ", missed"
    return (
        slo.tenant_id,
        slo.qos_class,
        _ms(slo.ttft_p50_ms),
        _ms(slo.ttft_p95_ms),
        target_ms,
        _ms(slo.tpot_p50_ms),
        _ms(slo.tpot_p95_ms),
        f"{slo.requests}, {slo.failed} failed",
        f"{100 * slo.availability:.3f} %",
        "-" if slo.availability_target is None else f"{100 * slo.availability_target:g} %",
        "-" if slo.error_budget is None else f"{100 * slo.error_budget:.0f} %",
    )


def _ms(duration_ms: float | None) -> str:
    return "-" if duration_ms is None else f"{duration_ms:.3g} ms" if duration_ms < 100 else f"{duration_ms:.0f} ms"


def _circuit_row(circuit: CircuitStatus) -> tuple[object, ...]:
    adapter = f"adapter {circuit.adapter_version[:12]}" if circuit.adapter_version else "base model"
    return (
        circuit.tenant_id,
        "whole tenant" if circuit.whole_tenant else adapter,
        circuit.router_id or "-",
        "half-open" if circuit.half_open else "open",
        f"{circuit.retry_after_s:.1f} s",
    )


def _public(worker: WorkerStatus) -> str:
    held, declared = worker.public_kv_blocks, worker.public_kv_blocks_declared
    if not declared:
        return ""
    return f", {held} public" if held == declared else f", {held} of {declared} public"


def _worker_row(worker: WorkerStatus) -> tuple[object, ...]:
    state = "draining" if worker.draining else "connected" if worker.connected else "not connected"
    return (
        worker.worker_id,
        worker.address,
        worker.device,
        state,
        f"{worker.running}/{worker.sequence_slots}",
        f"{worker.kv_blocks_free}/{worker.kv_blocks_total}{_public(worker)}",
        f"{worker.adapters_on_device} device, {worker.adapters_on_host} host",
        worker.generated_tokens,
    )
