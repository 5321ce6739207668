"""What each tenant waits for, and whose load begins next.

Owns the tenants' queues of adapters, and their tags: how many bytes were loaded for each by weight since it began to
wait. Start-time fair queuing (Goyal et al. 1996): the least tag is next, and who comes begins at the tag of the load
that began last. Written by AdapterCache; Loading charges.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping

from manylora_shared.ids import AdapterUid, TenantId

from manylora_worker.adapters.room import Entry

_SCALE_BITS = 20


class Turns:
    """
    Args:
        weight_of: a tenant's weight, at least 1.
    """

    def __init__(self, weight_of: Callable[[TenantId], int]) -> None:
        self._weight_of = weight_of
        self._queues: dict[TenantId, dict[AdapterUid, Entry]] = {}
        """In the order of coming; numbers stand in Entry.queued."""
        self._tags: dict[TenantId, int] = {}
        """In 2^-20 bytes by unit of weight; of those that wait, or did lately."""
        self._virtual_time = 0
        self._queued = 0
        self.version = 0
        """Grows with each change of a queue."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._queues)

    @property
    def queues(self) -> Mapping[TenantId, Mapping[AdapterUid, Entry]]:
        return self._queues

    def add(self, tenant_id: TenantId, entry: Entry) -> None:
        """The tenant waits for it; again is no difference."""
        if tenant_id in entry.queued:
            return
        if tenant_id not in self._queues:
            if not self._queues:
                self._tags.clear()
                self._virtual_time = 0
            self._queues[tenant_id] = {}
            self._tags[tenant_id] = max(self._tags.get(tenant_id, 0), self._virtual_time)
        self._queued += 1
        self.version += 1
        entry.queued[tenant_id] = self._queued
        self._queues[tenant_id][entry.uid] = entry

    def remove(self, tenant_id: TenantId, entry: Entry) -> bool:
        """The tenant waits for it no more. Returns whether it did."""
        if entry.queued.pop(tenant_id, None) is None:
            return False
        self.version += 1
        queue = self._queues[tenant_id]
        del queue[entry.uid]
        if not queue:
            del self._queues[tenant_id]
        return True

    def charge(self, tenant_id: TenantId, num_bytes: int) -> None:
        """A load begins for it."""
        self._virtual_time = max(self._virtual_time, self._tags[tenant_id])
        self._tags[tenant_id] += (num_bytes << _SCALE_BITS) // self._weight_of(tenant_id)

    def take(self) -> Iterator[tuple[TenantId, Entry]]:
        """Everything that waits, each once: a tenant's queue from its front until a load begins for it (`charge`), then
        the next tenant's. What leaves a queue meanwhile is left out."""
        turns = [
            (self._tags[tenant], next(iter(queue.values())).queued[tenant], tenant, list(reversed(queue)))
            for tenant, queue in self._queues.items()
        ]
        heapq.heapify(turns)
        while turns:
            tag, number, tenant, left = heapq.heappop(turns)
            while left and self._tags.get(tenant) == tag:
                entry = self._queues.get(tenant, {}).get(left.pop())
                if entry is not None:
                    yield tenant, entry
            if left:
                heapq.heappush(turns, (self._tags.get(tenant, tag), number, tenant, left))

    def check_invariants(self) -> None:
        for tenant, queue in self._queues.items():
            numbers = [entry.queued[tenant] for entry in queue.values()]
            assert numbers, "an empty queue was kept"
            assert numbers == sorted(numbers)
            assert tenant in self._tags
