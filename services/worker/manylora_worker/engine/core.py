"""The engine: requests in, token outputs out, step by step. One thread, no clock: times are the caller's `now`, in
seconds.

A step is `begin_step` -> `submit` -> `wait` -> `end_step`; commands come between these, except between `begin_step` and
`submit`. With an AheadRunner a step begins before the last has ended (decision 17). A stop token ends a choice and is
*not* part of its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from manylora_shared.composition import uids_of
from manylora_shared.errors import AlreadyExists, Overloaded
from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.cache import AdapterCache, AdapterCacheLimits, TenantAdapters
from manylora_worker.adapters.loading import LOOK_AGAIN_S
from manylora_worker.adapters.pins import Pin
from manylora_worker.adapters.prediction import Prediction
from manylora_worker.engine.arena_turns import Arena
from manylora_worker.engine.counters import EngineStats, FlowTokens, Setbacks, StepSeconds, WorkCounters, stats_of
from manylora_worker.engine.endings import Endings
from manylora_worker.engine.flights import Begun, Flight, Flights, Part, chunk_of, part_of
from manylora_worker.engine.invariants import check_adapters, check_blocks, check_queues, check_under_way
from manylora_worker.engine.masks import Masks
from manylora_worker.engine.merge_turns import HOLDER, Merging, Told
from manylora_worker.engine.outbox import Outbox, RequestEnd
from manylora_worker.engine.request_bounds import RequestBounds, can_speculate
from manylora_worker.engine.request_table import RequestTable
from manylora_worker.kinds.api import (
    AdapterBackend,
    AdapterTier,
    ArenaRunner,
    EngineRequest,
    FinishReason,
    ModelRunner,
    Sampled,
    StepBatch,
    SwapRunner,
    TokenOutput,
    draft_model_of,
    state_blocks_of,
)
from manylora_worker.kinds.flow import FlowKey
from manylora_worker.kinds.sequence import GroupTimes, Sequence, SequenceGroup, SequenceStatus, sequence_id_of
from manylora_worker.memory.arena import ArenaLimits, ArenaPolicy
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.prefix_cache import PrefixOptions
from manylora_worker.memory.prefixes import Prefixes
from manylora_worker.memory.swapping import Swapper
from manylora_worker.memory.tenant_shares import TenantShare, TenantShares
from manylora_worker.planning.slots import Scheduled
from manylora_worker.planning.step_planner import FlowSlots, PlannerLimits, StepPlanner
from manylora_worker.planning.step_time import StepTime


@dataclass(frozen=True)
class EngineLimits:
    planner: PlannerLimits
    adapters: AdapterCacheLimits
    max_requests: int  # in the engine, waiting ones included
    guesses: bool = False  # adapters are loaded to the host that a tenant is likely to ask for next
    longest_context_tokens: int = 0  # of a request with an adapter, where that is more than the runner's
    # bytes of the device's arena that adapters may have at least and at most; None: they have what they have at first
    arena_bytes: tuple[int, int] | None = None

    def arena_of(self, runner: ModelRunner) -> ArenaLimits | None:
        """None: nothing moves."""
        if self.arena_bytes is None or not isinstance(runner, ArenaRunner):
            return None
        least, most = (size_bytes // runner.block_bytes for size_bytes in self.arena_bytes)
        return ArenaLimits.of(runner.num_blocks, len(runner.adapter_blocks), least, most)


_POLL_S = 0.002  # how often copies of KV are asked for, where nothing else is to do


class EngineCore:
    """prefix: None: there is no prefix cache, as for a model that keeps states."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: AdapterBackend,
        limits: EngineLimits,
        prefix: PrefixOptions | None = None,
        *,
        clears_freed: bool = False,
    ) -> None:
        self._max_requests = limits.max_requests
        arena = limits.arena_of(runner)
        state_blocks = state_blocks_of(runner)
        lent, least_kv = (0, runner.num_blocks) if arena is None else (arena.home, arena.least_kv)
        max_idle_blocks = 0 if prefix is None else prefix.max_idle_blocks(runner.num_blocks)
        num_blocks, block_size = runner.num_blocks, runner.block_size
        self._pool = BlockPool(
            num_blocks, block_size, max_idle_blocks, clears_freed=clears_freed, num_lent=lent, state_blocks=state_blocks
        )
        self._prefixes = Prefixes(self._pool, None if prefix is None else prefix.keys)
        self._shares = TenantShares(least_kv, runner.num_blocks + lent)
        self._bounds = RequestBounds(
            runner.max_context_tokens,
            limits.planner.sequence_slots,
            least_kv,
            runner.block_size,
            self._shares,
            longest_context_tokens=limits.longest_context_tokens,
            state_blocks=state_blocks,
        )
        self._swapper = Swapper(runner.host_kv if isinstance(runner, SwapRunner) else None, self._pool, self._shares)
        self._step_time = StepTime()
        self._planner = StepPlanner(
            self._pool, limits.planner, self._shares, self._swapper, self._prefixes, self._step_time,
            draft_model_of(runner),
        )  # fmt: skip
        self._adapters = AdapterCache(backend, limits.adapters, self._shares.tenant_weight)
        self._merging = Merging(runner, self._adapters)
        self._arena = None
        if arena is not None and isinstance(runner, ArenaRunner):
            self._arena = Arena(runner, self._pool, self._adapters, ArenaPolicy(arena))
        self._prediction = Prediction() if limits.guesses else None
        self._requests = RequestTable(shares_prompts=not state_blocks)
        self._flights = Flights(runner)
        self._fresh: list[GroupTimes] = []  # of requests whose first step this is
        self._begun: Begun | None = None  # between `begin_step` and `submit`
        self._outbox = Outbox()
        self._endings = Endings(
            self._requests, self._planner, self._prefixes, self._adapters, self._outbox, self._request_closed
        )
        self._masks = Masks(self._endings, self._flights, is_recurrent=state_blocks > 0)
        self._counters = WorkCounters()
        # with the version that they are of
        self._tenant_adapters: tuple[int, Mapping[TenantId, TenantAdapters]] | None = None
        self._step_ended_s = float("-inf")
        self.step_error: Exception | None = None  # why the last step failed; None after one that did not
        self.is_trial_error = False  # it says nothing of other steps

    # -- commands, between steps ---------------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> None:
        """From any thread. Raises as RequestBounds.check does."""
        self._bounds.check(request)

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        """None: default weights, no bounds. Requests that are here run to their end."""
        assert self._begun is None
        scope = self._shares.cache_scope(tenant_id)
        self._shares.set(tenant_id, share)
        if self._shares.cache_scope(tenant_id) != scope:
            self._pool.forget_computed(tenant_id)
            self._requests.leave_scope(tenant_id)
        self._note_longest(tenant_id)
        self._planner.shares_changed(tenant_id)
        self._adapters.weights_changed()

    def _note_longest(self, tenant_id: TenantId) -> None:
        requests = (group.request for group in self._requests.groups)
        longest = (self._bounds.longest_blocks(request) for request in requests if request.tenant_id == tenant_id)
        self._shares.accept(tenant_id, max(longest, default=0))

    def _request_closed(self, request: EngineRequest) -> None:
        if self._bounds.longest_blocks(request) == self._shares.hard(request.tenant_id):
            self._note_longest(request.tenant_id)

    def add(self, request: EngineRequest, now: float) -> None:
        """`check` has accepted the request, perhaps under wider bounds.

        Raises:
            InvalidRequest: the model could never run it.
            AlreadyExists: its id is here.
            Overloaded: `max_requests` are here.
        """
        assert self._begun is None
        assert self._merging.takes(request), "it would be computed with another adapter's weights"
        self._bounds.check_model(request)
        if request.request_id in self._requests:
            raise AlreadyExists(f"request_id: {request.request_id} is being executed")
        if len(self._requests) >= self._max_requests:
            raise Overloaded(f"the worker has {len(self._requests)} requests")
        scope = self._shares.cache_scope(request.tenant_id)
        group = self._requests.add(request, scope, self._bounds.max_output_tokens(request), now)
        flow = (request.tenant_id, request.qos_class)
        if can_speculate(group) and not self._pool.state_blocks:
            group.speculates, group.drafts = self._shares.speculates(flow), self._shares.drafts(flow)
        for sequence in group.sequences:
            if not sequence.is_finished:
                self._masks.take(sequence, sequence.output_token_ids)
        if self._bounds.longest_blocks(request) > self._shares.hard(request.tenant_id):
            self._note_longest(request.tenant_id)
        key = request.adapter_uid if self._merging.merged is None else None
        if key is None or self._adapters.acquire(request.request_id, request.tenant_id, key, now):
            self._adapter_ready(group, now)
        else:
            self._requests.load_begun(group)
        if key is not None and self._prediction is not None:
            for uid in self._prediction.asked(request.tenant_id, uids_of(key), now):
                self._adapters.guess(uid, request.tenant_id, now)

    def abort(self, request_id: RequestId, now: float) -> None:
        """Unknown ids are ignored, here and below."""
        assert self._begun is None
        self._planner.parking.tick(now)
        if (group := self._requests.find(request_id)) is not None:
            self._endings.end_request(group, FinishReason.ABORTED, "aborted", now)

    def stop_choice(self, request_id: RequestId, choice: int, now: float) -> None:
        """With STOP; the others go on."""
        assert self._begun is None
        self._planner.parking.tick(now)
        group = self._requests.find(request_id)
        sequence = group.sequences[choice] if group is not None and choice < len(group.sequences) else None
        if sequence is not None and not sequence.is_finished:
            self._endings.end_choice(sequence, FinishReason.STOP, now)

    def pause(self, request_id: RequestId) -> None:
        """Its KV stays until others take it."""
        self._set_paused(request_id, is_paused=True)

    def resume(self, request_id: RequestId) -> None:
        self._set_paused(request_id, is_paused=False)

    def _set_paused(self, request_id: RequestId, *, is_paused: bool) -> None:
        assert self._begun is None
        group = self._requests.find(request_id)
        if group is None or group.is_paused == is_paused:
            return
        self._requests.set_paused(group, is_paused=is_paused)
        unfinished = [s for s in group.sequences if not s.is_finished]
        if is_paused:
            self._planner.pause(unfinished)
        else:
            self._planner.resume(unfinished)

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId | None = None) -> None:
        assert self._begun is None
        self._adapters.prefetch(adapter_uid, tenant_id)

    def drop_adapters(self) -> int:
        """See AdapterCache.drop_idle."""
        assert self._begun is None
        return self._adapters.drop_idle()

    def drop_prefixes(self) -> int:
        """See BlockPool.forget_computed."""
        assert self._begun is None
        return self._pool.forget_computed()

    def set_pins(self, pins: Mapping[TenantId, SequenceOf[Pin]], largest_bytes: int) -> None:
        """See AdapterCache.set_pins."""
        assert self._begun is None
        self._adapters.set_pins(pins, largest_bytes)

    @property
    def merge_problem(self) -> str:
        """Why no adapter is merged here; empty: one may be. From any thread."""
        return self._merging.problem

    def set_merged(self, uid: AdapterUid | None, tenant_id: TenantId, tell: Told, now: float) -> None:
        """See Merging.set. No prefix of before is found behind it."""
        assert self._begun is None
        assert len(self._requests) + len(self._flights) == 0, "rows are being computed"
        self._pool.forget_computed()
        self._merging.set(uid, tenant_id, tell, now)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[TokenOutput]:
        """Starts a step if one can be, ends the oldest if it must be."""
        batch = self.begin_step(now)
        if batch is not None:
            self.submit(batch, now)
        if self.must_wait or (batch is None and self._flights):
            self.end_step(self.wait(), now)
        return self.take_outputs()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def must_wait(self) -> bool:
        """The oldest step has to end before another may begin."""
        return self._flights.must_wait

    def begin_step(self, now: float) -> StepBatch | None:
        """A batch must go to `submit`. None: nothing can be computed now. Raises RunnerLost."""
        self._flights.check()
        assert self._begun is None
        assert not self.must_wait
        if self._flights.is_over:
            return None
        self._planner.parking.tick(now)
        self._pump_adapters(now)
        if self._merging.is_changing:
            self._merging.pump(now)
        self._pump_copies()
        self._masks.pump(now)
        if self._arena is not None:
            self._arena.look(now, kv_is_short=self._planner.was_short)
        plan = self._planner.plan(is_ahead=bool(self._flights))
        self._counters.planned(plan)
        if not plan.scheduled:
            return None
        for item in plan.scheduled:
            times = item.sequence.group.times
            if times.first_step_s is None:
                times.first_step_s = now
                self._fresh.append(times)
        work = self._pool.take_work()
        chunks = [chunk_of(item, is_merged=self._merging.merged is not None) for item in plan.scheduled]
        self._begun = Begun([part_of(item) for item in plan.scheduled], work, now, plan.qos_class)
        return StepBatch(chunks, copy_blocks=work.copies, clear_blocks=work.clears)

    def submit(self, batch: StepBatch, now: float) -> None:
        assert self._begun is not None
        self._planner.parking.tick(now)
        for times in self._fresh:
            times.first_built_s, times.first_rows = now, len(batch.chunks)
        self._fresh.clear()
        begun, self._begun = self._begun, None
        self._flights.submit(batch, begun)
        for part in begun.parts:
            self._advance(part.scheduled)

    def wait(self) -> SequenceOf[Sampled] | Exception:
        """Touches no state."""
        return self._flights.wait()

    def end_step(self, result: SequenceOf[Sampled] | Exception, now: float) -> None:
        """An exception ends every request of the oldest step and of the one behind it; a trial's, the trial alone."""
        self._planner.parking.tick(now)
        flight = self._flights.end()
        self._counters.steps += 1
        result = self._flights.checked(flight, result)
        if isinstance(result, Exception):
            self._fail(flight, result, now)
            return
        self.step_error = None
        self._measure(flight, now)
        self._pool.commit(flight.work)
        drawn = iter(result)
        for part in flight.parts:
            self._settle(part, next(drawn) if part.is_answered else None, now)
        self._endings.let_go()

    def drain(self, now: float) -> None:
        """Ends the steps and copies under way. Blocks."""
        while self._flights:
            self.end_step(self.wait(), now)
        self._swapper.wait()
        self._planner.parking.tick(now)
        self._pump_copies()

    def take_outputs(self) -> list[TokenOutput]:
        return self._outbox.take_outputs()

    def take_ended(self) -> list[RequestEnd]:
        """Nothing of them is left here."""
        return self._outbox.take_ended()

    # -- what others may know ------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Some request is not paused, or adapters or KV are on their way."""
        is_loading = self._merging.moves_adapters and self._adapters.has_work
        return is_loading or self._merging.is_changing or self._swapper.num_copying + self._requests.num_active > 0

    def rest_s(self) -> float | None:
        """Where no step could begin; None: until a command or a load's end."""
        if not self.has_work():
            return None
        if self._merging.is_writing:
            return 0.0
        # Who is not paused and has its adapter can be computed, unless blocks are being copied: so loads and copies are
        # all that there is to wait for.
        is_settled = self._adapters.is_settled and not self._swapper.num_copying and not self._masks.has_work
        return LOOK_AGAIN_S if is_settled else _POLL_S

    def next_step_s(self) -> float | None:
        """When the device should be ready for another step, as steps took so far; None: it is."""
        flight = self._flights.alone
        if flight is None:
            return None
        return max(flight.begun_s, self._step_ended_s) + self._step_time.expected(flight.num_prefill_tokens)

    def request_ids(self) -> list[RequestId]:
        """Oldest first."""
        return self._requests.ids

    def stats(self) -> EngineStats:
        return stats_of(self._counters, self._requests, self._planner, self._pool, self._swapper, self._adapters)

    def adapter_tiers(self) -> Mapping[AdapterUid, AdapterTier]:
        return self._adapters.tiers()

    def tenant_adapters(self) -> Mapping[TenantId, TenantAdapters]:
        """Of whoever has, had or pins adapters. Never changed in place."""
        version = self._adapters.tenants_version
        if self._tenant_adapters is None or self._tenant_adapters[0] != version:
            self._tenant_adapters = version, self._adapters.tenants()
        return self._tenant_adapters[1]

    def flow_slots(self) -> Mapping[FlowKey, FlowSlots]:
        return self._planner.flow_slots(self._requests.loading)

    def flows(self) -> Mapping[FlowKey, FlowTokens]:
        return self._counters.flows()

    def take_changed_flows(self) -> dict[FlowKey, FlowTokens]:
        return self._counters.take_changed_flows()

    def take_step_times(self) -> SequenceOf[StepSeconds]:
        return self._counters.take_step_times()

    def take_changed_setbacks(self) -> Mapping[TenantId, Setbacks]:
        return self._counters.take_changed_setbacks()

    def blocks_held_by(self, tenant_id: TenantId) -> int:
        return self._pool.held_by(tenant_id)

    def blocks_held(self) -> dict[TenantId, int]:
        """What several tenants share counts for each."""
        return self._pool.held()

    def host_blocks_held(self) -> dict[TenantId, int]:
        return self._swapper.host.held()

    def tenant_of(self, holding_id: int) -> TenantId:
        """holding_id: of a sequence as the runner sees it."""
        return self._requests.sequence(sequence_id_of(holding_id)).tenant_id

    def check_invariants(self) -> None:
        assert self._begun is not None or self._pool.pending_copies() == [], "a copy was planned and not made"
        check_queues(self._requests, self._planner)
        check_blocks(self._requests, self._pool)
        check_under_way(self._requests, self._flights, self._swapper)
        if self._merging.merged is None and not self._merging.is_changing:
            check_adapters(self._requests, self._adapters)

    # -- inside --------------------------------------------------------------------------------------------------

    def _pump_adapters(self, now: float) -> None:
        if not self._adapters.has_work or not self._merging.moves_adapters:
            return
        update = self._adapters.pump(now)
        for request_id in update.ready:
            if request_id == HOLDER:
                self._merging.loaded()
            else:
                self._adapter_ready(self._requests[request_id], now)
        for failure in update.failed:
            reason = FinishReason.ADAPTER_UNAVAILABLE if failure.is_passing else FinishReason.ADAPTER_FAILED
            if HOLDER in failure.holders:  # alone: there are no requests
                self._merging.load_failed(failure.message)
                continue
            for request_id in failure.holders:
                self._endings.end_request(self._requests[request_id], reason, failure.message, now)

    def _pump_copies(self) -> None:
        for sequence in self._swapper.poll():
            if sequence.is_finished:
                self._swapper.ended(sequence)
            else:
                self._planner.parking.copy_ended(sequence)
        self._endings.let_go()

    def _measure(self, flight: Flight, now: float) -> None:
        """The device begins a step when the one before is through."""
        seconds = now - max(flight.begun_s, self._step_ended_s)
        self._swapper.costs.computed(flight.num_prefill_tokens, flight.num_tokens, seconds)
        self._step_time.measured(flight.num_prefill_tokens, seconds)
        self._counters.stepped(flight.qos_class, seconds)
        self._planner.guesses.step_over(flight.num_prefill_tokens, flight.num_plain, now - self._step_ended_s)
        self._step_ended_s = now

    def _adapter_ready(self, group: SequenceGroup, now: float) -> None:
        group.times.adapter_ready_s = now
        self._requests.load_over(group)
        for sequence in group.sequences:
            if not sequence.is_finished:
                sequence.move_to(SequenceStatus.WAITING)
        leader = group.leader
        assert leader is not None
        for sequence in group.sequences if group.is_forked else (leader,):
            if not sequence.is_finished:
                self._planner.parking.enqueue(sequence)

    def _advance(self, item: Scheduled) -> None:
        sequence, group = item.sequence, item.sequence.group
        is_prefill = sequence.status is SequenceStatus.PREFILL
        is_charged = is_prefill and sequence.num_new_tokens(item.num_tokens) > 0
        sequence.advance(item.num_tokens, samples=item.samples, draft=item.draft)
        sequence.num_guesses = item.num_guesses
        if is_prefill:
            reached = min(sequence.num_computed_tokens, len(group.request.prompt_token_ids))
            group.num_prompt_tokens_computed = max(group.num_prompt_tokens_computed, reached)
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
            self._planner.parking.fork(sequence, others)

    def _settle(self, part: Part, sampled: Sampled | None, now: float) -> None:
        sequence = part.scheduled.sequence
        group = sequence.group
        part.leave()
        if part.is_undrawn:
            if not sequence.is_finished:
                self._masks.came_too_late(sequence)
            return
        if part.num_recomputed_tokens:
            self._counters.set_back(sequence.tenant_id, Setbacks(recomputed_tokens=part.num_recomputed_tokens))
        is_taken = part.scheduled.samples and not sequence.is_finished
        num_drawn = 1 + len(sampled.further) if is_taken and sampled is not None else int(is_taken)
        self._counters.computed(sequence.flow, part.num_new_tokens, num_drawn)
        # What one choice has scored is told though it has ended since: no other scores it again.
        is_scored = part.num_scored > 0 and group.leader is not None
        if sampled is not None and sampled.error is not None and (is_scored or not sequence.is_finished):
            self._end_unsound(sequence, sampled.error, now)
        elif sampled is not None and is_scored:
            self._outbox.prompt_scored(group, sampled.scored)
        if sequence.is_finished:
            return
        self._prefixes.publish(sequence, part.end - part.scheduled.num_tokens, part.end)
        if sampled is not None and part.scheduled.samples:
            if group.times.first_token_s is None:
                group.times.first_token_s = now
            self._take_tokens(part, sampled, now)

    def _fail(self, flight: Flight, error: Exception, now: float) -> None:
        message = f"the step failed: {type(error).__name__}: {error}"
        self.step_error, self.is_trial_error = error, flight.is_trial
        lost = [flight]
        if not flight.is_trial or all(each.is_trial for each in self._flights):
            lost += self._flights
            while self._flights:
                self._flights.wait()  # its blocks are about to be given away
                self._flights.end()
        self._counters.failed_steps += len(lost)
        self._counters.steps += len(lost) - 1
        for each in lost:
            self._pool.reject(each.work)
            for part in each.parts:
                part.leave()
        for each in lost:
            for part in each.parts:
                self._endings.end_request(part.scheduled.sequence.group, FinishReason.ERROR, message, now, refund=True)
        self._endings.let_go()

    def _end_unsound(self, sequence: Sequence, message: str, now: float) -> None:
        reason = FinishReason.ERROR
        if sequence.group.request.adapter_uid is not None:  # no other tenant's request, and no fault of the worker
            reason, message = FinishReason.ADAPTER_FAILED, f"with its weights {message}"
        self._endings.end_request(sequence.group, reason, message, now, refund=sequence.num_steps_in_flight > 0)

    def _take_tokens(self, part: Part, sampled: Sampled, now: float) -> None:
        sequence, num_guesses = part.scheduled.sequence, part.scheduled.num_guesses
        self._take_token(sequence, sampled, now)
        for token_id in sampled.further:
            if sequence.is_finished:
                return
            sequence.num_computed_tokens += 1  # the guess's KV is that of the token before
            self._take_token(sequence, Sampled(sampled.sequence_id, token_id), now)
        if num_guesses and not sequence.is_finished:
            self._counters.guessed(num_guesses, len(sampled.further))
            sequence.judged(num_guesses, len(sampled.further))
            self._prefixes.publish(sequence, part.end, part.end + len(sampled.further))
        self._planner.guesses.drew(sequence, part.turn, num_guesses, 1 + len(sampled.further), now)

    def _take_token(self, sequence: Sequence, sampled: Sampled, now: float) -> None:
        request = sequence.group.request
        # What a later step draws is of no use then.
        is_in_vain = sequence.num_steps_in_flight > 0
        if sampled.token_id in request.stop_token_ids:
            stop_token_id = sampled.token_id
            self._endings.end_choice(sequence, FinishReason.STOP, now, stop_token_id=stop_token_id, refund=is_in_vain)
            return
        position = len(sequence.output_token_ids)
        sequence.output_token_ids.append(sampled.token_id)
        if sequence.speculation is not None:
            sequence.speculation.tell(sampled.token_id)
        is_last = position + 1 >= sequence.max_output_tokens
        self._outbox.token(sequence, sampled, position, is_last=is_last)
        if is_last:
            self._endings.end_told_choice(sequence, FinishReason.LENGTH, now)
        else:
            self._masks.take(sequence, (sampled.token_id,))
