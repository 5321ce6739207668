"""Who makes trouble for others, and the numbers that say so. Pure; time is passed in.

Owns what three detectors remember. They report; what follows from it is OverloadGate's. A tenant alone is nobody's
neighbour.

    kv_growth       a tenant holds much of a worker's KV blocks, and at its pace the free ones end soon
    adapter_thrash  most of a tenant's grants load their adapter, over many adapters, and most loads are its
    wait_skew       a tenant's oldest request has waited much longer than the other tenants', and it has half the queue
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from manylora_shared.ids import AdapterUid, QosClass, TenantId, WorkerId

from manylora_scheduler.core.reports import WorkerReport
from manylora_scheduler.core.request import FlowKey

MEMORY_WINDOW_S = 10.0
MEMORY_SAMPLE_S = 1.0
MIN_KV_PART = 0.25
MIN_KV_GAIN = 0.1
EXHAUSTED_IN_S = 30.0
LOADS_WINDOW_S = 30.0
MIN_LOADS = 16
MIN_ADAPTERS = 8
MAX_GRANTS = 10_000  # in a busier cluster the window is shorter
SKEW = 4.0
MIN_SKEW_S = 0.2
NOISY_KINDS = ("kv_growth", "adapter_thrash", "wait_skew")
HURTING_KINDS = ("kv_growth", "adapter_thrash")  # others' memory; a queue of its own hurts nobody else
MAX_FOUND = 32  # reports at a time: each detector's strongest first


@dataclass(frozen=True)
class FlowWait:
    flow: FlowKey
    queued: int
    oldest_s: float
    stands_for: int = 1  # so many flows like it


@dataclass(frozen=True)
class Noisy:
    kind: str
    tenant_id: TenantId
    worker_id: str  # empty: on all
    evidence: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Grant:
    at: float
    tenant_id: TenantId
    uid: AdapterUid
    loads: bool


@dataclass(slots=True)
class _Memory:
    """KV of one worker."""

    blocks: dict[TenantId, int] = field(default_factory=dict)
    total: int = 0
    free: int = 0
    samples: deque[tuple[float, dict[TenantId, int]]] = field(default_factory=deque)  # of `blocks`, oldest first


class Neighbours:
    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Memory] = {}
        self._grants: deque[_Grant] = deque(maxlen=MAX_GRANTS)

    def memory(self, worker_id: WorkerId, report: WorkerReport, now: float) -> None:
        if report.snapshot:
            self._workers[worker_id] = _Memory()
        memory = self._workers.get(worker_id)
        if memory is None:
            return  # it left, and this was on its way
        memory.total, memory.free = report.kv_blocks_total, report.kv_blocks_free
        for tenant_id, blocks in report.tenants.items():
            if blocks:
                memory.blocks[tenant_id] = blocks
            else:
                memory.blocks.pop(tenant_id, None)
        if not memory.samples or now - memory.samples[-1][0] >= MEMORY_SAMPLE_S:
            memory.samples.append((now, dict(memory.blocks)))
        while memory.samples[0][0] < now - MEMORY_WINDOW_S:
            memory.samples.popleft()

    def kv_blocks(self, worker_id: WorkerId) -> Mapping[TenantId, int]:
        memory = self._workers.get(worker_id)
        return memory.blocks if memory is not None else {}

    def worker_left(self, worker_id: WorkerId) -> None:
        self._workers.pop(worker_id, None)

    def granted(self, tenant_id: TenantId, uid: AdapterUid, is_resident: bool, now: float) -> None:
        """`is_resident`: the worker has the adapter's weights."""
        self._grants.append(_Grant(now, tenant_id, uid, not is_resident))

    def loads_part(self, now: float) -> float:
        """Of late grants with an adapter, those that load it."""
        since = now - LOADS_WINDOW_S
        late = [grant.loads for grant in self._grants if grant.at >= since]
        return sum(late) / len(late) if late else 0.0

    def find(
        self, waits: list[FlowWait], tops: Callable[[TenantId], tuple[float, float, float]], now: float
    ) -> tuple[Noisy, ...]:
        """`waits` are of all flows with requests; `tops` is a tenant's demand in shares, as in demand.py."""
        found = [*self._kv_growth(now), *self._adapter_thrash(now)]
        for qos_class in QosClass:
            found += self._wait_skew([wait for wait in waits if wait.flow.qos_class is qos_class], tops)
        return tuple(found[:MAX_FOUND])

    def _kv_growth(self, now: float) -> list[Noisy]:
        found: list[tuple[float, Noisy]] = []
        for worker_id, memory in self._workers.items():
            if not memory.total or len(memory.blocks) < 2:
                continue
            then, before = memory.samples[0]
            for tenant_id, blocks in memory.blocks.items():
                gained = blocks - before.get(tenant_id, 0)
                if blocks < MIN_KV_PART * memory.total or gained < MIN_KV_GAIN * memory.total or now <= then:
                    continue
                per_s = gained / (now - then)
                exhausted_in_s = memory.free / per_s
                if exhausted_in_s <= EXHAUSTED_IN_S:
                    evidence = {
                        "kv_blocks": float(blocks),
                        "kv_part": blocks / memory.total,
                        "growth_blocks_per_s": per_s,
                        "free_blocks": float(memory.free),
                        "exhausted_in_s": exhausted_in_s,
                    }
                    found.append((exhausted_in_s, Noisy("kv_growth", tenant_id, worker_id, evidence)))
        return [noisy for _, noisy in sorted(found, key=lambda f: (f[0], f[1].tenant_id, f[1].worker_id))]

    def _adapter_thrash(self, now: float) -> list[Noisy]:
        while self._grants and self._grants[0].at < now - LOADS_WINDOW_S:
            self._grants.popleft()
        all_loads = sum(grant.loads for grant in self._grants)
        if all_loads < MIN_LOADS:
            return []
        by_tenant: dict[TenantId, list[_Grant]] = {}
        for grant in self._grants:
            by_tenant.setdefault(grant.tenant_id, []).append(grant)
        found: list[Noisy] = []
        for tenant_id, mine in sorted(by_tenant.items()) if len(by_tenant) > 1 else []:
            loads = sum(grant.loads for grant in mine)
            adapters = len({grant.uid for grant in mine})
            if loads >= MIN_LOADS and 2 * loads >= len(mine) and 2 * loads >= all_loads and adapters >= MIN_ADAPTERS:
                evidence = {
                    "loads": float(loads),
                    "loads_per_s": loads / max(now - self._grants[0].at, 1.0),
                    "load_part_of_grants": loads / len(mine),
                    "part_of_all_loads": loads / all_loads,
                    "adapters": float(adapters),
                }
                found.append(Noisy("adapter_thrash", tenant_id, "", evidence))
        return found

    def _wait_skew(self, waits: list[FlowWait], tops: Callable[[TenantId], tuple[float, float, float]]) -> list[Noisy]:
        # All flows are of one class.
        queued = sum(wait.queued * wait.stands_for for wait in waits)
        if len(waits) < 2 or not queued:
            return []
        worst = max(waits, key=lambda wait: (wait.queued, wait.flow))
        others_s = statistics.median([wait.oldest_s for wait in waits if wait is not worst])
        if 2 * worst.queued < queued or worst.oldest_s < max(SKEW * others_s, MIN_SKEW_S):
            return []
        evidence = {
            "oldest_wait_s": worst.oldest_s,
            "others_median_wait_s": others_s,
            "queued": float(worst.queued),
            "queued_part": worst.queued / queued,
            "demand_shares": tops(worst.flow.tenant_id)[-1],
        }
        return [Noisy("wait_skew", worst.flow.tenant_id, "", evidence)]
