"""Whose load begins next: the tenant's that had the fewest bytes loaded by weight since it began to wait. AdapterCache
writes it; Loading charges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from manylora_shared.fairness.reference import ReferenceQueue
from manylora_shared.fairness.seam import Pick, Rank, Share
from manylora_shared.ids import AdapterUid, TenantId

from manylora_worker.adapters.room import Entry

_Turn = tuple[TenantId, int]


class LoadOrder:
    """weight_of: at least 1."""

    def __init__(self, weight_of: Callable[[TenantId], int]) -> None:
        self._weight_of = weight_of
        # in the order of coming; numbers stand in Entry.queued
        self._queues: dict[TenantId, dict[AdapterUid, Entry]] = {}
        self._fair: ReferenceQueue[TenantId, _Turn] = ReferenceQueue()
        self._turns: dict[TenantId, _Turn] = {}  # of those that wait
        # the last load's turn and cost: reserved until the next begins, so that who comes now goes before whom it was
        # for
        self._begun: tuple[_Turn, int] | None = None
        self._queued = self._num_turns = 0
        self.version = 0  # grows with each change of a queue

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def queues(self) -> Mapping[TenantId, Mapping[AdapterUid, Entry]]:
        return self._queues

    def add(self, tenant_id: TenantId, entry: Entry) -> None:
        if tenant_id in entry.queued:
            return
        if tenant_id not in self._queues:
            self._queues[tenant_id] = {}
            self._push_turn(tenant_id)
        self._queued += 1
        self.version += 1
        entry.queued[tenant_id] = self._queued
        self._queues[tenant_id][entry.uid] = entry

    def remove(self, tenant_id: TenantId, entry: Entry) -> bool:
        """Whether the tenant waited for it."""
        if entry.queued.pop(tenant_id, None) is None:
            return False
        self.version += 1
        queue = self._queues[tenant_id]
        del queue[entry.uid]
        if not queue:
            del self._queues[tenant_id]
            self._fair.remove(self._turns.pop(tenant_id))
            if not self._queues:
                self._end_begun()
        return True

    def charge(self, tenant_id: TenantId, num_bytes: int) -> None:
        turn = self._turns[tenant_id]
        self._push_turn(tenant_id)  # first: it waits all the while
        self._fair.dispatch(Pick(turn, None, self._fair.tag_of(tenant_id), None), num_bytes)
        self._end_begun()
        self._begun = turn, num_bytes

    def take(self) -> Iterator[tuple[TenantId, Entry]]:
        """Everything that waits, once: a tenant's queue until a load begins for it, then the next tenant's."""
        left = {tenant: list(reversed(queue)) for tenant, queue in self._queues.items()}
        for turn, *_ in self._fair.in_order():
            tenant, _ = turn
            while left[tenant] and self._turns.get(tenant) == turn:
                entry = self._queues[tenant].get(left[tenant].pop())
                if entry is not None:
                    yield tenant, entry

    def _end_begun(self) -> None:
        if self._begun is not None:
            self._fair.settle(*self._begun)
            self._begun = None

    def _push_turn(self, tenant_id: TenantId) -> None:
        self._num_turns += 1
        turn = self._turns[tenant_id] = tenant_id, self._num_turns
        self._fair.push(turn, tenant_id, share=Share(self._weight_of(tenant_id)), rank=Rank(0, 0, self._num_turns))

    def check_invariants(self) -> None:
        self._fair.check_invariants()
        assert self._turns.keys() == self._queues.keys()
        assert self._fair.num_queued == len(self._turns)
        for tenant, queue in self._queues.items():
            numbers = [entry.queued[tenant] for entry in queue.values()]
            assert numbers, "an empty queue was kept"
            assert numbers == sorted(numbers)
