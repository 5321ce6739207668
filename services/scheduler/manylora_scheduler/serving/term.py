"""One term of leadership: a core, its one timer, the routers' and the workers' lines.

Events go in by `post` and the core's commands out, in one turn of the event loop, so that a grant leaves in the turn in
which its room appeared. Once this scheduler does not lead any more nothing is posted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

from manylora.v1 import admin_pb2, scheduler_pb2, status_pb2, worker_pb2
from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.coordination.policies import StoredPolicy, stored_policy
from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.errors import Code, ServiceUnavailable
from manylora_shared.ids import DEFAULT_POOL, RouterId, TenantId, WorkerId
from manylora_shared.process.heap import collector_paused
from manylora_shared.telemetry import Telemetry
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Transport

from manylora_scheduler.core.core import Core, CoreLimits, Order
from manylora_scheduler.core.events import (
    Command,
    Dropped,
    Event,
    HeldLease,
    PolicyChanged,
    RouterConnected,
    RouterDisconnected,
    SendDedicate,
    SendGrant,
    SendLease,
    SendLeaseRefusal,
    SendOverload,
    SendPrefetch,
    SendRefusal,
    Tick,
    WorkerDedicated,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from manylora_scheduler.core.succession import ClockSnapshot
from manylora_scheduler.gates.dedication_plan import DedicationPlan
from manylora_scheduler.gates.overload import OverloadGate
from manylora_scheduler.gates.pools import Pools
from manylora_scheduler.gates.queue_delay import OverloadTargets
from manylora_scheduler.gates.quota import QuotaGate
from manylora_scheduler.gates.signals import PoolSignals, Signals
from manylora_scheduler.serving.clock_codec import Legacy
from manylora_scheduler.serving.clock_keeper import ClockKeeper
from manylora_scheduler.serving.dedications import Wanted
from manylora_scheduler.serving.metrics import TermMetrics
from manylora_scheduler.serving.router_line import RouterLine
from manylora_scheduler.serving.spans import QueueSpans
from manylora_scheduler.serving.told import Told, adapter_sums, sums
from manylora_scheduler.serving.wire import (
    flow_status,
    grant_message,
    kv_statuses,
    lease_message,
    neighbour_status,
    overload_message,
    overload_status,
    pool_status,
    quota_status,
    refusal_message,
    worker_status,
)
from manylora_scheduler.serving.worker_line import WorkerLine

_LOG = logging.getLogger(__name__)

MIN_CLOCK_PAUSE_S = 1.0
CLOCK_ENTRIES_PER_S = 10_000  # a large clock is saved less often: saving takes a few percent of the time
LAST_SAVE_TIMEOUT_S = 0.5


class Term:
    """Args:
    epoch: the fencing epoch, on every grant and every control stream.
    is_leading: whether this one leads at a moment of the event loop's clock.
    outranked: called where others obey another leader.
    policies: the tenants' policy documents; each is read when the tenant's first request comes.
    predecessor: what was kept last.
    order: see Core.
    overload: whether anything is given up under overload.
    targets: of time in the queue.
    """

    def __init__(
        self,
        *,
        epoch: int,
        scheduler_id: str,
        is_leading: Callable[[float], bool],
        outranked: Callable[[], None],
        policies: Mapping[str, StoredPolicy],
        limits: CoreLimits,
        order: Order,
        overload: bool,
        targets: OverloadTargets,
        clock: ClockKeeper,
        predecessor: Legacy | None,
        transport: Transport,
        telemetry: Telemetry,
        rng: random.Random,
    ) -> None:
        self.epoch = epoch
        self._scheduler_id = scheduler_id
        self._is_leading = is_leading
        self._outranked = outranked
        self._policies = policies
        self._transport = transport
        self._telemetry = telemetry
        self._metrics = TermMetrics(telemetry)
        self._spans = QueueSpans(telemetry, scheduler_id, epoch)
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._clock = clock

        def make(pool: str, left: ClockSnapshot | None) -> OverloadGate:
            return OverloadGate(Core(limits, left, order), targets, enabled=overload, pool=pool)

        self.pools = Pools(make, predecessor.clocks if predecessor is not None else {})
        self.core = self.pools.default.core
        self.overload = self.pools.default
        settled = predecessor.settled.items() if predecessor is not None else ()
        known = {flow: tokens for flow, tokens in settled if flow.tenant_id in policies}
        self.quotas = QuotaGate(self.pools, self._loop.time(), known)
        self._dedications: dict[str, DedicationPlan] = {}
        self._signals: dict[str, PoolSignals] = {}
        self._routers: dict[RouterId, RouterLine] = {}
        self._workers: dict[WorkerId, WorkerLine] = {}
        self._ending: dict[asyncio.Task[None], None] = {}
        self._known_tenants: dict[TenantId, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._clock_pause_s = MIN_CLOCK_PAUSE_S
        self._next_session = 1
        self.num_events = 0  # nothing else changes the core, the overload gate and the quotas
        self._closed = False
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._keeping = asyncio.create_task(self._keep_clock(), name="clock")
        self._keeping.add_done_callback(self._keeping_ended)
        self.post(Tick())

    @property
    def is_leading(self) -> bool:
        return not self._closed and self._is_leading(self._loop.time())

    @property
    def num_routers(self) -> int:
        return len(self._routers)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def post(self, event: Event) -> None:
        now = self._loop.time()
        if self._closed or not self._is_leading(now):
            return
        began_ns = self._telemetry.now_ns()
        self.num_events += 1
        for command in self.quotas.apply(event, now):
            self._send(command, began_ns)
        self._set_timer()

    async def failed(self) -> None:
        """Waits for ever, unless a bug ends a part of the term: raises that."""
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        """Routers are told to look for the leader; workers go on with what they have."""
        was_leading = self.is_leading
        self._closed = True
        self._keeping.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for router in list(self._routers.values()):
            # One each: an error that is raised keeps the frames that it came through.
            router.close(ServiceUnavailable("this scheduler is not the leader any more"))
        self._routers.clear()
        for worker_id in list(self._workers):
            self._end_line(worker_id)
        while self._ending:
            await asyncio.wait(list(self._ending))
        await asyncio.wait([self._keeping])
        self._metrics.close()
        if was_leading:
            await self._save_last()
        if not self._failure.done():
            self._failure.cancel()

    # ---- routers

    def connect_router(self, router_id: RouterId, leases: tuple[HeldLease, ...] = ()) -> RouterLine:
        """An earlier stream of the router's that is not over yet is ended."""
        line = RouterLine(router_id, self._next_session)
        self._next_session += 1
        before = self._routers.get(router_id)
        if before is not None:
            before.close(ServiceUnavailable("another stream of this router took over"))
        self._routers[router_id] = line
        for tenant_id in dict.fromkeys(lease.flow.tenant_id for lease in leases):
            self.learn_tenant(tenant_id)
        self.post(RouterConnected(router_id, line.session, leases))
        return line

    def disconnect_router(self, line: RouterLine) -> None:
        if self._routers.get(line.router_id) is line:
            del self._routers[line.router_id]
        self.post(RouterDisconnected(line.router_id, line.session))

    def learn_tenant(self, tenant_id: TenantId) -> None:
        """Before its first request, so that the core knows its policy."""
        if tenant_id not in self._known_tenants:
            self._known_tenants[tenant_id] = None
            self._post_policy(tenant_id)

    def policy_changed(self, tenant_id: TenantId) -> None:
        if tenant_id in self._known_tenants:
            self._post_policy(tenant_id)

    def _post_policy(self, tenant_id: TenantId) -> None:
        stored = self._policies.get(tenant_id)
        policy = stored_policy(tenant_id, stored.in_force) if stored is not None else None
        if policy is not None or stored is None:  # else routers refuse
            self.post(PolicyChanged(tenant_id, policy))

    # ---- workers

    def dedicate(self, wanted: Wanted) -> None:
        now, gates = self._loop.time(), dict(self.pools.gates)
        self._dedications = {pool: self._dedications.get(pool) or DedicationPlan(now) for pool in gates}
        for pool, gate in gates.items():
            plan = self._dedications[pool]
            for worker_id, owner in plan.look(wanted.get(pool, {}), gate.core.workers, now):
                more = fields(worker=worker_id, tenant=owner.tenant_id if owner else "", pool=pool)
                _LOG.info("a worker is dedicated" if owner else "a worker goes back to everybody", extra=more)
                self.post(WorkerDedicated(worker_id, owner))

    def worker_changed(self, worker_id: WorkerId, record: WorkerRecord | None) -> None:
        """None: its record went."""
        line = self._workers.get(worker_id)
        if line is not None and (record is None or record.life != line.life):
            self._end_line(worker_id)
            self.post(WorkerLeft(worker_id))
        if record is not None and worker_id not in self._workers:
            longest = max(record.max_context_tokens, record.longest_context_tokens)
            can_merge = not record.merge_problem
            self.post(WorkerJoined(worker_id, record.address, record.device, longest, record.pool, can_merge))
            self._workers[worker_id] = WorkerLine(
                worker_id,
                record.address,
                life=record.life,
                hello=worker_pb2.ControlHello(epoch=self.epoch, scheduler_id=self._scheduler_id),
                transport=self._transport,
                post=self._post_of_worker,
                rng=self._rng,
                outranked=self._outranked,
                failed=self._fail,
            )

    def _post_of_worker(self, event: Event) -> None:
        """After a takeover workers may tell of work before a router tells of its tenant."""
        if isinstance(event, WorkerReported):
            for tenant_id in self.pools.core_of(event.worker_id).view.tenants_charged(event):
                self.learn_tenant(tenant_id)
        self.post(event)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _end_line(self, worker_id: WorkerId) -> None:
        task = asyncio.create_task(self._workers.pop(worker_id).close(), name=f"end control {worker_id}")
        self._ending[task] = None
        task.add_done_callback(self._line_ended)

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        del self._ending[task]

    # ---- the clock

    async def _keep_clock(self) -> None:
        while True:
            await asyncio.sleep(self._clock_pause_s)
            told = {worker_id: line.told for worker_id, line in self._workers.items()}
            self._metrics.record([gate.state() for gate in self.pools.gates.values()], told)
            self._metrics.record_pools(self._look())
            if self.pools.is_restoring:
                continue
            try:
                if not await self._clock.save(self._take_clock()):
                    self._outranked()
                    return
            except StoreUnavailable as e:
                _LOG.warning("the clock was not saved", extra=fields(error=str(e)))

    def _look(self) -> dict[str, Signals]:
        now, gates = self._loop.time(), self.pools.gates
        self._signals = {pool: self._signals.get(pool) or PoolSignals() for pool in gates}
        return {pool: self._signals[pool].look(gate.seen(now), now) for pool, gate in gates.items()}

    async def _save_last(self) -> None:
        """The planned end of a term: the next leader begins exactly where this one ended."""
        if self.pools.is_restoring:
            return
        try:
            async with asyncio.timeout(LAST_SAVE_TIMEOUT_S):
                await self._clock.save(self._take_clock())
        except (StoreUnavailable, TimeoutError) as e:
            _LOG.warning("the last clock was not saved", extra=fields(error=str(e)))

    def _take_clock(self) -> Legacy:
        with collector_paused():
            clocks = self.pools.clocks()
            settled = self.quotas.authority.settled()
        size = sum(clock.size for clock in clocks.values())
        self._clock_pause_s = max(MIN_CLOCK_PAUSE_S, size / CLOCK_ENTRIES_PER_S)
        return Legacy(clocks, settled)

    def _keeping_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    # ---- status

    def scheduler_status(self, address: str) -> admin_pb2.SchedulerStatus:
        now = self._loop.time()
        gates = self.pools.gates
        flows = [flow_status(view, pool) for pool, gate in gates.items() for view in gate.core.view.flow_views(now)]
        quotas = [quota_status(view) for view in self.quotas.authority.views(now)]
        states = {pool: gate.state() for pool, gate in gates.items()}
        told = {worker_id: line.told for worker_id, line in self._workers.items() if line.told is not None}
        return admin_pb2.SchedulerStatus(
            reachable=True,
            address=address,
            epoch=self.epoch,
            flows=flows,
            quotas=quotas,
            overload=overload_status(states[DEFAULT_POOL]),
            neighbours=[neighbour_status(noisy) for state in states.values() for noisy in state.noisy],
            pools=[pool_status(pool, gates[pool].core, state) for pool, state in states.items()],
            adapters=adapter_sums(each.adapters for each in told.values()),
            kv=kv_statuses((self._kv_blocks(worker), each.kv_block_bytes) for worker, each in told.items()),
            setbacks=sums(status_pb2.TenantSetbacks, (each.setbacks for each in told.values())),
        )

    def worker_statuses(self) -> list[admin_pb2.WorkerStatus]:
        found = []
        for pool, view in self.pools.workers:
            line = self._workers.get(view.worker_id)
            told = line.told if line is not None and line.told is not None else Told()
            found.append(worker_status(view, told, self._kv_blocks(view.worker_id), pool))
        return found

    def _kv_blocks(self, worker_id: WorkerId) -> Mapping[TenantId, int]:
        return self.pools.gate_of(worker_id).kv_blocks(worker_id)

    # ---- the inside

    def _set_timer(self) -> None:
        at = self.quotas.next_wakeup()
        if self._timer is not None:
            if self._timer_at == at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer, self._timer_at = self._loop.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer = None
        self.post(Tick())

    def _send(self, command: Command, began_ns: int) -> None:
        match command:
            case SendGrant():
                self._spans.granted(command, began_ns, self.pools.num_queued)
                self._send_to_router(command, grant_message(command, self.epoch))
            case SendRefusal():
                self._spans.ended(command.request, command.code, command.message)
                self._log_refusal(command)
                self._send_to_router(command, refusal_message(command))
            case SendLease() | SendLeaseRefusal():
                line = self._routers.get(command.router_id)
                if line is not None and line.session == command.session:
                    line.send(lease_message(command))
            case SendOverload():
                self._send_overload(command)
            case SendPrefetch():
                worker = self._workers.get(command.worker_id)
                if worker is not None:
                    worker.prefetch(command.adapter_uid, command.tenant_id)
            case SendDedicate():
                worker = self._workers.get(command.worker_id)
                if worker is not None:
                    worker.dedicate(command.owner)
            case Dropped():
                self._spans.ended(command.request, Code.CANCELLED, "withdrawn")

    def _log_refusal(self, refusal: SendRefusal) -> None:
        if _LOG.isEnabledFor(logging.DEBUG):
            request = refusal.request
            flow = {"tenant": request.flow.tenant_id, "qos_class": request.flow.qos_class}
            why = {"outcome": refusal.code.name, "error": refusal.message, "traceparent": request.traceparent}
            _LOG.debug("a request was refused", extra=fields(request=request.request_id, **flow, **why))

    def _send_overload(self, command: SendOverload) -> None:
        message = overload_message(command.view, command.pool)
        for line in list(self._routers.values()):
            if command.router_id in (None, line.router_id):
                line.send(message)

    def _send_to_router(self, command: SendGrant | SendRefusal, message: scheduler_pb2.ScheduleResponse) -> None:
        line = self._routers.get(command.request.router_id)
        if line is not None and line.session == command.session:
            line.send(message)
