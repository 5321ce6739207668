"""Whose decode quantum ends early, and for whose prompt.

Where no slot is free, a prompt of a flow that has less than its share of the slots does not wait for a quantum's end: a
quantum of a flow that has more, and has come as far, ends there and then. Shares go by weight among the flows that have
slots or wait for some. Equal flows cut nothing of one another, so whole quanta remain the rule.

Owns nothing. StepPlanner asks, and does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from manylora_worker.kinds.sequence import SequenceStatus
from manylora_worker.memory.tenant_shares import FlowKey, TenantShares
from manylora_worker.planning.slots import Slots, Unit
from manylora_worker.planning.unit_queue import UnitQueue


class QuantumCuts:
    def __init__(self, slots: Slots, queue: UnitQueue, shares: TenantShares) -> None:
        self._slots = slots
        self._queue = queue
        self._shares = shares

    def prompts(self) -> Set[int | None]:
        """The queued items for which a quantum may be cut: prompts of flows with less than their share of the slots."""
        slots_of, share_of = self._slots.by_flow, self._slot_shares()
        return {
            sequence.item
            for sequence in self._queue.sequences
            if sequence.status is not SequenceStatus.DECODE and slots_of.get(sequence.flow, 0) < share_of[sequence.flow]
        }

    def unit_for(self, item: int) -> Unit | None:
        """The quantum to cut for a prompt: that with least left of the flows with more than their share, which have
        come as far as the prompt's."""
        flows = self._flows_ahead(self._queue.sequence(item).flow, self._slot_shares())
        quanta = [unit for unit in self._slots.units if unit.ends_at and unit.cost and unit.sequence.flow in flows]
        return min(quanta, key=lambda unit: unit.tokens_left, default=None)

    def _flows_ahead(self, behind: FlowKey, share_of: Mapping[FlowKey, int]) -> Set[FlowKey]:
        """Those with more than their share of the slots that have come as far as a flow."""
        fair, slots_of = self._queue.fair, self._slots.by_flow
        return {
            flow for flow, count in slots_of.items() if count > share_of[flow] and fair.has_come_as_far(flow, behind)
        }

    def _slot_shares(self) -> dict[FlowKey, int]:
        """Slots that are a flow's by weight, at least one, of each flow that has any or waits for one."""
        flows = (*self._slots.by_flow, *(sequence.flow for sequence in self._queue.sequences))
        weights = {flow: self._shares.weight(flow) for flow in flows}
        total = sum(weights.values())
        return {flow: max(1, self._slots.num_slots * weight // total) for flow, weight in weights.items()}
