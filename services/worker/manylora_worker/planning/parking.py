"""The sequences without a slot: parked ones, with blocks, and waiting ones. Moves them as StepPlanner decides."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf

from manylora_worker.kinds.sequence import Sequence, SequenceStatus, SwapStage
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.block_tables import BlockTables
from manylora_worker.memory.prefixes import Prefixes
from manylora_worker.memory.swapping import Swapper
from manylora_worker.planning.unit_queue import UnitQueue


class Parking:
    def __init__(
        self, pool: BlockPool, tables: BlockTables, swapper: Swapper, prefixes: Prefixes, queue: UnitQueue
    ) -> None:
        self._pool = pool
        self._tables = tables
        self._swapper = swapper
        self._prefixes = prefixes
        self._queue = queue
        self._parked: dict[Sequence, None] = {}
        self.parked = self._parked.keys()  # with blocks
        self._waiting: list[Sequence] = []  # oldest first
        self.step = 0  # the plan being made, or made last
        self.swapped: list[Sequence] = []  # in this plan, to the host
        self.evicted: list[Sequence] = []  # in this plan
        self.ready_decodes = 0  # parked sequences that could decode, since they were counted

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """Swapped ones too; oldest first."""
        return self._waiting

    def tick(self, now: float) -> None:
        """What takes or gives blocks from now on does so at this time."""
        self._tables.now = now

    def begin_plan(self) -> None:
        self.step += 1
        self.swapped, self.evicted = [], []

    def enqueue(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.WAITING
        bisect.insort(self._waiting, sequence, key=_order)
        self._queue.push(sequence)

    def fork(self, leader: Sequence, others: SequenceOf[Sequence]) -> None:
        """Each of `others` computes the last prompt token, to draw its first one."""
        num_shared_tokens = len(leader.group.request.prompt_token_ids) - 1
        for sequence in others:
            self._tables.share(leader, sequence, num_shared_tokens)
            sequence.move_to(SequenceStatus.PREFILL)
            self.park(sequence)
            self._queue.push(sequence)

    def leave(self, sequence: Sequence) -> bool:
        """A finished sequence keeps its blocks. Returns whether it was here."""
        if not self._queue.remove(sequence, is_parked=sequence in self._parked):
            return False
        if sequence in self._parked:
            del self._parked[sequence]
        else:
            self._leave_waiting(sequence)
        return True

    def release_blocks(self, sequence: Sequence) -> None:
        self._tables.lose(sequence)
        self._swapper.forget(sequence)

    def copy_ended(self, sequence: Sequence) -> None:
        assert sequence.swap is not None
        resumes_as, num_blocks = sequence.swap.resumes_as, len(sequence.swap.host_blocks)
        if self._swapper.ended(sequence) is SwapStage.LEAVING:
            self._tables.lose(sequence)
        else:
            self._leave_waiting(sequence)
            sequence.move_to(resumes_as)
            # Its first blocks are as they were before it left: what follows them is found behind them again.
            end = min(self._pool.tokens_in(num_blocks), sequence.num_computed_tokens)
            self._prefixes.publish(sequence, 0, end)
            self.park(sequence)
        self._queue.requeue(sequence)

    def count_ready_decodes(self) -> None:
        self.ready_decodes = sum(s.status is SequenceStatus.DECODE and s.item is not None for s in self._parked)

    def leave_for_slot(self, sequence: Sequence, end: int) -> None:
        """With the blocks up to `end`."""
        if sequence.status is SequenceStatus.WAITING:
            self.admit(sequence)
        else:
            self._tables.extend(sequence, end)
        self._unpark(sequence)

    def admit(self, sequence: Sequence) -> None:
        """The last token is computed even if it is cached."""
        self._leave_waiting(sequence)
        self._queue.end_capped(sequence.flow)
        num_cached = self._tables.fill(sequence)
        sequence.start_behind(num_cached * self._pool.block_size)
        sequence.move_to(SequenceStatus.PREFILL)
        self.park(sequence)

    def bring_back(self, sequence: Sequence) -> None:
        """Starts the copy of what is not cached."""
        self._queue.end_capped(sequence.flow)
        num_cached = self._tables.fill(sequence)
        self._swapper.bring_back(sequence, num_cached)
        if num_cached:  # blocks that others computed, without a draft model perhaps
            sequence.num_drafted_tokens = 0
        self._queue.requeue(sequence)

    def swap_or_evict(self, sequence: Sequence) -> None:
        if not self._swapper.pays(sequence):
            self.evict(sequence)
            return
        self._swapper.leave(sequence)
        self._leave_parked(sequence)
        self.swapped.append(sequence)
        sequence.move_to(SequenceStatus.SWAPPED)
        self._queue.requeue(sequence)

    def evict(self, sequence: Sequence) -> None:
        """It is computed again, uncharged."""
        self._leave_parked(sequence)
        self._tables.lose(sequence)
        sequence.num_computed_tokens = sequence.num_drafted_tokens = 0
        sequence.move_to(SequenceStatus.WAITING)
        self._queue.requeue(sequence)
        sequence.group.num_evictions += 1
        self.evicted.append(sequence)

    def _leave_parked(self, sequence: Sequence) -> None:
        """What was done for it is not charged again."""
        assert not sequence.num_steps_in_flight
        self._unpark(sequence)
        is_decoding = sequence.status is SequenceStatus.DECODE
        done = sequence.num_tokens if is_decoding else sequence.num_computed_tokens
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, done)
        bisect.insort(self._waiting, sequence, key=_order)

    def park(self, sequence: Sequence) -> None:
        sequence.parked_at = self.step
        self._parked[sequence] = None

    def _unpark(self, sequence: Sequence) -> None:
        del self._parked[sequence]
        self.ready_decodes -= sequence.status is SequenceStatus.DECODE and sequence.item is not None

    def _leave_waiting(self, sequence: Sequence) -> None:
        del self._waiting[bisect.bisect_left(self._waiting, sequence.order, key=_order)]


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
