"""SchedulerService. Moves messages between the routers' streams and the present term; decides nothing.

Without a term every call ends with UNAVAILABLE, and the router asks the coordination store who leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from manylora.v1 import scheduler_pb2
from manylora_shared.coordination.space import SpaceWatch
from manylora_shared.errors import Code, InvalidRequest, ManyloraError, ServiceUnavailable
from manylora_shared.ids import RequestId, RouterId, WorkerId
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.base import ServerCall, Service

from manylora_scheduler.core.events import Enqueued, GrantClosed, LeaseWanted, Settled, Withdrawn
from manylora_scheduler.gates.dedication_plan import advice
from manylora_scheduler.serving.hot_adapters import HotAdapters
from manylora_scheduler.serving.rollouts import Rollouts
from manylora_scheduler.serving.router_line import RouterLine
from manylora_scheduler.serving.term import Term
from manylora_scheduler.serving.wire import MAX_ID_LENGTH, advice_message, held_lease, queued_request, refused_flows

_DESCRIPTOR = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]


class SchedulerServicer:
    """The app sets `term`, `rollouts` and `hot`, and takes them away."""

    def __init__(self, telemetry: Telemetry, space: SpaceWatch, leave: Callable[[], None]) -> None:
        self.term: Term | None = None
        self.rollouts: Rollouts | None = None  # the term's, as the next
        self.hot: HotAdapters | None = None
        self.address = ""
        self._telemetry = telemetry
        self._space = space
        self._leave = leave

    def service(self) -> Service:
        handlers: dict[str, Callable[..., Any]] = {
            "Schedule": self.schedule,
            "GetSchedulerStatus": self.get_scheduler_status,
            "Resign": self.resign,
        }
        return Service(_DESCRIPTOR, handlers)

    async def resign(self, request: scheduler_pb2.ResignRequest, call: ServerCall) -> scheduler_pb2.ResignResponse:
        self._leave()
        return scheduler_pb2.ResignResponse()

    async def get_scheduler_status(
        self, request: scheduler_pb2.GetSchedulerStatusRequest, call: ServerCall
    ) -> scheduler_pb2.GetSchedulerStatusResponse:
        term = self._leading_term()
        status = term.scheduler_status(self.address)
        if (space := self._space.last) is not None:
            status.etcd.used_bytes, status.etcd.quota_bytes = space.used_bytes, space.quota_bytes
            status.etcd.full = space.is_full
        if self.hot is not None:
            uses = self.hot.shares.shares(asyncio.get_running_loop().time())
            workers_of = {pool: gate.core.workers for pool, gate in term.pools.gates.items()}
            status.merge_advice.extend(map(advice_message, advice(uses, workers_of)))
        return scheduler_pb2.GetSchedulerStatusResponse(scheduler=status, workers=term.worker_statuses())

    async def schedule(
        self, requests: AsyncIterator[scheduler_pb2.ScheduleRequest], call: ServerCall
    ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
        term = self._leading_term()
        first = await anext(aiter(requests), None)
        if first is None:
            return
        router_id = first.hello.router_id
        if not first.HasField("hello") or not 1 <= len(router_id) <= MAX_ID_LENGTH:
            raise InvalidRequest.of("hello", f"must come first, with a router_id of 1 to {MAX_ID_LENGTH} characters")
        leases = tuple(held_lease(lease) for lease in first.hello.leases)
        if not term.is_leading:
            raise _not_leading()
        line = term.connect_router(RouterId(router_id), leases)
        reader = asyncio.create_task(self._read_all(term, line, requests), name=f"router {router_id}")
        try:
            yield scheduler_pb2.ScheduleResponse(hello=scheduler_pb2.SchedulerHello(epoch=term.epoch))
            while (message := await line.next()) is not None:
                yield message
        finally:
            term.disconnect_router(line)
            reader.cancel()
            await asyncio.wait([reader])
            if not reader.cancelled():
                reader.result()

    async def _read_all(
        self, term: Term, line: RouterLine, requests: AsyncIterator[scheduler_pb2.ScheduleRequest]
    ) -> None:
        try:
            async for received in requests:
                for message in received.more or (received,):
                    self._take(term, line, message)
            line.close()
        except ManyloraError as e:
            line.close(e)
        except Exception:
            line.close(ServiceUnavailable("the stream failed"))
            raise

    def _take(self, term: Term, line: RouterLine, message: scheduler_pb2.ScheduleRequest) -> None:
        match message.WhichOneof("event"):
            case "enqueue":
                self._enqueue(term, line, message.enqueue)
            case "withdraw":
                term.post(Withdrawn(line.session, RequestId(message.withdraw.request_id)))
            case "grant_closed":
                closed = message.grant_closed
                term.post(
                    GrantClosed(
                        session=line.session,
                        router_id=line.router_id,
                        request_id=RequestId(closed.request_id),
                        worker_id=WorkerId(closed.worker_id),
                        reached_worker=closed.reached_worker,
                        is_unavailable=closed.worker_unavailable,
                    )
                )
            case "lease_wanted":
                request_id = RequestId(message.lease_wanted.request_id)
                term.post(LeaseWanted(line.session, line.router_id, request_id))
            case "settled":
                settled = message.settled
                term.post(Settled(line.router_id, RequestId(settled.request_id), settled.tokens))
            case "refused":
                refused = refused_flows(message.refused)
                for flow, _ in refused.flows:
                    term.learn_tenant(flow.tenant_id)
                term.post(refused)
            case "trial_counts":
                if self.rollouts is not None and self.term is term:
                    self.rollouts.take(message.trial_counts, asyncio.get_running_loop().time())
            case other:
                raise InvalidRequest.of("event", f"{other or 'nothing'} is not expected here")

    def _enqueue(self, term: Term, line: RouterLine, message: scheduler_pb2.Enqueue) -> None:
        now = asyncio.get_running_loop().time()
        try:
            request = queued_request(message, line.router_id, now=now, enqueued_ns=self._telemetry.now_ns())
        except InvalidRequest as e:
            refusal = scheduler_pb2.Refusal(
                request_id=message.request_id, code=int(Code.INVALID_ARGUMENT), message=e.message
            )
            line.send(scheduler_pb2.ScheduleResponse(refusal=refusal))
            return
        term.learn_tenant(request.flow.tenant_id)
        if self.hot is not None and self.term is term:
            self.hot.shares.asked(request.pool, request.flow.tenant_id, request.adapter_uid, now)
            if request.adapter_uid is not None:
                self.hot.used(request.flow.tenant_id, request.adapter_uid, now)
        term.post(Enqueued(line.session, request))

    def _leading_term(self) -> Term:
        if self.term is None or not self.term.is_leading:
            raise _not_leading()
        return self.term


def _not_leading() -> ServiceUnavailable:
    return ServiceUnavailable("this scheduler is not the leader", retry_after_s=1.0)
