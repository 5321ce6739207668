"""The modelled worker of overload: which sequences have its slots, what they make, and what it reports.

It steps as the real one does (worker/engine/step_planner.py), without memory: a slot runs a prefill chunk or a decode
quantum, and at its end goes to the ready sequence of the flow with the least tag; it takes `parked` sequences beyond
its slots. When a step begins and ends, and when a report is due, is the model's to say.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from manylora_scheduler.core.reports import NO_LOAD, FlowLoad, FlowTokens, StartedRequest, WorkerReport
from manylora_scheduler.core.request import FlowKey, QueuedRequest
from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.ids import RequestId, WorkerId
from manylora_shared.tenancy.policy import DEFAULT_WEIGHTS

CHUNK_TOKENS = 256
BATCH_TOKENS = 512
"""A step's; as the worker's default."""
BLOCK_SIZE = 16


@dataclass(eq=False)
class Call:
    """A request, and what has become of it on a worker."""

    request: QueuedRequest
    output_tokens: int
    came_at: float
    ends_by: float
    made_tokens: int = 0
    worker: Worker | None = None


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

    def __init__(self, call: Call, flow: _Flow) -> None:
        self.call = call
        self.flow = flow
        self.prompt_left = call.request.prompt_tokens
        self.unit_left = 0


class Worker:
    """Slots, and who is in them. Sequences come by `start`; the model calls `step` at each step's end."""

    def __init__(self, worker_id: WorkerId, slots: int, parked: int) -> None:
        self.worker_id = worker_id
        self._slots = slots
        self._max_sequences = slots + parked
        self._flows: dict[FlowKey, _Flow] = {}
        self._running: list[_Sequence] = []
        self._unfinished = 0
        self._clock = 0.0
        self.firsts: list[Call] = []
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

    def start(self, call: Call) -> None:
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

    def end_step(self, now: float) -> list[Call]:
        """What the step made. Returns the calls that ended with it, or whose callers have gone."""
        budget = BATCH_TOKENS - sum(not s.prompt_left for s in self._running)
        still: list[_Sequence] = []
        over: list[_Sequence] = []
        ended: list[Call] = []
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
