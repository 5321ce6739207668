"""How one leader's clock becomes the next one's. Pure; written by the core alone.

Owns what the predecessor had reserved for requests that may still run, and when dispatch begins after a takeover:
once all workers have reported, at the latest after `MAX_WAIT_S`.
"""

from __future__ import annotations

from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.queue_succession import Snapshot, restore, resume, take_snapshot
from manylora_shared.ids import RequestId, WorkerId

from manylora_scheduler.core.flows import Flows
from manylora_scheduler.core.request import FlowKey, Ticket

MIN_WAIT_S = 0.25
MAX_WAIT_S = 1.0

ClockSnapshot = Snapshot[FlowKey, RequestId]


class Succession:
    def __init__(self, queue: FairQueue[FlowKey, Ticket | RequestId], predecessor: ClockSnapshot | None) -> None:
        self._queue = queue
        self._follows = predecessor is not None
        self._inherited: dict[RequestId, tuple[FlowKey, int]] = {}
        self._adopted: dict[RequestId, WorkerId] = {}  # the predecessor's that still run, and where
        self._began_at: float | None = None
        if predecessor is not None:
            self._inherited = {request_id: (flow, left) for request_id, flow, left in predecessor.reserved}
            restore(self._queue, predecessor)

    def begin(self, now: float) -> tuple[float, ...]:
        """The moments at which dispatch may begin, at the core's first event."""
        if self._began_at is not None:
            return ()
        self._began_at = now
        return now + MIN_WAIT_S, now + MAX_WAIT_S

    def try_resume(self, now: float, *, all_reported: bool) -> bool:
        """Returns whether dispatch still waits."""
        assert self._began_at is not None, "begin comes first"
        if now >= self._began_at + (MIN_WAIT_S if all_reported else MAX_WAIT_S):
            resume(self._queue)
            self._inherited.clear()
        return self._queue.is_restoring

    def adopt(self, request_id: RequestId, worker_id: WorkerId, flows: Flows) -> None:
        # A worker runs a request that this leader did not grant.
        found = self._inherited.pop(request_id, None)
        if found is not None:
            flow, left = found
            self._queue.adopt(request_id, flow, share=flows.share(flow), reserve=left)
            self._adopted[request_id] = worker_id

    def end(self, request_id: RequestId, worker_id: WorkerId) -> None:
        # One that was not adopted is ignored.
        if self._adopted.get(request_id) == worker_id:
            del self._adopted[request_id]
            self._queue.settle(request_id)

    def first_report(self, worker_id: str, totals: dict[FlowKey, int]) -> bool:
        """Whether a first report's counters are charged: not for what was done before this cluster had a clock."""
        if self._follows or self._queue.knows_source(worker_id):
            return True
        self._queue.begin_counting(worker_id, totals)
        return False

    def snapshot(self) -> ClockSnapshot:
        """Not to be taken while dispatch waits."""
        assert not self._queue.is_restoring, "what was inherited is not all here yet"
        taken = take_snapshot(self._queue)
        reserved = [
            (item.request.request_id if isinstance(item, Ticket) else item, flow, left)
            for item, flow, left in taken.reserved
        ]
        return Snapshot(taken.clock, taken.flows, tuple(reserved), taken.counted)

    @property
    def adopted(self) -> set[tuple[RequestId, WorkerId]]:
        return set(self._adopted.items())
