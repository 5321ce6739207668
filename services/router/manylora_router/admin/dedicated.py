"""Whether a pool has enough workers for those that policies dedicate, as far as a router knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.ids import AdapterName, TenantId
from manylora_shared.tenancy.policy import TenantPolicy


def dedicated_problem(
    policy: TenantPolicy,
    others: Collection[TenantPolicy],
    pool_of: Mapping[tuple[TenantId, AdapterName], str],
    workers: Mapping[str, Collection[WorkerRecord]],
) -> str | None:
    """None: nothing speaks against it. pool_of: by tenant and adapter, of those that are registered; another is looked
    for in its policy's first pool. workers: by pool; of one without any nothing is known.
    """
    own = _by_pool(policy, pool_of)
    for pool, count in own.items():
        members = workers.get(pool, ())
        if not members:
            continue
        able = [worker for worker in members if not worker.merge_problem]
        taken = sum(_by_pool(other, pool_of).get(pool, 0) for other in others)
        if count + taken <= min(len(able), len(members) - 1):
            continue
        why = next((f" ({w.worker_id}: {w.merge_problem})" for w in members if w.merge_problem), "")
        beside = f", and other tenants' policies for {taken}" if taken else ""
        return (
            f"asks for {count} dedicated workers of pool {pool}{beside}: it has {len(members)}, of which "
            f"{len(able)} can merge an adapter{why}, and one at least stays everybody's"
        )
    return None


def _by_pool(policy: TenantPolicy, pool_of: Mapping[tuple[TenantId, AdapterName], str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in policy.dedicated.items():
        pool = pool_of.get((policy.tenant_id, name), policy.pools[0])
        found[pool] = found.get(pool, 0) + count
    return found
