"""What others may ask of the core. Pure; owns and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.seam import TAG_SCALE
from manylora_shared.ids import RequestId, TenantId

from manylora_scheduler.core.events import WorkerReported
from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.flows import Flows
from manylora_scheduler.core.request import QUEUED, FlowKey, QueuedRequest, Ticket
from manylora_scheduler.core.tickets import Tickets


@dataclass(frozen=True, slots=True)
class FlowView:
    flow: FlowKey
    queued: int
    running: int
    oldest_wait_s: float
    served_cost: int
    weight: int
    debt_cost: int


class CoreView:
    def __init__(self, queue: FairQueue[FlowKey, Ticket], fleet: Fleet, tickets: Tickets, flows: Flows) -> None:
        self._queue = queue
        self._fleet = fleet
        self._tickets = tickets
        self._flows = flows

    # ---- for overload control

    @property
    def is_serving(self) -> bool:
        # Requests are granted as room appears.
        return self._fleet.any_serving and not self._queue.is_restoring

    @property
    def free_part(self) -> float:
        """The free part of the sequence slots of all workers that take requests: O(workers)."""
        serving = [worker for worker in self._fleet.workers if worker.serving]
        slots = sum(worker.sequence_slots for worker in serving)
        return sum(worker.free_sequences for worker in serving) / slots if slots else 0.0

    @property
    def kv_part(self) -> float:
        """The used part of the KV blocks of all workers that take requests: O(workers)."""
        serving = [worker for worker in self._fleet.workers if worker.serving]
        blocks = sum(worker.kv_blocks_total for worker in serving)
        return 1.0 - sum(worker.free_blocks for worker in serving) / blocks if blocks else 0.0

    @property
    def num_serving(self) -> int:
        # Those that are dedicated, too.
        return sum(worker.serving or worker.serves_owner for worker in self._fleet.workers)

    @property
    def num_dedicated(self) -> int:
        return sum(worker.owner is not None and worker.connected for worker in self._fleet.workers)

    def is_queued(self, request_id: RequestId) -> bool:
        ticket = self._tickets.wanted.get(request_id)
        return ticket is not None and ticket.phase is QUEUED

    def is_known(self, request_id: RequestId) -> bool:
        """Whether an attempt is queued, has a live grant, or came back unused lately."""
        return request_id in self._tickets.wanted or self._tickets.has_place(request_id)

    def expected_cost(self, request: QueuedRequest) -> int:
        return self._flows.known[request.flow].expected_cost(request)

    def weight_of(self, flow: FlowKey) -> int:
        return self._flows.weight(flow)

    def served_cost(self, flow: FlowKey) -> int:
        return self._flows.served_cost(flow)

    # ---- for who applies events

    def tenants_charged(self, event: WorkerReported) -> list[TenantId]:
        """The tenants that a report may charge for work, whose policies are to be known before it is applied."""
        flows = event.report.flows
        if not event.report.snapshot:
            return [flow.tenant_id for flow in flows]
        counted = self._queue.counted_by(event.worker_id)
        return [
            flow.tenant_id
            for flow, (prompt_tokens, output_tokens) in flows.items()
            if counted.get(flow, 0) != PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
        ]

    # ---- for a status

    def flow_views(self, now: float) -> list[FlowView]:
        queue, oldest = self._queue, self._tickets.oldest_by_flow()
        return [
            FlowView(
                flow=flow,
                queued=queue.queued_in(flow),
                running=queue.running_in(flow),
                oldest_wait_s=now - oldest.get(flow, now),
                served_cost=self._flows.served_cost(flow),
                weight=queue.weight_of(flow),
                debt_cost=max(0, queue.tag_of(flow) - queue.virtual_time) * queue.weight_of(flow) // TAG_SCALE,
            )
            for flow in queue.flows()
        ]
