"""Offered load beyond capacity, in virtual time: the scheduler's real control plane between model callers and workers.

What is real: the quotas' gate, overload control, the core with its fair queue and placement (`QuotaGate`,
`OverloadGate`, `Core`), and the routers' early refusals by the view that they were told. What is modelled: callers
(overload_scenario.py says who comes); routers, which hear of a view after ROUTER_DELAY_S; and workers
(overload_worker.py), whose steps take `step_s` each. Callers give up where their patience ends: in the queue the
scheduler drops them, in mid-stream their work is wasted.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from manylora_scheduler.core.core import Core, CoreLimits
from manylora_scheduler.core.events import (
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
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_scheduler.gates.overload import OverloadGate
from manylora_scheduler.gates.quota import QuotaGate
from manylora_shared.ids import QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.tenancy.overload import OverloadView, retry_after_s
from manylora_shared.tenancy.policy import TenantPolicy

from bench.overload_result import Result
from bench.overload_scenario import Scenario
from bench.overload_worker import Call, Worker

ROUTER_DELAY_S = 0.002
REFUSED_S = 0.1
COUNTERS_S = 0.05
"""A worker reports its counters so often; what is urgent at once."""


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
        self.calls: dict[RequestId, Call] = {}
        worker_ids = [WorkerId(f"w{i}") for i in range(scenario.workers)]
        self.workers = {name: Worker(name, scenario.slots, scenario.parked) for name in worker_ids}
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
            self._was_refused(flow, retry_after_s(self.view.level_of(tenant_id, qos_class), request_id))
            if not self.refused:
                self.at(self.now + REFUSED_S, self._tell_refused)
            self.refused[flow] = self.refused.get(flow, 0) + 1
            return
        self.calls[request_id] = Call(request, output_tokens, self.now, self.now + load.patience_s)
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

    def _start(self, call: Call) -> None:
        worker = call.worker
        assert worker is not None
        worker.start(call)
        if not worker.is_stepping:
            worker.is_stepping = True
            self._begin_step(worker)

    def _begin_step(self, worker: Worker) -> None:
        worker.begin_step()
        worker.look()
        self._busy_slot_steps += worker.num_running * self._is_measured
        delay_s, self._delays_s[worker.worker_id] = self._delays_s[worker.worker_id], 0.0
        self.at(self.now + self.scenario.step_s + delay_s, lambda: self._end_step(worker))
        if worker.is_urgent or self.now >= worker.reported_at + COUNTERS_S:
            report = worker.report(self.now)
            self.at(self.now + ROUTER_DELAY_S, lambda: self.apply(WorkerReported(worker.worker_id, report)))

    def _end_step(self, worker: Worker) -> None:
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

    def _end(self, call: Call) -> None:
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


def run(scenario: Scenario) -> Result:
    return Model(scenario).run()
