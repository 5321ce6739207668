"""Which worker runs a request: where its adapter is, while that does not crowd one worker. Pure; keeps only a cache.

Among the workers with room (a slot for each sequence, KV blocks for the prompt), with n of them and `total` sequences
in flight on these, a worker is *under the cap* while

    load + 1 <= min(slots, max(ceil(1.25 * (total + 1) / n), slots // 4))

(bounded load: Mirrokni, Thorup, Zadimoghaddam 2018; never above the real slots, and a lightly loaded worker is not left
for the sake of balance). In this order, least loaded first:

    1. the adapter is on the device, under the cap          2. on the host, under the cap
    3. it is arriving there, under the cap                  4. the first under the cap in the adapter's own order

The adapter's own order is by rendezvous hash (blake2b, the same in every process), so a worker that leaves moves only
what it had. Requests for the base model go to the least loaded. A request with no worker here stays in the queue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from manylora_shared.ids import AdapterUid, WorkerId

from manylora_scheduler.fleet import Residency, WorkerView
from manylora_scheduler.request import QueuedRequest

_MAX_CACHED_HASHES = 65_536


class Placement:
    def __init__(self) -> None:
        self._hashes: dict[tuple[AdapterUid, WorkerId], bytes] = {}

    def choose(self, request: QueuedRequest, workers: Sequence[WorkerView]) -> WorkerView | None:
        """The worker for a request among those that may be used; None where none of them has room."""
        candidates = [w for w in workers if w.has_room_for(request)]
        if not candidates:
            return None
        uid = request.adapter_uid
        if uid is None:
            return min(candidates, key=_load_order)
        cap = load_cap(candidates)
        under = [w for w in candidates if w.used_sequences < min(w.sequence_slots, max(cap, w.sequence_slots // 4))]
        assert under, "the least loaded worker is under the cap"
        nearest = max(w.residency(uid) for w in under)
        if nearest is Residency.ABSENT:
            return self.home(uid, under)
        near = [w for w in under if w.residency(uid) is nearest]
        return min(near, key=lambda w: (w.used_sequences / w.sequence_slots, self._hash(uid, w.worker_id)))

    def home(self, uid: AdapterUid, workers: Sequence[WorkerView]) -> WorkerView:
        """The first of some workers in the adapter's own order."""
        return min(workers, key=lambda w: self._hash(uid, w.worker_id))

    def _hash(self, uid: AdapterUid, worker_id: WorkerId) -> bytes:
        found = self._hashes.get((uid, worker_id))
        if found is None:
            if len(self._hashes) >= _MAX_CACHED_HASHES:
                self._hashes.clear()
            found = hashlib.blake2b(f"{uid}|{worker_id}".encode(), digest_size=8).digest()
            self._hashes[uid, worker_id] = found
        return found


def load_cap(candidates: Sequence[WorkerView]) -> int:
    """ceil(1.25 * (total + 1) / n) over the candidates."""
    total = sum(w.used_sequences for w in candidates)
    return -(-5 * (total + 1) // (4 * len(candidates)))


def _load_order(worker: WorkerView) -> tuple[float, int, WorkerId]:
    return (worker.used_sequences / worker.sequence_slots, -worker.free_blocks, worker.worker_id)
