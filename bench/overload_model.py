"""Offered load beyond capacity, in virtual time: the scheduler's real control plane between model callers and workers.

What is real: the quotas' gate, overload control, the core with its fair queue and placement (`QuotaGate`,
`OverloadGate`, `Core`), and the routers' early refusals by the view that they were told. What is modelled: callers;
routers, which hear of a view after ROUTER_DELAY_S; and workers. Callers are *open* (they come by a Poisson process, or
in groups, whatever happens to them) or *closed* (so many streams, each of which asks again as soon as its last request
has ended or was refused). They give up where their patience ends: in the queue the scheduler drops them, in mid-stream
their work is wasted.

A worker steps as the real one does (worker/engine/step_planner.py), without memory: a slot runs a prefill chunk or a
decode quantum, and at its end goes to the ready sequence of the flow with the least tag; it takes `parked` sequences
beyond its slots; a step takes `step_s`, and each token of output one step.

All tenants have the same weight and, but for a `large` one, the same load, in the classes' mix. So at a load of 1 all
classes fit just so; at 3 with the mix of MIX, interactive work alone still fits, and little else does.

Goodput counts tokens, prompt and output, of requests that ended within their caller's patience.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping
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
from manylora_scheduler.overload import OverloadGate
from manylora_scheduler.quota import QuotaGate
from manylora_scheduler.reports import NO_LOAD, FlowLoad, FlowTokens, StartedRequest, WorkerReport
from manylora_scheduler.request import FlowKey, QueuedRequest
from manylora_shared.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.overload import OverloadView, retry_after_s
from manylora_shared.policy import DEFAULT_WEIGHTS, TenantPolicy

CHUNK_TOKENS = 256
BATCH_TOKENS = 512
"""A step's; as the worker's default."""
QUANTUM_TOKENS = 16
ROUTER_DELAY_S = 0.002
REFUSED_S = 0.1
COUNTERS_S = 0.05
"""A worker reports its counters so often; what is urgent at once."""
BLOCK_SIZE = 16


@dataclass(frozen=True)
class ClassLoad:
    """What requests of a class are like."""

    part: float
    """Of the offered cost; of a closed loop's requests."""
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    patience_s: float
    """The caller's deadline."""

    def slot_steps(self) -> float:
        """Steps that a request has a slot for, on average."""
        return sum(self.output_tokens) / 2 + sum(self.prompt_tokens) / 2 / CHUNK_TOKENS


MIX: Mapping[QosClass, ClassLoad] = {
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
    parked: int = 16
    """Sequences that a worker takes beyond its slots; 0: none, and who has a slot keeps it."""
    step_s: float = 0.02
    tenants: int = 12
    seed: int = 1
    mix: Mapping[QosClass, ClassLoad] = field(default_factory=lambda: MIX)
    group: int = 1
    """So many calls come at once, on average: 1 is a Poisson process."""
    large: float = 0.0
    """Part of all calls that is the first tenant's, besides its even part of the others."""
    flooder: bool = False
    """All of the load beyond `base_load` is one tenant's interactive requests."""
    streams: int = 0
    """Callers in a closed loop, instead of the open load; a class's part is then of requests."""
    retry_s: float = 0.003
    """What it takes a caller of a closed loop to ask again after a refusal."""
    heeds_hints: bool = False
    """Callers of a closed loop wait as long as a refusal says."""
    refusal_cost_s: float = 0.0
    """By so much a refusal delays each worker's next step: where callers, routers and workers share cores."""


def random_scenario(seed: int, load: float, *, overload: bool = True) -> Scenario:
    """A cluster and callers of any kind, by seed: the same at each load. Interactive work fits at three times the load,
    taking up to 84 % of all slots; callers come by a Poisson process or in groups; one tenant may have 30 % of all."""
    rng = random.Random(f"mix {seed}")
    interactive = rng.uniform(0.08, 0.28)
    standard = rng.uniform(0.1, 0.9) * (1 - interactive)

    def kind(part: float, log2_output: tuple[float, float], patience_s: float) -> ClassLoad:
        output, prompt = round(2 ** rng.uniform(*log2_output)), round(2 ** rng.uniform(4, 9))
        prompts = max(1, prompt // 3), 2 * prompt - prompt // 3
        return ClassLoad(part, prompts, (max(1, output // 3), 2 * output - output // 3), patience_s)

    mix = {
        QosClass.INTERACTIVE: kind(interactive, (4, 7), 20.0),
        QosClass.STANDARD: kind(standard, (5, 8), 30.0),
        QosClass.BATCH: kind(1 - interactive - standard, (6, 8.5), 120.0),
    }
    slots, workers = rng.choice((8, 16, 24, 32)), rng.choice((2, 4, 6, 8))
    return Scenario(
        load=load,
        overload=overload,
        mix=mix,
        slots=slots,
        parked=slots,
        workers=workers,
        step_s=rng.choice((0.01, 0.02, 0.04)),
        tenants=rng.choice((2, 3, 6, 12, 24, 48)),
        group=rng.choice((1, 1, 3, 6)),
        large=rng.choice((0.0, 0.0, 0.3)),
        seed=seed,
        measured_from_s=25.0,
        ends_s=70.0,
        until_s=70.0,
    )


@dataclass(eq=False)
class _Call:
    request: QueuedRequest
    output_tokens: int
    came_at: float
    ends_by: float
    made_tokens: int = 0
    worker: _Worker | None = None


class _Flow:
    """A flow on a worker."""

    __slots__ = ("key", "ready", "slotted", "tag", "weight")

    def __init__(self, key: FlowKey) -> None:
        self.key = key
        self.weight = DEFAULT_WEIGHTS[key.qos_class]
        self.tag = 0.0
        self.ready: deque[_Sequence] = deque()
        self.slotted = 0


class _Sequence:
    __slots__ = ("call", "flow", "prompt_left", "unit_left")

    def __init__(self, call: _Call, flow: _Flow) -> None:
        self.call = call
        self.flow = flow
        self.prompt_left = call.request.prompt_tokens
        self.unit_left = 0


class _Worker:
    """Slots, and who is in them. Sequences come by `start`; the model calls `step` at each step's end."""

    def __init__(self, worker_id: WorkerId, scenario: Scenario) -> None:
        self.worker_id = worker_id
        self._slots = scenario.slots
        self._max_sequences = scenario.slots + scenario.parked
        self._flows: dict[FlowKey, _Flow] = {}
        self._running: list[_Sequence] = []
        self._unfinished = 0
        self._clock = 0.0
        self.firsts: list[_Call] = []
        """Calls whose first token the last step made."""
        self._new: list[StartedRequest] = []
        self._gone: list[RequestId] = []
        self._tokens: dict[FlowKey, FlowTokens] = {}
        self._changed: dict[FlowKey, FlowTokens] = {}
        self._told: dict[FlowKey, FlowLoad] = {}
        self._served: set[FlowKey] = set()
        """Flows without a ready sequence."""
        self.is_stepping = False
        self.is_urgent = True
        self.reported_at = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._unfinished

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, call: _Call) -> None:
        request = call.request
        flow = self._flows.get(request.flow)
        if flow is None:
            flow = self._flows[request.flow] = _Flow(request.flow)
        self._unfinished += 1
        self._new.append(StartedRequest(request.request_id, request.flow, 1))
        self._make_ready(_Sequence(call, flow))
        self.is_urgent = True

    def _make_ready(self, sequence: _Sequence) -> None:
        flow = sequence.flow
        if not flow.ready:
            flow.tag = max(flow.tag, self._clock)
        if sequence.prompt_left == sequence.call.request.prompt_tokens:
            flow.ready.append(sequence)
        else:
            flow.ready.appendleft(sequence)  # who has blocks goes first

    def begin_step(self) -> None:
        """Free slots go to ready sequences."""
        free = self._slots - len(self._running)
        if free > 0:
            waiting = [(flow.tag, flow.key, flow) for flow in self._flows.values() if flow.ready]
            heapq.heapify(waiting)
            while free and waiting:
                tag, key, flow = heapq.heappop(waiting)
                self._clock = max(self._clock, tag)
                sequence = flow.ready.popleft()
                call = sequence.call
                if sequence.prompt_left:
                    sequence.unit_left = min(CHUNK_TOKENS, sequence.prompt_left)
                    cost = PROMPT_TOKEN_COST * sequence.unit_left
                else:
                    sequence.unit_left = min(QUANTUM_TOKENS, call.output_tokens - call.made_tokens)
                    cost = OUTPUT_TOKEN_COST * sequence.unit_left
                flow.tag += cost / flow.weight
                flow.slotted += 1
                self._running.append(sequence)
                free -= 1
                if flow.ready:
                    heapq.heappush(waiting, (flow.tag, key, flow))

    def end_step(self, now: float) -> list[_Call]:
        """What the step made. Returns the calls that ended with it, or whose callers have gone."""
        budget = BATCH_TOKENS - sum(not s.prompt_left for s in self._running)
        still: list[_Sequence] = []
        over: list[_Sequence] = []
        ended: list[_Call] = []
        for sequence in self._running:
            call = sequence.call
            prompt_tokens = output_tokens = 0
            if sequence.prompt_left:
                prompt_tokens = min(sequence.unit_left, budget)
                budget -= prompt_tokens
                sequence.prompt_left -= prompt_tokens
                sequence.unit_left -= prompt_tokens
                output_tokens = int(not sequence.prompt_left)
            else:
                output_tokens = 1
                sequence.unit_left -= 1
            if output_tokens and not call.made_tokens:
                self.firsts.append(call)
            call.made_tokens += output_tokens
            self._count(sequence.flow.key, prompt_tokens, output_tokens)
            if call.made_tokens >= call.output_tokens or now >= call.ends_by:
                sequence.flow.slotted -= 1
                ended.append(call)
            elif not sequence.unit_left:
                sequence.flow.slotted -= 1
                over.append(sequence)
            else:
                still.append(sequence)
        self._running = still
        for sequence in over:
            self._make_ready(sequence)
        for flow in self._flows.values():
            gone = [s for s in flow.ready if now >= s.call.ends_by]
            for sequence in gone:
                flow.ready.remove(sequence)
                ended.append(sequence.call)
        for call in ended:
            self._unfinished -= 1
            self._gone.append(call.request.request_id)
            self.is_urgent = True
        return ended

    def _count(self, key: FlowKey, prompt_tokens: int, output_tokens: int) -> None:
        before = self._tokens.get(key, _NO_TOKENS)
        after = FlowTokens(before.prompt_tokens + prompt_tokens, before.output_tokens + output_tokens)
        self._tokens[key] = self._changed[key] = after

    def look(self) -> None:
        """Notes whether there is something urgent to report."""
        served = {flow.key for flow in self._flows.values() if flow.slotted and not flow.ready}
        self.is_urgent |= served != self._served
        self._served = served

    def report(self, now: float, *, snapshot: bool = False) -> WorkerReport:
        loads: dict[FlowKey, FlowLoad] = {}
        for key, flow in list(self._flows.items()):
            load = FlowLoad(flow.slotted, len(flow.ready), 0)
            if load != self._told.get(key, NO_LOAD):
                loads[key] = self._told[key] = load
        report = WorkerReport(
            snapshot=snapshot,
            sequence_slots=self._slots,
            running_sequences=self._unfinished,
            kv_blocks_total=100_000,
            kv_blocks_free=100_000,
            block_size=BLOCK_SIZE,
            started=tuple(self._new),
            finished=tuple(self._gone),
            flows=self._changed,
            max_sequences=self._max_sequences,
            loads=loads,
        )
        self._new, self._gone, self._changed = [], [], {}
        self.is_urgent, self.reported_at = False, now
        return report


_NO_TOKENS = FlowTokens(0, 0)


def _by_class() -> dict[QosClass, int]:
    return dict.fromkeys(QosClass, 0)


@dataclass
class Result:
    offered: dict[QosClass, int] = field(default_factory=_by_class)
    completed: dict[QosClass, int] = field(default_factory=_by_class)
    refused: dict[QosClass, int] = field(default_factory=_by_class)
    expired: dict[QosClass, int] = field(default_factory=_by_class)
    capped: int = 0
    good_tokens: int = 0
    ttft_s: dict[QosClass, list[float]] = field(default_factory=lambda: {q: [] for q in QosClass})
    ttft_flows: dict[FlowKey, list[float]] = field(default_factory=dict)
    waits_s: dict[QosClass, list[float]] = field(default_factory=lambda: {q: [] for q in QosClass})
    levels: list[tuple[float, int]] = field(default_factory=list)
    refused_tenants: dict[tuple[TenantId, QosClass], int] = field(default_factory=dict)
    offered_tenants: dict[tuple[TenantId, QosClass], int] = field(default_factory=dict)
    at_rest_s: float | None = None
    """After the load fell back: when nothing was given up any more."""
    busy_part: float = 0.0
    """Of all slots' steps."""


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
        self.workers = {WorkerId(f"w{i}"): _Worker(WorkerId(f"w{i}"), scenario) for i in range(scenario.workers)}
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._wakes_at: float | None = None
        self._busy_slot_steps = 0
        self._delays_s = dict.fromkeys(self.workers, 0.0)
        self.apply(RouterConnected(self.router, 1))
        self.tenants = [TenantId(f"tenant-{i}") for i in range(scenario.tenants)]
        for tenant_id in self.tenants:
            self.apply(PolicyChanged(tenant_id, TenantPolicy(tenant_id)))
        for worker in self.workers.values():
            self.apply(WorkerJoined(worker.worker_id, worker.worker_id, "cuda", 8192))
            self.apply(WorkerReported(worker.worker_id, worker.report(0.0, snapshot=True)))

    # ---- time

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._order), what))

    def run(self) -> Result:
        s = self.scenario
        for _ in range(s.streams):
            self.at(self.rng.random(), self._ask_again)
        for qos_class in QosClass if not s.streams else ():
            self._next_call(qos_class)
        while self._due and self._due[0][0] < s.until_s:
            self.now, _, what = heapq.heappop(self._due)
            what()
        slot_steps = s.workers * s.slots * (s.until_s - s.measured_from_s) / s.step_s
        self.result.busy_part = self._busy_slot_steps / slot_steps
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
        """Each class offers its part of the load; groups come by a Poisson process."""
        s = self.scenario
        load = s.mix[qos_class]
        extra = max(0.0, self._load() - s.base_load) if s.flooder else 0.0
        offered = load.part * (self._load() - extra) + (extra if qos_class is QosClass.INTERACTIVE else 0.0)
        if not offered:
            self.at(self.now + 1.0, lambda: self._next_call(qos_class))
            return
        per_s = offered * s.workers * s.slots / (load.slot_steps() * s.step_s)
        size = 1
        while s.group > 1 and self.rng.random() < 1.0 - 1.0 / s.group:
            size += 1

        def come() -> None:
            for _ in range(size):
                floods = s.flooder and qos_class is QosClass.INTERACTIVE and self.rng.random() * offered < extra
                self._call(self.tenants[-1] if floods else self._tenant(), qos_class)
            self._next_call(qos_class)

        self.at(self.now + self.rng.expovariate(per_s / s.group), come)

    def _ask_again(self) -> None:
        """A stream of a closed loop."""
        mix = self.scenario.mix
        (qos_class,) = self.rng.choices(list(mix), [load.part for load in mix.values()])
        self._call(self._tenant(), qos_class)

    def _tenant(self) -> TenantId:
        return self.tenants[0] if self.rng.random() < self.scenario.large else self.rng.choice(self.tenants)

    def _call(self, tenant_id: TenantId, qos_class: QosClass) -> None:
        load, flow = self.scenario.mix[qos_class], FlowKey(tenant_id, qos_class)
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
            self._was_refused(flow, retry_after_s(self.view.level_of(tenant_id), request_id))
            if not self.refused:
                self.at(self.now + REFUSED_S, self._tell_refused)
            self.refused[flow] = self.refused.get(flow, 0) + 1
            return
        self.calls[request_id] = _Call(request, output_tokens, self.now, self.now + load.patience_s)
        self.apply(Enqueued(1, request))

    def _tell_refused(self) -> None:
        refused, self.refused = self.refused, {}
        self.apply(RoutersRefused(tuple(refused.items())))

    def _was_refused(self, flow: FlowKey, hint_s: float) -> None:
        s = self.scenario
        if self._is_measured:
            self.result.refused[flow.qos_class] += 1
            self._count(self.result.refused_tenants, flow)
        for worker_id in self._delays_s:
            self._delays_s[worker_id] += s.refusal_cost_s
        if s.streams:
            self.at(self.now + (hint_s if s.heeds_hints else s.retry_s), self._ask_again)

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
                    self._ended()
                else:
                    assert command.retry_after_s is not None
                    self._was_refused(command.request.flow, command.retry_after_s)
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
        worker = call.worker
        assert worker is not None
        worker.start(call)
        if not worker.is_stepping:
            worker.is_stepping = True
            self._begin_step(worker)

    def _begin_step(self, worker: _Worker) -> None:
        worker.begin_step()
        worker.look()
        self._busy_slot_steps += worker.num_running * self._is_measured
        delay_s, self._delays_s[worker.worker_id] = self._delays_s[worker.worker_id], 0.0
        self.at(self.now + self.scenario.step_s + delay_s, lambda: self._end_step(worker))
        if worker.is_urgent or self.now >= worker.reported_at + COUNTERS_S:
            report = worker.report(self.now)
            self.at(self.now + ROUTER_DELAY_S, lambda: self.apply(WorkerReported(worker.worker_id, report)))

    def _end_step(self, worker: _Worker) -> None:
        ended = worker.end_step(self.now)
        firsts, worker.firsts = worker.firsts, []
        for call in firsts if self._is_measured else ():
            flow, ttft_s = call.request.flow, self.now - call.came_at
            self.result.ttft_s[flow.qos_class].append(ttft_s)
            self.result.ttft_flows.setdefault(flow, []).append(ttft_s)
        for call in ended:
            self._end(call)
        if worker.is_idle:
            worker.is_stepping = False
            worker.look()
            report = worker.report(self.now)
            self.at(self.now + ROUTER_DELAY_S, lambda: self.apply(WorkerReported(worker.worker_id, report)))
        else:
            self._begin_step(worker)

    def _end(self, call: _Call) -> None:
        worker, request = call.worker, call.request
        assert worker is not None
        is_good = call.made_tokens >= call.output_tokens and self.now <= call.ends_by
        qos_class = request.flow.qos_class
        if self._is_measured:
            self.result.completed[qos_class] += is_good
            self.result.expired[qos_class] += not is_good
            self.result.good_tokens += (request.prompt_tokens + call.made_tokens) * is_good
        del self.calls[request.request_id]
        self.apply(GrantClosed(1, self.router, request.request_id, worker.worker_id, True))
        self.apply(Settled(self.router, request.request_id, request.prompt_tokens + call.made_tokens))
        self._ended()

    def _ended(self) -> None:
        if self.scenario.streams:
            self.at(self.now + self.scenario.retry_s, self._ask_again)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run(scenario: Scenario) -> Result:
    return Model(scenario).run()


def ttft_of_small(scenario: Scenario, result: Result) -> list[float]:
    """Interactive requests' times to first token, in seconds, but for the large tenant's: it is above its share."""
    large = TenantId("tenant-0") if scenario.large else None
    return [
        ttft_s
        for flow, ttfts_s in result.ttft_flows.items()
        if flow.qos_class is QosClass.INTERACTIVE and flow.tenant_id != large
        for ttft_s in ttfts_s
    ]


def work_of(scenario: Scenario, result: Result) -> float:
    """What was completed, as a part of what all slots can do: tokens would compare one class's with another's."""
    steps = sum(result.completed[q] * scenario.mix[q].slot_steps() for q in QosClass)
    seconds = scenario.until_s - scenario.measured_from_s
    return steps * scenario.step_s / (seconds * scenario.slots * scenario.workers)


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
    line["busy_part"] = round(result.busy_part, 3)
    levels = [level for at, level in result.levels if at >= scenario.measured_from_s]
    line["level_max"] = max(levels, default=0)
    line["level_median"] = percentile([float(level) for level in levels], 0.5)
    return line
