"""How one fair queue's clock becomes the next one's, in another process. Pure; called by the two queues' owners.

Owns nothing. `take_snapshot` reads a queue's clock, books and counters; `restore` and `resume` write those of a new
queue, which has no other writer but its own rules. What was queued and what runs is not in a snapshot, but for
reservations: those who know come and say it again. The order of a succession, on the new queue:

    restore   the clock, every flow's settled tag and the counters are the snapshot's
    count     each source's cumulative counters: what was done since the snapshot
    adopt     each item that runs, with what is left of its reservation
    push      each item that waits
    resume    V is brought up to date, and dispatch begins

The middle three come in any order, and as often as anybody comes. Then the tag of a flow that was backlogged all the
time is exactly what it would have been without a succession.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.fairness.seam import Share

F = TypeVar("F", bound=Hashable)
I = TypeVar("I", bound=Hashable)  # noqa: E741


class FlowSnapshot(NamedTuple, Generic[F]):
    flow: F
    weight: int
    settled: int
    queued: bool


@dataclass(frozen=True)
class Snapshot(Generic[F, I]):
    """All that a successor cannot hear from the sources. Together with their counters it gives the tags again."""

    clock: int
    flows: tuple[FlowSnapshot[F], ...]
    reserved: tuple[tuple[I, F, int], ...]
    """What is left of each running item's reservation, in the order of dispatch."""
    counted: Mapping[str, Mapping[F, int]]
    """By source: the counters up to which `settled` goes."""

    @property
    def size(self) -> int:
        """Entries in all."""
        return len(self.flows) + len(self.reserved) + sum(map(len, self.counted.values()))


def take_snapshot(queue: FairQueue[F, I]) -> Snapshot[F, I]:
    """What the queue's successor needs; O(all flows and counters)."""
    books = queue.books.values()
    return Snapshot(
        clock=queue.virtual_time,
        flows=tuple(FlowSnapshot(flow.key, flow.share.weight, flow.settled, flow.num_queued > 0) for flow in books),
        reserved=tuple((item, flow.key, left) for flow in books for item, left in flow.unspent.items()),
        counted={source: dict(counted) for source, counted in queue.counted.items()},
    )


def restore(queue: FairQueue[F, Any], taken: Snapshot[F, Any]) -> None:
    """Has a new queue take over its predecessor's clock, before anything else is done there.

    Reservations are not restored: whoever hears that an item runs adopts it.
    """
    assert not queue.books
    assert not queue.counted
    queue.virtual_time = taken.clock
    queue.returning = {}
    for known in taken.flows:
        queue.remember(known.flow, Share(known.weight)).settled = known.settled
        if known.queued:
            queue.returning[known.flow] = None
    for source, counted in taken.counted.items():
        queue.begin_counting(source, counted)


def resume(queue: FairQueue[F, Any]) -> None:
    """Whoever was to come back has: V is brought up to date.

    The clock went on behind the snapshot. It passed no flow that stayed backlogged, so the least tag of those is where
    it may have come to; whoever was not among them begins there.
    """
    returning, queue.returning = queue.returning, None
    assert returning is not None, "nothing is being restored"
    books = queue.books
    returned = [books[flow] for flow in returning if books[flow].num_queued]
    if returned:
        queue.virtual_time = max(queue.virtual_time, min(flow.tag for flow in returned))
    for flow in books.values():
        if flow.num_queued and flow.key not in returning:
            queue.forgo(flow.key)
    for flow in list(books.values()):
        if flow.key in books:
            queue.rest(flow)
