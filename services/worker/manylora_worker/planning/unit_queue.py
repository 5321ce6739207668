"""Whose turn it is: the sequences that could begin their next unit, by their flows' tags. StepPlanner and Parking write
it.

A *paused* sequence is not queued. A *capped* flow begins at the clock when it may go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from typing import TypeVar

from manylora_shared.fairness.reference import ReferenceQueue
from manylora_shared.fairness.seam import Fairness, Pick, Rank, Share
from manylora_shared.ids import QosClass, TenantId

from manylora_worker.kinds.flow import FlowKey
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.tenant_shares import TenantShares

PlaceT = TypeVar("PlaceT")


class UnitQueue:
    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._fair: ReferenceQueue[FlowKey, int] = ReferenceQueue()
        self._sequences: dict[int, Sequence] = {}  # by item: sequences that are parked or wait for blocks
        self._next_item = 0
        self._paused: dict[Sequence, None] = {}
        self._capped: dict[FlowKey, None] = {}
        self._capped_version = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def fair(self) -> Fairness[FlowKey, int]:
        return self._fair

    @property
    def paused(self) -> AbstractSet[Sequence]:
        return self._paused.keys()

    @property
    def capped(self) -> AbstractSet[FlowKey]:
        """A tenant's own hard cap kept their first unit from starting, when last asked."""
        return self._capped.keys()

    @property
    def capped_version(self) -> int:
        """Grows with each change of `capped`."""
        return self._capped_version

    def sequence(self, item: int) -> Sequence:
        return self._sequences[item]

    @property
    def sequences(self) -> Collection[Sequence]:
        return self._sequences.values()

    def shares_changed(self, tenant_id: TenantId) -> None:
        for qos_class in QosClass:
            flow = (tenant_id, qos_class)
            self._fair.set_share(flow, Share(self._shares.weight(flow)))

    # ---- who waits

    def push(self, sequence: Sequence) -> None:
        if sequence.group.is_paused:
            self._paused[sequence] = None
            return
        self._next_item += 1
        sequence.item = self._next_item
        self._sequences[self._next_item] = sequence
        flow = sequence.flow
        if flow in self._capped:
            self._fair.forgo(flow)  # this unit may be one that can start
        self._fair.push(
            self._next_item,
            flow,
            share=Share(self._shares.weight(flow)),
            rank=Rank(sequence.is_out + sequence.is_copying, 0, sequence.sequence_id),
        )

    def requeue(self, sequence: Sequence) -> None:
        """Its place in its flow has changed; the flow stays backlogged."""
        before = sequence.item
        if before is None:
            return  # it is paused
        self.push(sequence)
        self._fair.remove(before)
        del self._sequences[before]

    def remove(self, sequence: Sequence, *, is_parked: bool) -> bool:
        """is_parked: it has blocks and no slot. Returns whether it was here."""
        if sequence in self._paused:
            del self._paused[sequence]
            return True
        if sequence.item is None:
            return False
        self._take_out(sequence, is_parked=is_parked)
        return True

    def pause(self, sequence: Sequence, *, is_parked: bool) -> None:
        if sequence.item is not None:
            self._take_out(sequence, is_parked=is_parked)
            self._paused[sequence] = None

    def resume(self, sequence: Sequence) -> None:
        if sequence in self._paused:
            del self._paused[sequence]
            self.push(sequence)

    def _take_out(self, sequence: Sequence, *, is_parked: bool) -> None:
        assert sequence.item is not None
        self._fair.remove(sequence.item)
        del self._sequences[sequence.item]
        sequence.item = None
        # It may have been what the cap held back; if another is, that is found out when it is asked for.
        if not is_parked or not self._fair.queued_in(sequence.flow):
            self.end_capped(sequence.flow)

    # ---- who is started

    def select(self, place_of: Callable[[int], PlaceT | None]) -> Pick[int, PlaceT] | None:
        """The first unit that has a place; changes nothing."""
        return self._fair.select(place_of)

    def start(self, pick: Pick[int, PlaceT], cost: int) -> None:
        """cost: reserved until `settle`."""
        self._fair.dispatch(pick, cost)
        self._sequences.pop(pick.item).item = None

    def settle(self, item: int, cost: int) -> None:
        """cost: what the unit came to."""
        self._fair.settle(item, cost)

    def note_capped(self, flow: FlowKey) -> None:
        if flow not in self._capped:
            self._capped[flow] = None
            self._capped_version += 1

    def end_capped(self, flow: FlowKey) -> None:
        if flow in self._capped:
            del self._capped[flow]
            self._fair.forgo(flow)
            self._capped_version += 1

    def check_invariants(self) -> None:
        self._fair.check_invariants()
        assert self._fair.num_queued == len(self._sequences)
        assert all(sequence.item == item for item, sequence in self._sequences.items())
        assert all(s.item is None and s.group.is_paused for s in self._paused)
        assert all(self._fair.queued_in(flow) for flow in self._capped)
