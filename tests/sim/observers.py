"""What the simulation hears of what goes on inside services: what routers meter, and which epochs workers let in.

Each stands at one method of one object and passes everything on; it keeps what it heard for the checks, and changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from manylora.v1 import worker_pb2
from manylora_router.links.scheduler_client import SchedulerClient
from manylora_scheduler.core.request import FlowKey
from manylora_shared.ids import TenantId
from manylora_shared.transport.base import ServerCall
from manylora_shared.wire import QOS_CLASSES
from manylora_worker.hosting.view import EngineView
from manylora_worker.kinds.api import EngineRequest
from manylora_worker.serving.control import ControlSession
from manylora_worker.serving.servicer import WorkerServicer


class Meter:
    """What all routers there ever were say that requests used."""

    def __init__(self) -> None:
        self.billed: dict[str, list[int]] = {}
        """By request id: the tokens of each settlement. One that used none has none."""
        self.flows: dict[FlowKey, int] = {}
        """In all."""
        self.last_at = float("-inf")

    def listen(self, client: SchedulerClient) -> None:
        settle = client.settle

        def settled(request_id: str, tokens: int) -> None:
            lease = client._leases.get(request_id)
            settle(request_id, tokens)
            if lease is None:
                return
            flow = FlowKey(TenantId(lease.request.tenant_id), QOS_CLASSES[lease.request.qos_class])
            self.last_at = asyncio.get_running_loop().time()
            self.flows[flow] = self.flows.get(flow, 0) + tokens
            if tokens:
                self.billed.setdefault(request_id, []).append(tokens)

        client.settle = settled


class Fence:
    """One incarnation of a worker: no control stream and no request of an epoch that is over may get in."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.num_refused = 0
        """Grants of an epoch that was over; what the worker said to them is its own matter until one begins."""
        self._epoch = 0
        self.begun: Counter[str] = Counter()
        """By request id: how often it was."""
        self._arrived: dict[str, int] = {}
        """By request id: the epoch of the grant that came last."""

    def listen(self, servicer: WorkerServicer, view: EngineView) -> None:
        begin: Callable[[int], ControlSession] = servicer._begin_session
        execute = servicer.execute

        def begun(epoch: int) -> ControlSession:
            session = begin(epoch)
            if epoch < self._epoch:
                self.faults.append(f"a control stream of epoch {epoch} was let in after {self._epoch}")
            self._epoch = max(self._epoch, epoch)
            return session

        def executed(message: worker_pb2.ExecuteRequest, call: ServerCall) -> AsyncIterator[worker_pb2.ExecuteResponse]:
            self._arrived[message.request_id] = message.epoch
            self.num_refused += message.epoch < self._epoch
            return execute(message, call)

        servicer._begin_session = begun
        servicer.execute = executed
        view.subscribe(self)

    # -- EngineListener

    def request_started(self, request: EngineRequest) -> None:
        self.begun[request.request_id] += 1
        epoch = self._arrived.pop(request.request_id)
        if epoch < self._epoch:
            self.faults.append(f"{request.request_id} of epoch {epoch} was begun in {self._epoch}")

    def request_ended(self, request_id: str) -> None:
        pass

    def engine_changed(self) -> None:
        pass
