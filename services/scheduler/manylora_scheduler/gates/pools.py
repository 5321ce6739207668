"""The pools of a cluster, each with a core and its overload control, behind the one book of quotas. Pure.

A pool's queue is its own: what a flow has had of one pool's workers says nothing of its turn at another's, and what
waits for one pool is in no other's way (docs/POLICY.md). Owns which worker is of which pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manylora_shared.coordination.pool import MAX_POOLS
from manylora_shared.errors import Code
from manylora_shared.ids import DEFAULT_POOL, RequestId, RouterId, TenantId, WorkerId

from manylora_scheduler.core.core import Core
from manylora_scheduler.core.events import (
    Command,
    Enqueued,
    Event,
    GrantClosed,
    PolicyChanged,
    RouterConnected,
    RouterDisconnected,
    RoutersRefused,
    SendRefusal,
    Tick,
    Withdrawn,
    WorkerDedicated,
    WorkerDisconnected,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.succession import ClockSnapshot
from manylora_scheduler.core.timers import earlier
from manylora_scheduler.core.worker_view import WorkerView
from manylora_scheduler.gates.overload import OverloadGate

MakeGate = Callable[[str, ClockSnapshot | None], OverloadGate]


class Pools:
    """Behind it the same seam as a core's: `apply` and `next_wakeup`."""

    def __init__(self, make: MakeGate, clocks: Mapping[str, ClockSnapshot] | None = None) -> None:
        """clocks: what a predecessor left, by pool."""
        clocks = clocks or {}
        self._make = make
        self.default = make(DEFAULT_POOL, clocks.get(DEFAULT_POOL))
        self.gates: dict[str, OverloadGate] = {DEFAULT_POOL: self.default}  # for reading
        self._pool_of: dict[WorkerId, str] = {}
        # what a pool that comes later is to know
        self._routers: dict[RouterId, RouterConnected] = {}
        self._policies: dict[TenantId, PolicyChanged] = {}
        for name, clock in clocks.items():
            if name not in self.gates and len(self.gates) < MAX_POOLS and (clock.flows or clock.reserved):
                self.gates[name] = make(name, clock)

    def apply(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, Enqueued):
            return self._on_enqueued(event, now)
        if isinstance(event, WorkerReported | WorkerDisconnected | WorkerDedicated):
            return self._of_worker(event.worker_id).apply(event, now)
        if isinstance(event, GrantClosed | Withdrawn):
            return self._of_request(event).apply(event, now)
        match event:
            case WorkerJoined():
                return self._on_joined(event, now)
            case WorkerLeft():
                gate = self._of_worker(event.worker_id)
                self._pool_of.pop(event.worker_id, None)
                return gate.apply(event, now)
            case RoutersRefused():
                gate = self.gates.get(event.pool, self.default)
                return gate.apply(event, now)
            case RouterConnected():
                self._routers[event.router_id] = event
            case RouterDisconnected():
                known = self._routers.get(event.router_id)
                if known is not None and known.session == event.session:
                    del self._routers[event.router_id]
            case PolicyChanged():
                self._policies[event.tenant_id] = event
                if event.policy is None:
                    del self._policies[event.tenant_id]
        return self._all(event, now)

    def next_wakeup(self) -> float | None:
        if len(self.gates) == 1:
            return self.default.next_wakeup()
        found: float | None = None
        for gate in self.gates.values():
            found = earlier(found, gate.next_wakeup())
        return found

    # ---- reading

    @property
    def num_queued(self) -> int:
        return sum(gate.core.num_queued for gate in self.gates.values())

    @property
    def num_granted(self) -> int:
        return sum(gate.core.num_granted for gate in self.gates.values())

    @property
    def is_restoring(self) -> bool:
        return any(gate.core.is_restoring for gate in self.gates.values())

    @property
    def workers(self) -> list[tuple[str, WorkerView]]:
        return [(name, worker) for name, gate in self.gates.items() for worker in gate.core.workers]

    def gate_of(self, worker_id: WorkerId) -> OverloadGate:
        return self._of_worker(worker_id)

    def core_of(self, worker_id: WorkerId) -> Core:
        return self._of_worker(worker_id).core

    def clocks(self) -> dict[str, ClockSnapshot]:
        return {name: gate.core.clock_snapshot() for name, gate in self.gates.items()}

    def check_invariants(self) -> None:
        for name, gate in self.gates.items():
            gate.core.check_invariants()
            gate.check_invariants()
            members = {worker.worker_id for worker in gate.core.workers}
            assert members == {worker_id for worker_id, pool in self._pool_of.items() if pool == name}

    # ---- the inside

    def _all(self, event: Event, now: float) -> list[Command]:
        if len(self.gates) == 1:
            return self.default.apply(event, now)
        return [command for gate in self.gates.values() for command in gate.apply(event, now)]

    def _of_worker(self, worker_id: WorkerId) -> OverloadGate:
        return self.gates[self._pool_of.get(worker_id, DEFAULT_POOL)]

    def _of_request(self, event: GrantClosed | Withdrawn) -> OverloadGate:
        if len(self.gates) == 1:
            return self.default
        request_id: RequestId = event.request_id
        for gate in self.gates.values():
            if gate.core.view.is_known(request_id):
                return gate
        # No pool waits for it any more; that its worker was not reached counts all the same.
        return self._of_worker(event.worker_id) if isinstance(event, GrantClosed) else self.default

    def _on_enqueued(self, event: Enqueued, now: float) -> list[Command]:
        pool = event.request.pool
        gate = self.gates.get(pool)
        if gate is not None:
            return gate.apply(event, now)
        if not self._make_room():
            message = f"pool {pool} is none of the {MAX_POOLS} that there are"
            return [SendRefusal(event.request, event.session, Code.UNAVAILABLE, message), *self._all(Tick(), now)]
        commands = self._begin(pool, now)
        return commands + self.gates[pool].apply(event, now)

    def _on_joined(self, event: WorkerJoined, now: float) -> list[Command]:
        commands: list[Command] = []
        before = self._pool_of.get(event.worker_id)
        if before is not None and before != event.pool:
            commands += self.gates[before].apply(WorkerLeft(event.worker_id), now)
        if event.pool not in self.gates:
            self._make_room()  # of pools with workers there are no more than that (coordination/pool.py)
            commands += self._begin(event.pool, now)
        self._pool_of[event.worker_id] = event.pool
        return commands + self.gates[event.pool].apply(event, now)

    def _make_room(self) -> bool:
        """For one more pool: of those without workers and requests, the one that came first goes."""
        if len(self.gates) < MAX_POOLS:
            return True
        of_workers = set(self._pool_of.values())
        for name, gate in self.gates.items():
            core = gate.core
            if gate is self.default or name in of_workers or core.num_queued or core.num_granted or core.is_restoring:
                continue
            del self.gates[name]
            return True
        return False

    def _begin(self, pool: str, now: float) -> list[Command]:
        gate = self.gates[pool] = self._make(pool, None)
        known: list[Event] = [*self._policies.values(), *self._routers.values()]
        return [command for event in known for command in gate.apply(event, now)]
