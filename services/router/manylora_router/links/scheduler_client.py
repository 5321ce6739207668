"""The router's line to the scheduler: one Schedule stream to the leader, kept alive for the router's whole life. Owns
the waiting requests, the grants, the quota leases, and the messages not yet sent, in the order of the calls.
"""

# enqueue --> waiting --Grant--> granted --close_grant--> gone
#                |--Refusal / withdraw--> gone
#
# A lost stream changes nothing: the next one tells of leases, unsent ends, and all that still wait.

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from manylora.v1 import common_pb2, scheduler_pb2
from manylora_shared.errors import Code, Overloaded, QuotaExhausted, RpcError
from manylora_shared.ids import DEFAULT_POOL
from manylora_shared.telemetry.logs import fields
from manylora_shared.tenancy.overload import OverloadView
from manylora_shared.tenancy.quota import QuotaLevel
from manylora_shared.transport.base import Channel, Stream, Transport, methods_of

from manylora_router.links.wire import (
    Grant,
    grant_of,
    held_lease,
    lease_refusal_of,
    levels_of,
    overload_view,
    refusal_of,
    wanted,
)

_LOG = logging.getLogger(__name__)
_METHODS = methods_of(scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"])
SCHEDULE = _METHODS["Schedule"]
GET_STATUS = _METHODS["GetSchedulerStatus"]

MAX_WAITING = 20_000
_MAX_UNSENT_ENDS = 20_000  # for a scheduler that is away
_HELLO_TIMEOUT_S = 3.0
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_ENDS_S = 0.005  # ends are gathered for so long, unless something else is sent: room is free by the worker's word
_REFUSED_S = 0.1  # refusals are gathered for so long
_MAX_MESSAGES = 256  # sent at once
_QUIET = OverloadView()
_OF_A_STREAM = ("lease_wanted", "refused", "trial_counts")  # not sent again on another


@dataclass(eq=False)
class _Waiting:
    request: scheduler_pb2.Enqueue
    deadline: float | None
    grant: asyncio.Future[Grant]


@dataclass(eq=False)
class Lease:
    """One task at a time waits for `changed`."""

    request: scheduler_pb2.Enqueue
    tokens: int | None = None  # prompt and output; None: not bounded
    levels: tuple[QuotaLevel, ...] = ()  # of the quotas behind it, when it was first given
    is_known: bool = False  # by the scheduler's word or grant
    is_wanted: bool = False
    refusal: QuotaExhausted | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class SchedulerCounters:
    connects: int = 0
    grants: int = 0
    grants_closed: int = 0
    settled_tokens: int = 0
    refused: int = 0  # by the overload view
    stray_grants: int = 0  # nobody waited for them


@dataclass(eq=False)
class _Line:
    address: str
    stream: Stream
    epoch: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class SchedulerClient:
    """`run` is one task's; the rest is for tasks of the same event loop."""

    def __init__(
        self, *, router_id: str, transport: Transport, leader_address: Callable[[], str | None], rng: random.Random
    ) -> None:
        """`leader_address` gives None where there is no leader; `leader_changed` is called when its answer changes."""
        self.counters = SchedulerCounters()
        self._router_id = router_id
        self._transport = transport
        self._leader_address = leader_address
        self._rng = rng
        self._waiting: dict[str, _Waiting] = {}
        self._granted: dict[str, str] = {}
        self._leases: dict[str, Lease] = {}
        self._settling: dict[str, Lease] = {}
        self._outbox: deque[scheduler_pb2.ScheduleRequest | _Waiting] = deque()
        self._overload: dict[str, OverloadView] = {}  # by pool; without a stream nothing is given up
        # since the scheduler was last told, by pool
        self._refused: dict[str, dict[tuple[str, common_pb2.QosClass], int]] = {}
        self._line: _Line | None = None
        self._leader_moved = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_unsent(self) -> int:
        return len(self._outbox)

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    async def grant(self, request: scheduler_pb2.Enqueue, deadline: float | None) -> Grant:
        """Queues a request and waits for its grant; whoever gets it must `close_grant` it. Withdraws when cancelled.

        Args:
            request: timeout_s is filled in from `deadline`.

        Raises:
            QuotaExceeded: the tenant's quotas do not admit it.
            Overloaded: too many requests wait, or the cluster gives requests like this one up.
            RpcError: the scheduler refused it otherwise.
        """
        request_id = request.request_id
        assert request_id not in self._waiting
        assert request_id not in self._granted
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests wait at this router already", retry_after_s=1.0)
        waiting = _Waiting(request, deadline, asyncio.get_running_loop().create_future())
        self._waiting[request_id] = waiting
        self._leases.setdefault(request_id, Lease(request))
        if self._line is not None:
            self._outbox.append(waiting)
            self._line.wake.set()
        try:
            return await waiting.grant
        except asyncio.CancelledError:
            if self._waiting.pop(request_id, None) is not None:
                withdraw = scheduler_pb2.Withdraw(request_id=request_id)
                self._send_end(scheduler_pb2.ScheduleRequest(withdraw=withdraw), urgent=True)
            elif request_id in self._granted:
                # The grant came in the same turn of the event loop as the cancellation.
                self.close_grant(request_id, reached_worker=False)
            elif not waiting.grant.cancelled():
                waiting.grant.exception()  # a refusal did: it is nobody's any more
            raise

    def close_grant(self, request_id: str, *, reached_worker: bool, is_unavailable: bool = False) -> None:
        """Once for each grant. `is_unavailable`: the worker was tried in vain."""
        worker_id = self._granted.pop(request_id)
        self.counters.grants_closed += 1
        self._close(request_id, worker_id, reached_worker=reached_worker, is_unavailable=is_unavailable)

    def lease(self, request_id: str) -> Lease:
        """Of a request that was granted and is not settled."""
        return self._leases[request_id]

    def want_more(self, request_id: str) -> None:
        """`changed` is set when the answer comes."""
        lease = self._leases[request_id]
        if not lease.is_wanted:
            lease.is_wanted, lease.refusal = True, None
            lease.changed.clear()
            if self._line is not None:
                self._outbox.append(wanted(request_id))
                self._line.wake.set()

    def settle(self, request_id: str, tokens: int) -> None:
        """Once, at the request's end. One that was never queued, or was refused before it began, has no lease."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._settling[request_id] = lease
            self.counters.settled_tokens += tokens
            settled = scheduler_pb2.Settled(request_id=request_id, tokens=tokens)
            self._send_end(scheduler_pb2.ScheduleRequest(settled=settled), urgent=False)

    def overload(self, pool: str) -> OverloadView:
        return self._overload.get(pool, _QUIET)

    def note_refused(self, tenant_id: str, qos_class: common_pb2.QosClass, pool: str) -> None:
        self.counters.refused += 1
        if self._line is None:
            return  # what was refused before a stream broke says nothing to the leader that comes
        if not self._refused:
            asyncio.get_running_loop().call_later(_REFUSED_S, self._tell_refused)
        counts = self._refused.setdefault(pool, {})
        counts[tenant_id, qos_class] = counts.get((tenant_id, qos_class), 0) + 1

    def _tell_refused(self) -> None:
        refused, self._refused = self._refused, {}
        if self._line is not None:
            for pool, counts in refused.items():
                flows = [
                    scheduler_pb2.FlowRefusals(tenant_id=tenant_id, qos_class=qos_class, requests=requests)
                    for (tenant_id, qos_class), requests in counts.items()
                ]
                told = scheduler_pb2.Refused(flows=flows, pool=pool)
                self._outbox.append(scheduler_pb2.ScheduleRequest(refused=told))
            self._line.wake.set()

    def tell_trial(self, counts: scheduler_pb2.TrialCounts) -> None:
        """Only while it is connected; what a stream loses is not told again."""
        if self._line is not None:
            self._outbox.append(scheduler_pb2.ScheduleRequest(trial_counts=counts))
            self._line.wake.set()

    def leader_changed(self) -> None:
        self._leader_moved.set()

    async def run(self) -> None:
        """Ends by cancellation."""
        backoff_s, tried = _MIN_BACKOFF_S, ""
        while True:
            self._leader_moved.clear()
            address = self._leader_address()
            if address is None:
                await self._leader_moved.wait()
                continue
            if address != tried:
                # What was tried in vain before says nothing of the new leader, which may need a moment to begin.
                backoff_s, tried = _MIN_BACKOFF_S, address
            try:
                await self._serve_line(address)
            except RpcError as e:
                _LOG.warning("scheduler stream ended", extra=fields(address=address, error=str(e)))
            finally:
                greeted = self.is_connected
                self._line = None
                self._overload.clear()
            backoff_s = _MIN_BACKOFF_S if greeted else min(2 * backoff_s, _MAX_BACKOFF_S)
            try:
                async with asyncio.timeout(backoff_s * (0.5 + self._rng.random())):
                    await self._leader_moved.wait()
            except TimeoutError:
                continue

    async def _serve_line(self, address: str) -> None:
        """One connection. Raises RpcError."""
        channel: Channel = self._transport.connect(address)
        stream: Stream | None = None
        try:
            stream = channel.stream(SCHEDULE)
            line = _Line(address, stream)
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = scheduler_pb2.RouterHello(router_id=self._router_id, leases=self._held_leases())
                await stream.write(scheduler_pb2.ScheduleRequest(hello=hello))
                first = await stream.read()
            if first is None or first.WhichOneof("event") != "hello":
                raise RpcError(Code.INTERNAL, "the scheduler's first message is no hello")
            line.epoch = first.hello.epoch
            ends = [
                m for m in self._outbox if not isinstance(m, _Waiting) and m.WhichOneof("event") not in _OF_A_STREAM
            ]
            asked = [wanted(request_id) for request_id, lease in self._leases.items() if lease.is_wanted]
            self._outbox = deque([*ends, *self._waiting.values(), *asked])
            self._line = line
            self.counters.connects += 1
            _LOG.info("connected to the scheduler", extra=fields(address=address, epoch=line.epoch))
            await self._exchange(line)
        except TimeoutError:
            raise RpcError(Code.UNAVAILABLE, "the scheduler did not greet in time") from None
        finally:
            if stream is not None:
                stream.cancel()
            await channel.close()

    async def _exchange(self, line: _Line) -> None:
        tasks = [
            asyncio.create_task(self._write_all(line), name="scheduler-writer"),
            asyncio.create_task(self._read_all(line), name="scheduler-reader"),
            asyncio.create_task(self._watch_leader(line), name="scheduler-leader"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        errors = [task.exception() for task in tasks if not task.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    async def _watch_leader(self, line: _Line) -> None:
        # Ends when the store names another leader. That it names none says only that a lease ran out.
        while True:
            if self._leader_address() not in (None, line.address):
                return
            self._leader_moved.clear()
            await self._leader_moved.wait()

    async def _write_all(self, line: _Line) -> None:
        while True:
            while self._outbox:
                items = [self._outbox.popleft() for _ in range(min(len(self._outbox), _MAX_MESSAGES))]
                messages = [message for item in items if (message := self._message(item)) is not None]
                if not messages:
                    continue
                try:
                    await line.stream.write(
                        messages[0] if len(messages) == 1 else scheduler_pb2.ScheduleRequest(more=messages)
                    )
                except BaseException:
                    # What still waits is sent anew on the next stream.
                    self._outbox.extendleft(item for item in reversed(items) if not isinstance(item, _Waiting))
                    raise
                for message in messages:
                    self._settling.pop(message.settled.request_id, None)
            line.wake.clear()
            await line.wake.wait()

    def _message(self, item: scheduler_pb2.ScheduleRequest | _Waiting) -> scheduler_pb2.ScheduleRequest | None:
        """None: it was withdrawn before it left."""
        if not isinstance(item, _Waiting):
            return item
        if self._waiting.get(item.request.request_id) is not item:
            return None
        if item.deadline is not None:
            item.request.timeout_s = max(0.0, item.deadline - asyncio.get_running_loop().time())
        return scheduler_pb2.ScheduleRequest(enqueue=item.request)

    async def _read_all(self, line: _Line) -> None:
        while (received := await line.stream.read()) is not None:
            for message in received.more or (received,):
                self._take(message)

    def _take(self, message: scheduler_pb2.ScheduleResponse) -> None:
        match message.WhichOneof("event"):
            case "grant":
                self._on_grant(message.grant)
            case "refusal":
                self._on_refusal(message.refusal)
            case "lease":
                self._on_lease(message.lease)
            case "lease_refused":
                self._on_lease_refused(message.lease_refused)
            case "overload":
                self._overload[message.overload.pool or DEFAULT_POOL] = overload_view(message.overload)
            case other:
                raise RpcError(Code.INTERNAL, f"unexpected message from the scheduler: {other}")

    def _on_grant(self, grant: scheduler_pb2.Grant) -> None:
        waiting = self._waiting.pop(grant.request_id, None)
        if waiting is None or waiting.grant.done():
            # Withdrawn meanwhile, or granted by two leaders. The grant in use is never closed by its double.
            if self._granted.get(grant.request_id) != grant.worker_id:
                self.counters.stray_grants += 1
                self._close(grant.request_id, grant.worker_id, reached_worker=False)
            return
        self.counters.grants += 1
        self._granted[grant.request_id] = grant.worker_id
        self._leases[grant.request_id].is_known = True
        waiting.grant.set_result(grant_of(grant))

    def _on_refusal(self, refusal: scheduler_pb2.Refusal) -> None:
        waiting = self._waiting.pop(refusal.request_id, None)
        if waiting is None or waiting.grant.done():
            return
        if not waiting.request.resumed:
            self._leases.pop(refusal.request_id, None)
        waiting.grant.set_exception(refusal_of(refusal))

    def _on_lease(self, message: scheduler_pb2.Lease) -> None:
        lease = self._leases.get(message.request_id)
        if lease is not None:
            lease.tokens = message.tokens if message.HasField("tokens") else None
            lease.is_known, lease.is_wanted = True, False
            lease.levels = levels_of(message) or lease.levels
            lease.changed.set()

    def _on_lease_refused(self, message: scheduler_pb2.LeaseRefused) -> None:
        lease = self._leases.get(message.request_id)
        if lease is not None:
            lease.refusal = lease_refusal_of(message)
            lease.is_wanted = False
            lease.changed.set()

    def _held_leases(self) -> list[scheduler_pb2.HeldLease]:
        # also those whose settlement has not left yet: the scheduler is told of both, in this order
        return [
            held_lease(lease.request, lease.tokens)
            for lease in [*self._leases.values(), *self._settling.values()]
            if lease.is_known
        ]

    def _close(self, request_id: str, worker_id: str, *, reached_worker: bool, is_unavailable: bool = False) -> None:
        closed = scheduler_pb2.GrantClosed(
            request_id=request_id,
            worker_id=worker_id,
            reached_worker=reached_worker,
            worker_unavailable=is_unavailable,
        )
        self._send_end(scheduler_pb2.ScheduleRequest(grant_closed=closed), urgent=not reached_worker)

    def _send_end(self, message: scheduler_pb2.ScheduleRequest, *, urgent: bool) -> None:
        if self._line is not None:
            if urgent:
                self._line.wake.set()
            elif not self._outbox:
                asyncio.get_running_loop().call_later(_ENDS_S, self._line.wake.set)
            self._outbox.append(message)
        else:
            if len(self._outbox) >= _MAX_UNSENT_ENDS:
                dropped = self._outbox.popleft()
                if not isinstance(dropped, _Waiting):
                    self._settling.pop(dropped.settled.request_id, None)
            self._outbox.append(message)
