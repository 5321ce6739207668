"""Workers under a traffic, step by step in virtual time: what their callers would see."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manylora.capacity.planning.curve import Curve
from manylora.capacity.planning.traffic import Request, Traffic
from manylora.capacity.planning.worker import Running, Worker, WorkerSettings

_ABOVE_MEAN = 1.5  # a holder of an adapter may run so much of the mean
_BEYOND_SLOTS = 64  # of a worker, for flows that are behind
_LATE = 0.06  # of the requests
Flow = tuple[str, str]  # tenant and class


@dataclass(frozen=True)
class Answer:
    at_s: float
    tenant: str
    qos_class: str
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Outcome:
    answers: Sequence[Answer]
    seconds: float  # from the first request to the last token
    output_tokens: int
    busy_share: float
    mean_rows: float
    mean_step_ms: float
    peak_kv_tokens: int  # of one worker
    loads: int
    file_loads: int
    evictions: int

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def percentile(self, name: str, part: float, tenant: str | None = None, after_s: float = 0.0) -> float:
        """Of `ttft_ms` or `tpot_ms`."""
        found = [
            getattr(answer, name)
            for answer in self.answers
            if answer.at_s >= after_s and (tenant is None or answer.tenant == tenant)
        ]
        return quantile(found, part)


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def play(curve: Curve, settings: WorkerSettings, count: int, traffic: Traffic) -> Outcome:
    """`count` workers, until the last request has ended."""
    outcome = play_unless_late(curve, settings, count, traffic, math.inf)
    assert outcome is not None
    return outcome


def play_unless_late(
    curve: Curve, settings: WorkerSettings, count: int, traffic: Traffic, longest_s: float
) -> Outcome | None:
    """None: more of the requests than a 95th percentile leaves out are queued for longer."""
    return _Play(curve, settings, count, traffic, longest_s).run()


class _Play:
    """Scheduler and workers. A request waits until a worker has a slot that no other request is meant for, unless its
    flow has less than an even share of the slots; the flow with the least goes first, and each in order of coming.
    """

    def __init__(self, curve: Curve, settings: WorkerSettings, count: int, traffic: Traffic, longest_s: float) -> None:
        self._longest_s, self._late_left = longest_s, _LATE * len(traffic.requests)
        self._curve, self._traffic, self._slots = curve, traffic, settings.slots
        self._holders: dict[str, dict[int, None]] = defaultdict(dict)
        self._workers = [Worker(curve, settings, self._teller(index)) for index in range(count)]
        _warm(self._workers, curve, traffic)
        self._queued: dict[Flow, deque[Request]] = {}
        self._open: Counter[Flow] = Counter()
        self._order = itertools.count()
        self._steps: list[tuple[float, int, int, bool]] = []  # when, order, worker, whether a step ends
        self._is_stepping = [False] * count
        self._ended: list[Running] = []

    def run(self) -> Outcome | None:
        requests = iter(self._traffic.requests)
        coming = next(requests, None)
        while coming is not None or self._steps:
            if coming is not None and (not self._steps or coming.at_s <= self._steps[0][0]):
                self._queued.setdefault((coming.tenant, coming.qos_class), deque()).append(coming)
                self._grant(coming.at_s)
                coming = next(requests, None)
                continue
            now, _, index, is_end = heapq.heappop(self._steps)
            began = self._workers[index].step_s
            if is_end:
                ended = self._workers[index].end(now)
                self._ended += ended
                for running in ended:
                    self._open[running.request.tenant, running.request.qos_class] -= 1
                if ended and self._queued:
                    self._grant(now, besides=index)
                    if self._late_left < 0:
                        return None
            elif self._is_stepping[index]:
                continue
            self._begin(index, now, began if is_end and self._curve.is_ahead else now)
        return _outcome(self._curve, self._workers, self._ended)

    def _teller(self, index: int) -> Callable[[str, bool], None]:
        def told(adapter: str, is_there: bool) -> None:
            if is_there:
                self._holders[adapter][index] = None
            else:
                self._holders[adapter].pop(index, None)

        return told

    def _grant(self, now: float, besides: int | None = None) -> None:
        """besides: a worker whose next step is begun by the caller."""
        while self._queued:
            flow = min(self._queued, key=lambda each: (self._open[each], self._queued[each][0].at_s))
            request = self._queued[flow][0]
            room = [index for index, worker in enumerate(self._workers) if worker.open < self._slots]
            if not room:
                flows = sum(1 for number in self._open.values() if number) + (not self._open[flow])
                if self._open[flow] >= max(1, self._slots * len(self._workers) // flows):
                    return
                most = self._slots + _BEYOND_SLOTS
                room = [index for index, worker in enumerate(self._workers) if worker.open < most]
                if not room:
                    return
            index = _place(self._workers, room, self._holders.get(request.adapter, {}))
            self._queued[flow].popleft()
            if not self._queued[flow]:
                del self._queued[flow]
            self._open[flow] += 1
            self._late_left -= now - request.at_s > self._longest_s
            self._workers[index].add(Running(request), now)
            if not self._is_stepping[index] and index != besides:
                self._begin(index, now, now)

    def _begin(self, index: int, now: float, seen_until: float) -> None:
        worker = self._workers[index]
        seconds = worker.begin(now, seen_until)
        if seconds is None and seen_until < now:
            seconds = worker.begin(now, now)  # nothing was submitted ahead
        self._is_stepping[index] = seconds is not None
        if seconds is not None:
            heapq.heappush(self._steps, (now + seconds, next(self._order), index, True))
        elif (ready := worker.next_ready()) is not None:
            heapq.heappush(self._steps, (ready, next(self._order), index, False))


def _warm(workers: Sequence[Worker], curve: Curve, traffic: Traffic) -> None:
    """The most used adapters are on devices from the beginning, as a cluster that runs for long has them."""
    ranks = traffic.ranks
    for number, (adapter, _) in enumerate(traffic.uses.most_common()):
        size = curve.shape.rank_bytes * ranks[adapter]
        workers[number % len(workers)].warm(adapter, size)
        for worker in workers:
            worker.warm_host(adapter, size)


def _place(workers: Sequence[Worker], room: Sequence[int], holders: dict[int, None]) -> int:
    """Of those with room one that has the adapter and is not far above the mean, else the one with the least to do."""
    having = [index for index in room if index in holders] if holders else []
    if having:
        least = min(having, key=lambda index: (workers[index].open, index))
        mean = sum(worker.open for worker in workers) / len(workers)
        if workers[least].open <= _ABOVE_MEAN * mean + 1:
            return least
    return min(room, key=lambda index: (workers[index].open, index))


def _outcome(curve: Curve, workers: Sequence[Worker], ended: Sequence[Running]) -> Outcome:
    answers = [
        Answer(
            at_s=running.request.at_s,
            tenant=running.request.tenant,
            qos_class=running.request.qos_class,
            ttft_ms=(running.first_at - running.request.at_s) * 1e3 + curve.service_ms,
            tpot_ms=(running.ended_at - running.first_at) * 1e3 / max(1, running.request.output_tokens - 1),
        )
        for running in ended
    ]
    first = min(running.request.at_s for running in ended)
    seconds = max(1e-9, max(running.ended_at for running in ended) - first)
    busy, steps = sum(worker.busy_s for worker in workers), sum(worker.steps for worker in workers)
    return Outcome(
        answers=answers,
        seconds=seconds,
        output_tokens=sum(running.request.output_tokens for running in ended),
        busy_share=busy / seconds / len(workers),
        mean_rows=sum(worker.row_s for worker in workers) / max(busy, 1e-9),
        mean_step_ms=busy * 1e3 / max(1, steps),
        peak_kv_tokens=max(worker.peak_kv for worker in workers),
        loads=sum(worker.loads for worker in workers),
        file_loads=sum(worker.file_loads for worker in workers),
        evictions=sum(worker.evictions for worker in workers),
    )
