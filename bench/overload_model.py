"""Offered load beyond capacity, in virtual time: the scheduler's real control plane between model callers and workers.

What is real: the quotas' gate, overload control, the core with its fair queue and placement (`QuotaGate`,
`OverloadGate`, `Core`), and the routers' early refusals by the view that they were told. What is modelled: callers, who
come by a Poisson process whatever happens to them; routers, which hear of a view after ROUTER_DELAY_S; and workers,
each with slots for sequences that all decode a token every STEP_S, after a prefill of CHUNK_TOKENS a step. Callers give
up where their patience ends: in the queue the scheduler drops them, in mid-stream their work is wasted.

All tenants have the same weight and, but for a `large` one, the same load, in the classes' mix of MIX. So at a load of
1 all classes fit just so; at 3, interactive work alone still fits, and little else does.

Goodput counts tokens, prompt and output, of requests that ended within their caller's patience.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from manylora_scheduler.core import Core, CoreLimits
from manylora_scheduler.events import (
    Command,
    Enqueued,
    Event,
    GrantClosed,
    PolicyChanged,
    RouterConnected,
    RoutersRefused,
    SendGrant,
    SendOverload,
    SendPrefetch,
    SendRefusal,
    Settled,
    Tick,
    WorkerJoined,
    WorkerReported,
)
from manylora_scheduler.fleet import FlowTokens, StartedRequest, WorkerReport
from manylora_scheduler.overload import OverloadGate
from manylora_scheduler.quota import QuotaGate
from manylora_scheduler.request import FlowKey, QueuedRequest
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.overload import OverloadView
from manylora_shared.policy import TenantPolicy

STEP_S = 0.02
CHUNK_TOKENS = 256
ROUTER_DELAY_S = 0.002
REFUSED_S = 0.1
BLOCK_SIZE = 16


@dataclass(frozen=True)
class ClassLoad:
    """What requests of a class are like."""

    part: float
    """Of the offered cost."""
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    patience_s: float
    """The caller's deadline."""


MIX = {
    QosClass.INTERACTIVE: ClassLoad(0.25, (20, 200), (20, 80), 20.0),
    QosClass.STANDARD: ClassLoad(0.3, (50, 400), (40, 160), 30.0),
    QosClass.BATCH: ClassLoad(0.45, (100, 800), (100, 400), 120.0),
}


@dataclass(frozen=True)
class Scenario:
    load: float
    """Offered, as a part of what all slots can do; from `begins_s` to `ends_s`, and `base_load` outside."""
    overload: bool = True
    base_load: float = 0.5
    begins_s: float = 10.0
    ends_s: float = 90.0
    measured_from_s: float = 30.0
    until_s: float = 90.0
    workers: int = 8
    slots: int = 16
    tenants: int = 12
    seed: int = 1
    large: float = 0.0
    """Part of all calls that is the first tenant's, besides its even part of the others."""
    flooder: bool = False
    """All of the load beyond `base_load` is one tenant's interactive requests."""


@dataclass(eq=False)
class _Call:
    request: QueuedRequest
    output_tokens: int
    came_at: float
    ends_by: float
    granted_tokens: int = 0
    first_token_at: float = 0.0
    worker: _Worker | None = None


@dataclass(eq=False)
class _Worker:
    worker_id: WorkerId
    running: dict[RequestId, _Call] = field(default_factory=dict)
    new: list[StartedRequest] = field(default_factory=list)
    gone: list[RequestId] = field(default_factory=list)
    flows: dict[FlowKey, FlowTokens] = field(default_factory=dict)
    changed: dict[FlowKey, FlowTokens] = field(default_factory=dict)
    reports_at: float | None = None


@dataclass
class Result:
    offered: dict[QosClass, int] = field(default_factory=lambda: dict.fromkeys(QosClass, 0))
    completed: dict[QosClass, int] = field(default_factory=lambda: dict.fromkeys(QosClass, 0))
    refused: dict[QosClass, int] = field(default_factory=lambda: dict.fromkeys(QosClass, 0))
    expired: dict[QosClass, int] = field(default_factory=lambda: dict.fromkeys(QosClass, 0))
    capped: int = 0
    good_tokens: int = 0
    ttft_s: dict[QosClass, list[float]] = field(default_factory=lambda: {q: [] for q in QosClass})
    waits_s: dict[QosClass, list[float]] = field(default_factory=lambda: {q: [] for q in QosClass})
    levels: list[tuple[float, int]] = field(default_factory=list)
    refused_tenants: dict[tuple[TenantId, QosClass], int] = field(default_factory=dict)
    offered_tenants: dict[tuple[TenantId, QosClass], int] = field(default_factory=dict)
    at_rest_s: float | None = None
    """After the load fell back: when nothing was given up any more."""


class Model:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.result = Result()
        self.rng = random.Random(scenario.seed)
        self.now = 0.0
        self.core = Core(CoreLimits())
        self.overload = OverloadGate(self.core, enabled=scenario.overload)
        self.gate = QuotaGate(self.overload, 0.0)
        self.router = RouterId("router")
        self.view = OverloadView()
        self.refused: dict[FlowKey, int] = {}
        self.calls: dict[RequestId, _Call] = {}
        self.workers = {WorkerId(f"w{i}"): _Worker(WorkerId(f"w{i}")) for i in range(scenario.workers)}
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._wakes_at: float | None = None
        self.apply(RouterConnected(self.router, 1))
        self.tenants = [TenantId(f"tenant-{i}") for i in range(scenario.tenants)]
        for tenant_id in self.tenants:
            self.apply(PolicyChanged(tenant_id, TenantPolicy(tenant_id)))
        for worker in self.workers.values():
            self.apply(WorkerJoined(worker.worker_id, worker.worker_id, "cuda", 8192))
            self.apply(WorkerReported(worker.worker_id, self._report(worker, snapshot=True)))

    # ---- time

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._order), what))

    def run(self) -> Result:
        for qos_class in QosClass:
            self._next_call(qos_class)
        while self._due and self._due[0][0] < self.scenario.until_s:
            self.now, _, what = heapq.heappop(self._due)
            what()
        return self.result

    def apply(self, event: Event) -> None:
        for command in self.gate.apply(event, self.now):
            self._take(command)
        at = self.gate.next_wakeup()
        if at is not None and (self._wakes_at is None or at < self._wakes_at):
            self._wakes_at = at
            self.at(max(at, self.now), self._wake)

    def _wake(self) -> None:
        self._wakes_at = None
        self.apply(Tick())

    # ---- callers and their router

    def _load(self) -> float:
        s = self.scenario
        return s.load if s.begins_s <= self.now < s.ends_s else s.base_load

    def _next_call(self, qos_class: QosClass) -> None:
        """Poisson arrivals: each class offers its part of the load."""
        load, s = MIX[qos_class], self.scenario
        extra = max(0.0, self._load() - s.base_load) if s.flooder else 0.0
        offered = load.part * (self._load() - extra) + (extra if qos_class is QosClass.INTERACTIVE else 0.0)
        seconds = sum(load.output_tokens) / 2 * STEP_S + STEP_S * (sum(load.prompt_tokens) / 2 / CHUNK_TOKENS + 1)
        per_s = offered * s.workers * s.slots / seconds

        def come() -> None:
            floods = s.flooder and qos_class is QosClass.INTERACTIVE and self.rng.random() * offered < extra
            self._call(self.tenants[-1] if floods else self._tenant(), qos_class)
            self._next_call(qos_class)

        self.at(self.now + self.rng.expovariate(per_s), come)

    def _tenant(self) -> TenantId:
        return self.tenants[0] if self.rng.random() < self.scenario.large else self.rng.choice(self.tenants)

    def _call(self, tenant_id: TenantId, qos_class: QosClass) -> None:
        load, flow = MIX[qos_class], FlowKey(tenant_id, qos_class)
        request_id = RequestId(f"{self.rng.getrandbits(64):016x}")
        if self._is_measured:
            self.result.offered[qos_class] += 1
            self._count(self.result.offered_tenants, flow)
        output_tokens = self.rng.randint(*load.output_tokens)
        request = QueuedRequest(
            request_id=request_id,
            router_id=self.router,
            flow=flow,
            prompt_tokens=self.rng.randint(*load.prompt_tokens),
            max_new_tokens=output_tokens,
            deadline=self.now + load.patience_s,
        )
        if not self.view.admits(tenant_id, qos_class, request_id):
            self._was_refused(flow)
            if not self.refused:
                self.at(self.now + REFUSED_S, self._tell_refused)
            self.refused[flow] = self.refused.get(flow, 0) + 1
            return
        self.calls[request_id] = _Call(request, output_tokens, self.now, self.now + load.patience_s)
        self.apply(Enqueued(1, request))

    def _tell_refused(self) -> None:
        refused, self.refused = self.refused, {}
        self.apply(RoutersRefused(tuple(refused.items())))

    def _was_refused(self, flow: FlowKey) -> None:
        if self._is_measured:
            self.result.refused[flow.qos_class] += 1
            self._count(self.result.refused_tenants, flow)

    def _count(self, counts: dict[tuple[TenantId, QosClass], int], flow: FlowKey) -> None:
        counts[flow] = counts.get(flow, 0) + 1

    @property
    def _is_measured(self) -> bool:
        return self.now >= self.scenario.measured_from_s

    # ---- what the scheduler says

    def _take(self, command: Command) -> None:
        match command:
            case SendGrant():
                call = self.calls[command.request.request_id]
                if command.max_output_tokens is not None:
                    call.output_tokens = min(call.output_tokens, command.max_output_tokens)
                    self.result.capped += self._is_measured
                call.worker = self.workers[command.worker_id]
                if self._is_measured:
                    self.result.waits_s[command.request.flow.qos_class].append(command.queue_s)
                self.at(self.now + ROUTER_DELAY_S, lambda: self._start(call))
            case SendRefusal():
                call = self.calls.pop(command.request.request_id)
                if self.now >= call.ends_by - 1e-9:
                    self.result.expired[command.request.flow.qos_class] += self._is_measured
                else:
                    self._was_refused(command.request.flow)
                request_id = command.request.request_id
                self.at(self.now, lambda: self.apply(Settled(self.router, request_id, 0)))
            case SendOverload():
                self.at(self.now + ROUTER_DELAY_S, lambda: self._hear(command.view))
            case SendPrefetch():
                raise AssertionError("no request here has an adapter")

    def _hear(self, view: OverloadView) -> None:
        self.view = view
        self.result.levels.append((self.now, max([view.level, *(t.level for t in view.tenants.values())])))
        if self.now >= self.scenario.ends_s and view.is_quiet and self.result.at_rest_s is None:
            self.result.at_rest_s = self.now - self.scenario.ends_s

    # ---- workers

    def _start(self, call: _Call) -> None:
        worker, request = call.worker, call.request
        assert worker is not None
        worker.running[request.request_id] = call
        worker.new.append(StartedRequest(request.request_id, request.flow, 1))
        prefill_s = STEP_S * (request.prompt_tokens // CHUNK_TOKENS + 1)
        call.first_token_at = self.now + prefill_s
        if self._is_measured:
            self.result.ttft_s[request.flow.qos_class].append(call.first_token_at - call.came_at)
        ends_at = call.first_token_at + (call.output_tokens - 1) * STEP_S
        self.at(max(self.now, min(ends_at, call.ends_by)), lambda: self._end(call, is_good=ends_at <= call.ends_by))
        self._report_soon(worker)

    def _end(self, call: _Call, *, is_good: bool) -> None:
        worker, request = call.worker, call.request
        assert worker is not None
        del worker.running[request.request_id]
        worker.gone.append(request.request_id)
        tokens = call.output_tokens if is_good else max(0, int((self.now - call.first_token_at) / STEP_S))
        before = worker.flows.get(request.flow, FlowTokens(0, 0))
        after = FlowTokens(before.prompt_tokens + request.prompt_tokens, before.output_tokens + tokens)
        worker.flows[request.flow] = worker.changed[request.flow] = after
        if self._is_measured:
            self.result.completed[request.flow.qos_class] += is_good
            self.result.expired[request.flow.qos_class] += not is_good
            self.result.good_tokens += (request.prompt_tokens + tokens) * is_good
        del self.calls[request.request_id]
        self.apply(GrantClosed(1, self.router, request.request_id, worker.worker_id, True))
        self.apply(Settled(self.router, request.request_id, request.prompt_tokens + tokens))
        self._report_soon(worker)

    def _report_soon(self, worker: _Worker) -> None:
        if worker.reports_at is None:
            worker.reports_at = self.now + ROUTER_DELAY_S
            self.at(worker.reports_at, lambda: self._send_report(worker))

    def _send_report(self, worker: _Worker) -> None:
        worker.reports_at = None
        self.apply(WorkerReported(worker.worker_id, self._report(worker)))

    def _report(self, worker: _Worker, *, snapshot: bool = False) -> WorkerReport:
        report = WorkerReport(
            snapshot=snapshot,
            sequence_slots=self.scenario.slots,
            running_sequences=len(worker.running),
            kv_blocks_total=100_000,
            kv_blocks_free=100_000,
            block_size=BLOCK_SIZE,
            adapters={} if snapshot else None,
            started=tuple(worker.new),
            finished=tuple(worker.gone),
            flows=worker.changed,
        )
        worker.new, worker.gone, worker.changed = [], [], {}
        return report


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run(scenario: Scenario) -> Result:
    return Model(scenario).run()


def describe(scenario: Scenario, result: Result) -> dict[str, object]:
    seconds = scenario.until_s - scenario.measured_from_s
    line: dict[str, object] = {
        "load": scenario.load,
        "overload_control": scenario.overload,
        "goodput_tokens_per_s": round(result.good_tokens / seconds, 1),
    }
    for qos_class in QosClass:
        name = qos_class.value
        line[f"{name}_ttft_p95_ms"] = round(1000 * percentile(result.ttft_s[qos_class], 0.95), 1)
        line[f"{name}_offered"] = result.offered[qos_class]
        line[f"{name}_completed"] = result.completed[qos_class]
        line[f"{name}_refused"] = result.refused[qos_class]
        line[f"{name}_expired"] = result.expired[qos_class]
    line["capped"] = result.capped
    levels = [level for at, level in result.levels if at >= scenario.measured_from_s]
    line["level_max"] = max(levels, default=0)
    line["level_median"] = percentile([float(level) for level in levels], 0.5)
    return line
