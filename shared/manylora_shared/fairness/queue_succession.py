"""How one fair queue's clock becomes the next one's, in another process. Pure; called by the queues' owners.

`restore` comes first, `resume` last; `count`, `adopt` and `push` between them, in any order.
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
    clock: int
    flows: tuple[FlowSnapshot[F], ...]
    reserved: tuple[tuple[I, F, int], ...]  # (item, flow, what is left), in the order of dispatch
    counted: Mapping[str, Mapping[F, int]]  # by source: up to which `settled` goes

    @property
    def size(self) -> int:
        return len(self.flows) + len(self.reserved) + sum(map(len, self.counted.values()))


def take_snapshot(queue: FairQueue[F, I]) -> Snapshot[F, I]:
    """O(all flows and counters)."""
    books = queue.books.values()
    return Snapshot(
        clock=queue.virtual_time,
        flows=tuple(FlowSnapshot(flow.key, flow.share.weight, flow.settled, flow.num_queued > 0) for flow in books),
        reserved=tuple((item, flow.key, left) for flow in books for item, left in flow.unspent.items()),
        counted={source: dict(counted) for source, counted in queue.counted.items()},
    )


def restore(queue: FairQueue[F, Any], taken: Snapshot[F, Any]) -> None:
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
    # The clock went on behind the snapshot, and passed no flow that stayed backlogged. So the least tag of those is
    # where it may have come to; whoever was not among them begins there.
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
