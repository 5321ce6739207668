"""The engine: requests in, token outputs out, step by step.

Owns every request in the worker, and through BlockPool, StepPlanner and AdapterCache (which it composes and alone
writes) all blocks, queues and adapter references. One thread, no clock: times are the caller's `now`, in seconds.

A step is `begin_step` (what to compute) -> `submit` (the model starts) -> `wait` (it is through) -> `end_step` (what
came of it); `step` is one turn of these. Commands (`add`, `abort`, `stop_choice`, `prefetch`) come between these calls,
but not between `begin_step` and `submit`. Outputs collect until `take_outputs` and `take_ended`.

With an AheadRunner, the next step is begun before the last one has ended. It is planned as if each sequence that is in
both went on: what the last step draws is a PENDING_TOKEN of the next. Where a sequence turns out to have ended (a stop
token, an abort), what the step in flight still draws for it is dropped: not put out, and not charged where a stop token
came in between. Blocks, adapter and request are let go only when no step in flight has the sequence, and no copy of its
KV is under way (*lingering* until then). A step that fails takes the one in flight behind it along, which built on it.
A copy that fails is the end of the engine: the exception goes through, for nothing on the device can be relied upon.

What a choice's output is: tokens are drawn until a stop token, `max_tokens` or a full context. A stop token ends the
choice with STOP and is *not* part of its output (`stop_token_id` names it); it is otherwise what greedy `generate` of
transformers returns behind the prompt, without the end-of-sequence token. Tokens emitted by an earlier attempt count
towards `max_tokens` and are not put out again.

Work is counted per flow (tenant, class): prompt_tokens are tokens computed in prefill, the one token a further choice
adds included, those computed again after an eviction (which we chose) left out; output_tokens are tokens drawn, stop
tokens included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from manylora_shared.errors import AlreadyExists, InvalidRequest, Overloaded
from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.cache import LOOK_AGAIN_S, AdapterCache, AdapterCacheLimits, TenantAdapters
from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.api import (
    AdapterBackend,
    AdapterTier,
    AheadRunner,
    EngineRequest,
    FinishReason,
    ModelRunner,
    PendingStep,
    Sampled,
    StepBatch,
    SwapRunner,
    TokenOutput,
)
from manylora_worker.engine.block_pool import BlockPool, BlockWork
from manylora_worker.engine.flights import Flight, Over, Part, chunk_of, part_of
from manylora_worker.engine.prefix_cache import PrefixOptions
from manylora_worker.engine.sequence import GroupTimes, Sequence, SequenceGroup, SequenceStatus, sequence_id_of
from manylora_worker.engine.step_planner import FlowSlots, PlannerLimits, Scheduled, StepPlanner
from manylora_worker.engine.swapping import SwapCounts, Swapper
from manylora_worker.engine.tenant_shares import FlowKey, TenantShare, TenantShares


@dataclass(frozen=True)
class EngineLimits:
    planner: PlannerLimits
    adapters: AdapterCacheLimits
    max_requests: int
    """Requests in the engine, waiting ones included."""


@dataclass(frozen=True)
class RequestEnd:
    """The end of a request, after the last output of its last choice."""

    request_id: RequestId
    reason: FinishReason
    """STOP where all choices ended by themselves (each TokenOutput says how), else why the request was cut short."""
    message: str
    cached_prompt_tokens: int
    """Found in the prefix cache at the first admission; what the request finds after an eviction is not counted."""
    num_swaps: int
    """How often one of its sequences went to host memory."""
    num_evictions: int
    """How often one lost its blocks and was computed again."""
    times: GroupTimes
    ended_s: float

    @property
    def adapter_wait_s(self) -> float:
        ready_s = self.times.adapter_ready_s
        return (self.ended_s if ready_s is None else ready_s) - self.times.added_s

    @property
    def prefill_s(self) -> float:
        """From its first step to its first token."""
        if self.times.first_step_s is None:
            return 0.0
        first_token_s = self.times.first_token_s
        return (self.ended_s if first_token_s is None else first_token_s) - self.times.first_step_s

    @property
    def decode_s(self) -> float:
        return 0.0 if self.times.first_token_s is None else self.ended_s - self.times.first_token_s


class FlowTokens(NamedTuple):
    """Cumulative since the engine's start."""

    prompt_tokens: int = 0
    output_tokens: int = 0


class EngineStats(NamedTuple):
    requests: int
    sequences: int
    """Unfinished, waiting ones included."""
    running_sequences: int
    blocks_total: int
    blocks_free: int
    block_size: int
    generated_tokens: int
    steps: int
    failed_steps: int
    preemptions: int
    """Sequences that gave up their slot to others at a unit's end."""
    evictions: int
    """Sequences that lost their blocks and are computed again."""
    recomputed_tokens: int
    swaps_out: int
    """Sequences whose KV went to host memory."""
    swaps_in: int
    """And came back."""
    blocks_out: int
    """Copied to host memory."""
    blocks_in: int
    """Copied back; what was in the prefix cache is not."""
    host_blocks_total: int
    host_blocks_free: int
    adapter_version: int
    """Grows with each change of `EngineCore.adapter_tiers`."""
    tenant_adapters_version: int
    """Grows with each change of `EngineCore.tenant_adapters`."""
    slots_version: int
    """Grows with each change of `EngineCore.flow_slots`."""


class EngineCore:
    """See the module. `prefix`: the prefix cache; None: there is none. `clears_freed`: see BlockPool."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: AdapterBackend,
        limits: EngineLimits,
        prefix: PrefixOptions | None = None,
        *,
        clears_freed: bool = False,
    ) -> None:
        self._runner = runner
        self._ahead = runner if isinstance(runner, AheadRunner) else None
        self._limits = limits
        max_idle_blocks = 0 if prefix is None else prefix.max_idle_blocks(runner.num_blocks)
        self._pool = BlockPool(runner.num_blocks, runner.block_size, max_idle_blocks, clears_freed=clears_freed)
        self._prefix_keys = None if prefix is None else prefix.keys
        self._shares = TenantShares(runner.num_blocks)
        self._swapper = Swapper(runner if isinstance(runner, SwapRunner) else None, self._pool, self._shares)
        self._planner = StepPlanner(self._pool, limits.planner, self._shares, self._swapper, self._prefix_keys)
        self._adapters = AdapterCache(backend, limits.adapters, self._shares.tenant_weight)
        self._groups: dict[RequestId, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._begun: tuple[SequenceOf[Part], BlockWork, float] | None = None
        """Between `begin_step` and `submit`."""
        self._flights: deque[Flight] = deque()
        """Oldest first."""
        self._lingering: dict[Sequence, None] = {}
        """Finished, and in a step in flight or being copied."""
        self._closing: dict[RequestId, RequestEnd] = {}
        """Requests whose last choice is finished and lingers, and how they ended."""
        self._outputs: list[TokenOutput] = []
        self._ended: list[RequestEnd] = []
        self._flows: dict[FlowKey, list[int]] = {}
        """[prompt tokens, output tokens], both cumulative."""
        self._changed_flows: dict[FlowKey, None] = {}
        self._unfinished = 0
        self._num_paused = 0
        self._loading: dict[RequestId, SequenceGroup] = {}
        """Those that wait for their adapter."""
        self._loading_version = 0
        self._generated_tokens = 0
        self._steps = 0
        self._step_ended_s = float("-inf")
        self._preemptions = 0
        self._evictions = 0
        self._recomputed_tokens = 0
        self._failed_steps = 0
        self.step_error: Exception | None = None
        """Why the last step failed; None after one that did not."""

    # -- commands, between steps ---------------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> None:
        """Whether the engine could ever run the request, under its tenant's present bounds. From any thread.

        Raises:
            InvalidRequest: the model never could.
            QuotaExceeded: its tenant's bounds never let it.
        """
        self._check_model(request)
        self._shares.check(request.tenant_id, self._longest_blocks(request), self._pool.block_size)

    def _check_model(self, request: EngineRequest) -> None:
        """As `check`, the tenant's bounds aside: depends on nothing that changes."""
        limits = self._limits.planner
        num_prompt = len(request.prompt_token_ids)
        num_start = num_prompt + len(request.emitted_token_ids)
        assert num_prompt > 0
        assert request.n == 1 or not request.emitted_token_ids
        if num_start >= self._runner.max_context_tokens:
            raise InvalidRequest.of(
                "prompt_token_ids",
                f"{num_start} tokens leave no room in the model's context of {self._runner.max_context_tokens}",
            )
        if len(request.emitted_token_ids) >= request.max_tokens:
            raise InvalidRequest.of("max_tokens", "must be greater than the number of emitted_token_ids")
        if request.n > limits.sequence_slots:
            raise InvalidRequest.of(
                "n", f"{request.n} choices need as many slots, the worker has {limits.sequence_slots}"
            )
        if self._longest_blocks(request) > self._pool.num_blocks:
            longest, capacity = self._longest_tokens(request), self._pool.num_blocks * self._pool.block_size
            raise InvalidRequest.of(
                "max_tokens", f"prompt and output are up to {longest + 1} tokens, the worker can hold {capacity}"
            )

    def _longest_tokens(self, request: EngineRequest) -> int:
        """Tokens of one choice whose KV may come to be held: its last one's never is."""
        return min(len(request.prompt_token_ids) + request.max_tokens, self._runner.max_context_tokens) - 1

    def _longest_blocks(self, request: EngineRequest) -> int:
        return self._pool.blocks_for(self._longest_tokens(request))

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        """What a tenant may have from now on; None: the default weights and no bounds.

        Requests that are here run to their end, see TenantShares.accept. A hard cap that falls below what is held is
        reached as soon as the running quanta are over.
        """
        assert self._begun is None
        self._shares.set(tenant_id, share)
        self._note_longest(tenant_id)
        self._planner.shares_changed(tenant_id)
        self._adapters.weights_changed()

    def _note_longest(self, tenant_id: TenantId) -> None:
        requests = (group.request for group in self._groups.values())
        longest = (self._longest_blocks(request) for request in requests if request.tenant_id == tenant_id)
        self._shares.accept(tenant_id, max(longest, default=0))

    def add(self, request: EngineRequest, now: float) -> None:
        """Takes a request that `check` accepted. Its tenant's bounds may have fallen since: it runs nevertheless.

        Raises:
            InvalidRequest: the model could never run it.
            AlreadyExists: a request of this id is there.
            Overloaded: `max_requests` are there.
        """
        assert self._begun is None
        self._check_model(request)
        if request.request_id in self._groups:
            raise AlreadyExists(f"request_id: {request.request_id} is being executed")
        if len(self._groups) >= self._limits.max_requests:
            raise Overloaded(f"the worker has {len(self._groups)} requests")
        self._arrivals += 1
        group = SequenceGroup(request, self._arrivals, GroupTimes(added_s=now))
        max_output_tokens = min(request.max_tokens, self._runner.max_context_tokens - len(request.prompt_token_ids))
        for choice in range(request.n):
            sequence = Sequence(self._arrivals * _CHOICES_BOUND + choice, group, choice, max_output_tokens)
            group.sequences.append(sequence)
            self._sequences[sequence.sequence_id] = sequence
        self._groups[request.request_id] = group
        self._unfinished += request.n
        if self._longest_blocks(request) > self._shares.hard(request.tenant_id):
            self._note_longest(request.tenant_id)
        if request.adapter_uid is None or self._adapters.acquire(
            request.request_id, request.tenant_id, request.adapter_uid, now
        ):
            self._adapter_ready(group, now)
        else:
            self._loading[request.request_id] = group
            self._loading_version += 1

    def abort(self, request_id: RequestId, now: float) -> None:
        """Ends the request's unfinished choices with ABORTED and frees all that it holds. Unknown ids are ignored."""
        assert self._begun is None
        group = self._groups.get(request_id)
        if group is not None:
            self._end_group(group, FinishReason.ABORTED, "aborted", now)

    def stop_choice(self, request_id: RequestId, choice: int, now: float) -> None:
        """Ends one choice with STOP; the others go on. Unknown and finished ones are ignored."""
        assert self._begun is None
        group = self._groups.get(request_id)
        if group is None or choice >= len(group.sequences):
            return
        sequence = group.sequences[choice]
        if not sequence.is_finished:
            self._finish(sequence, FinishReason.STOP, now)

    def pause(self, request_id: RequestId) -> None:
        """The request takes no further slot until `resume`; a unit that runs goes on to its end. Unknown ids are
        ignored. Nothing of it is lost: its KV stays until others take it, and then it is computed again."""
        self._set_paused(request_id, is_paused=True)

    def resume(self, request_id: RequestId) -> None:
        """The request goes on. Unknown ids are ignored."""
        self._set_paused(request_id, is_paused=False)

    def _set_paused(self, request_id: RequestId, *, is_paused: bool) -> None:
        assert self._begun is None
        group = self._groups.get(request_id)
        if group is None or group.is_paused == is_paused:
            return
        group.is_paused = is_paused
        self._num_paused += 1 if is_paused else -1
        unfinished = [s for s in group.sequences if not s.is_finished]
        if is_paused:
            self._planner.pause(unfinished)
        else:
            self._planner.resume(unfinished)

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId | None = None) -> None:
        """Loads an adapter that a request of the tenant may need soon. Best effort."""
        assert self._begun is None
        self._adapters.prefetch(adapter_uid, tenant_id)

    def set_pins(self, pins: Mapping[TenantId, SequenceOf[Pin]], largest_bytes: int) -> None:
        """Which adapters stay on the device from now on; see AdapterCache.set_pins."""
        assert self._begun is None
        self._adapters.set_pins(pins, largest_bytes)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[TokenOutput]:
        """One turn: starts a step if one can be, ends the oldest if it must be; the outputs since `take_outputs`."""
        batch = self.begin_step(now)
        if batch is not None:
            self.submit(batch)
        if self.must_wait or (batch is None and self._flights):
            self.end_step(self.wait(), now)
        return self.take_outputs()

    @property
    def num_in_flight(self) -> int:
        """Steps that are submitted and not ended."""
        return len(self._flights)

    @property
    def must_wait(self) -> bool:
        """Whether the oldest step in flight has to end before another may begin."""
        return len(self._flights) > (self._ahead is not None)

    def begin_step(self, now: float) -> StepBatch | None:
        """Decides the next step; None where nothing can be computed now, or not before the step in flight has ended.

        A batch must go to `submit`.
        """
        assert self._begun is None
        assert not self.must_wait
        if self._flights and isinstance(self._flights[0].pending, Over):
            return None
        self._pump_adapters(now)
        self._pump_copies()
        plan = self._planner.plan(is_ahead=bool(self._flights))
        self._preemptions += plan.num_yielded
        self._evictions += plan.num_evicted
        if not plan.scheduled:
            return None
        for item in plan.scheduled:
            times = item.sequence.group.times
            if times.first_step_s is None:
                times.first_step_s = now
        work = self._pool.take_work()
        chunks = [chunk_of(item) for item in plan.scheduled]
        self._begun = ([part_of(item) for item in plan.scheduled], work, now)
        return StepBatch(chunks, copy_blocks=work.copies, clear_blocks=work.clears)

    def submit(self, batch: StepBatch) -> None:
        """Has the model compute what `begin_step` gave: at once, or beside what comes next."""
        assert self._begun is not None
        (parts, work, begun_s), self._begun = self._begun, None
        pending: PendingStep
        try:
            pending = Over(self._runner.execute(batch)) if self._ahead is None else self._ahead.submit(batch)
        except Exception as error:  # whatever it is, it ends the batch's requests (end_step) and is told by step_error
            pending = Over(error)
        self._flights.append(Flight(parts, work, pending, begun_s))
        for part in parts:
            self._advance(part.scheduled)

    def wait(self) -> SequenceOf[Sampled] | Exception:
        """What came of the oldest step in flight. Touches no state, so it may take its time."""
        try:
            return self._flights[0].pending.result()
        except Exception as error:
            return error

    def end_step(self, result: SequenceOf[Sampled] | Exception, now: float) -> None:
        """Takes what the model made of the oldest step in flight. An exception ends every request of it and of the
        step behind it, and no other."""
        flight = self._flights.popleft()
        self._steps += 1
        if not isinstance(result, Exception):
            result = self._check_result(flight.parts, result)
        if isinstance(result, Exception):
            self._fail(flight, result, now)
            return
        self.step_error = None
        self._measure(flight, now)
        self._pool.commit(flight.work)
        drawn = iter(result)
        for part in flight.parts:
            self._settle(part, next(drawn) if part.scheduled.samples else None, now)
        self._let_go()

    def drain(self, now: float) -> None:
        """Ends the steps and copies that are under way; what was aborted is let go then. Blocks."""
        while self._flights:
            self.end_step(self.wait(), now)
        self._swapper.wait()
        self._pump_copies()

    def take_outputs(self) -> list[TokenOutput]:
        """Outputs since the last call, in order."""
        taken, self._outputs = self._outputs, []
        return taken

    def take_ended(self) -> list[RequestEnd]:
        """Requests that ended since the last call; nothing of them is left in the engine."""
        taken, self._ended = self._ended, []
        return taken

    # -- what others may know ------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether further steps may do something: some request is not paused, adapters are being loaded, or KV is being
        copied."""
        return len(self._groups) > self._num_paused or self._adapters.has_work or self._swapper.num_copying > 0

    def rest_s(self) -> float | None:
        """Where no step could begin: when to try again, in seconds, unless there is news (a command, or a load that
        ended); None: then only."""
        if not self.has_work():
            return None
        num_loading = sum(not group.is_paused for group in self._loading.values())
        is_polled = len(self._groups) - self._num_paused > num_loading or self._swapper.num_copying > 0
        return LOOK_AGAIN_S if self._adapters.is_settled and not is_polled else _POLL_S

    def request_ids(self) -> list[RequestId]:
        """Of the requests in the engine, oldest first."""
        return list(self._groups)

    def stats(self) -> EngineStats:
        swaps = self._swapper.total
        return EngineStats(
            requests=len(self._groups),
            sequences=self._unfinished,
            running_sequences=self._planner.num_running,
            blocks_total=self._pool.num_blocks,
            blocks_free=self._pool.num_free,
            block_size=self._pool.block_size,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            failed_steps=self._failed_steps,
            preemptions=self._preemptions,
            evictions=self._evictions,
            recomputed_tokens=self._recomputed_tokens,
            swaps_out=swaps.swaps_out,
            swaps_in=swaps.swaps_in,
            blocks_out=swaps.blocks_out,
            blocks_in=swaps.blocks_in,
            host_blocks_total=self._swapper.host.num_blocks,
            host_blocks_free=self._swapper.host.num_free,
            adapter_version=self._adapters.version,
            tenant_adapters_version=self._adapters.tenants_version,
            slots_version=self._planner.slots_version + self._loading_version,
        )

    def adapter_tiers(self) -> Mapping[AdapterUid, AdapterTier]:
        return self._adapters.tiers()

    def tenant_adapters(self) -> Mapping[TenantId, TenantAdapters]:
        """Of all tenants that have, had or pin adapters here."""
        return self._adapters.tenants()

    def flow_slots(self) -> Mapping[FlowKey, FlowSlots]:
        """Of the flows with a slot, and of those with sequences that cannot use one: their own hard cap keeps them, or
        their adapters are being loaded."""
        slots = self._planner.flow_slots()
        for group in self._loading.values():
            flow = (group.request.tenant_id, group.request.qos_class)
            known = slots.get(flow, FlowSlots())
            slots[flow] = known._replace(num_loading=known.num_loading + group.num_unfinished)
        return slots

    def flows(self) -> Mapping[FlowKey, FlowTokens]:
        return {flow: FlowTokens(*tokens) for flow, tokens in self._flows.items()}

    def take_changed_flows(self) -> dict[FlowKey, FlowTokens]:
        """The flows whose counters grew since the last call."""
        changed = {flow: FlowTokens(*self._flows[flow]) for flow in self._changed_flows}
        self._changed_flows.clear()
        return changed

    def blocks_held_by(self, tenant_id: TenantId) -> int:
        return self._pool.held_by(tenant_id)

    def blocks_held(self) -> dict[TenantId, int]:
        """By each tenant that holds any."""
        return self._pool.held()

    def host_blocks_held(self) -> dict[TenantId, int]:
        """Of host memory, by each tenant that has any."""
        return self._swapper.host.held()

    def swaps(self) -> Mapping[TenantId, SwapCounts]:
        """By each tenant that had any."""
        return self._swapper.counts()

    def tenant_of(self, holding_id: int) -> TenantId:
        """The tenant of a sequence that is in the engine, by the id that the runner sees."""
        return self._sequences[sequence_id_of(holding_id)].tenant_id

    def check_invariants(self) -> None:
        """Asserts that the parts agree; between steps. For tests and idle moments, not for each step."""
        self._pool.check_invariants()
        self._adapters.check_invariants()
        assert self._begun is not None or self._pool.pending_copies() == [], "a copy was planned and not made"
        references: dict[int, int] = {}
        self._planner.check_invariants()
        everywhere = [*self._planner.running, *self._planner.parked, *self._planner.waiting]
        queued = {id(s) for s in everywhere}
        assert len(queued) == len(everywhere), "a sequence is queued twice"
        for group in self._groups.values():
            assert (group.leader is None) == (group.request.request_id in self._closing), "an ended request was kept"
            for sequence in group.sequences:
                assert self._sequences.get(sequence.sequence_id) is sequence
                for block_id in sequence.block_table:
                    references[block_id] = references.get(block_id, 0) + 1
                    assert self._pool.owner_of(block_id) == sequence.tenant_id
                _check_sequence(sequence, is_queued=id(sequence) in queued)
                queued.discard(id(sequence))
            if group.request.adapter_uid is not None:
                waits = any(s.status is SequenceStatus.WAITING_ADAPTER for s in group.sequences)
                assert waits != self._adapters.uses(group.request.request_id)
                assert waits == (group.request.request_id in self._loading)
        assert not queued, "a sequence of no request is queued"
        in_flight: dict[Sequence, int] = {}
        for part in (part for flight in self._flights for part in flight.parts):
            sequence = part.scheduled.sequence
            in_flight[sequence] = in_flight.get(sequence, 0) + 1
            assert part.holding_id == sequence.holding_id, "a sequence lost its blocks to another in mid-step"
        assert all(s.num_steps_in_flight == in_flight.get(s, 0) for s in self._sequences.values())
        assert all(s.num_pending_tokens <= s.num_steps_in_flight for s in self._sequences.values())
        self._swapper.check_invariants(list(self._sequences.values()))
        under_way = [*in_flight, *self._swapper.copying]
        assert self._lingering.keys() == {s for s in under_way if s.is_finished}
        assert len(self._sequences) == sum(len(g.sequences) for g in self._groups.values())
        assert self._num_paused == sum(g.is_paused for g in self._groups.values())
        assert self._unfinished == sum(g.num_unfinished for g in self._groups.values())
        assert len(references) == self._pool.num_held, "a block is held by no sequence"
        with_adapter = sum(g.request.adapter_uid is not None for g in self._groups.values())
        assert self._adapters.num_holders == with_adapter, "an adapter is held by no request"

    # -- inside --------------------------------------------------------------------------------------------------

    def _pump_adapters(self, now: float) -> None:
        if not self._adapters.has_work:
            return
        update = self._adapters.pump(now)
        for request_id in update.ready:
            self._adapter_ready(self._groups[request_id], now)
        for failure in update.failed:
            for request_id in failure.holders:
                group = self._groups[request_id]
                self._end_group(group, FinishReason.ADAPTER_FAILED, failure.message, now)

    def _pump_copies(self) -> None:
        for sequence in self._swapper.poll():
            if sequence.is_finished:
                self._swapper.ended(sequence)
            else:
                self._planner.copy_ended(sequence)
        self._let_go()

    def _measure(self, flight: Flight, now: float) -> None:
        """How long a step took: the device begins it when the one before it is through."""
        counts = [part.scheduled.num_tokens for part in flight.parts]
        num_prefill = sum(part.num_new_tokens + part.num_recomputed_tokens for part in flight.parts)
        self._swapper.costs.computed(num_prefill, sum(counts), now - max(flight.begun_s, self._step_ended_s))
        self._step_ended_s = now

    def _adapter_ready(self, group: SequenceGroup, now: float) -> None:
        group.times.adapter_ready_s = now
        self._loading_over(group.request.request_id)
        for sequence in group.sequences:
            if not sequence.is_finished:
                sequence.move_to(SequenceStatus.WAITING)
        leader = group.leader
        assert leader is not None
        self._planner.enqueue(leader)

    def _loading_over(self, request_id: RequestId) -> None:
        if self._loading.pop(request_id, None) is not None:
            self._loading_version += 1

    def _check_result(self, parts: SequenceOf[Part], result: SequenceOf[Sampled]) -> SequenceOf[Sampled] | Exception:
        expected = [part.holding_id for part in parts if part.scheduled.samples]
        if [sampled.sequence_id for sampled in result] != expected:
            return RuntimeError("the model's answer is not that of the batch")
        for sampled in result:
            if sampled.error is None and not 0 <= sampled.token_id < self._runner.vocab_size:
                return RuntimeError(f"token {sampled.token_id} is not in the vocabulary")
        return result

    def _advance(self, item: Scheduled) -> None:
        """One sequence, when a step with it is started."""
        sequence, group = item.sequence, item.sequence.group
        is_prefill = sequence.status is SequenceStatus.PREFILL
        is_charged = is_prefill and sequence.num_new_tokens(item.num_tokens) > 0
        sequence.advance(item.num_tokens, samples=item.samples)
        if is_charged:
            sequence.num_charged_tokens = sequence.num_computed_tokens
        if not item.samples:
            return
        if sequence.num_output_tokens >= sequence.max_output_tokens:
            sequence.move_to(SequenceStatus.ENDING)
        elif is_prefill:
            sequence.move_to(SequenceStatus.DECODE)
        if not group.is_forked:
            group.is_forked = True
            others = [s for s in group.sequences if s is not sequence and not s.is_finished]
            self._planner.fork(sequence, others)

    def _settle(self, part: Part, sampled: Sampled | None, now: float) -> None:
        """One sequence, when a step that computed its tokens is over."""
        sequence = part.scheduled.sequence
        group = sequence.group
        self._leave_step(part)
        self._recomputed_tokens += part.num_recomputed_tokens
        is_taken = sampled is not None and not sequence.is_finished
        self._count(group, part.num_new_tokens, int(is_taken))
        if sequence.is_finished:
            return
        self._publish(part)
        if sampled is not None:
            if group.times.first_token_s is None:
                group.times.first_token_s = now
            self._take_token(sequence, sampled, now)

    def _leave_step(self, part: Part) -> None:
        sequence = part.scheduled.sequence
        sequence.num_steps_in_flight -= 1
        sequence.num_pending_tokens -= part.scheduled.samples

    def _let_go(self) -> None:
        """Frees what lingers no more."""
        for sequence in [s for s in self._lingering if not (s.num_steps_in_flight or s.is_copying)]:
            del self._lingering[sequence]
            self._planner.release_blocks(sequence)
            request_id = sequence.group.request.request_id
            if request_id in self._closing and not any(s in self._lingering for s in sequence.group.sequences):
                self._close(sequence.group, self._closing.pop(request_id))

    def _fail(self, flight: Flight, error: Exception, now: float) -> None:
        self.step_error = error
        message = f"the step failed: {type(error).__name__}: {error}"
        lost = [flight, *self._flights]
        while self._flights:
            self.wait()  # its blocks are about to be given away
            self._flights.popleft()
        self._failed_steps += len(lost)
        self._steps += len(lost) - 1
        for each in lost:
            self._pool.reject(each.work)
            for part in each.parts:
                self._leave_step(part)
        for each in lost:
            for part in each.parts:
                self._end_group(part.scheduled.sequence.group, FinishReason.ERROR, message, now, refund=True)
        self._let_go()

    def _publish(self, part: Part) -> None:
        """Lets the tenant's lookups find the blocks that the part has filled."""
        block_size = self._pool.block_size
        first, behind = (part.end - part.scheduled.num_tokens) // block_size, part.end // block_size
        if first == behind or self._prefix_keys is None:
            return
        sequence = part.scheduled.sequence
        for index in range(first, behind):
            key = self._prefix_keys.key_at(sequence, index, block_size)
            self._pool.publish(sequence.block_table[index], key)

    def _take_token(self, sequence: Sequence, sampled: Sampled, now: float) -> None:
        request = sequence.group.request
        # What a later step draws is of no use then.
        is_in_vain = sequence.num_steps_in_flight > 0
        if sampled.error is not None:
            self._end_group(sequence.group, FinishReason.ERROR, sampled.error, now, refund=is_in_vain)
            return
        if sampled.token_id in request.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, now, stop_token_id=sampled.token_id, refund=is_in_vain)
            return
        position = len(sequence.output_token_ids)
        sequence.output_token_ids.append(sampled.token_id)
        is_last = position + 1 >= sequence.max_output_tokens
        self._outputs.append(
            TokenOutput(
                request_id=request.request_id,
                choice=sequence.choice,
                first_position=position,
                token_ids=(sampled.token_id,),
                logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
        )
        if is_last:
            self._remove(sequence, FinishReason.LENGTH, now)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        message: str = "",
        stop_token_id: int | None = None,
        refund: bool = False,
    ) -> None:
        """Ends a choice without a further token. refund: see StepPlanner.remove."""
        self._outputs.append(
            TokenOutput(
                request_id=sequence.group.request.request_id,
                choice=sequence.choice,
                first_position=len(sequence.output_token_ids),
                token_ids=(),
                finish_reason=reason,
                message=message,
                stop_token_id=stop_token_id,
            )
        )
        self._remove(sequence, reason, now, message=message, refund=refund)

    def _remove(
        self, sequence: Sequence, reason: FinishReason, now: float, *, message: str = "", refund: bool = False
    ) -> None:
        """Frees what a choice holds, and with the last one all of its request, or leaves that to `_let_go`."""
        group = sequence.group
        sequence.move_to(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        self._unfinished -= 1
        was_queued = self._planner.remove(sequence, refund=refund)
        if sequence.num_steps_in_flight or sequence.is_copying:
            self._lingering[sequence] = None
        else:
            self._planner.release_blocks(sequence)
        leader = group.leader
        if leader is not None:
            if was_queued and not group.is_forked:
                self._planner.enqueue(leader)  # the prompt is computed anew for the next choice
            return
        cut_short = reason in (FinishReason.ABORTED, FinishReason.ADAPTER_FAILED, FinishReason.ERROR)
        end = RequestEnd(
            request_id=group.request.request_id,
            reason=reason if cut_short else FinishReason.STOP,
            message=message,
            cached_prompt_tokens=group.cached_prompt_tokens or 0,
            num_swaps=group.num_swaps,
            num_evictions=group.num_evictions,
            times=group.times,
            ended_s=now,
        )
        if any(each in self._lingering for each in group.sequences):
            self._closing[end.request_id] = end
        else:
            self._close(group, end)

    def _close(self, group: SequenceGroup, end: RequestEnd) -> None:
        """No step in flight has a choice of it any more."""
        self._adapters.release(end.request_id, end.ended_s)
        del self._groups[end.request_id]
        self._num_paused -= group.is_paused
        self._loading_over(end.request_id)
        if self._longest_blocks(group.request) == self._shares.hard(group.request.tenant_id):
            self._note_longest(group.request.tenant_id)
        for each in group.sequences:
            del self._sequences[each.sequence_id]
        self._ended.append(end)

    def _end_group(
        self, group: SequenceGroup, reason: FinishReason, message: str, now: float, *, refund: bool = False
    ) -> None:
        """Ends all choices that are left, the last one first: so none becomes the leader in between."""
        for sequence in reversed(group.sequences):
            if not sequence.is_finished:
                if reason is FinishReason.ERROR:
                    self._pool.unpublish(sequence.block_table)  # a retry must not find what may have been the cause
                self._finish(sequence, reason, now, message=message, refund=refund)

    def _count(self, group: SequenceGroup, prompt_tokens: int, output_tokens: int) -> None:
        key = (group.request.tenant_id, group.request.qos_class)
        tokens = self._flows.setdefault(key, [0, 0])
        tokens[0] += prompt_tokens
        tokens[1] += output_tokens
        self._changed_flows[key] = None
        self._generated_tokens += output_tokens


_POLL_S = 0.002
"""How often it is asked whether copies of KV are over, where nothing else is to do."""
_CHOICES_BOUND = 64
"""Sequence ids: arrival x this + choice."""


def _check_sequence(sequence: Sequence, *, is_queued: bool) -> None:
    computed = sequence.num_computed_tokens
    match sequence.status:
        case SequenceStatus.FINISHED:
            assert not is_queued
            assert not sequence.block_table or sequence.num_steps_in_flight or sequence.is_copying
        case SequenceStatus.ENDING:
            assert sequence.num_pending_tokens
            assert computed == sequence.num_tokens - 1
        case SequenceStatus.WAITING_ADAPTER:
            assert not is_queued
            assert computed == 0
            assert not sequence.block_table
        case SequenceStatus.WAITING:
            is_behind_leader = not sequence.group.is_forked and sequence is not sequence.group.leader
            assert is_queued != is_behind_leader
            assert computed == 0
            assert not sequence.block_table
        case SequenceStatus.SWAPPED:
            assert is_queued
            assert 0 < computed < sequence.num_tokens
            assert sequence.swap is not None
            assert bool(sequence.block_table) == sequence.is_copying
        case SequenceStatus.PREFILL:
            assert is_queued
            assert computed < sequence.num_tokens
        case SequenceStatus.DECODE:
            assert is_queued
            assert computed == sequence.num_tokens - 1
