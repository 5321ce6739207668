"""How long requests wait: the book of queued requests by flow, and what is measured in it. Pure; written by
OverloadGate.

Owns what is queued, what was granted since the last measurement, and which flows wait for a slot on a worker.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import chain, islice

from manylora_shared.ids import QosClass, RequestId, RouterId, WorkerId
from manylora_shared.tenancy.overload import WARNING_PART, Sample, place_of

from manylora_scheduler.core.reports import WorkerReport
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.gates.neighbours import FlowWait

MAX_LOOKED_AT = 512  # flows that a tick looks through; of more, all in turn
MAX_WAITS = 1_024  # flows that are compared for noisy neighbours; of more a sample
_MIN_TARGET_S = 1e-3
_COMPACT_SLACK = 64


@dataclass(frozen=True)
class OverloadTargets:
    # Of queueing time. A batch request's target is half of the time its caller gives it.
    interactive_s: float = 0.2
    standard_s: float = 2.0

    def of(self, qos_class: QosClass) -> float | None:
        match qos_class:
            case QosClass.INTERACTIVE:
                return self.interactive_s
            case QosClass.STANDARD:
                return self.standard_s
            case QosClass.BATCH:
                return None

    def of_request(self, request: QueuedRequest, now: float) -> float | None:
        """None: it may wait as long as it takes."""
        target_s = self.of(request.flow.qos_class)
        if target_s is None and request.deadline is not None:
            return max(_MIN_TARGET_S, (request.deadline - now) / 2)
        return target_s


_NEVER_SHED = -1.0  # below all places


@dataclass(slots=True)
class Waiting:
    router_id: RouterId
    since: float
    cost: float
    place: float
    target_s: float | None  # None: it may wait as long as it takes


@dataclass(slots=True)
class FlowDelays:
    queued: dict[RequestId, Waiting] = field(default_factory=dict)  # in the order in which they came
    # a heap of (negated place, request); entries of requests that left linger
    highest: list[tuple[float, RequestId]] = field(default_factory=list)
    count: float = 0.0  # with a target, granted since the last tick; `warned` and `late` as in Sample
    warned: float = 0.0
    late: float = 0.0

    def queue(self, request_id: RequestId, waiting: Waiting) -> None:
        self.queued[request_id] = waiting
        heapq.heappush(self.highest, (-waiting.place, request_id))
        if len(self.highest) > 2 * len(self.queued) + _COMPACT_SLACK:
            self.highest = [(-w.place, r) for r, w in self.queued.items()]
            heapq.heapify(self.highest)

    def from_place(self, limit: float, count: int) -> list[RequestId]:
        """Those with a place of `limit` or more, the greatest first. They leave the queue: they are not found again."""
        found: list[RequestId] = []
        while self.highest and -self.highest[0][0] >= limit and len(found) < count:
            place, request_id = heapq.heappop(self.highest)
            waiting = self.queued.get(request_id)
            if waiting is not None and waiting.place == -place:
                found.append(request_id)
        return found

    def add(self, wait_s: float, target_s: float, stands_for: float = 1.0, warning_part: float = WARNING_PART) -> None:
        self.count += stands_for
        self.warned += stands_for * (wait_s > warning_part * target_s)
        self.late += stands_for * (wait_s > target_s)


class QueueDelays:
    def __init__(self, targets: OverloadTargets) -> None:
        self._targets = targets
        self.flows: dict[FlowKey, FlowDelays] = {}  # with something queued, or granted since the last measurement
        self.num_queued = 0
        self._granted: dict[FlowKey, None] = {}
        self._round: list[FlowKey] = []  # still to be looked through, from the end
        # flows with sequences that wait for a slot on a worker, and since when
        self._ready: dict[WorkerId, dict[FlowKey, float]] = {}
        self._offset = 0  # where the next sample of `_ready` begins
        # the flow with most that is queued, as far as it was looked through
        self._longest: dict[QosClass, FlowKey] = {}

    # ---- who comes and goes

    def queue(self, request: QueuedRequest, cost: float, now: float) -> None:
        target_s = self._targets.of_request(request, now)
        place = _NEVER_SHED if request.is_resumed else place_of(request.request_id)
        waiting = Waiting(request.router_id, now, cost, place, target_s)
        self.flows.setdefault(request.flow, FlowDelays()).queue(request.request_id, waiting)
        self.num_queued += 1

    def leave(self, request: QueuedRequest) -> Waiting | None:
        """None: it is not here."""
        book = self.flows.get(request.flow)
        waiting = book.queued.get(request.request_id) if book is not None else None
        if book is None or waiting is None or waiting.router_id != request.router_id:
            return None
        del book.queued[request.request_id]
        self.num_queued -= 1
        return waiting

    def granted(self, flow: FlowKey, waiting: Waiting, now: float) -> None:
        if waiting.target_s is not None:
            self.flows[flow].add(now - waiting.since, waiting.target_s)
            self._granted[flow] = None

    def note_ready(self, worker_id: WorkerId, report: WorkerReport, now: float) -> None:
        if report.snapshot:
            self._ready.pop(worker_id, None)
        for flow, load in report.loads.items():
            if load.ready:
                self._ready.setdefault(worker_id, {}).setdefault(flow, now)
            elif worker_id in self._ready:
                self._ready[worker_id].pop(flow, None)

    def worker_gone(self, worker_id: WorkerId) -> None:
        self._ready.pop(worker_id, None)

    # ---- what is measured

    def next_flows(self) -> list[FlowKey]:
        """Those that this tick looks through. Flows that have nothing left are forgotten on the way."""
        if not self._round:
            self._round = list(self.flows)
        some = self._round[-MAX_LOOKED_AT:]
        del self._round[-MAX_LOOKED_AT:]
        found: list[FlowKey] = []
        for flow in some:
            book = self.flows.get(flow)
            if book is None:
                continue
            if book.queued:
                found.append(flow)
                longest = self.flows.get(self._longest.get(flow.qos_class, flow))
                if longest is None or len(book.queued) >= len(longest.queued):
                    self._longest[flow.qos_class] = flow
            elif not book.count:
                del self.flows[flow]
        return found

    def measure(self, looked_at: list[FlowKey], now: float) -> list[tuple[FlowKey, Sample]]:
        """Since the last tick, of those that were granted, and of the oldest of each flow that still waits."""
        stands_for = max(1.0, len(self.flows) / MAX_LOOKED_AT)
        for flow in looked_at:
            book = self.flows[flow]
            oldest = next(iter(book.queued.values()))
            if oldest.target_s is not None:
                book.add(now - oldest.since, oldest.target_s, stands_for)
        self._measure_ready(now)
        found: list[tuple[FlowKey, Sample]] = []
        for flow in {**dict.fromkeys(looked_at), **self._granted}:
            book = self.flows[flow]
            if not book.count:
                continue
            found.append((flow, Sample(book.count, book.warned, book.late)))
            book.count = book.warned = book.late = 0.0
            if not book.queued:
                del self.flows[flow]
        self._granted.clear()
        return found

    def _measure_ready(self, now: float) -> None:
        # A flow that takes turns on a worker waits for a few steps now and then, so nothing less than the target
        # counts.
        number = sum(map(len, self._ready.values()))
        stride = max(1, number // MAX_LOOKED_AT)
        waiting = chain.from_iterable(map(dict.items, self._ready.values()))
        for flow, since in islice(waiting, self._offset % stride, None, stride):
            target_s = self._targets.of(flow.qos_class)
            if target_s is not None:
                self.flows.setdefault(flow, FlowDelays()).add(now - since, target_s, stride, 1.0)
                self._granted[flow] = None
        self._offset += 1

    def longest_s(self, now: float) -> float:
        """Of those with a target, the oldest that `waits` sees."""
        return max((wait.oldest_s for wait in self.waits(now) if self._targets.of(wait.flow.qos_class)), default=0.0)

    def waits(self, now: float) -> list[FlowWait]:
        """Of each class the flow with most that is queued, and a sample of all."""
        stride = max(1, len(self.flows) // MAX_WAITS)
        found: list[FlowWait] = []
        stand_for = dict.fromkeys(islice(self.flows, 0, None, stride), stride)
        for flow, flows in {**stand_for, **dict.fromkeys(self._longest.values(), 1)}.items():
            book = self.flows.get(flow)
            if book is not None and book.queued:
                oldest_s = now - next(iter(book.queued.values())).since
                found.append(FlowWait(flow, len(book.queued), oldest_s, flows))
        return found
