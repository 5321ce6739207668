"""The engine: requests in, token outputs out, one step at a time.

Owns every request in the worker, and through BlockPool, StepPlanner and AdapterCache (which it composes and alone
writes) all blocks, queues and adapter references. One thread, no clock: times are the caller's `now`, in seconds.

A step is `begin_step` (what to compute) -> `run` (the model) -> `end_step` (what came of it); `step` is the three
together. Commands (`add`, `abort`, `stop_choice`, `prefetch`) come between steps only: a *token boundary*. Outputs
collect until `take_outputs` and `take_ended`.

What a choice's output is: tokens are drawn until a stop token, `max_tokens` or a full context. A stop token ends the
choice with STOP and is *not* part of its output (`stop_token_id` names it); it is otherwise what greedy `generate` of
transformers returns behind the prompt, without the end-of-sequence token. Tokens emitted by an earlier attempt count
towards `max_tokens` and are not put out again.

Work is counted per flow (tenant, class): prompt_tokens are tokens computed in prefill, the one token a further choice
adds included, those computed again after an eviction (which we chose) left out; output_tokens are tokens drawn, stop
tokens included.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from manylora_shared.errors import AlreadyExists, InvalidRequest, Overloaded
from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.cache import AdapterCache, AdapterCacheLimits
from manylora_worker.engine.api import (
    AdapterBackend,
    AdapterTier,
    EngineRequest,
    FinishReason,
    ModelRunner,
    Sampled,
    SequenceChunk,
    StepBatch,
    TokenOutput,
)
from manylora_worker.engine.block_pool import BlockPool
from manylora_worker.engine.prefix_cache import PrefixOptions
from manylora_worker.engine.sequence import GroupTimes, Sequence, SequenceGroup, SequenceStatus, sequence_id_of
from manylora_worker.engine.step_planner import PlannerLimits, Scheduled, StepPlanner
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


@dataclass(frozen=True)
class FlowTokens:
    """Cumulative since the engine's start."""

    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class EngineStats:
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
    adapter_version: int
    """Grows with each change of `EngineCore.adapter_tiers`."""


class EngineCore:
    """See the module. `prefix`: the prefix cache; None: there is none."""

    def __init__(
        self, runner: ModelRunner, backend: AdapterBackend, limits: EngineLimits, prefix: PrefixOptions | None = None
    ) -> None:
        self._runner = runner
        self._limits = limits
        max_idle_blocks = 0 if prefix is None else prefix.max_idle_blocks(runner.num_blocks)
        self._pool = BlockPool(runner.num_blocks, runner.block_size, max_idle_blocks)
        self._prefix_keys = None if prefix is None else prefix.keys
        self._shares = TenantShares(runner.num_blocks)
        self._planner = StepPlanner(
            self._pool, limits.planner, self._shares, runner.max_context_tokens, self._prefix_keys
        )
        self._adapters = AdapterCache(backend, limits.adapters)
        self._groups: dict[RequestId, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._in_step: SequenceOf[Scheduled] | None = None
        self._outputs: list[TokenOutput] = []
        self._ended: list[RequestEnd] = []
        self._flows: dict[FlowKey, list[int]] = {}
        """[prompt tokens, output tokens], both cumulative."""
        self._changed_flows: dict[FlowKey, None] = {}
        self._unfinished = 0
        self._generated_tokens = 0
        self._steps = 0
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
        assert self._in_step is None
        self._shares.set(tenant_id, share)
        self._note_longest(tenant_id)
        self._planner.shares_changed(tenant_id)

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
        assert self._in_step is None
        self._check_model(request)
        if request.request_id in self._groups:
            raise AlreadyExists(f"request_id: {request.request_id} is being executed")
        if len(self._groups) >= self._limits.max_requests:
            raise Overloaded(f"the worker has {len(self._groups)} requests")
        self._arrivals += 1
        group = SequenceGroup(request, self._arrivals, GroupTimes(added_s=now))
        for choice in range(request.n):
            sequence = Sequence(self._arrivals * _CHOICES_BOUND + choice, group, choice)
            group.sequences.append(sequence)
            self._sequences[sequence.sequence_id] = sequence
        self._groups[request.request_id] = group
        self._unfinished += request.n
        if self._longest_blocks(request) > self._shares.hard(request.tenant_id):
            self._note_longest(request.tenant_id)
        if request.adapter_uid is None or self._adapters.acquire(request.request_id, request.adapter_uid):
            self._adapter_ready(group, now)

    def abort(self, request_id: RequestId, now: float) -> None:
        """Ends the request's unfinished choices with ABORTED and frees all that it holds. Unknown ids are ignored."""
        assert self._in_step is None
        group = self._groups.get(request_id)
        if group is not None:
            self._end_group(group, FinishReason.ABORTED, "aborted", now)

    def stop_choice(self, request_id: RequestId, choice: int, now: float) -> None:
        """Ends one choice with STOP; the others go on. Unknown and finished ones are ignored."""
        assert self._in_step is None
        group = self._groups.get(request_id)
        if group is None or choice >= len(group.sequences):
            return
        sequence = group.sequences[choice]
        if not sequence.is_finished:
            self._finish(sequence, FinishReason.STOP, now)

    def prefetch(self, adapter_uid: AdapterUid) -> None:
        """Loads an adapter that a request may need soon. Best effort."""
        assert self._in_step is None
        self._adapters.prefetch(adapter_uid)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[TokenOutput]:
        """One whole step, and the outputs since the last `take_outputs`."""
        batch = self.begin_step(now)
        if batch is not None:
            self.end_step(self.run(batch), now)
        return self.take_outputs()

    def begin_step(self, now: float) -> StepBatch | None:
        """Decides the next step; None where nothing can be computed now. A batch must go to `run` and `end_step`."""
        assert self._in_step is None
        self._pump_adapters(now)
        plan = self._planner.plan()
        self._preemptions += plan.num_yielded
        self._evictions += plan.num_evicted
        if not plan.scheduled:
            return None
        for item in plan.scheduled:
            times = item.sequence.group.times
            if times.first_step_s is None:
                times.first_step_s = now
        self._in_step = plan.scheduled
        return StepBatch(
            chunks=[_chunk_of(item) for item in plan.scheduled],
            copy_blocks=self._pool.pending_copies(),
            clear_blocks=self._pool.pending_clears(),
        )

    def run(self, batch: StepBatch) -> SequenceOf[Sampled] | Exception:
        """Runs the model. Touches no state, so it may take its time while others read `stats` and the like."""
        try:
            return self._runner.execute(batch)
        except Exception as error:  # whatever it is, it ends the batch's requests (end_step) and is told by step_error
            return error

    def end_step(self, result: SequenceOf[Sampled] | Exception, now: float) -> None:
        """Takes what the model made of the batch. An exception ends every request of the batch, and no other."""
        scheduled, self._in_step = self._in_step, None
        assert scheduled is not None
        self._steps += 1
        if not isinstance(result, Exception):
            result = self._check_result(scheduled, result)
        if isinstance(result, Exception):
            self.step_error = result
            self._failed_steps += 1
            self._planner.step_failed()
            for item in scheduled:
                message = f"the step failed: {type(result).__name__}: {result}"
                self._end_group(item.sequence.group, FinishReason.ERROR, message, now)
            return
        self.step_error = None
        self._pool.commit()
        drawn = iter(result)
        for item in scheduled:
            self._advance(item, next(drawn) if item.samples else None, now)

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
        """Whether further steps may do something: requests are there, or adapters are being loaded."""
        return bool(self._groups) or self._adapters.has_work

    def request_ids(self) -> list[RequestId]:
        """Of the requests in the engine, oldest first."""
        return list(self._groups)

    def stats(self) -> EngineStats:
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
            adapter_version=self._adapters.version,
        )

    def adapter_tiers(self) -> Mapping[AdapterUid, AdapterTier]:
        return self._adapters.tiers()

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

    def tenant_of(self, holding_id: int) -> TenantId:
        """The tenant of a sequence that is in the engine, by the id that the runner sees."""
        return self._sequences[sequence_id_of(holding_id)].tenant_id

    def check_invariants(self) -> None:
        """Asserts that the parts agree; between steps. For tests and idle moments, not for each step."""
        self._pool.check_invariants()
        self._adapters.check_invariants()
        assert self._pool.pending_copies() == [], "a copy was planned and not made"
        references: dict[int, int] = {}
        self._planner.check_invariants()
        everywhere = [*self._planner.running, *self._planner.parked, *self._planner.waiting]
        queued = {id(s) for s in everywhere}
        assert len(queued) == len(everywhere), "a sequence is queued twice"
        for group in self._groups.values():
            assert group.leader is not None, "an ended request was kept"
            for sequence in group.sequences:
                assert self._sequences.get(sequence.sequence_id) is sequence
                for block_id in sequence.block_table:
                    references[block_id] = references.get(block_id, 0) + 1
                    assert self._pool.owner_of(block_id) == sequence.tenant_id
                _check_sequence(sequence, is_queued=id(sequence) in queued)
                queued.discard(id(sequence))
            if group.request.adapter_uid is not None:
                waits = any(s.status is SequenceStatus.WAITING_ADAPTER for s in group.sequences)
                assert waits != self._adapters.is_pinned(group.request.request_id)
        assert not queued, "a sequence of no request is queued"
        assert len(self._sequences) == sum(len(g.sequences) for g in self._groups.values())
        assert self._unfinished == sum(g.num_unfinished for g in self._groups.values())
        assert len(references) == self._pool.num_held, "a block is held by no sequence"
        with_adapter = sum(g.request.adapter_uid is not None for g in self._groups.values())
        assert self._adapters.num_holders == with_adapter, "an adapter is held by no request"

    # -- inside --------------------------------------------------------------------------------------------------

    def _pump_adapters(self, now: float) -> None:
        if not self._adapters.has_work:
            return
        update = self._adapters.pump()
        for request_id in update.ready:
            self._adapter_ready(self._groups[request_id], now)
        for failure in update.failed:
            for request_id in failure.holders:
                group = self._groups[request_id]
                self._end_group(group, FinishReason.ADAPTER_FAILED, failure.message, now)

    def _adapter_ready(self, group: SequenceGroup, now: float) -> None:
        group.times.adapter_ready_s = now
        for sequence in group.sequences:
            if not sequence.is_finished:
                sequence.move_to(SequenceStatus.WAITING)
        leader = group.leader
        assert leader is not None
        self._planner.enqueue(leader)

    def _check_result(
        self, scheduled: SequenceOf[Scheduled], result: SequenceOf[Sampled]
    ) -> SequenceOf[Sampled] | Exception:
        expected = [item.sequence.holding_id for item in scheduled if item.samples]
        if [sampled.sequence_id for sampled in result] != expected:
            return RuntimeError("the model's answer is not that of the batch")
        for sampled in result:
            if sampled.error is None and not 0 <= sampled.token_id < self._runner.vocab_size:
                return RuntimeError(f"token {sampled.token_id} is not in the vocabulary")
        return result

    def _advance(self, item: Scheduled, sampled: Sampled | None, now: float) -> None:
        """One sequence after a step that computed its tokens."""
        sequence, group = item.sequence, item.sequence.group
        is_prefill = sequence.status is SequenceStatus.PREFILL
        new_tokens = 0
        if is_prefill:
            new_tokens = sequence.num_new_tokens(item.num_tokens)
            self._recomputed_tokens += item.num_tokens - new_tokens
        sequence.num_computed_tokens += item.num_tokens
        if new_tokens:
            sequence.num_charged_tokens = sequence.num_computed_tokens
        self._publish(sequence, item.num_tokens)
        self._count(group, new_tokens, 0 if sampled is None else 1)
        if sequence.is_finished or sampled is None:
            return
        if is_prefill:
            sequence.move_to(SequenceStatus.DECODE)
        if group.times.first_token_s is None:
            group.times.first_token_s = now
        if not group.is_forked:
            group.is_forked = True
            others = [s for s in group.sequences if s is not sequence and not s.is_finished]
            self._planner.fork(sequence, others)
        self._take_token(sequence, sampled, now)

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        """Lets the tenant's lookups find the blocks that the step's `num_computed` tokens have filled."""
        if self._prefix_keys is None or sequence.is_finished:
            return
        block_size = self._pool.block_size
        first = (sequence.num_computed_tokens - num_computed) // block_size
        for index in range(first, sequence.num_computed_tokens // block_size):
            key = self._prefix_keys.key_at(sequence, index, block_size)
            self._pool.publish(sequence.block_table[index], key)

    def _take_token(self, sequence: Sequence, sampled: Sampled, now: float) -> None:
        request = sequence.group.request
        if sampled.error is not None:
            self._end_group(sequence.group, FinishReason.ERROR, sampled.error, now)
            return
        if sampled.token_id in request.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, now, stop_token_id=sampled.token_id)
            return
        position = len(sequence.output_token_ids)
        sequence.output_token_ids.append(sampled.token_id)
        is_full = sequence.num_tokens >= self._runner.max_context_tokens
        is_last = is_full or position + 1 >= request.max_tokens
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
    ) -> None:
        """Ends a choice without a further token."""
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
        self._remove(sequence, reason, now, message=message)

    def _remove(self, sequence: Sequence, reason: FinishReason, now: float, *, message: str = "") -> None:
        """Frees what a choice holds, and with the last one all of its request."""
        group = sequence.group
        sequence.move_to(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        self._unfinished -= 1
        was_queued = self._planner.remove(sequence)
        leader = group.leader
        if leader is not None:
            if was_queued and not group.is_forked:
                self._planner.enqueue(leader)  # the prompt is computed anew for the next choice
            return
        request_id = group.request.request_id
        self._adapters.release(request_id)
        del self._groups[request_id]
        if self._longest_blocks(group.request) == self._shares.hard(group.request.tenant_id):
            self._note_longest(group.request.tenant_id)
        for each in group.sequences:
            del self._sequences[each.sequence_id]
        cut_short = reason in (FinishReason.ABORTED, FinishReason.ADAPTER_FAILED, FinishReason.ERROR)
        self._ended.append(
            RequestEnd(
                request_id=request_id,
                reason=reason if cut_short else FinishReason.STOP,
                message=message,
                cached_prompt_tokens=group.cached_prompt_tokens or 0,
                times=group.times,
                ended_s=now,
            )
        )

    def _end_group(self, group: SequenceGroup, reason: FinishReason, message: str, now: float) -> None:
        """Ends all choices that are left, the last one first: so none becomes the leader in between."""
        for sequence in reversed(group.sequences):
            if not sequence.is_finished:
                if reason is FinishReason.ERROR:
                    self._pool.unpublish(sequence.block_table)  # a retry must not find what may have been the cause
                self._finish(sequence, reason, now, message=message)

    def _count(self, group: SequenceGroup, prompt_tokens: int, output_tokens: int) -> None:
        key = (group.request.tenant_id, group.request.qos_class)
        tokens = self._flows.setdefault(key, [0, 0])
        tokens[0] += prompt_tokens
        tokens[1] += output_tokens
        self._changed_flows[key] = None
        self._generated_tokens += output_tokens


_CHOICES_BOUND = 64
"""Sequence ids: arrival x this + choice."""


def _chunk_of(item: Scheduled) -> SequenceChunk:
    sequence, request = item.sequence, item.sequence.group.request
    start = sequence.num_computed_tokens
    return SequenceChunk(
        sequence_id=sequence.holding_id,
        token_ids=sequence.tokens(start, start + item.num_tokens),
        start_position=start,
        block_table=sequence.block_table,
        adapter_uid=request.adapter_uid,
        samples=item.samples,
        sampling=request.sampling,
        choice=sequence.choice,
        output_index=len(sequence.output_token_ids),
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
    )


def _check_sequence(sequence: Sequence, *, is_queued: bool) -> None:
    computed = sequence.num_computed_tokens
    match sequence.status:
        case SequenceStatus.FINISHED:
            assert not is_queued
            assert not sequence.block_table
        case SequenceStatus.WAITING_ADAPTER:
            assert not is_queued
            assert computed == 0
            assert not sequence.block_table
        case SequenceStatus.WAITING:
            is_behind_leader = not sequence.group.is_forked and sequence is not sequence.group.leader
            assert is_queued != is_behind_leader
            assert computed == 0
            assert not sequence.block_table
        case SequenceStatus.PREFILL:
            assert is_queued
            assert computed < sequence.num_tokens
        case SequenceStatus.DECODE:
            assert is_queued
            assert computed == sequence.num_tokens - 1
