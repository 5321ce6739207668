"""What is done to the cluster, and what callers may see of it: docs/OPERATIONS.md says the same."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.callers import Summary
from bench.chaos.cluster import ETCD, ROUTERS, WORKERS, Act, ChaosCluster

FROZEN_S = 8.0
ETCD_FULL_S = 6.0


@dataclass(frozen=True)
class Effect:
    """What is stated. Codes: those with which plain callers' answers may end; the client's own end with none of them
    unless `patient_codes` has it."""

    pause_p95_s: float = 2.0  # nothing, for callers: callers and all services share two cores
    calm_ttft_p95_ms: float = 2_000.0
    availability: float = 1.0
    plain_codes: Sequence[str] = ()
    patient_codes: Sequence[str] = ()
    new_leader: bool | None = False  # None: it may be

    def broken(self, seen: Summary) -> list[str]:
        """In which points what was seen goes beyond it."""
        found = []
        for caller, allowed in (("patient", self.patient_codes), ("plain", self.plain_codes)):
            more = {code: n for code, n in seen.errors[caller].items() if code not in allowed}
            if more:
                found.append(f"{caller} callers: {more}")
        if seen.changed:
            found.append(f"{seen.changed} answers changed")
        if seen.hung:
            found.append(f"{seen.hung} answers hang")
        if (seen.pause_p95_s or 0.0) > self.pause_p95_s:
            found.append(f"pause p95 {seen.pause_p95_s:.2f} s > {self.pause_p95_s:g}")
        if (seen.calm_ttft_p95_ms or 0.0) > self.calm_ttft_p95_ms:
            found.append(f"TTFT p95 {seen.calm_ttft_p95_ms:.0f} ms > {self.calm_ttft_p95_ms:g}")
        if seen.availability < self.availability:
            found.append(f"availability {seen.availability:.4f} < {self.availability:g}")
        return found


@dataclass(frozen=True)
class Fault:
    """lasts_s: between `begin` and `end`. needs: of Setting."""

    name: str
    effect: Effect
    begin: Act
    lasts_s: float = 4.0
    end: Act | None = None
    needs: str = ""


def _kill(name: str) -> Act:
    async def act(cluster: ChaosCluster) -> None:
        cluster.signal(await _resolved(cluster, name), signal.SIGKILL)

    return act


class _Freeze:
    """It may be another process that goes by the role when it is thawed."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._name = ""

    async def begin(self, cluster: ChaosCluster) -> None:
        self._name = await _resolved(cluster, self._role)
        cluster.signal(self._name, signal.SIGSTOP)

    async def end(self, cluster: ChaosCluster) -> None:
        cluster.signal(self._name, signal.SIGCONT)


async def _resolved(cluster: ChaosCluster, role: str) -> str:
    if role == "leader":
        return await cluster.leader()
    if role == "worker":
        return await cluster.busiest()
    return await cluster.standby() if role == "standby" else role


def _frozen(name: str, role: str, effect: Effect) -> Fault:
    freeze = _Freeze(role)
    return Fault(name, effect, freeze.begin, FROZEN_S, freeze.end)


async def _nothing(cluster: ChaosCluster) -> None: ...


async def _drain_worker(cluster: ChaosCluster) -> None:
    await cluster.operator.drain(await cluster.busiest())


async def _drain_leader(cluster: ChaosCluster) -> None:
    await cluster.operator.drain(await cluster.leader())


async def _drain_router(cluster: ChaosCluster) -> None:
    await cluster.operator.drain("router-1")


async def _drop_adapters(cluster: ChaosCluster) -> None:
    for worker in WORKERS:
        await cluster.operator.drop_caches(worker, prefixes=False)


async def _drop_prefixes(cluster: ChaosCluster) -> None:
    for worker in WORKERS:
        await cluster.operator.drop_caches(worker, adapters=False)


async def _cut_worker(cluster: ChaosCluster) -> None:
    cluster.isolate(await cluster.busiest())


async def _cut_worker_from_leader(cluster: ChaosCluster) -> None:
    cluster.cut(await cluster.leader(), await cluster.busiest())


async def _cut_router_from_leader(cluster: ChaosCluster) -> None:
    cluster.cut(await cluster.leader(), "router-1")


async def _cut_leader_from_etcd(cluster: ChaosCluster) -> None:
    cluster.cut(await cluster.leader(), ETCD)


async def _cut_leader(cluster: ChaosCluster) -> None:
    cluster.isolate(await cluster.leader())


async def _cut_routers_from_worker(cluster: ChaosCluster) -> None:
    cluster.cut(await cluster.busiest(), *ROUTERS)


async def _mend(cluster: ChaosCluster) -> None:
    cluster.mend()


def _clocks(seconds: int) -> Act:
    async def act(cluster: ChaosCluster) -> None:
        for name in (await cluster.leader(), "worker-0", "router-0"):
            cluster.set_clock(name, seconds)

    return act


async def _clocks_back(cluster: ChaosCluster) -> None:
    for name in ("scheduler", "scheduler-1", "worker-0", "router-0"):
        cluster.set_clock(name, 0)


# A frozen worker is missed after 3 s, a silent leader after 2; then work goes on elsewhere.
_LOST = Effect(pause_p95_s=5.0, calm_ttft_p95_ms=6_000)
_SLOWED = Effect(pause_p95_s=5.0, calm_ttft_p95_ms=5_000)  # by libfaketime, whatever the clocks are
_LEADERLESS = Effect(calm_ttft_p95_ms=5_000, new_leader=True)
_ROUTER = Effect(pause_p95_s=6.0, calm_ttft_p95_ms=6_000, plain_codes=("UNAVAILABLE", "DEADLINE_EXCEEDED"))

FAULTS: tuple[Fault, ...] = (
    Fault("nothing", Effect(), _nothing),
    Fault("worker killed", _LOST, _kill("worker")),
    _frozen("worker frozen", "worker", _LOST),
    Fault("worker drained", Effect(calm_ttft_p95_ms=5_000), _drain_worker),
    Fault("leader killed", _LEADERLESS, _kill("leader")),
    _frozen("leader frozen", "leader", _LEADERLESS),
    Fault("leader drained", Effect(new_leader=True), _drain_leader),
    Fault("standby killed", Effect(), _kill("standby")),
    Fault("router killed", _ROUTER, _kill("router-1")),
    _frozen("router frozen", "router-1", _ROUTER),
    Fault("router drained", _ROUTER, _drain_router),
    Fault("etcd killed", Effect(), _kill(ETCD)),
    _frozen("etcd frozen", ETCD, Effect(new_leader=None)),
    Fault(
        "etcd's quota full",
        Effect(),
        ChaosCluster.fill_quota,
        ETCD_FULL_S,
        ChaosCluster.clear_quota,
    ),
    Fault(
        "etcd's disk full",
        Effect(new_leader=None),
        ChaosCluster.fill_disk,
        ETCD_FULL_S,
        ChaosCluster.clear_disk,
        "has_disk",
    ),
    Fault("worker cut off", _LOST, _cut_worker, FROZEN_S, _mend, "networks"),
    Fault("worker cut from the leader", _LOST, _cut_worker_from_leader, FROZEN_S, _mend, "networks"),
    Fault("worker cut from the routers", _LOST, _cut_routers_from_worker, FROZEN_S, _mend, "networks"),
    Fault("router cut from the leader", _ROUTER, _cut_router_from_leader, FROZEN_S, _mend, "networks"),
    Fault("leader cut from etcd", _LEADERLESS, _cut_leader_from_etcd, FROZEN_S, _mend, "networks"),
    Fault("leader cut off", _LEADERLESS, _cut_leader, FROZEN_S, _mend, "networks"),
    Fault("adapters dropped", Effect(), _drop_adapters),
    Fault("prefixes dropped", Effect(), _drop_prefixes),
    Fault("nothing (clocks can be set)", _SLOWED, _nothing, 6.0, needs="clocks"),
    Fault("clocks an hour on", _SLOWED, _clocks(3600), 6.0, _clocks_back, "clocks"),
    Fault("clocks an hour back", _SLOWED, _clocks(-3600), 6.0, _clocks_back, "clocks"),
)


async def lasts(fault: Fault, cluster: ChaosCluster) -> None:
    """From its beginning until the cluster is whole again."""
    await fault.begin(cluster)
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        if fault.end is not None:
            await fault.end(cluster)
