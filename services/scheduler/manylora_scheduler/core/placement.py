"""Which worker runs a request: where its adapter is, while that does not crowd one worker. Pure; keeps nothing.

The choice is the least loaded open worker that is under the cap and has the adapter, then the first under the cap in
the adapter's own order (the ring), then any. The cap is bounded load (Mirrokni, Thorup, Zadimoghaddam 2018), never
above the real slots. Requests for the base model go to the least loaded.
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
        cap = load_cap(fleet)

        def under_cap(worker: WorkerView) -> bool:
            slots = worker.sequence_slots
            return (
                worker.slotted_sequences < min(slots, max(cap, slots // 4))
                and worker.serving
                and worker.can_take(request)
                and allowed(worker)
            )

        near = [worker for worker in _holders(uid, fleet) if under_cap(worker)]
        if near:
            return min(near, key=lambda w: (-w.nearness(uid), w.slotted_sequences / w.sequence_slots, w.worker_id))
        found = home(uid, fleet, under_cap)
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


def home(uid: AdapterKey, fleet: Fleet, accepts: Callable[[WorkerView], bool]) -> WorkerView | None:
    """The first open one in the adapter's own order."""
    if fleet.num_open <= _FEW:
        found = [worker for worker in fleet.open_workers() if accepts(worker)]
        if len(found) == 1:
            return found[0]
        return min(found, key=lambda w: (fleet.ring.distance(uid, w.worker_id), w.worker_id), default=None)
    return next(in_order(uid, fleet, accepts), None)


def in_order(uid: AdapterKey, fleet: Fleet, accepts: Callable[[WorkerView], bool]) -> Iterator[WorkerView]:
    for worker_id in fleet.ring.walk(uid):
        worker = _member(fleet, worker_id)
        if accepts(worker):
            yield worker


def load_cap(fleet: Fleet) -> int:
    """ceil(1.25 * (sequences + 1) / workers) over the open workers, of which there is one at least."""
    return -(-5 * (fleet.slotted_sequences + 1) // (4 * fleet.num_open))


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
