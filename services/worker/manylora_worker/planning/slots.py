"""Who has a slot, what it does there, and when the slot is free again. StepPlanner alone writes it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from manylora_worker.kinds.api import Draft
from manylora_worker.kinds.flow import FlowKey
from manylora_worker.kinds.sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """What one step computes of a sequence."""

    sequence: Sequence
    num_tokens: int
    samples: bool  # it computes the sequence's last token, so that the next one is drawn
    guesses: SequenceOf[int] = ()  # computed behind the `num_tokens`
    draft: Draft | None = None  # or what the draft model does for them

    @property
    def num_guesses(self) -> int:
        return len(self.guesses) if self.draft is None else self.draft.num_guesses


class Unit:
    """What a sequence does in its slot."""

    __slots__ = (
        "chunk", "cost", "draft_cost", "ends_at", "item", "num_held_up", "sequence", "step_cost", "tokens_left",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, item: int, chunk: Scheduled, tokens_left: int, ends_at: int) -> None:
        self.sequence = sequence
        self.item = item
        self.chunk = chunk  # what it computes in each of its steps
        # a quantum's tokens that no step computed or computes yet; of a chunk all or nothing
        self.tokens_left = tokens_left
        # the step in which a quantum's slot is free again, unless it ends before; 0: it is a chunk
        self.ends_at = ends_at
        self.cost = 0  # of the steps so far, the one that was planned last included
        self.step_cost = 0  # of that last one
        self.draft_cost = 0  # in `cost`, the draft model's
        self.num_held_up = 0  # the last plans, in which its mask was not there


class Slots:
    def __init__(self, num_slots: int, quantum_tokens: int) -> None:
        self.num_slots = num_slots
        self._quantum_tokens = quantum_tokens
        self._units: list[Unit] = []
        self._by_flow: dict[FlowKey, int] = {}
        self._ends: dict[int, int] = {}  # by step: quanta that end there
        self._version = 0

    def __len__(self) -> int:
        return len(self._units)

    @property
    def units(self) -> SequenceOf[Unit]:
        """Oldest sequence first."""
        return self._units

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._units)

    @property
    def by_flow(self) -> Mapping[FlowKey, int]:
        return self._by_flow

    @property
    def version(self) -> int:
        """Grows with each change of `by_flow`."""
        return self._version

    def take(self, unit: Unit) -> None:
        assert self.num_free > 0
        flow = unit.sequence.flow
        self._by_flow[flow] = self._by_flow.get(flow, 0) + 1
        self._version += 1
        if unit.ends_at:
            self._ends[unit.ends_at] = self._ends.get(unit.ends_at, 0) + 1
        bisect.insort(self._units, unit, key=_order)

    def leave(self, sequence: Sequence) -> Unit | None:
        """None: it has no slot."""
        index = bisect.bisect_left(self._units, sequence.order, key=_order)
        if index == len(self._units) or self._units[index].sequence is not sequence:
            return None
        unit = self._units.pop(index)
        self._count_out(unit)
        return unit

    def take_ended(self) -> list[Unit]:
        ended = [unit for unit in self._units if unit.tokens_left <= 0]
        if ended:
            self._units = [unit for unit in self._units if unit.tokens_left > 0]
        for unit in ended:
            self._count_out(unit)
        return ended

    def spread(self, step: int, most: int) -> int:
        """Tokens, up to `most`, after which a quantum that begins in `step` keeps its distance from others' ends."""
        slots, quantum = self.num_slots, self._quantum_tokens
        even, gap = -(-slots // quantum), max(1, quantum // slots)
        ends, end = self._ends, step + most
        near = sum(ends.get(other, 0) for other in range(end - gap + 1, end + gap))
        for num_tokens in range(most, 0, -1):
            if near < even:
                return num_tokens
            end = step + num_tokens
            near += ends.get(end - gap, 0) - ends.get(end + gap - 1, 0)
        return most

    def _count_out(self, unit: Unit) -> None:
        flow = unit.sequence.flow
        self._version += 1
        self._by_flow[flow] -= 1
        if not self._by_flow[flow]:
            del self._by_flow[flow]
        if unit.ends_at:
            self._ends[unit.ends_at] -= 1
            if not self._ends[unit.ends_at]:
                del self._ends[unit.ends_at]

    def check_invariants(self) -> None:
        assert len(self._units) <= self.num_slots
        by_flow: dict[FlowKey, int] = {}
        for unit in self._units:
            by_flow[unit.sequence.flow] = by_flow.get(unit.sequence.flow, 0) + 1
        assert by_flow == self._by_flow
        assert sum(self._ends.values()) == sum(unit.ends_at > 0 for unit in self._units)
        assert all(unit.sequence.item is None for unit in self._units)


def _order(unit: Unit) -> tuple[int, int]:
    return unit.sequence.order
