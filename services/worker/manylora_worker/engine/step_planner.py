"""Which sequences the next step computes, and with which blocks.

Owns the sequences whose adapter is on the device, and the fair queue of their units. Called by EngineCore alone. Knows
flows, tokens and blocks; neither adapters nor models.

A *unit* is one prefill chunk, or one decode quantum: up to QUANTUM_TOKENS tokens of one sequence. A sequence in a slot
runs one unit; at the unit's end it is *parked*, with its blocks, and its next unit is queued. A free slot goes to the
queued unit of the flow (tenant, class) with the least tag (`FairQueue`: reserved at dispatch, settled at the end; 1 for
a prompt token, 2 for an output token, nothing for what is computed again). Inside a flow a sequence that has blocks
goes before one that has none, and then the older before the younger. So where all fit into the slots every sequence
gets its slot back at once, and where they do not, a slot is given away at a quantum's end and never before. Quanta are
cut so that they end in different steps (`_spread`): who comes anew waits for the next end, and not for that of a whole
batch of quanta that began together.

A step is filled under `max_batch_tokens`: one token of each quantum, then prefills in the order of the queue, up to
`prefill_chunk_tokens` each. A token is kept for each decode that could still take a slot, so no prefill holds one up.

Blocks are taken when a unit is started: all that it may write; of a sequence without blocks those of all its tokens.
So what is in a slot never waits for memory, and all that is not can be *evicted*: it frees its blocks and is computed
again; or, where that is cheaper (swapping.py), *swapped*: its blocks are free when they are copied to host memory.

Where none are free, parked sequences give theirs up: reclaim.py has the order. A swapped sequence whose turn it is
takes its blocks as one without blocks does; it is parked again when its KV is back in them. It has no slot meanwhile,
and neither has who awaits blocks that are being copied.

A waiting sequence that asks for no more than its tenant's reserve gets its blocks before anybody is started, slot or
none (`_claim_reserves`); if it has waited for a quantum's end, nothing is swapped for it.

Held is what cannot use a slot by its own tenant's doing: a sequence whose reader does not read (`pause`), and a flow
whose next sequence would pass its tenant's hard cap. Neither is backlogged: a paused sequence stands in no queue, and a
capped flow begins at the clock when it may go on. A paused one keeps its blocks until somebody lacks blocks. It takes
nothing until its reader reads, so it undoes no such eviction.

Progress. In 1 and 3 of reclaim.py's order the taker is before its victim in the order (tag of the flow, age), and tags
grow by charged work only; in 2 the victim has done charged work since it got its blocks; a claim's taker stays within
its reserve, where nothing is taken from it. So no eviction is undone without charged work between: no livelock. What
comes back from the host is a taker like any other. Where nothing at all can be started and no step or copy is under
way, the first in order takes from whomever it needs, and nothing is swapped for it (`_force`). Since no sequence is
added that could not run alone (`EngineCore.add`), each step with a sequence in it computes at least one token, and
those without one end with a copy.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from manylora_shared.fair_queue import FairQueue, Pick, Rank, Share
from manylora_shared.ids import QosClass, TenantId

from manylora_worker.engine.block_pool import BlockPool
from manylora_worker.engine.prefix_cache import PrefixKeys
from manylora_worker.engine.reclaim import PROMPT_TOKEN_COST, Reclaim, Room, least_recent
from manylora_worker.engine.sequence import Sequence, SequenceStatus, SwapStage
from manylora_worker.engine.swapping import Swapper
from manylora_worker.engine.tenant_shares import FlowKey, TenantShares

QUANTUM_TOKENS = 16
OUTPUT_TOKEN_COST = 2


@dataclass(frozen=True)
class PlannerLimits:
    max_batch_tokens: int
    """Tokens a step; at least `sequence_slots`, so that every running sequence can decode in every step."""
    prefill_chunk_tokens: int
    """Prompt tokens of one sequence in one step."""
    sequence_slots: int
    """Sequences that run at the same time."""

    def __post_init__(self) -> None:
        if self.sequence_slots < 1 or self.prefill_chunk_tokens < 1:
            raise ValueError("sequence_slots and prefill_chunk_tokens must be at least 1")
        if self.max_batch_tokens < self.sequence_slots:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least sequence_slots ({self.sequence_slots})"
            )


@dataclass(frozen=True)
class Scheduled:
    """`num_tokens` of one sequence, from its num_computed_tokens on, in one step."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    """It computes the sequence's last token, so that the next one is drawn."""


class StepPlan(NamedTuple):
    scheduled: SequenceOf[Scheduled]
    num_evicted: int
    """Sequences that lost their blocks."""
    num_yielded: int
    """Sequences that are parked at a unit's end because others are before them."""


class FlowSlots(NamedTuple):
    """A flow's place in the slots."""

    num_slots: int = 0
    is_capped: bool = False
    """Its tenant's own hard cap keeps its next sequence from starting."""
    num_loading: int = 0
    """Sequences that wait for their adapter."""


class _Unit:
    """What a sequence does in its slot."""

    __slots__ = ("chunk", "cost", "ends_at", "item", "sequence", "step_cost", "tokens_left")

    def __init__(self, sequence: Sequence, item: int, chunk: Scheduled, tokens_left: int, ends_at: int) -> None:
        self.sequence = sequence
        self.item = item
        self.chunk = chunk
        """What it computes in each of its steps."""
        self.tokens_left = tokens_left
        """A quantum's tokens that no step computed or computes yet; of a chunk all or nothing."""
        self.ends_at = ends_at
        """The step in which its slot is free again, unless it ends before."""
        self.cost = 0
        """Of the steps so far, the one that was planned last included."""
        self.step_cost = 0
        """Of that last one."""


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
        prefix_keys: PrefixKeys | None = None,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._shares = shares
        self._swapper = swapper
        self._prefix_keys = prefix_keys
        """None: nothing is looked up."""
        self._queue: FairQueue[FlowKey, int] = FairQueue()
        self._queued: dict[int, Sequence] = {}
        """By item: sequences that are parked or wait for blocks."""
        self._units: list[_Unit] = []
        """In the slots, oldest sequence first."""
        self._parked: dict[Sequence, None] = {}
        self._waiting: list[Sequence] = []
        """Oldest first."""
        self._held: dict[Sequence, None] = {}
        """Of the parked and waiting ones those that are paused: without an item."""
        self._capped: dict[FlowKey, None] = {}
        """Flows whose first unit its tenant's own hard cap kept from starting, when it was asked for last."""
        self._slots_by_flow: dict[FlowKey, int] = {}
        self._ends: dict[int, int] = {}
        """By step: quanta that end there."""
        self.slots_version = 0
        """Grows with each change of `flow_slots`."""
        self._late_claims: dict[Sequence, None] = {}
        """Sequences whose claim on their tenant's reserve has waited for a unit's end."""
        self._next_item = 0
        self._step = 0
        self._reclaim = Reclaim(pool, shares, swapper, self._queue, self._parked.keys(), self._held.keys())
        self._round = _Round(0, 0)

    @property
    def running(self) -> SequenceOf[Sequence]:
        """In a slot; oldest first."""
        return [unit.sequence for unit in self._units]

    @property
    def num_running(self) -> int:
        return len(self._units)

    @property
    def parked(self) -> Iterable[Sequence]:
        """With blocks and without a slot."""
        return self._parked.keys()

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """Without blocks that could be computed in: swapped ones too; oldest first."""
        return self._waiting

    @property
    def queue(self) -> FairQueue[FlowKey, int]:
        """For reading."""
        return self._queue

    def flow_slots(self) -> dict[FlowKey, FlowSlots]:
        """Who has the slots, and whom its own hard cap holds back."""
        flows = dict.fromkeys((*self._slots_by_flow, *self._capped))
        return {flow: FlowSlots(self._slots_by_flow.get(flow, 0), flow in self._capped) for flow in flows}

    def shares_changed(self, tenant_id: TenantId) -> None:
        """The tenant's weights or bounds have another value from now on."""
        for qos_class in QosClass:
            flow = (tenant_id, qos_class)
            self._queue.set_share(flow, Share(self._shares.weight(flow)))

    def enqueue(self, sequence: Sequence) -> None:
        """A sequence in WAITING, for admission."""
        assert sequence.status is SequenceStatus.WAITING
        bisect.insort(self._waiting, sequence, key=_order)
        self._push(sequence)

    def fork(self, leader: Sequence, others: SequenceOf[Sequence]) -> None:
        """Parks `others` behind the leader, sharing its blocks of the prompt but the last prompt token's place.

        Each computes that token itself and draws its own first token from it; the block where it stands is copied
        before it is written (only where another holder is left by then).
        """
        num_shared_tokens = len(leader.group.request.prompt_token_ids) - 1
        shared = leader.block_table[: self._pool.blocks_for(num_shared_tokens)]
        for sequence in others:
            self._pool.share(shared)
            sequence.block_table = list(shared)
            sequence.block_keys = list(leader.block_keys)  # so far of prompt blocks alone
            sequence.num_computed_tokens = num_shared_tokens
            sequence.move_to(SequenceStatus.PREFILL)
            self._park(sequence)
            self._push(sequence)

    def remove(self, sequence: Sequence, *, refund: bool = False) -> bool:
        """Takes a finished sequence out and settles its unit; its blocks it keeps. Returns whether it was here.

        Args:
            refund: its part of the last plan is not charged: it is computed for nothing, or was not computed.
        """
        if sequence.item is not None or sequence in self._held:
            self._unqueue(sequence)
            self._held.pop(sequence, None)
            if sequence in self._parked:
                del self._parked[sequence]
            else:
                del self._waiting[bisect.bisect_left(self._waiting, sequence.order, key=_order)]
        else:
            index = bisect.bisect_left(self._units, sequence.order, key=_unit_order)
            if index == len(self._units) or self._units[index].sequence is not sequence:
                return False
            unit = self._units.pop(index)
            self._leave_slot(unit)
            self._queue.settle(unit.item, unit.cost - unit.step_cost * refund)
        return True

    def release_blocks(self, sequence: Sequence) -> None:
        """Frees what a sequence holds that was removed."""
        self._lose_blocks(sequence)
        self._swapper.forget(sequence)

    def copy_ended(self, sequence: Sequence) -> None:
        """Its KV is on the host now, or back on the device. It is not finished."""
        assert sequence.swap is not None
        resumes_as, num_blocks = sequence.swap.resumes_as, len(sequence.swap.host_blocks)
        if self._swapper.ended(sequence) is SwapStage.LEAVING:
            self._lose_blocks(sequence)
        else:
            del self._waiting[bisect.bisect_left(self._waiting, sequence.order, key=_order)]
            sequence.move_to(resumes_as)
            self._publish(sequence, num_blocks)
            self._park(sequence)
        self._requeue(sequence)

    def _publish(self, sequence: Sequence, num_blocks: int) -> None:
        """Its first blocks are as they were before it left: what follows them is found behind them again."""
        keys, block_size = self._prefix_keys, self._pool.block_size
        if keys is not None:
            for index in range(min(num_blocks, sequence.num_computed_tokens // block_size)):
                self._pool.publish(sequence.block_table[index], keys.key_at(sequence, index, block_size))

    def pause(self, sequences: Iterable[Sequence]) -> None:
        """Their group is paused: they take no slot until `resume`. One that has a slot keeps it to its unit's end."""
        for sequence in sequences:
            assert sequence.group.is_paused
            if sequence.item is not None:
                self._unqueue(sequence)
                self._held[sequence] = None

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Their group is paused no longer."""
        for sequence in sequences:
            assert not sequence.group.is_paused
            if sequence in self._held:
                del self._held[sequence]
                self._push(sequence)

    # ---- a plan

    def plan(self, *, is_ahead: bool = False) -> StepPlan:
        """Decides one step and takes its blocks. Everything scheduled must then be computed, or its sequences ended.

        Args:
            is_ahead: a step is in flight, and what becomes of its sequences is not known yet. There may be nothing to
                schedule then, though there would be without it.
        """
        self._step += 1
        ended = self._end_units()
        self._round = _Round(
            budget=self._limits.max_batch_tokens - len(self._units),
            ready_decodes=sum(s.status is SequenceStatus.DECODE and s.item is not None for s in self._parked),
        )
        self._reclaim.begin_plan()
        self._late_claims = {s: None for s in self._late_claims if s.is_out and not s.is_finished}
        self._trim_to_caps()
        if self._waiting and self._shares.reserves:
            self._claim_reserves()
        self._fill_slots()
        if not self._units and self._queued and not is_ahead and not self._swapper.num_copying:
            self._force()
        chunks: list[Scheduled] = []
        scheduled: list[Scheduled] = []
        for unit in self._units:
            unit.step_cost = _cost(unit.chunk)
            unit.cost += unit.step_cost
            if unit.sequence.status is SequenceStatus.DECODE:
                unit.tokens_left -= 1
                scheduled.append(unit.chunk)
            else:
                unit.tokens_left = 0
                chunks.append(unit.chunk)
        num_yielded = sum(s in self._parked and s.item is not None for s in ended) if self._parked else 0
        return StepPlan(scheduled + chunks, self._round.num_evicted, num_yielded)

    def _end_units(self) -> list[Sequence]:
        """Parks the sequences whose units are through, and queues their next ones; what is ENDING has none.

        The next unit is queued before the present one is settled, so the flow does not count as newly backlogged.
        """
        over = [unit for unit in self._units if not unit.tokens_left]
        if over:
            self._units = [unit for unit in self._units if unit.tokens_left]
        for unit in over:
            self._leave_slot(unit)
            unit.sequence.has_worked |= unit.cost > 0
            if unit.sequence.status is not SequenceStatus.ENDING:
                self._park(unit.sequence)
                self._push(unit.sequence)
            self._queue.settle(unit.item, unit.cost)
        return [unit.sequence for unit in over]

    def _fill_slots(self) -> None:
        while self._queued and len(self._units) < self._limits.sequence_slots:
            pick = self._queue.select(self._fits, 0)
            if self._round.deferred is not None:
                self._do_deferred()  # and ask again: who is first now may be another
            elif pick is None:
                return
            else:
                self._start(pick)

    def _force(self) -> None:
        """Nothing can be started: the first in order takes from whomever it needs, reserves and leads aside."""
        round_ = self._round
        self._reclaim.is_forced = True
        for refusals in (self._reclaim.claims, self._reclaim.awaited, round_.refused):
            refusals.clear()
        pick = self._queue.select(self._fits, 0)
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
                self._evict(victim)
            else:
                self._swap_or_evict(victim)
        if room.is_now:
            del self._reclaim.awaited[sequence]
            self._bring_back(sequence)

    def _start(self, pick: Pick[int, _Place]) -> None:
        """Gives the unit its slot and its blocks."""
        sequence, place = self._queued.pop(pick.item), pick.place
        sequence.item = None
        for victim in place.room.victims:
            self._evict(victim)
        self._take_blocks(sequence, place.end)
        del self._parked[sequence]
        num_tokens, ends_at = place.num_tokens, 0
        if sequence.status is SequenceStatus.DECODE:
            ends_at = self._step + num_tokens
            self._ends[ends_at] = self._ends.get(ends_at, 0) + 1
            chunk = Scheduled(sequence, 1, samples=True)
            cost = num_tokens * OUTPUT_TOKEN_COST
            self._round.ready_decodes -= 1
            self._round.budget -= 1
        else:
            num_tokens = min(num_tokens, sequence.num_uncomputed_tokens)  # fewer, where some were cached
            chunk = Scheduled(sequence, num_tokens, samples=num_tokens == sequence.num_uncomputed_tokens)
            cost = _cost(chunk)
            self._round.budget -= num_tokens
        self._queue.dispatch(pick, cost)
        flow = sequence.flow
        self._slots_by_flow[flow] = self._slots_by_flow.get(flow, 0) + 1
        self.slots_version += 1
        bisect.insort(self._units, _Unit(sequence, pick.item, chunk, num_tokens, ends_at), key=_unit_order)

    def _leave_slot(self, unit: _Unit) -> None:
        """Books of a unit that has left the slots."""
        flow = unit.sequence.flow
        self.slots_version += 1
        self._slots_by_flow[flow] -= 1
        if not self._slots_by_flow[flow]:
            del self._slots_by_flow[flow]
        if unit.ends_at:
            self._ends[unit.ends_at] -= 1
            if not self._ends[unit.ends_at]:
                del self._ends[unit.ends_at]

    def _spread(self, most: int) -> int:
        """Tokens of a quantum that could have `most`: the longest whose end keeps its distance from others' ends, as if
        the slots' ends were spread evenly over a quantum's steps. Only quanta that begin together are cut; each one
        that follows a whole one ends where its slot was free before.
        """
        slots = self._limits.sequence_slots
        even, gap = -(-slots // QUANTUM_TOKENS), max(1, QUANTUM_TOKENS // slots)
        for num_tokens in range(most, 0, -1):
            end = self._step + num_tokens
            if sum(self._ends.get(step, 0) for step in range(end - gap + 1, end + gap)) < even:
                return num_tokens
        return most

    def _fits(self, item: int) -> _Place | None:
        """How a queued unit can be started now; None: it cannot. Changes nothing."""
        round_ = self._round
        if self._reclaim.waits or round_.deferred is not None or item in round_.refused:
            return None
        sequence = self._queued[item]
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
        if is_over and sequence.flow not in self._capped:
            self._capped[sequence.flow] = None
            self.slots_version += 1

    def _end_capped(self, flow: FlowKey) -> None:
        """The flow can go on, or has nothing to start. It was not backlogged meanwhile: it begins at the clock."""
        if flow in self._capped:
            del self._capped[flow]
            self._queue.forgo(flow)
            self.slots_version += 1

    def _place_of(self, sequence: Sequence) -> _Place | None:
        if sequence.status is not SequenceStatus.DECODE:
            # What comes back from the host is not computed in this step.
            num_tokens = 0 if sequence.swap is not None else self._chunk_tokens(sequence)
            if num_tokens == 0 and sequence.swap is None:
                return None
            if sequence.is_out:
                cached = self._find_cached(sequence)
                num_blocks = self._pool.blocks_for(sequence.num_tokens) - len(cached)
                # As good as free are those that are idle, and those that are on their way to be: others may await them.
                num_blocks += self._pool.num_idle_among(cached) + self._swapper.num_leaving_among(cached)
                room = self._room(sequence, num_blocks, may_evict=False)
                if room is not None:
                    return _Place(num_tokens, sequence.num_tokens, room)
            # A sequence without blocks takes those of all its tokens: two half-computed prompts never lock each other.
            # Where it evicts, what is cached does not count: it may be what the victims hold.
            return self._place(sequence, num_tokens, sequence.num_tokens, may_evict=True)
        computed = sequence.num_computed_tokens
        most = self._spread(min(QUANTUM_TOKENS, sequence.max_output_tokens - sequence.num_output_tokens))
        place = self._place(sequence, most, computed + most, may_evict=False)
        if place is not None and place.room.is_now:
            return place
        # A short quantum, up to the end of the block, rather than an eviction.
        block_size = self._pool.block_size
        left = len(sequence.block_table) * block_size - computed
        num_tokens = min(most, left if left > 0 else block_size)
        return self._place(sequence, num_tokens, computed + num_tokens, may_evict=True)

    def _place(self, sequence: Sequence, num_tokens: int, end: int, *, may_evict: bool) -> _Place | None:
        room = self._room(sequence, self._missing(sequence, end), may_evict=may_evict)
        return None if room is None else _Place(num_tokens, end, room)

    def _room(self, sequence: Sequence, num_blocks: int, *, may_evict: bool) -> Room | None:
        return self._reclaim.room(
            sequence,
            num_blocks,
            may_evict=may_evict,
            may_swap=sequence not in self._late_claims,
            is_beside_others=bool(self._units or self._parked),
        )

    def _chunk_tokens(self, sequence: Sequence) -> int:
        """Tokens of the next part of a prefill; 0 where the step has none left for it."""
        other_slots = self._limits.sequence_slots - len(self._units) - 1
        budget = self._round.budget - min(self._round.ready_decodes, other_slots)
        return max(0, min(sequence.num_uncomputed_tokens, self._limits.prefill_chunk_tokens, budget))

    # ---- blocks

    def _missing(self, sequence: Sequence, end: int) -> int:
        """Blocks that the sequence takes to write its tokens up to `end`, the copy of a shared one included."""
        missing = max(0, self._pool.blocks_for(end) - len(sequence.block_table))
        return missing + self._writes_shared_block(sequence)

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        """Only the first block that is written can be shared: those behind it are the sequence's own."""
        index = sequence.num_computed_tokens // self._pool.block_size
        return index < len(sequence.block_table) and self._pool.is_shared(sequence.block_table[index])

    def _take_blocks(self, sequence: Sequence, end: int) -> None:
        """Takes the blocks up to position `end`. Counted anew: the victims may have been who shared a block."""
        num_blocks = self._missing(sequence, end)
        if sequence.status is SequenceStatus.WAITING:
            self._admit(sequence)
            return
        index = sequence.num_computed_tokens // self._pool.block_size
        if num_blocks and self._writes_shared_block(sequence):
            sequence.block_table[index] = self._pool.copy_on_write(sequence.block_table[index])
            num_blocks -= 1
        else:  # a further choice whose siblings are gone writes the prompt's last token anew, in a block that is cached
            self._pool.unpublish(sequence.block_table[index : index + 1])
        sequence.block_table += self._pool.allocate(sequence.tenant_id, num_blocks)

    def _admit(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks those of all its tokens, and parks it.

        What is cached of its tokens it takes, but the last token is always computed. The order does not depend on what
        is cached.
        """
        del self._waiting[bisect.bisect_left(self._waiting, sequence.order, key=_order)]
        num_cached = self._take_all_blocks(sequence)
        sequence.start_behind(num_cached * self._pool.block_size)
        sequence.move_to(SequenceStatus.PREFILL)
        self._park(sequence)

    def _bring_back(self, sequence: Sequence) -> None:
        """Gives a swapped sequence the blocks of all its tokens, and starts the copy into those that are not cached."""
        num_cached = self._take_all_blocks(sequence)
        self._swapper.bring_back(sequence, num_cached)
        self._requeue(sequence)

    def _take_all_blocks(self, sequence: Sequence) -> int:
        """Returns how many of them were cached."""
        self._end_capped(sequence.flow)
        cached = self._find_cached(sequence)
        num_blocks = self._pool.blocks_for(sequence.num_tokens) - len(cached)
        self._pool.take_cached(cached)
        sequence.block_table = cached + self._pool.allocate(sequence.tenant_id, num_blocks)
        sequence.has_worked = False
        return len(cached)

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """The longest chain of full blocks that the sequence can begin with; a swapped one goes on where it stood."""
        keys, block_size = self._prefix_keys, self._pool.block_size
        if keys is None:
            return []
        most = sequence.num_tokens - 1 if sequence.swap is None else sequence.num_computed_tokens
        chain = (keys.key_at(sequence, index, block_size) for index in range(most // block_size))
        return self._pool.find_cached(sequence.tenant_id, chain)

    def _claim_reserves(self) -> None:
        """Gives waiting sequences their blocks, slot or none, as far as their tenant's reserve goes.

        Where what others hold above their reserves is in the slots now, the blocks are kept for the claim as they come
        free: at the latest when every quantum that runs now is over.
        """
        blocked: dict[TenantId, None] = {}
        for sequence in list(self._waiting):
            if sequence in self._held or sequence.is_copying:
                continue
            tenant_id = sequence.tenant_id
            reserve = self._shares.reserve(tenant_id)
            num_blocks = self._pool.blocks_for(sequence.num_tokens)
            if tenant_id in blocked or self._pool.held_by(tenant_id) + num_blocks > reserve:
                continue
            room = self._room(sequence, num_blocks, may_evict=True)
            if room is not None and room.is_now:
                for victim in room.victims:
                    self._evict(victim)
                if sequence.swap is None:
                    self._admit(sequence)
                    self._requeue(sequence)
                else:
                    self._bring_back(sequence)
                continue
            self._reclaim.claims[tenant_id] = num_blocks
            blocked[tenant_id] = None
            if room is None:
                self._late_claims[sequence] = None
                continue
            for victim in room.victims:
                self._swap_or_evict(victim)

    def _trim_to_caps(self) -> None:
        """Evicts what stands above a hard cap that has been lowered."""
        for tenant_id in {s.tenant_id: None for s in self._parked} if self._shares.has_caps else ():
            while self._reclaim.will_hold(tenant_id) > self._shares.hard(tenant_id):
                own = [s for s in self._parked if s.tenant_id == tenant_id]
                if not own:
                    break
                victim = min(own, key=least_recent)
                if victim.num_steps_in_flight:
                    self._reclaim.waits = True
                    break
                self._evict(victim)

    def _swap_or_evict(self, sequence: Sequence) -> None:
        """Has a parked sequence give up its blocks: at once, or when they are copied."""
        if not self._swapper.pays(sequence):
            self._evict(sequence)
            return
        self._swapper.leave(sequence)
        self._leave_parked(sequence)
        sequence.move_to(SequenceStatus.SWAPPED)
        self._requeue(sequence)

    def _evict(self, sequence: Sequence) -> None:
        """Frees a parked sequence's blocks; it is computed again, and not charged for that."""
        self._leave_parked(sequence)
        self._lose_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.move_to(SequenceStatus.WAITING)
        self._requeue(sequence)
        sequence.group.num_evictions += 1
        self._round.num_evicted += 1

    def _leave_parked(self, sequence: Sequence) -> None:
        """What was done for it stays charged, and is not charged again."""
        assert not sequence.num_steps_in_flight
        del self._parked[sequence]
        is_decoding = sequence.status is SequenceStatus.DECODE
        self._round.ready_decodes -= is_decoding and sequence.item is not None
        done = sequence.num_tokens if is_decoding else sequence.num_computed_tokens
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, done)
        bisect.insort(self._waiting, sequence, key=_order)

    def _lose_blocks(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_holdings += 1

    # ---- the queue

    def _park(self, sequence: Sequence) -> None:
        sequence.parked_at = self._step
        self._parked[sequence] = None

    def _push(self, sequence: Sequence) -> None:
        """Queues the sequence's next unit; of a paused one there is none."""
        if sequence.group.is_paused:
            self._held[sequence] = None
            return
        self._next_item += 1
        sequence.item = self._next_item
        self._queued[self._next_item] = sequence
        flow = sequence.flow
        if flow in self._capped:
            self._queue.forgo(flow)  # this unit may be one that can start
        # Each unit is offered by itself: what it takes to start it is never quite what another takes.
        self._queue.push(
            self._next_item,
            flow,
            share=Share(self._shares.weight(flow)),
            need=self._next_item,
            rank=Rank(sequence.is_out + sequence.is_copying, 0, sequence.sequence_id),
        )

    def _requeue(self, sequence: Sequence) -> None:
        """Its place in its flow has changed. The flow is backlogged all the while."""
        before = sequence.item
        if before is None:
            return  # it is paused
        self._push(sequence)
        self._queue.remove(before)
        del self._queued[before]

    def _unqueue(self, sequence: Sequence) -> None:
        if sequence.item is not None:
            self._queue.remove(sequence.item)
            del self._queued[sequence.item]
            sequence.item = None
            flow = sequence.flow
            # It may have been what the cap held back; if another is, that is found out when it is asked for.
            if sequence not in self._parked or not self._queue.queued_in(flow):
                self._end_capped(flow)

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        self._queue.check_invariants()
        assert len(self._units) <= self._limits.sequence_slots
        assert self._queue.num_running == len(self._units)
        num_held = len(self._held)
        assert self._queue.num_queued == len(self._queued) == len(self._parked) + len(self._waiting) - num_held
        assert all(s.item is None and s.group.is_paused for s in self._held)
        assert all(s in self._parked or s in self._waiting for s in self._held)
        slots: dict[FlowKey, int] = {}
        for unit in self._units:
            slots[unit.sequence.flow] = slots.get(unit.sequence.flow, 0) + 1
        assert slots == self._slots_by_flow
        assert all(self._queue.queued_in(flow) for flow in self._capped)
        assert sum(self._ends.values()) == sum(unit.ends_at > 0 for unit in self._units)
        assert all(self._queued[s.item] is s for s in (*self._parked, *self._waiting) if s.item is not None)
        assert all(unit.sequence.item is None for unit in self._units)
        assert all(unit.cost <= self._queue.reserved_by(unit.sequence.flow) for unit in self._units)


class _Round:
    """What one plan has left, and what it has found out."""

    __slots__ = ("budget", "deferred", "num_evicted", "ready_decodes", "refused")

    def __init__(self, budget: int, ready_decodes: int) -> None:
        self.budget = budget
        """Tokens of the step."""
        self.ready_decodes = ready_decodes
        """Decodes without a slot."""
        self.deferred: tuple[Sequence, Room] | None = None
        """Who gets room when the choice that is being made is over; until then nothing else is chosen."""
        self.refused: dict[int, None] = {}
        """Items that cannot be started in this plan."""
        self.num_evicted = 0


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _unit_order(unit: _Unit) -> tuple[int, int]:
    return unit.sequence.order


def _cost(item: Scheduled) -> int:
    """What a step's part costs its flow."""
    if item.sequence.status is SequenceStatus.DECODE:
        return OUTPUT_TOKEN_COST
    new_tokens = item.sequence.num_new_tokens(item.num_tokens)
    return new_tokens * PROMPT_TOKEN_COST + item.samples * OUTPUT_TOKEN_COST
