"""The scheduler as one object: serves, stands for election, and leads a term whenever it is elected.

Owns the server, the election, the mirrors of workers and tenants (kept warm while standing by) and the present term.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store, StoreUnavailable
from manylora_shared.coordination.peers import PeerSecret, PeerTransport, guarded
from manylora_shared.coordination.policies import PolicyMirror, StoredPolicy
from manylora_shared.coordination.pool import kept_out
from manylora_shared.coordination.records import SchedulerMember, SchedulerRecord, WorkerRecord
from manylora_shared.coordination.session import Election, LeaseSession, Mirror, first_of
from manylora_shared.coordination.space import SpaceWatch
from manylora_shared.ids import TenantId, WorkerId
from manylora_shared.process.clock import SystemClock, WallClock
from manylora_shared.telemetry import Attribute, Metrics, Telemetry
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Server, Transport

from manylora_scheduler.config import SchedulerConfig
from manylora_scheduler.core.core import CoreLimits, Order
from manylora_scheduler.gates.queue_delay import OverloadTargets
from manylora_scheduler.serving.clock_codec import Legacy
from manylora_scheduler.serving.clock_keeper import ClockKeeper
from manylora_scheduler.serving.dedications import Dedications
from manylora_scheduler.serving.hot_adapters import HotAdapters
from manylora_scheduler.serving.rollouts import Rollouts
from manylora_scheduler.serving.servicer import SchedulerServicer
from manylora_scheduler.serving.term import Term

_LOG = logging.getLogger(__name__)
_STOP_GRACE_S = 1.0
_LOAD_RETRY_S = 0.1


class SchedulerApp:
    def __init__(
        self,
        config: SchedulerConfig,
        *,
        transport: Transport,
        store: Store,
        telemetry: Telemetry,
        rng: random.Random,
        peer_secret: PeerSecret,
        clock: WallClock | None = None,
        order: Order = "fair",
        overload: bool = True,
    ) -> None:
        """The given parts stay their giver's to close."""
        self.config = config
        self.scheduler_id = config.scheduler_id or f"scheduler-{rng.getrandbits(32):08x}"
        self._transport = transport
        self._store = store
        self._telemetry = telemetry
        self._rng = rng
        self._order = order
        self._overload = overload
        self._peer_secret = peer_secret
        self._clock = clock or SystemClock()
        self._space = SpaceWatch(store, telemetry, quota_bytes=config.etcd_quota_mb << 20)
        self._leaving = asyncio.Event()
        self._servicer = SchedulerServicer(telemetry, self._space, self._leaving.set)
        self._workers = Mirror(store, keys.WORKERS, parse=WorkerRecord.stored, on_change=self._worker_changed)
        self._tenants = PolicyMirror(store, self._tenant_changed)
        self._kept_out: Mapping[str, str] = {}
        self._dedications: Dedications | None = None  # while this scheduler leads
        self._server: Server | None = None
        self._election: Election | None = None
        self._membership = LeaseSession(store, ttl_s=config.lease_ttl_s)
        self._leading: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def instance_id(self) -> str:
        return self.scheduler_id

    @property
    def address(self) -> str:
        assert self._server is not None, "start comes first"
        return self.config.advertise or self._server.address

    @property
    def endpoints(self) -> Mapping[str, str]:
        return {}

    @property
    def term(self) -> Term | None:
        """None while this scheduler does not lead."""
        return self._servicer.term

    def debug_counters(self) -> dict[str, int]:
        """What is held now: all zero when nothing runs, but for the lines to living routers and workers."""
        term = self.term
        if term is None:
            return {"queued": 0, "granted": 0, "leases": 0, "routers": 0, "workers": 0}
        return {
            "queued": term.pools.num_queued,
            "granted": term.pools.num_granted,
            "leases": term.quotas.authority.num_leases,
            "routers": term.num_routers,
            "workers": term.num_workers,
        }

    async def start(self) -> None:
        """Returns when this scheduler serves, leading or not. Waits for the store as long as it takes."""
        self._workers.start()
        self._tenants.start()
        await self._workers.ready()
        await self._tenants.ready()
        self._server = await self._transport.serve(
            self.config.listen, [guarded(self._servicer.service(), self._peer_secret)]
        )
        self._servicer.address = self.address
        record = SchedulerRecord(scheduler_id=self.scheduler_id, address=self.address)
        self._election = Election(
            self._store, key=keys.SCHEDULER_LEADER, value=record.to_json(), ttl_s=self.config.lease_ttl_s
        )
        self._election.start()
        member = SchedulerMember(self.scheduler_id, self.address)
        self._membership.start()
        self._membership.set(member.key, member.to_json())
        self._leading = asyncio.create_task(self._lead(self._election), name="leadership")
        self._looking = asyncio.create_task(self._space.run(), name="etcd's space")
        self._server.set_serving(True)

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Leaves leadership to others at once, then ends everything. What workers run goes on."""
        if self._server is not None:
            self._server.set_serving(False)
        if self._looking is not None:
            self._looking.cancel()
        error = await self._end_leading()
        if self._election is not None:
            await self._election.resign()
            await self._membership.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        await self._workers.close()
        await self._tenants.close()
        if error is not None:
            raise error

    async def failed(self) -> None:
        """Returns when the leadership task or a mirror ends, which only a bug makes it do; raises what that raised."""
        assert self._leading is not None, "start comes first"
        assert self._looking is not None
        await first_of(
            asyncio.shield(self._leading), asyncio.shield(self._looking), self._workers.failed(), self._tenants.failed()
        )

    async def told_to_leave(self) -> None:
        await self._leaving.wait()

    async def _end_leading(self) -> BaseException | None:
        if self._leading is None:
            return None
        self._leading.cancel()
        await asyncio.wait([self._leading])
        return None if self._leading.cancelled() else self._leading.exception()

    async def _lead(self, election: Election) -> None:
        while True:
            self._telemetry.gauge(Metrics.LEADING, 0)
            epoch = await election.elected()
            clock = ClockKeeper(self._store, epoch)
            predecessor = await self._load(clock, election, epoch)
            term = Term(
                epoch=epoch,
                scheduler_id=self.scheduler_id,
                is_leading=election.leads,
                outranked=election.outranked,
                policies=self._tenants.values,
                limits=CoreLimits(
                    max_queued=self.config.max_queued,
                    max_queued_per_tenant=self.config.max_queued_per_tenant,
                    worker_wait_s=self.config.worker_wait_s,
                ),
                order=self._order,
                overload=self._overload,
                targets=OverloadTargets(
                    interactive_s=self.config.interactive_queue_ms / 1000,
                    standard_s=self.config.standard_queue_ms / 1000,
                ),
                clock=clock,
                predecessor=predecessor,
                transport=PeerTransport(self._transport, self._peer_secret),
                telemetry=self._telemetry,
                rng=self._rng,
            )
            rollouts = Rollouts(self._store, epoch, self._telemetry, self._clock)
            hot = HotAdapters(self._store, epoch)
            self._dedications = dedications = Dedications(self._store, self._tenants.values, term.dedicate)
            self._servicer.term, self._servicer.rollouts, self._servicer.hot = term, rollouts, hot
            self._telemetry.gauge(Metrics.LEADING, 1)
            try:
                self._tell_workers(term)
                await first_of(election.lost(epoch), term.failed(), rollouts.run(), hot.run(), dedications.run())
            finally:
                self._servicer.term = self._servicer.rollouts = self._servicer.hot = self._dedications = None
                await term.close()

    async def _load(self, clock: ClockKeeper, election: Election, epoch: int) -> Legacy | None:
        """What the predecessor left; waits for the store as long as this scheduler leads."""
        while election.leads(asyncio.get_running_loop().time()):
            try:
                return await clock.load()
            except StoreUnavailable as e:
                _LOG.warning("the last leader's clock is not there yet", extra=fields(epoch=epoch, error=str(e)))
                await asyncio.sleep(_LOAD_RETRY_S)
        return None

    def _worker_changed(self, name: str, record: WorkerRecord | None) -> None:
        workers = self._workers.values
        reasons = kept_out(workers)
        for worker_id, reason in reasons.items():
            if self._kept_out.get(worker_id) != reason:
                _LOG.error(
                    "a worker is kept out of the pool: %s",
                    reason,
                    extra=fields(worker=worker_id, pool=workers[worker_id].pool),
                )
        for worker_id in self._kept_out.keys() - reasons.keys() & workers.keys():
            _LOG.warning("a worker that was kept out joins the pool", extra=fields(worker=worker_id))
        self._kept_out = reasons
        self._tell_kept_out(workers)
        if self.term is not None:
            if record is None:
                self.term.worker_changed(WorkerId(name), None)
            self._tell_workers(self.term)

    def _tell_kept_out(self, workers: Mapping[str, WorkerRecord]) -> None:
        counts = Counter(workers[worker_id].pool for worker_id in self._kept_out)
        self._telemetry.clear(Metrics.KEPT_OUT_WORKERS)
        for pool in {worker.pool for worker in workers.values()}:
            self._telemetry.gauge(Metrics.KEPT_OUT_WORKERS, counts[pool], {Attribute.POOL: pool})

    def _tell_workers(self, term: Term) -> None:
        """One that goes or comes may change who is kept out."""
        for worker_id, record in self._workers.values.items():
            term.worker_changed(WorkerId(worker_id), None if worker_id in self._kept_out else record)

    def _tenant_changed(self, name: str, policy: StoredPolicy | None) -> None:
        if self.term is not None:
            self.term.policy_changed(TenantId(name))
        if self._dedications is not None:
            self._dedications.policy_changed(TenantId(name), policy)
