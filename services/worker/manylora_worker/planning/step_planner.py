"""Which sequences the next step computes, and with which blocks.

Of the sequences whose adapter is on the device it decides who takes a slot, with which blocks, and who gives up blocks
for that. It alone writes its parts: those in the slots (Slots), those without one (Parking), the queue of their units
(UnitQueue) and what blocks they have (BlockTables); EngineCore tells Parking who comes, and what is let go. Called by
EngineCore alone. Knows flows, tokens and blocks; neither adapters nor models.

A *unit* is one prefill chunk, or one decode quantum: up to QUANTUM_TOKENS tokens of one sequence. A sequence in a slot
runs one unit; at the unit's end it is *parked*, with its blocks, and its next unit is queued. A free slot goes to the
queued unit of the flow (tenant, class) with the least tag (`Fairness`: reserved at dispatch, settled at the end; 1 for
a prompt token, 2 for an output token, nothing for what is computed again). So where all fit into the slots every
sequence gets its slot back at once, and where they do not, a slot is given away at a quantum's end. Quanta are cut so
that they end in different steps (`Slots.spread`): who comes anew waits for the next end, and not for that of a whole
batch of quanta that began together. Nor does it wait for that where its flow has less than its share of the slots: a
quantum of a flow that has more is cut for it (quantum_cuts.py).

A step is filled under `max_batch_tokens`: one token of each quantum, then prefills in the order of the queue, up to
`prefill_chunk_tokens` each, and in all as many as fit into the time that a step should take (StepTime). A token is kept
for each decode that could still take a slot, so no prefill holds one up.

Blocks are taken when a unit is started: all that it may write; of a sequence without blocks those of all its tokens.
So what is in a slot never waits for memory, and all that is not can be *evicted*: it frees its blocks and is computed
again; or, where that is cheaper (swapping.py), *swapped*: its blocks are free when they are copied to host memory.

Where none are free, parked sequences give theirs up: reclaim.py has the order. A swapped sequence whose turn it is
takes its blocks as one without blocks does; it is parked again when its KV is back in them. It has no slot meanwhile,
and neither has who awaits blocks that are being copied.

A waiting sequence that asks for no more than its tenant's reserve gets its blocks before anybody is started, slot or
none (`_claim_reserves`); if it has waited for a quantum's end, nothing is swapped for it.

A paused sequence, whose reader does not read, keeps its blocks until somebody lacks blocks. It takes nothing until its
reader reads, so it undoes no such eviction.

Progress. In 1 and 3 of reclaim.py's order the taker is before its victim in the order (tag of the flow, age), and tags
grow by charged work only; in 2 the victim has done charged work since it got its blocks; a claim's taker stays within
its reserve, where nothing is taken from it. So no eviction is undone without charged work between: no livelock. What
comes back from the host is a taker like any other. Where nothing at all can be started and no step or copy is under
way, the first in order takes from whomever it needs, and nothing is swapped for it (`_force`). Since no sequence is
added that could not run alone (`EngineCore.add`), each step with a sequence in it computes at least one token, and
those without one end with a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from manylora_shared.fairness.costs import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, QUANTUM_TOKENS
from manylora_shared.fairness.seam import Fairness, Pick
from manylora_shared.ids import TenantId

from manylora_worker.kinds.sequence import Sequence, SequenceStatus
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.block_tables import BlockTables
from manylora_worker.memory.prefixes import Prefixes
from manylora_worker.memory.swapping import Swapper
from manylora_worker.memory.tenant_shares import FlowKey, TenantShares
from manylora_worker.planning.parking import Parking
from manylora_worker.planning.quantum_cuts import QuantumCuts
from manylora_worker.planning.reclaim import Reclaim, Room, least_recent
from manylora_worker.planning.slots import Scheduled, Slots, Unit
from manylora_worker.planning.step_time import LEAST_CHUNK_TOKENS, StepTime
from manylora_worker.planning.unit_queue import UnitQueue


@dataclass(frozen=True)
class PlannerLimits:
    max_batch_tokens: int
    """Tokens a step; at least `sequence_slots`, so that every running sequence can decode in every step."""
    prefill_chunk_tokens: int
    """Prompt tokens of one sequence in one step."""
    sequence_slots: int
    """Sequences that run at the same time."""
    target_step_s: float | None = None
    """How long a step with prompts should take at most; None: any time."""

    def __post_init__(self) -> None:
        if self.sequence_slots < 1 or self.prefill_chunk_tokens < 1:
            raise ValueError("sequence_slots and prefill_chunk_tokens must be at least 1")
        if self.target_step_s is not None and self.target_step_s <= 0:
            raise ValueError(f"target_step_s ({self.target_step_s}) must be greater than 0")
        if self.max_batch_tokens < self.sequence_slots:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least sequence_slots ({self.sequence_slots})"
            )


class StepPlan(NamedTuple):
    scheduled: SequenceOf[Scheduled]
    yielded: SequenceOf[Sequence]
    """Their unit is through, and others are before their next one."""
    swapped: SequenceOf[Sequence]
    """Their KV is on its way to the host."""
    evicted: SequenceOf[Sequence]
    """They lost their blocks; one that came in between, more than once."""


class FlowSlots(NamedTuple):
    """A flow's place in the slots."""

    num_slots: int = 0
    is_capped: bool = False
    """Its tenant's own hard cap keeps its next sequence from starting."""
    num_loading: int = 0
    """Sequences that wait for their adapter."""


class _Place(NamedTuple):
    """How a unit can be started."""

    num_tokens: int
    end: int
    """The position up to which blocks are taken."""
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
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._step_time = step_time
        self._shares = shares
        self._swapper = swapper
        self._prefixes = prefixes
        self._tables = BlockTables(pool, prefixes)
        self._queue = UnitQueue(shares)
        self._slots = Slots(limits.sequence_slots, QUANTUM_TOKENS)
        self._cuts = QuantumCuts(self._slots, self._queue, shares)
        self.parking = Parking(pool, self._tables, swapper, prefixes, self._queue)
        """Of it EngineCore calls `enqueue`, `fork`, `copy_ended` and `release_blocks`."""
        self._late_claims: dict[Sequence, None] = {}
        """Sequences whose claim on their tenant's reserve has waited for a unit's end."""
        self._reclaim = Reclaim(pool, shares, swapper, self._queue.fair, self.parking.parked, self._queue.paused)
        self._round = _Round(0, None)

    @property
    def running(self) -> SequenceOf[Sequence]:
        """In a slot; oldest first."""
        return [unit.sequence for unit in self._slots.units]

    @property
    def num_running(self) -> int:
        return len(self._slots)

    @property
    def queue(self) -> Fairness[FlowKey, int]:
        """For reading."""
        return self._queue.fair

    @property
    def slots_version(self) -> int:
        """Grows with each change of `flow_slots`."""
        return self._slots.version + self._queue.capped_version

    def flow_slots(self) -> dict[FlowKey, FlowSlots]:
        """Who has the slots, and whom its own hard cap holds back."""
        slots, capped = self._slots.by_flow, self._queue.capped
        return {flow: FlowSlots(slots.get(flow, 0), flow in capped) for flow in dict.fromkeys((*slots, *capped))}

    def shares_changed(self, tenant_id: TenantId) -> None:
        """The tenant's weights or bounds have another value from now on."""
        self._queue.shares_changed(tenant_id)

    def remove(self, sequence: Sequence, *, refund: bool = False) -> bool:
        """Takes a finished sequence out and settles its unit; its blocks it keeps. Returns whether it was here.

        Args:
            refund: its part of the last plan is not charged: it is computed for nothing, or was not computed.
        """
        if self.parking.leave(sequence):
            return True
        unit = self._slots.leave(sequence)
        if unit is not None:
            self._queue.settle(unit.item, unit.cost - unit.step_cost * refund)
        return unit is not None

    def pause(self, sequences: Iterable[Sequence]) -> None:
        """Their group is paused: they take no slot until `resume`. One that has a slot keeps it to its unit's end."""
        for sequence in sequences:
            assert sequence.group.is_paused
            self._queue.pause(sequence, is_parked=sequence in self.parking.parked)

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Their group is paused no longer."""
        for sequence in sequences:
            assert not sequence.group.is_paused
            self._queue.resume(sequence)

    # ---- a plan

    def plan(self, *, is_ahead: bool = False) -> StepPlan:
        """Decides one step and takes its blocks. Everything scheduled must then be computed, or its sequences ended.

        Args:
            is_ahead: a step is in flight, and what becomes of its sequences is not known yet. There may be nothing to
                schedule then, though there would be without it.
        """
        parking = self.parking
        parking.begin_plan()
        ended = self._end_units()
        parking.count_ready_decodes()
        budget = self._limits.max_batch_tokens - len(self._slots)
        self._round = _Round(budget, self._step_time.max_prompt_tokens())
        self._reclaim.begin_plan()
        self._late_claims = {s: None for s in self._late_claims if s.is_out and not s.is_finished}
        self._trim_to_caps()
        if parking.waiting and self._shares.reserves:
            self._claim_reserves()
        self._fill_slots()
        ended += self._cut_quanta()
        if not self._slots and self._queue and not is_ahead and not self._swapper.num_copying:
            self._force()
        chunks: list[Scheduled] = []
        scheduled: list[Scheduled] = []
        for unit in self._slots.units:
            unit.step_cost = _cost(unit.chunk)
            unit.cost += unit.step_cost
            if unit.sequence.status is SequenceStatus.DECODE:
                unit.tokens_left -= 1
                scheduled.append(unit.chunk)
            else:
                unit.tokens_left = 0
                chunks.append(unit.chunk)
        yielded = [sequence for sequence in ended if sequence.item is not None]
        return StepPlan(scheduled + chunks, yielded, parking.swapped, parking.evicted)

    def _end_units(self) -> list[Sequence]:
        """Parks the sequences whose units are through, and queues their next ones; what is ENDING has none.

        The next unit is queued before the present one is settled, so the flow does not count as newly backlogged.
        """
        over = self._slots.take_ended()
        for unit in over:
            self._park(unit)
        return [unit.sequence for unit in over]

    def _park(self, unit: Unit) -> None:
        """After its unit, which has left its slot."""
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
        """Where no slot is free, ends quanta for prompts that are not to wait (quantum_cuts.py), which begin in this
        step. Returns whose they were: they are parked."""
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
        """Nothing can be started: the first in order takes from whomever it needs, reserves and leads aside."""
        round_ = self._round
        self._reclaim.is_forced = True
        for refusals in (self._reclaim.claims, self._reclaim.awaited, round_.refused):
            refusals.clear()
        pick = self._queue.select(self._fits)
        if round_.deferred is not None:
            self._do_deferred()
        else:
            assert pick is not None, "a sequence cannot run alone"
            self._start(pick)
        self._reclaim.is_forced = False
        self._fill_slots()

    def _do_deferred(self) -> None:
        """Makes room for a sequence that cannot be started in this plan: it awaits copies, or its own KV comes back."""
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
        """Gives the unit its slot and its blocks."""
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
        self._queue.start(pick, cost)
        self._slots.take(Unit(sequence, pick.item, chunk, num_tokens, ends_at))

    def _fits(self, item: int) -> _Place | None:
        """How a queued unit can be started now; None: it cannot. Changes nothing."""
        round_ = self._round
        if self._reclaim.waits or round_.deferred is not None or item in round_.refused:
            return None
        sequence = self._queue.sequence(item)
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
        """A sequence cannot be started: is that its own tenant's doing?"""
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
        left = len(sequence.block_table) * block_size - computed
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
        """Tokens of the next part of a prefill; 0 where the step has none left for it."""
        other_slots = max(0, self._slots.num_free - 1)
        prompt_budget = self._round.prompt_budget
        if not self._round.prompt_tokens:
            prompt_budget = max(prompt_budget, LEAST_CHUNK_TOKENS)
        budget = min(prompt_budget, self._round.budget - min(self.parking.ready_decodes, other_slots))
        return max(0, min(sequence.num_uncomputed_tokens, self._limits.prefill_chunk_tokens, budget))

    # ---- blocks

    def _claim_reserves(self) -> None:
        """Gives waiting sequences their blocks, slot or none, as far as their tenant's reserve goes.

        Where what others hold above their reserves is in the slots now, the blocks are kept for the claim as they come
        free: at the latest when every quantum that runs now is over.
        """
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
        """Evicts what stands above a hard cap that has been lowered."""
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
        """For tests and idle moments."""
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
    """What one plan has left, and what it has found out."""

    __slots__ = ("budget", "deferred", "prompt_budget", "prompt_tokens", "refused")

    def __init__(self, budget: int, max_prompt_tokens: int | None) -> None:
        self.budget = budget
        """Tokens of the step."""
        self.prompt_budget = budget if max_prompt_tokens is None else min(budget, max_prompt_tokens)
        """Of these what prompts may have; the first one LEAST_CHUNK_TOKENS, if that is more."""
        self.prompt_tokens = 0
        """Of those that were started."""
        self.deferred: tuple[Sequence, Room] | None = None
        """Who gets room when the choice that is being made is over; until then nothing else is chosen."""
        self.refused: dict[int, None] = {}
        """Items that cannot be started in this plan."""

    def take_prompt(self, chunk: Scheduled) -> None:
        """A part of a prompt is in the step."""
        self.budget -= chunk.num_tokens
        self.prompt_budget -= chunk.num_tokens
        self.prompt_tokens += chunk.num_tokens


def _cost(item: Scheduled) -> int:
    """What a step's part costs its flow."""
    if item.sequence.status is SequenceStatus.DECODE:
        return OUTPUT_TOKEN_COST
    new_tokens = item.sequence.num_new_tokens(item.num_tokens)
    return new_tokens * PROMPT_TOKEN_COST + item.samples * OUTPUT_TOKEN_COST
