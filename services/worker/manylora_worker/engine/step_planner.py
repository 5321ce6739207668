"""Which sequences the next step computes, and with which blocks.

Owns the two queues of sequences whose adapter is on the device: running (they hold blocks) and waiting (they do not).
Called by EngineCore alone. Decides by age, tokens and blocks; knows neither adapters nor models.

A step is filled in this order, under `max_batch_tokens`:

1. decoding sequences, one token each;
2. running prefills, oldest first, up to `prefill_chunk_tokens` each. A long prompt is cut, so no decode waits for it;
3. waiting sequences in `_admission_order`, while slots, blocks for their whole prompt and tokens of the step are left.

When a running sequence needs a block and none is free, the youngest running sequence is preempted: it frees its blocks
and waits, keeping its output, to be recomputed. Only an older sequence takes blocks from a younger one and a waiting
one takes none, so the oldest running sequence always advances. Since no sequence is added that could not run alone
(`EngineCore.add`), each step with a running or waiting sequence computes at least one token, and every sequence becomes
the oldest in finite time: no livelock, no starvation.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from manylora_worker.engine.block_pool import BlockPool
from manylora_worker.engine.prefix_cache import PrefixKeys
from manylora_worker.engine.sequence import Sequence, SequenceStatus

_WATERMARK_DIVISOR = 100
"""A hundredth of all blocks stays free when a sequence is admitted beside running ones, for these to grow into."""


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


@dataclass(frozen=True)
class StepPlan:
    scheduled: SequenceOf[Scheduled]
    num_preempted: int


class StepPlanner:
    def __init__(self, pool: BlockPool, limits: PlannerLimits, prefix_keys: PrefixKeys | None = None) -> None:
        self._pool = pool
        self._limits = limits
        self._prefix_keys = prefix_keys
        """None: nothing is looked up."""
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._watermark_blocks = pool.num_blocks // _WATERMARK_DIVISOR

    @property
    def running(self) -> SequenceOf[Sequence]:
        """Oldest first."""
        return self._running

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """Oldest first."""
        return self._waiting

    def enqueue(self, sequence: Sequence) -> None:
        """A sequence in WAITING, for admission."""
        assert sequence.status is SequenceStatus.WAITING
        bisect.insort(self._waiting, sequence, key=_order)

    def fork(self, leader: Sequence, others: SequenceOf[Sequence]) -> None:
        """Starts `others` in the leader's slots, sharing its blocks of the prompt but the last prompt token's place.

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
            bisect.insort(self._running, sequence, key=_order)

    def remove(self, sequence: Sequence) -> bool:
        """Takes a finished sequence out of its queue and frees its blocks. Returns whether it was in one."""
        for queue in (self._running, self._waiting):
            index = bisect.bisect_left(queue, sequence.order, key=_order)
            if index < len(queue) and queue[index] is sequence:
                del queue[index]
                self._release_blocks(sequence)
                return True
        return False

    def plan(self) -> StepPlan:
        """Decides one step and takes its blocks. Everything scheduled must then be computed, or its sequences ended."""
        scheduled: list[Scheduled] = []
        num_preempted = 0
        for item in self._wanted():
            if item.sequence.status is SequenceStatus.WAITING:
                continue  # preempted for an older one
            fits, evicted = self._make_room(item)
            num_preempted += evicted
            if fits:
                scheduled.append(item)
        if num_preempted == 0:
            scheduled += self._admit(self._limits.max_batch_tokens - sum(item.num_tokens for item in scheduled))
        return StepPlan(scheduled, num_preempted)

    def _wanted(self) -> list[Scheduled]:
        """What the running sequences would compute, blocks aside; oldest first."""
        budget = self._limits.max_batch_tokens
        budget -= sum(s.status is SequenceStatus.DECODE for s in self._running)
        wanted: list[Scheduled] = []
        for sequence in self._running:
            if sequence.status is SequenceStatus.DECODE:
                wanted.append(Scheduled(sequence, 1, samples=True))
                continue
            if budget > 0:
                chunk = self._chunk(sequence, budget)
                wanted.append(chunk)
                budget -= chunk.num_tokens
        return wanted

    def _chunk(self, sequence: Sequence, budget: int) -> Scheduled:
        """The next part of a prefill."""
        num_uncomputed = sequence.num_uncomputed_tokens
        num_tokens = min(num_uncomputed, self._limits.prefill_chunk_tokens, budget)
        return Scheduled(sequence, num_tokens, samples=num_tokens == num_uncomputed)

    def _make_room(self, item: Scheduled) -> tuple[bool, int]:
        """Gives the sequence the blocks that it is about to write, preempting the youngest while too few are free.

        Returns:
            Whether it has them (else it was the youngest and is preempted itself), and how many were preempted.
        """
        sequence = item.sequence
        num_preempted = 0
        while True:
            must_copy = self._writes_shared_block(sequence)
            end = sequence.num_computed_tokens + item.num_tokens
            missing = max(0, self._pool.blocks_for(end) - len(sequence.block_table))
            if missing + must_copy <= self._pool.num_free:
                break
            victim = self._running[-1]
            self._preempt(victim)
            num_preempted += 1
            if victim is sequence:
                return False, num_preempted
        index = sequence.num_computed_tokens // self._pool.block_size
        if must_copy:
            sequence.block_table[index] = self._pool.copy_on_write(sequence.block_table[index])
        else:  # a further choice whose siblings are gone writes the prompt's last token anew, in a block that is cached
            self._pool.unpublish(sequence.block_table[index : index + 1])
        sequence.block_table += self._pool.allocate(sequence.tenant_id, missing)
        return True, num_preempted

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        """Only the first block that is written can be shared: those behind it are the sequence's own."""
        index = sequence.num_computed_tokens // self._pool.block_size
        return index < len(sequence.block_table) and self._pool.is_shared(sequence.block_table[index])

    def _preempt(self, sequence: Sequence) -> None:
        assert self._running[-1] is sequence
        self._running.pop()
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.move_to(SequenceStatus.WAITING)
        bisect.insort(self._waiting, sequence, key=_order)

    def _release_blocks(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_holdings += 1

    def _admission_order(self) -> SequenceOf[Sequence]:
        """The order in which waiting sequences are admitted; the first that does not fit holds back those behind it."""
        return self._waiting

    def _admit(self, budget: int) -> list[Scheduled]:
        """Moves waiting sequences to running, each with the blocks of all its tokens and its first chunk.

        What is cached of a sequence's tokens it takes, but the last token is always computed. The order does not depend
        on what is cached.
        """
        admitted: list[Scheduled] = []
        slots = self._limits.sequence_slots - sum(s.slots for s in self._running)
        for sequence in list(self._admission_order()):
            if budget == 0 or sequence.slots > slots:
                break
            cached = self._find_cached(sequence)
            blocks = self._pool.blocks_for(sequence.num_tokens) - len(cached)
            spare = self._watermark_blocks if self._running else 0
            if blocks + self._pool.num_idle_among(cached) + spare > self._pool.num_free:
                break
            slots -= sequence.slots
            self._waiting.remove(sequence)
            self._pool.take_cached(cached)
            sequence.block_table = cached + self._pool.allocate(sequence.tenant_id, blocks)
            sequence.start_behind(len(cached) * self._pool.block_size)
            sequence.move_to(SequenceStatus.PREFILL)
            bisect.insort(self._running, sequence, key=_order)
            chunk = self._chunk(sequence, budget)
            budget -= chunk.num_tokens
            admitted.append(chunk)
        return admitted

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """The longest chain of full blocks that the sequence can begin with."""
        keys, block_size = self._prefix_keys, self._pool.block_size
        if keys is None:
            return []
        chain = (keys.key_at(sequence, index, block_size) for index in range((sequence.num_tokens - 1) // block_size))
        return self._pool.find_cached(sequence.tenant_id, chain)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
