"""Which decode quantum ends early for which prompt, where no slot is free (decision 15)."""

from __future__ import annotations

from collections.abc import Mapping, Set

from manylora_worker.kinds.flow import FlowKey
from manylora_worker.kinds.sequence import SequenceStatus
from manylora_worker.memory.tenant_shares import TenantShares
from manylora_worker.planning.slots import Slots, Unit
from manylora_worker.planning.unit_queue import UnitQueue


class QuantumCuts:
    def __init__(self, slots: Slots, queue: UnitQueue, shares: TenantShares) -> None:
        self._slots = slots
        self._queue = queue
        self._shares = shares

    def prompts(self) -> Set[int | None]:
        """Queued items that a quantum may be cut for."""
        slots_of, share_of = self._slots.by_flow, self._slot_shares()
        return {
            sequence.item
            for sequence in self._queue.sequences
            if sequence.status is not SequenceStatus.DECODE and slots_of.get(sequence.flow, 0) < share_of[sequence.flow]
        }

    def is_behind(self, item: int) -> bool:
        """Whether a queued prompt's flow is below its share, and one above its own has come as far."""
        flow, share_of = self._queue.sequence(item).flow, self._slot_shares()
        return self._slots.by_flow.get(flow, 0) < share_of[flow] and bool(self._flows_ahead(flow, share_of))

    def unit_for(self, item: int) -> Unit | None:
        """The one with the least left."""
        flows = self._flows_ahead(self._queue.sequence(item).flow, self._slot_shares())
        quanta = [unit for unit in self._slots.units if unit.ends_at and unit.cost and unit.sequence.flow in flows]
        return min(quanta, key=lambda unit: unit.tokens_left, default=None)

    def _flows_ahead(self, behind: FlowKey, share_of: Mapping[FlowKey, int]) -> Set[FlowKey]:
        """Those above their share that have come as far."""
        fair, slots_of = self._queue.fair, self._slots.by_flow
        return {
            flow for flow, count in slots_of.items() if count > share_of[flow] and fair.has_come_as_far(flow, behind)
        }

    def _slot_shares(self) -> dict[FlowKey, int]:
        """At least one each."""
        flows = (*self._slots.by_flow, *(sequence.flow for sequence in self._queue.sequences))
        weights = {flow: self._shares.weight(flow) for flow in flows}
        total = sum(weights.values())
        return {flow: max(1, self._slots.num_slots * weight // total) for flow, weight in weights.items()}
