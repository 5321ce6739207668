"""What must hold of a leader at every moment. Asked ten times a second, so it costs little."""

from __future__ import annotations

from manylora_scheduler.core.core import Core
from manylora_scheduler.serving.term import Term


class TermChecks:
    """Of all terms there ever were."""

    def __init__(self) -> None:
        self._events: dict[Term, int] = {}
        """Up to which of its events each was checked."""
        self._clocks: dict[Term, int] = {}

    def check(self, term: Term) -> None:
        if self._events.get(term) == term.num_events:
            return
        self._events[term] = term.num_events
        term.pools.check_invariants()
        term.quotas.authority.check_invariants()
        clock = term.core._queue.virtual_time
        assert clock >= self._clocks.get(term, 0), "the clock fell"
        self._clocks[term] = clock
        for gate in term.pools.gates.values():
            check_no_room_is_idle(gate.core)


def check_no_room_is_idle(core: Core) -> None:
    """No request that is first in its flow waits while a worker that it may go to has room for it."""
    if not core.num_queued or core.is_restoring:
        return
    workers = [worker for worker in core.workers if worker.serving and worker.free_sequences]
    if not workers:
        return
    for flow in core._queue.books.values():
        if flow.head is not None:
            request = flow.head.item.request
            allows = core._dispatch._allows(request)
            idle = [w.worker_id for w in workers if w.can_take(request) and allows(w)]
            assert not idle, f"{request.request_id} of {flow.key} waits, and {idle} could take it"
