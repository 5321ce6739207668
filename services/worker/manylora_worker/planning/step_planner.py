"""Which sequences the next step computes, and with which blocks. Called by EngineCore alone.

A *unit* is a prefill chunk or a decode quantum. It starts with all blocks that it may write; at its end the sequence is
*parked* with them. A free slot goes to the flow with the least tag (decision 8). Who has no slot can be *evicted*, to
be computed again, or *swapped* to the host (reclaim.py, decision 15).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.fairness.seam import Fairness, Pick
from manylora_shared.ids import QosClass, TenantId

from manylora_worker.kinds.api import DraftModel
from manylora_worker.kinds.flow import FlowKey
from manylora_worker.kinds.guessing import MOST_SPECULATING
from manylora_worker.kinds.sequence import Sequence, SequenceGroup, SequenceStatus
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.block_tables import BlockTables
from manylora_worker.memory.prefixes import Prefixes
from manylora_worker.memory.swapping import Swapper
from manylora_worker.memory.tenant_shares import TenantShares
from manylora_worker.planning.drafts import Drafts
from manylora_worker.planning.guesses import Guesses
from manylora_worker.planning.parking import Parking
from manylora_worker.planning.quantum_cuts import QuantumCuts
from manylora_worker.planning.reclaim import Reclaim, Room, least_recent
from manylora_worker.planning.slots import Scheduled, Slots, Unit
from manylora_worker.planning.staggering import Staggering
from manylora_worker.planning.step_targets import NO_TARGETS, StepTargets
from manylora_worker.planning.step_time import LEAST_CHUNK_TOKENS, StepTime
from manylora_worker.planning.unit_queue import UnitQueue


@dataclass(frozen=True)
class PlannerLimits:
    max_batch_tokens: int  # a step; at least `sequence_slots`, so that every running sequence can decode in every step
    prefill_chunk_tokens: int  # of one sequence in one step
    sequence_slots: int  # sequences that run at the same time
    targets: StepTargets = NO_TARGETS  # for a step with prompts

    def __post_init__(self) -> None:
        if self.sequence_slots < 1 or self.prefill_chunk_tokens < 1:
            raise ValueError("sequence_slots and prefill_chunk_tokens must be at least 1")
        if self.max_batch_tokens < self.sequence_slots:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least sequence_slots ({self.sequence_slots})"
            )


_CLASSES = tuple(QosClass)  # highest first


class StepPlan(NamedTuple):
    scheduled: SequenceOf[Scheduled]
    yielded: SequenceOf[Sequence]  # their unit is through, and others are before their next one
    swapped: SequenceOf[Sequence]  # their KV is on its way to the host
    evicted: SequenceOf[Sequence]  # they lost their blocks; one that came in between, more than once
    qos_class: QosClass  # the highest of those that run or wait


class FlowSlots(NamedTuple):
    num_slots: int = 0
    is_capped: bool = False  # its tenant's own hard cap keeps its next sequence from starting
    num_loading: int = 0  # sequences that wait for their adapter


class _Place(NamedTuple):
    num_tokens: int
    end: int  # the position up to which blocks are taken
    room: Room


class StepPlanner:
    def __init__(
        self,
        pool: BlockPool,
        limits: PlannerLimits,
        shares: TenantShares,
        swapper: Swapper,
        prefixes: Prefixes,
        step_time: StepTime,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._pool = pool
        self._drafts = Drafts(draft_model)
        self.guesses = Guesses(0.0 if draft_model is None else draft_model.share)
        self._limits = limits
        self._step_time = step_time
        self._shares = shares
        self._swapper = swapper
        self._prefixes = prefixes
        self._tables = BlockTables(pool, prefixes)
        self._queue = UnitQueue(shares)
        self._slots = Slots(limits.sequence_slots, QUANTUM_TOKENS)
        self._cuts = QuantumCuts(self._slots, self._queue, shares)
        self._staggering = Staggering(limits.sequence_slots, QUANTUM_TOKENS)
        # of it EngineCore calls `enqueue`, `fork`, `copy_ended` and `release_blocks`
        self.parking = Parking(pool, self._tables, swapper, prefixes, self._queue)
        # their claim on their tenant's reserve has waited for a unit's end
        self._late_claims: dict[Sequence, None] = {}
        self._reclaim = Reclaim(
            pool, shares, swapper, self._queue.fair, self.parking.parked, self._queue.paused, self._slots
        )
        self._round = _Round(0, None)

    @property
    def running(self) -> SequenceOf[Sequence]:
        """Oldest first."""
        return [unit.sequence for unit in self._slots.units]

    @property
    def was_short(self) -> bool:
        """In the last plan somebody wanted more blocks than were free."""
        return self._reclaim.was_short

    @property
    def num_claimed(self) -> int:
        """Blocks that the last plan kept, as far as they were free, for one that waits for quanta to end."""
        return self._reclaim.num_claimed

    @property
    def num_running(self) -> int:
        return len(self._slots)

    @property
    def queue(self) -> Fairness[FlowKey, int]:
        return self._queue.fair

    @property
    def slots_version(self) -> int:
        """Grows with each change of `flow_slots`."""
        return self._slots.version + self._queue.capped_version

    def flow_slots(self, loading: Iterable[SequenceGroup]) -> dict[FlowKey, FlowSlots]:
        """Of flows with a slot, or kept from one: capped or loading."""
        slots, capped = self._slots.by_flow, self._queue.capped
        found = {flow: FlowSlots(slots.get(flow, 0), flow in capped) for flow in dict.fromkeys((*slots, *capped))}
        for group in loading:
            flow = (group.request.tenant_id, group.request.qos_class)
            known = found.get(flow, FlowSlots())
            found[flow] = known._replace(num_loading=known.num_loading + group.num_unfinished)
        return found

    def shares_changed(self, tenant_id: TenantId) -> None:
        self._queue.shares_changed(tenant_id)

    def remove(self, sequence: Sequence, *, refund: bool = False) -> bool:
        """Returns whether the sequence was here.

        Args:
            refund: its part of the last plan is not charged.
        """
        if self.parking.leave(sequence):
            return True
        unit = self._slots.leave(sequence)
        if unit is not None:
            self._queue.settle(unit.item, unit.cost - unit.step_cost * refund)
        return unit is not None

    def pause(self, sequences: Iterable[Sequence]) -> None:
        """A sequence with a slot keeps it to its unit's end."""
        for sequence in sequences:
            assert sequence.group.is_paused
            self._queue.pause(sequence, is_parked=sequence in self.parking.parked)

    def resume(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            assert not sequence.group.is_paused
            self._queue.resume(sequence)

    # ---- a plan

    def plan(self, *, is_ahead: bool = False) -> StepPlan:
        """Takes the blocks too. Everything scheduled must be computed, or its sequences ended.

        Args:
            is_ahead: a step is in flight.
        """
        parking = self.parking
        parking.begin_plan()
        ended = self._end_units()
        parking.count_ready_decodes()
        budget = self._limits.max_batch_tokens - len(self._slots)
        classes = self._classes()
        self._round = _Round(budget, self._step_time.max_prompt_tokens(self._limits.targets.among(classes)))
        self._reclaim.begin_plan()
        self._late_claims = {s: None for s in self._late_claims if s.is_out and not s.is_finished}
        self._trim_to_caps()
        if parking.waiting and self._shares.reserves:
            self._claim_reserves()
        self._fill_slots()
        ended += self._cut_quanta()
        if not self._slots and self._queue and not is_ahead and not self._swapper.num_copying:
            self._force()
        if self._slots:
            held_back = min(self._slots.num_free, len(parking.waiting)) if self._round.is_held_back else 0
            self._staggering.planned(held_back)
        self._round.draws = self._limits.sequence_slots - len(self._slots)
        self.guesses.planned(len(self._slots))
        most = min(self._limits.prefill_chunk_tokens, self._limits.max_batch_tokens)
        self._round.draft_tokens = self._drafts.most_tokens(self._round.prompt_budget, most)
        chunks: list[Scheduled] = []
        scheduled: list[Scheduled] = []
        for unit in self._slots.units:
            unit.num_held_up = unit.num_held_up + 1 if unit.sequence.is_held_up else 0
            waits = unit.num_held_up > 0 or self._round.has_trial is not unit.sequence.group.request.is_trial
            chunk = None if waits else self._with_guesses(unit)
            if chunk is None:
                unit.step_cost = 0  # it keeps its slot, and the others go on
                continue
            draft_cost = self._drafts.take(unit, chunk)
            unit.step_cost = _cost(unit.chunk) + chunk.num_guesses * OUTPUT_TOKEN_COST + draft_cost
            unit.cost += unit.step_cost
            if unit.sequence.status is SequenceStatus.DECODE:
                unit.tokens_left -= 1 + chunk.num_guesses
                scheduled.append(chunk)
            else:
                unit.tokens_left = 0
                chunks.append(unit.chunk)
        yielded = [sequence for sequence in ended if sequence.item is not None]
        highest = min(classes, key=_CLASSES.index, default=QosClass.BATCH)
        return StepPlan(scheduled + chunks, yielded, parking.swapped, parking.evicted, highest)

    def _classes(self) -> set[QosClass]:
        """Of those that run or wait."""
        return {flow[1] for flow in self._slots.by_flow} | {s.flow[1] for s in self._queue.sequences}

    def _with_guesses(self, unit: Unit) -> Scheduled | None:
        """None: it is not computed in this step. A quantum counts the guesses, right or wrong: they are computed."""
        sequence, round_, chunk = unit.sequence, self._round, unit.chunk
        if sequence.num_guesses:
            return None
        if sequence.status is not SequenceStatus.DECODE or len(self._slots) > MOST_SPECULATING:
            return chunk
        most = min(unit.tokens_left - 1, round_.budget, round_.draws)
        found: Scheduled | None
        drafts = self._drafts.drafts(sequence)
        if not drafts and not sequence.group.speculates:
            return chunk
        self.guesses.begin(sequence, drafts=drafts)
        if drafts:
            found = self._drafts.with_draft(unit, most, round_.draft_tokens)
        else:
            guesses = sequence.guess(most)
            found = None if guesses is None else replace(chunk, guesses=guesses) if guesses else chunk
        if found is None:
            if not unit.cost:
                return chunk  # it began in this plan: copies into its blocks are due
            assert sequence.guessing is not None
            sequence.guessing.waits = True
            return None
        round_.budget -= found.num_guesses
        round_.draws -= found.num_guesses
        if found.draft is not None:
            round_.draft_tokens -= len(found.draft.token_ids)
        return found

    def _end_units(self) -> list[Sequence]:
        over = self._slots.take_ended()
        if self._queue and not over and (not self._slots.num_free or self.was_short):
            # a slow grammar's slot and blocks would be of no use for as many masks as a quantum has tokens
            over = [unit for unit in self._slots.units if unit.num_held_up >= QUANTUM_TOKENS]
            for unit in over:
                self._slots.leave(unit.sequence)
        for unit in over:
            self._park(unit)
        return [unit.sequence for unit in over]

    def _park(self, unit: Unit) -> None:
        """Queues the next unit before it settles this one (decision 8)."""
        unit.sequence.has_worked |= unit.cost > 0
        if unit.sequence.status is not SequenceStatus.ENDING:
            self.parking.park(unit.sequence)
            self._queue.push(unit.sequence)
        self._queue.settle(unit.item, unit.cost)

    def _fill_slots(self) -> None:
        while self._queue and self._slots.num_free:
            pick = self._queue.select(self._fits)
            if self._round.deferred is not None:
                self._do_deferred()  # and ask again: who is first now may be another
            elif pick is None:
                return
            else:
                self._start(pick)

    def _cut_quanta(self) -> list[Sequence]:
        """For prompts that begin in this step. Returns whose quanta ended."""
        cut: list[Sequence] = []
        while self._queue and not self._slots.num_free and (prompts := self._cuts.prompts()):
            pick = self._queue.select(lambda item: self._fits(item) if item in prompts else None)
            if self._round.deferred is not None:
                self._do_deferred()
                break
            unit = None if pick is None else self._cuts.unit_for(pick.item)
            if pick is None or unit is None:
                break
            self._slots.leave(unit.sequence)
            self._park(unit)
            self._round.budget += 1
            cut.append(unit.sequence)
            self._start(pick)
        return cut

    def _force(self) -> None:
        """Nothing runs or can start: the first in order takes from anybody."""
        round_ = self._round
        self._reclaim.is_forced = True
        self._reclaim.forget_kept()
        round_.refused.clear()
        pick = self._queue.select(self._fits)
        if round_.deferred is not None:
            self._do_deferred()
        else:
            assert pick is not None or round_.awaits_mask, "a sequence cannot run alone"
            if pick is not None:
                self._start(pick)
        self._reclaim.is_forced = False
        self._fill_slots()

    def _do_deferred(self) -> None:
        """Makes room for a sequence that starts in a later plan."""
        assert self._round.deferred is not None
        (sequence, room), self._round.deferred = self._round.deferred, None
        for victim in room.victims:
            if room.is_now:
                self.parking.evict(victim)
            else:
                self.parking.swap_or_evict(victim)
        if room.is_now:
            del self._reclaim.awaited[sequence]
            self.parking.bring_back(sequence)

    def _start(self, pick: Pick[int, _Place]) -> None:
        sequence, place = self._queue.sequence(pick.item), pick.place
        for victim in place.room.victims:
            self.parking.evict(victim)
        self.parking.leave_for_slot(sequence, place.end)
        num_tokens, ends_at = place.num_tokens, 0
        if sequence.status is SequenceStatus.DECODE:
            ends_at = self.parking.step + num_tokens
            chunk = Scheduled(sequence, 1, samples=True)
            cost = num_tokens * OUTPUT_TOKEN_COST
            self._round.budget -= 1
        else:
            num_tokens = min(num_tokens, sequence.num_uncomputed_tokens)  # fewer, where some were cached
            chunk = Scheduled(sequence, num_tokens, samples=num_tokens == sequence.num_uncomputed_tokens)
            cost = _cost(chunk)
            self._round.take_prompt(chunk)
        self._round.has_started, self._round.has_trial = True, sequence.group.request.is_trial
        self._queue.start(pick, cost)
        self._slots.take(Unit(sequence, pick.item, chunk, num_tokens, ends_at))

    def _fits(self, item: int) -> _Place | None:
        """None: it cannot start now."""
        round_ = self._round
        if self._reclaim.waits or round_.deferred is not None or item in round_.refused:
            return None
        sequence = self._queue.sequence(item)
        if round_.has_trial or (sequence.group.request.is_trial and round_.has_started):
            round_.refused[item] = None
            return None
        if sequence.is_held_up or sequence.num_guesses:
            round_.refused[item] = None
            round_.awaits_mask = True
            return None
        place = None if sequence.is_copying else self._place_of(sequence)
        if place is not None and place.room.is_now and sequence.swap is None:
            return place
        round_.refused[item] = None  # in one plan room only shrinks
        if place is None:
            self._note_capped(sequence)
            return None
        self._reclaim.awaited[sequence] = place.room.num_blocks
        if place.room.is_now or place.room.victims:
            round_.deferred = (sequence, place.room)
        return None

    def _note_capped(self, sequence: Sequence) -> None:
        if not self._shares.has_caps:
            return
        held = self._pool.held_by(sequence.tenant_id) + self._pool.blocks_for(sequence.num_tokens)
        is_over = sequence.is_out and not sequence.is_copying and held > self._shares.hard(sequence.tenant_id)
        if is_over:
            self._queue.note_capped(sequence.flow)

    def _place_of(self, sequence: Sequence) -> _Place | None:
        if sequence.status is not SequenceStatus.DECODE:
            # What comes back from the host is not computed in this step.
            num_tokens = 0 if sequence.swap is not None else self._chunk_tokens(sequence)
            if num_tokens == 0 and sequence.swap is None:
                return None
            if sequence.is_out:
                cached = self._prefixes.find(sequence)
                num_blocks = self._pool.blocks_for(sequence.num_tokens) - len(cached)
                # As good as free are those that are idle, and those that are on their way to be: others may await them.
                num_idle = self._pool.num_idle_among(cached)
                num_blocks += num_idle + self._swapper.num_leaving_among(cached)
                num_joined = self._pool.num_new_among(sequence.tenant_id, cached) - num_idle
                room = self._room(sequence, num_blocks, num_joined=num_joined, may_evict=False)
                if room is not None:
                    return _Place(num_tokens, sequence.num_tokens, room)
            # A sequence without blocks takes those of all its tokens: two half-computed prompts never lock each other.
            # Where it evicts, what is cached does not count: it may be what the victims hold.
            return self._place(sequence, num_tokens, sequence.num_tokens, may_evict=True)
        computed = sequence.num_computed_tokens
        most = self._slots.spread(
            self.parking.step, min(QUANTUM_TOKENS, sequence.max_output_tokens - sequence.num_output_tokens)
        )
        place = self._place(sequence, most, computed + most, may_evict=False)
        if place is not None and place.room.is_now:
            return place
        # A short quantum, up to the end of the block, rather than an eviction.
        block_size = self._pool.block_size
        left = self._pool.tokens_in(len(sequence.block_table)) - computed
        num_tokens = min(most, left if left > 0 else block_size)
        return self._place(sequence, num_tokens, computed + num_tokens, may_evict=True)

    def _place(self, sequence: Sequence, num_tokens: int, end: int, *, may_evict: bool) -> _Place | None:
        room = self._room(sequence, self._tables.missing(sequence, end), may_evict=may_evict)
        return None if room is None else _Place(num_tokens, end, room)

    def _room(self, sequence: Sequence, num_blocks: int, *, num_joined: int = 0, may_evict: bool) -> Room | None:
        return self._reclaim.room(
            sequence,
            num_blocks,
            num_joined=num_joined,
            may_evict=may_evict,
            may_swap=sequence not in self._late_claims,
            is_beside_others=bool(self._slots or self.parking.parked),
        )

    def _chunk_tokens(self, sequence: Sequence) -> int:
        """0: the step has none left, or the prompt is held back."""
        other_slots = max(0, self._slots.num_free - 1)
        prompt_budget = self._round.prompt_budget
        if not self._round.prompt_tokens:
            prompt_budget = max(prompt_budget, LEAST_CHUNK_TOKENS)
        budget = min(prompt_budget, self._round.budget - min(self.parking.ready_decodes, other_slots))
        num_tokens = max(0, min(sequence.num_uncomputed_tokens, self._limits.prefill_chunk_tokens, budget))
        ends = sequence.is_out and num_tokens == sequence.num_uncomputed_tokens
        if ends and self._staggering.holds_back(self._round.num_ended) and not self._is_behind(sequence):
            self._round.is_held_back = True
            return 0
        return num_tokens

    def _is_behind(self, sequence: Sequence) -> bool:
        return sequence.item is not None and self._cuts.is_behind(sequence.item)

    # ---- blocks

    def _claim_reserves(self) -> None:
        """Up to each tenant's reserve; what slots hold is kept for the claim until it is free."""
        blocked: dict[TenantId, None] = {}
        for sequence in list(self.parking.waiting):
            if sequence in self._queue.paused or sequence.is_copying:
                continue
            tenant_id = sequence.tenant_id
            reserve = self._shares.reserve(tenant_id)
            num_blocks = self._pool.blocks_for(sequence.num_tokens)
            if tenant_id in blocked or self._pool.held_by(tenant_id) + num_blocks > reserve:
                continue
            room = self._room(sequence, num_blocks, may_evict=True)
            if room is not None and room.is_now:
                for victim in room.victims:
                    self.parking.evict(victim)
                if sequence.swap is None:
                    self.parking.admit(sequence)
                    self._queue.requeue(sequence)
                else:
                    self.parking.bring_back(sequence)
                continue
            self._reclaim.claims[tenant_id] = num_blocks
            blocked[tenant_id] = None
            if room is None:
                self._late_claims[sequence] = None
                continue
            for victim in room.victims:
                self.parking.swap_or_evict(victim)

    def _trim_to_caps(self) -> None:
        for tenant_id in {s.tenant_id: None for s in self.parking.parked} if self._shares.has_caps else ():
            while self._reclaim.will_hold(tenant_id) > self._shares.hard(tenant_id):
                own = [s for s in self.parking.parked if s.tenant_id == tenant_id]
                if not own:
                    break
                victim = min(own, key=least_recent)
                if victim.num_steps_in_flight:
                    self._reclaim.waits = True
                    break
                self.parking.evict(victim)

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        self._slots.check_invariants()
        paused, fair = self._queue.paused, self._queue.fair
        assert fair.num_running == len(self._slots)
        assert len(self._queue) == len(self.parking.parked) + len(self.parking.waiting) - len(paused)
        assert all(s in self.parking.parked or s in self.parking.waiting for s in paused)
        with_unit = [s for s in (*self.parking.parked, *self.parking.waiting) if s.item is not None]
        assert all(self._queue.sequence(s.item) is s for s in with_unit if s.item is not None)
        assert all(unit.cost <= fair.reserved_by(unit.sequence.flow) for unit in self._slots.units)


class _Round:
    """What one plan has left."""

    __slots__ = (
        "awaits_mask",
        "budget",
        "deferred",
        "draft_tokens",
        "draws",
        "has_started",
        "has_trial",
        "is_held_back",
        "num_ended",
        "prompt_budget",
        "prompt_tokens",
        "refused",
    )

    def __init__(self, budget: int, max_prompt_tokens: int | None) -> None:
        self.budget = budget  # tokens of the step
        # of these what prompts may have; the first one LEAST_CHUNK_TOKENS, if that is more
        self.prompt_budget = budget if max_prompt_tokens is None else min(budget, max_prompt_tokens)
        self.prompt_tokens = 0  # of those that were started
        self.draws = 0  # beside one of each slot: a runner takes as many as there are slots
        self.draft_tokens = 0  # that the draft model may see
        self.awaits_mask = False  # some that could have started have no mask yet
        self.has_started = self.has_trial = False  # a unit; and one of a trial, which is alone in its step
        self.num_ended = 0  # prompts that end in the step
        self.is_held_back = False  # some that could have ended wait for the next step
        # who gets room when the present choice is over; until then nothing else is chosen
        self.deferred: tuple[Sequence, Room] | None = None
        self.refused: dict[int, None] = {}  # items that cannot be started in this plan

    def take_prompt(self, chunk: Scheduled) -> None:
        self.budget -= chunk.num_tokens
        self.prompt_budget -= chunk.num_tokens
        self.prompt_tokens += chunk.num_tokens
        self.num_ended += chunk.samples


def _cost(item: Scheduled) -> int:
    if item.sequence.status is SequenceStatus.DECODE:
        return OUTPUT_TOKEN_COST
    new_tokens = item.sequence.num_new_tokens(item.num_tokens)
    return new_tokens * PROMPT_TOKEN_COST + item.samples * OUTPUT_TOKEN_COST
