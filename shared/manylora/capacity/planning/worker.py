"""One worker as the planner plays it: slots, decode quanta, chunks of prompts, KV and adapters in its arena. It is what
the worker's own planner does, with sequences in order of their coming instead of by fair shares.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from manylora_worker.planning.staggering import Staggering
from manylora_worker.planning.step_time import LEAST_CHUNK_TOKENS, StepTime

from manylora.capacity.planning.curve import Curve
from manylora.capacity.planning.traffic import Request

QUANTUM_TOKENS = 16
_READERS = 4  # adapters that are read at a time
_LOOKED_AT = 64  # of those that wait for memory, so many may overtake


@dataclass(frozen=True)
class WorkerSettings:
    """kv_tokens, adapter_bytes: the two parts of the arena."""

    slots: int
    kv_tokens: int
    adapter_bytes: int
    host_bytes: int = 1 << 62
    max_batch_tokens: int = 512
    chunk_tokens: int = 256
    target_step_ms: float = 50.0


class Running:
    """A request that a worker has."""

    __slots__ = ("computed", "ended_at", "first_at", "order", "produced", "ready_at", "request", "unit")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.computed = request.cached_tokens
        self.produced = 0
        self.unit = 0
        self.order = 0
        self.ready_at = request.at_s  # when it can begin
        self.first_at = self.ended_at = 0.0

    @property
    def context(self) -> int:
        return self.request.prompt_tokens + self.produced


class Worker:
    """
    Args:
        told: called when an adapter comes to the device or leaves it.
    """

    def __init__(self, curve: Curve, settings: WorkerSettings, told: Callable[[str, bool], None]) -> None:
        self.curve, self.settings, self._told = curve, settings, told
        self.open = 0  # requests that it has
        self.loads = self.file_loads = self.evictions = self.peak_kv = self.steps = 0
        self.busy_s = self.row_s = 0.0
        self.step_s = 0.0  # since when the step runs
        self._step_time = StepTime()
        self._staggering = Staggering(settings.slots, QUANTUM_TOKENS)
        self._rows = self._kv = self._held = self._sum_ranks = self._order = 0
        self._ends: list[tuple[int, int, Running]] = []
        self._prompts: deque[Running] = deque()
        self._parked: deque[Running] = deque()
        self._loading: list[tuple[float, int, Running]] = []
        self._blocked: deque[Running] = deque()
        self._chunks: list[tuple[Running, int]] = []
        self._active: Counter[str] = Counter()
        self._ranks: Counter[int] = Counter()
        self._pins: Counter[str] = Counter()
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._coming: dict[str, float] = {}
        self._host: OrderedDict[str, int] = OrderedDict()
        self._used = self._host_used = 0
        self._readers = [0.0] * _READERS

    # ---- adapters and memory

    def warm(self, adapter: str, size: int) -> bool:
        """Puts an adapter onto the device, where there is room."""
        if self._used + size > self.settings.adapter_bytes:
            return False
        self._resident[adapter] = size
        self._used += size
        self._keep(adapter, size)
        self._told(adapter, True)
        return True

    def warm_host(self, adapter: str, size: int) -> None:
        if self._host_used + size <= self.settings.host_bytes:
            self._keep(adapter, size)

    def _keep(self, adapter: str, size: int) -> None:
        if adapter not in self._host:
            self._host_used += size
        self._host[adapter] = size
        self._host.move_to_end(adapter)
        while self._host_used > self.settings.host_bytes and len(self._host) > 1:
            _, gone = self._host.popitem(last=False)
            self._host_used -= gone

    def add(self, running: Running, now: float) -> None:
        self.open += 1
        if not self._admit(running, now):
            self._blocked.append(running)

    def _admit(self, running: Running, now: float) -> bool:
        request = running.request
        tokens = self._tokens(request)
        if self._held + tokens > self.settings.kv_tokens:
            return False
        running.ready_at = now
        if request.adapter and not self._bring(running, now):
            return False
        self._held += tokens
        self.peak_kv = max(self.peak_kv, self._held)
        if running.ready_at > now:
            self._order += 1
            heapq.heappush(self._loading, (running.ready_at, self._order, running))
        else:
            self._enqueue(running, self._prompts)
        return True

    def _tokens(self, request: Request) -> int:
        """Of KV, its state among them."""
        return request.prompt_tokens + request.output_tokens + self.curve.shape.state_tokens

    def _bring(self, running: Running, now: float) -> bool:
        """Its adapter onto the device; `ready_at` is when it is there."""
        adapter, size = running.request.adapter, self.curve.shape.rank_bytes * running.request.rank
        if adapter not in self._resident:
            if not self._make_room(size):
                return False
            self.loads += 1
            begins, seconds = now, size / self.curve.load_device_mb_s / 1e6
            if adapter not in self._host:
                self.file_loads += 1
                begins = max(now, heapq.heappop(self._readers))
                seconds += size / self.curve.load_host_mb_s / 1e6
                heapq.heappush(self._readers, begins + seconds)
            self._keep(adapter, size)
            self._resident[adapter] = size
            self._used += size
            self._coming[adapter] = begins + seconds
            self._told(adapter, True)
        self._resident.move_to_end(adapter)
        running.ready_at = max(now, self._coming.get(adapter, 0.0))
        self._pins[adapter] += 1
        return True

    def _make_room(self, size: int) -> bool:
        room = self.settings.adapter_bytes
        while self._used + size > room:
            gone = next((name for name in self._resident if not self._pins[name]), None)
            if gone is None:
                return False
            self._used -= self._resident.pop(gone)
            self._coming.pop(gone, None)
            self.evictions += 1
            self._told(gone, False)
        return True

    # ---- steps

    def begin(self, now: float, seen_until: float) -> float | None:
        """The seconds of the step that begins, with what had come by `seen_until`; None: there is nothing to do."""
        while self._loading and self._loading[0][0] <= seen_until:
            self._enqueue(heapq.heappop(self._loading)[2], self._prompts)
        self._fill(seen_until)
        if not self._rows and not self._chunks:
            return None
        prompt_tokens = sum(tokens for _, tokens in self._chunks)
        for running, _ in self._chunks:
            self._use(running, 1)
        ms = self.curve.step_ms(
            self._rows,
            self._kv,
            sum_ranks=self._sum_ranks,
            max_rank=max(self._ranks, default=0),
            prompt_tokens=prompt_tokens,
        )
        for running, _ in self._chunks:
            self._use(running, -1)
        self._step_time.measured(prompt_tokens, ms / 1e3)
        self.step_s = now
        self.steps += 1
        self.busy_s += ms / 1e3
        self.row_s += self._rows * ms / 1e3
        return ms / 1e3

    def next_ready(self) -> float | None:
        """When an idle worker has something to do by itself."""
        return self._loading[0][0] if self._loading else None

    def end(self, now: float) -> list[Running]:
        """Those that the step has ended."""
        ended: list[Running] = []
        self._kv += self._rows
        for running, tokens in self._chunks:
            running.computed += tokens
            if running.computed >= running.request.prompt_tokens:
                running.first_at, running.produced = now, 1
                self._after(running, now, ended)
            else:
                self._enqueue(running, self._prompts)
        self._chunks.clear()
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, running = heapq.heappop(self._ends)
            self._rows -= 1
            running.produced += running.unit
            self._kv -= running.context
            self._use(running, -1)
            self._after(running, now, ended)
        if ended:
            for _ in range(min(len(self._blocked), _LOOKED_AT)):
                waiting = self._blocked.popleft()
                if not self._admit(waiting, now):
                    self._blocked.append(waiting)
        return ended

    def _after(self, running: Running, now: float, ended: list[Running]) -> None:
        request = running.request
        if running.produced < request.output_tokens:
            self._enqueue(running, self._parked)
            return
        running.ended_at = now
        self.open -= 1
        self._held -= self._tokens(request)
        if request.adapter:
            self._pins[request.adapter] -= 1
        ended.append(running)

    def _enqueue(self, running: Running, queue: deque[Running]) -> None:
        self._order += 1
        running.order = self._order
        queue.append(running)

    def _fill(self, seen_until: float) -> None:
        """The slots, in the order of coming, but for prompts that the step has no tokens left for."""
        free = self.settings.slots - self._rows
        budget = self.settings.max_batch_tokens - self._rows
        most = self._step_time.max_prompt_tokens(self.settings.target_step_ms / 1e3)
        prompt_budget = budget if most is None else min(budget, most)
        num_ended = 0
        skipped: list[Running] = []
        while free and (self._parked or self._prompts):
            prompt = self._prompts[0] if self._prompts else None
            if self._parked and (prompt is None or self._parked[0].order < prompt.order):
                self._decode(self._parked.popleft())
                budget -= 1
                free -= 1
                continue
            assert prompt is not None
            if prompt.ready_at > seen_until and not self._parked:
                break
            self._prompts.popleft()
            left = prompt.request.prompt_tokens - prompt.computed
            most_tokens = max(prompt_budget, 0 if self._chunks else LEAST_CHUNK_TOKENS)
            tokens = min(left, self.settings.chunk_tokens, most_tokens, budget - min(len(self._parked), free - 1))
            is_end = tokens == left
            if tokens <= 0:
                skipped.append(prompt)
                while free and self._parked:
                    self._decode(self._parked.popleft())
                    free -= 1
                break
            if prompt.ready_at > seen_until or (is_end and self._staggering.holds_back(num_ended)):
                skipped.append(prompt)
                continue
            budget -= tokens
            prompt_budget -= tokens
            num_ended += is_end
            free -= 1
            self._chunks.append((prompt, tokens))
        self._prompts.extendleft(reversed(skipped))
        if self._rows or self._chunks:
            self._staggering.planned(min(free, len(skipped)))

    def _decode(self, running: Running) -> None:
        running.unit = min(QUANTUM_TOKENS, running.request.output_tokens - running.produced)
        self._rows += 1
        self._kv += running.context
        self._use(running, 1)
        heapq.heappush(self._ends, (self.steps + running.unit, running.order, running))

    def _use(self, running: Running, change: int) -> None:
        """Its adapter, by this or one more of the step's sequences."""
        adapter, rank = running.request.adapter, running.request.rank
        if not adapter:
            return
        before = self._active[adapter]
        self._active[adapter] = before + change
        if before + change and before:
            return
        self._sum_ranks += rank * change
        self._ranks[rank] += change
        if not self._ranks[rank]:
            del self._ranks[rank]
