"""Which worker runs a request: where its adapter is, while that does not crowd one worker. Pure; keeps nothing.

Of the workers that have the adapter and are not too full, the nearest one; among those, the first in the adapter's own
order (the ring) that is not above the mean, so that copies beyond the load are used no more, and leave. A cold adapter
comes to one under the cap (bounded load: Mirrokni, Thorup, Zadimoghaddam 2018), of the first in its order to where its
rank slows the fewest. A copy is made further above the mean than it is given up. Base model: the least loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from manylora_shared.composition import uids_of
from manylora_shared.ids import AdapterKey, WorkerId

from manylora_scheduler.core.fleet import Fleet
from manylora_scheduler.core.request import QueuedRequest
from manylora_scheduler.core.worker_view import WorkerView

_MAX_NEAR = 32  # of more workers that have an adapter, so many are looked at
_MAX_SPARE = 8
_NEAR = 8  # of the first workers in a cold adapter's order, so many are compared by rank
_FEW = 16  # so many open workers are compared by distance; of more, the ring is walked


def choose(request: QueuedRequest, fleet: Fleet, allowed: Callable[[WorkerView], bool]) -> WorkerView | None:
    """None where none that `allowed` accepts has room."""
    only = fleet.only_open
    if only is not None:  # a busy cluster's usual case, and then there is nothing to compare
        return only if only.can_take(request) and allowed(only) else None
    if fleet.most_free_kv <= request.prompt_tokens:
        return None

    uid = request.adapter_uid
    if uid is not None:
        spread = spread_cap(fleet)

        def takes(worker: WorkerView, most: int) -> bool:
            slots = worker.sequence_slots
            return (
                worker.slotted_sequences < min(slots, max(most, slots // 4))
                and worker.serving
                and worker.can_take(request)
                and allowed(worker)
            )

        near = [worker for worker in _holders(uid, fleet) if takes(worker, spread)]
        if near:
            return near[0] if len(near) == 1 else _of_holders(uid, fleet, near)
        cap = load_cap(fleet)
        found = home(uid, fleet, lambda worker: takes(worker, cap), request.adapter_rank)
        if found is not None:
            return found
    for worker in fleet.open_workers():
        if worker.can_take(request) and allowed(worker):
            return worker
    return None


def choose_spare(request: QueuedRequest, fleet: Fleet, allowed: Callable[[WorkerView], bool]) -> WorkerView | None:
    """The worker that takes a request beyond its free room. Looks at the first few alone.

    It is one with blocks for the prompt, else one that has the adapter, else the one with most spare places.
    """
    near = dict.fromkeys(islice(fleet.spare_workers(), _MAX_SPARE))
    uid = request.adapter_uid
    if uid is not None:
        for part in uids_of(uid):
            near |= dict.fromkeys([w for w in islice(fleet.holders.of(part), _MAX_SPARE) if w.serving])
    found = [worker for worker in near if worker.can_hold(request) and allowed(worker)]

    def rank(worker: WorkerView) -> tuple[bool, int, int, WorkerId]:
        nearness = 0 if uid is None else worker.nearness(uid)
        return not worker.has_blocks_for(request), -nearness, -worker.spare_sequences, worker.worker_id

    return min(found, key=rank, default=None)


def _of_holders(uid: AdapterKey, fleet: Fleet, near: Collection[WorkerView]) -> WorkerView:
    """Those above the mean come behind, the fullest last; and all by their load, where nearly all have the adapter."""
    total, num_open = fleet.slotted_sequences, fleet.num_open
    is_everywhere = len(near) >= min(num_open, _MAX_NEAR)

    def rank(worker: WorkerView) -> tuple[int, float, int, WorkerId]:
        counts = is_everywhere or worker.slotted_sequences * num_open > total
        load = worker.slotted_sequences / worker.sequence_slots if counts else 0.0
        return -worker.nearness(uid), load, fleet.ring.distance(uid, worker.worker_id), worker.worker_id

    return min(near, key=rank)


def home(
    uid: AdapterKey, fleet: Fleet, accepts: Callable[[WorkerView], bool], adapter_rank: int = 0
) -> WorkerView | None:
    """Of the first open ones in the adapter's own order that where its rank slows the fewest; 0: the first."""
    found: Iterable[WorkerView]
    if fleet.num_open <= _FEW:
        those = [worker for worker in fleet.open_workers() if accepts(worker)]
        if len(those) < 2:
            return those[0] if those else None
        those.sort(key=lambda w: (fleet.ring.distance(uid, w.worker_id), w.worker_id))
        found = those
    else:
        found = in_order(uid, fleet, accepts)
    if not adapter_rank:
        return next(iter(found), None)
    return min(islice(found, _NEAR), key=lambda worker: worker.slowed_by(adapter_rank), default=None)


def in_order(uid: AdapterKey, fleet: Fleet, accepts: Callable[[WorkerView], bool]) -> Iterator[WorkerView]:
    for worker_id in fleet.ring.walk(uid):
        worker = _member(fleet, worker_id)
        if accepts(worker):
            yield worker


def load_cap(fleet: Fleet) -> int:
    """1.25 times the mean of the open workers."""
    return _times_mean(fleet, 5)


def spread_cap(fleet: Fleet) -> int:
    """1.5 times the mean: up to here who has an adapter takes its requests."""
    return _times_mean(fleet, 6)


def _times_mean(fleet: Fleet, quarters: int) -> int:
    """ceil(quarters / 4 * (sequences + 1) / workers) over the open workers, of which there is one at least."""
    return -(-quarters * (fleet.slotted_sequences + 1) // (4 * fleet.num_open))


def _holders(uid: AdapterKey, fleet: Fleet) -> Iterable[WorkerView]:
    # Where they are many, only some are told. Of a composition they are those that have any part.
    holders: Collection[WorkerView] = ()
    for part in uids_of(uid):
        more = fleet.holders.of(part)
        holders = more if not holders else dict.fromkeys([*islice(holders, _MAX_NEAR), *islice(more, _MAX_NEAR)])
    if len(holders) <= _MAX_NEAR:
        return holders
    idle = [w for w in islice(fleet.open_workers(), _MAX_NEAR) if w.nearness(uid)]
    return [*idle, *islice(holders, _MAX_NEAR)]


def _member(fleet: Fleet, worker_id: WorkerId) -> WorkerView:
    worker = fleet.get(worker_id)
    assert worker is not None, "the ring has members only"
    return worker
