"""`manylora status`."""

from __future__ import annotations

from manylora.cli.output import Target, print_json, print_table, write
from manylora.client import ClusterStatus, WorkerStatus


async def show(target: Target, *, as_json: bool) -> None:
    async with target.client() as client:
        status = await client.status()
    if as_json:
        print_json(status)
    else:
        _print(status)


def _print(status: ClusterStatus) -> None:
    scheduler = status.scheduler
    state = f"{scheduler.address}, epoch {scheduler.epoch}" if scheduler.reachable else "not reachable"
    write(f"model      {status.base_model}\n")
    write(f"scheduler  {state}\n")
    write(f"routers    {', '.join(f'{r.router_id} ({r.address})' for r in status.routers)}\n")
    write(f"tenants    {status.tenants}, with {status.adapters} adapters\n\n")
    columns = ("worker", "address", "device", "state", "running", "KV blocks free", "adapters", "tokens")
    print_table(columns, [_worker_row(w) for w in status.workers], empty="no worker is registered")
    if scheduler.flows:
        flows = [
            (f.tenant_id, f.qos_class, f.queued, f.running, f"{f.oldest_wait_s:.1f} s", f.served_cost)
            for f in scheduler.flows
        ]
        print_table(("tenant", "class", "queued", "running", "oldest wait", "served cost"), flows, empty="")

    if any(quota.level_tokens is not None for quota in scheduler.quotas):
        quotas = [
            (q.tenant_id, q.qos_class, q.requests, q.leased_tokens, q.settled_tokens, q.level_tokens)
            for q in scheduler.quotas
            if q.level_tokens is not None
        ]
        print_table(("tenant", "class", "requests", "leased", "settled", "tokens left"), quotas, empty="")


def _worker_row(worker: WorkerStatus) -> tuple[object, ...]:
    state = "draining" if worker.draining else "connected" if worker.connected else "not connected"
    return (
        worker.worker_id,
        worker.address,
        worker.device,
        state,
        f"{worker.running}/{worker.sequence_slots}",
        f"{worker.kv_blocks_free}/{worker.kv_blocks_total}",
        f"{worker.adapters_on_device} device, {worker.adapters_on_host} host",
        worker.generated_tokens,
    )
