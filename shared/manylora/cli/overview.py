"""`manylora status`."""

from __future__ import annotations

from manylora.cli.output import print_json, print_table, write
from manylora.client import Client, ClusterStatus, WorkerStatus


async def show(server: str, *, as_json: bool) -> None:
    async with Client(server) as client:
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
