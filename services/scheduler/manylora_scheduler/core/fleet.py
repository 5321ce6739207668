"""All workers, and the orders in which placement looks for one. Pure; written by the core alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from manylora_shared.ids import WorkerId

from manylora_scheduler.core.request import QueuedRequest
from manylora_scheduler.core.ring import Ring
from manylora_scheduler.core.worker_view import (
    AWAY,
    CONNECTED,
    IS_FULL,
    NOWHERE,
    OPEN,
    SERVING,
    SPARE,
    FleetPlace,
    Holders,
    Load,
    WorkerView,
)


class Fleet:
    """A worker is *open* while it has a free sequence slot, *spare* while it could hold one more beyond its slots.

    The orders are sorted lists, brought up to date when they are read.
    """

    def __init__(self) -> None:
        self.ring = Ring()
        self.holders = Holders()
        self._workers: dict[WorkerId, WorkerView] = {}
        # the dict's own: it is asked with every report
        self.get: Callable[[WorkerId], WorkerView | None] = self._workers.get
        self._open: dict[WorkerId, WorkerView] = {}
        self._unsorted: dict[WorkerId, WorkerView] = {}  # those whose place in the orders may be another by now
        self._by_load: list[Load] = []
        self._by_free_kv: list[tuple[int, WorkerId]] = []
        self._by_spare: list[tuple[int, WorkerId]] = []  # most spare places first (negated)
        self._slotted_sequences = 0  # on open workers, as the orders have them
        self._num_connected = 0
        self._num_serving = 0
        # For reading:
        self.num_open = 0
        self.num_spare = 0
        self.has_room = False
        self.only_open: WorkerView | None = None

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def workers(self) -> Iterable[WorkerView]:
        return self._workers.values()

    def join(
        self, worker_id: WorkerId, address: str, device: str, max_context_tokens: int, *, can_merge: bool = False
    ) -> WorkerView:
        assert worker_id not in self._workers
        view = self._workers[worker_id] = WorkerView(worker_id, address, device, max_context_tokens, self.holders)
        view.can_merge = can_merge
        self.ring.add(worker_id)
        return view

    def leave(self, worker_id: WorkerId) -> WorkerView | None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._stand(worker, AWAY)
            self._unsorted.pop(worker_id, None)
            self._move(worker, NOWHERE)
            worker.leave()
            self.ring.remove(worker_id)
        return worker

    def update(self, worker: WorkerView) -> bool:
        """Returns whether the worker began or ceased to take requests."""
        before, standing = worker.standing, worker.standing_now()
        if standing != before:
            self._stand(worker, standing)
        if standing > IS_FULL or worker.place is not NOWHERE:
            self._unsorted[worker.worker_id] = worker
        return (standing ^ before) & SERVING != 0

    def _stand(self, worker: WorkerView, standing: int) -> None:
        changed, worker.standing = standing ^ worker.standing, standing
        if changed & OPEN:
            members = self._open
            if standing & OPEN:
                members[worker.worker_id] = worker
            else:
                del members[worker.worker_id]
            self.num_open = count = len(members)
            self.only_open = next(iter(members.values())) if count == 1 else None
            self.has_room = count > 0 or self.num_spare > 0
        if changed != OPEN:
            if changed & SPARE:
                self.num_spare += 1 if standing & SPARE else -1
            if changed & CONNECTED:
                self._num_connected += 1 if standing & CONNECTED else -1
            if changed & SERVING:
                self._num_serving += 1 if standing & SERVING else -1
            self.has_room = self.num_open > 0 or self.num_spare > 0

    def _sort(self) -> None:
        for worker in self._unsorted.values():
            place = worker.place_now()
            if place != worker.place:
                self._move(worker, place)
        self._unsorted.clear()

    def _move(self, worker: WorkerView, place: FleetPlace) -> None:
        before, worker.place, worker_id = worker.place, place, worker.worker_id
        if before.load is not None:
            self._slotted_sequences -= before.slotted_sequences
            del self._by_load[bisect_left(self._by_load, before.load)]
            del self._by_free_kv[bisect_left(self._by_free_kv, (before.free_kv, worker_id))]
        if place.load is not None:
            self._slotted_sequences += place.slotted_sequences
            insort(self._by_load, place.load)
            insort(self._by_free_kv, (place.free_kv, worker_id))
        if before.spare != place.spare:
            if before.spare:
                del self._by_spare[bisect_left(self._by_spare, (-before.spare, worker_id))]
            if place.spare:
                insort(self._by_spare, (-place.spare, worker_id))

    # ---- reading

    def spare_workers(self) -> Iterator[WorkerView]:
        """Most spare places first; nothing may be changed meanwhile."""
        self._sort()
        for _, worker_id in self._by_spare:
            yield self._workers[worker_id]

    @property
    def slotted_sequences(self) -> int:
        """Those on open workers."""
        self._sort()
        return self._slotted_sequences

    @property
    def most_free_kv(self) -> int:
        """In tokens, on open workers."""
        self._sort()
        return self._by_free_kv[-1][0] if self._by_free_kv else 0

    def open_workers(self) -> Iterator[WorkerView]:
        """Least loaded first; nothing may be changed meanwhile."""
        self._sort()
        for load in self._by_load:
            yield load[3]

    @property
    def any_serving(self) -> bool:
        return self._num_serving > 0

    @property
    def all_connected(self) -> bool:
        return self._num_connected == len(self._workers)

    def could_ever_run(self, request: QueuedRequest) -> bool:
        for worker in self._workers.values():  # noqa: SIM110 - the first one can, mostly: not worth a generator
            if worker.standing & SERVING and worker.could_ever_run(request):
                return True
        return False

    def check_invariants(self) -> None:
        workers = self._workers.values()
        assert all(worker.standing == worker.standing_now() for worker in workers), "update was forgotten"
        assert self._open == {worker.worker_id: worker for worker in workers if worker.standing & OPEN}
        assert (self.num_open, self.num_spare) == (len(self._open), sum(w.standing & SPARE > 0 for w in workers))
        assert self.has_room == bool(self.num_open or self.num_spare)
        assert self.only_open is (next(iter(self._open.values())) if self.num_open == 1 else None)
        assert self._num_connected == sum(worker.connected for worker in workers)
        assert self._num_serving == sum(worker.serving for worker in workers)
        behind = {w.worker_id for w in workers if w.place != w.place_now()}
        assert behind <= self._unsorted.keys(), "update was forgotten"
        placed = [worker for worker in workers if worker.place.load is not None]
        assert self._slotted_sequences == sum(worker.place.slotted_sequences for worker in placed)
        assert sorted((-w.place.spare, w.worker_id) for w in workers if w.place.spare) == self._by_spare
        assert self._by_load == sorted(w.place.load for w in placed if w.place.load is not None)
        assert sorted((worker.place.free_kv, worker.worker_id) for worker in placed) == self._by_free_kv
        for worker in self._workers.values():
            worker.check_invariants()
