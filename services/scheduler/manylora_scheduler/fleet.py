"""Workers as the scheduler sees them: folded from their records in the coordination store and from their reports.

Owns, for each worker, what it said last and what was granted to it since and is not part of a report yet. Room is
always the worker's word minus those grants, so a grant counts exactly once. Written by the core alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manylora_shared.ids import AdapterUid, RequestId, WorkerId

from manylora_scheduler.request import FlowKey, QueuedRequest, Ticket


class Residency(enum.IntEnum):
    """Where an adapter's weights are on a worker, nearest last."""

    ABSENT = 0
    ARRIVING = 1
    """A request for it was granted, or a prefetch was sent, and the worker has not reported it yet."""
    HOST = 2
    DEVICE = 3


@dataclass(frozen=True, slots=True)
class StartedRequest:
    request_id: RequestId
    flow: FlowKey
    sequences: int


@dataclass(frozen=True, slots=True)
class FlowTokens:
    """Cumulative since the worker's start."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One report of a worker. Meaning as in worker.proto."""

    snapshot: bool
    sequence_slots: int
    running_sequences: int
    kv_blocks_total: int
    kv_blocks_free: int
    block_size: int
    draining: bool = False
    generated_tokens: int = 0
    adapters: Mapping[AdapterUid, Residency] | None = None
    """All that are resident, or None where nothing changed."""
    started: tuple[StartedRequest, ...] = ()
    finished: tuple[RequestId, ...] = ()
    flows: Mapping[FlowKey, FlowTokens] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """A request that the worker reported. `ticket` is None for one that was granted by an earlier leader."""

    flow: FlowKey
    sequences: int
    ticket: Ticket | None


class WorkerView:
    """One worker. It takes requests while it is connected (the present stream brought a snapshot) and not draining."""

    def __init__(self, worker_id: WorkerId, address: str, device: str, max_context_tokens: int) -> None:
        self.worker_id = worker_id
        self.address = address
        self.device = device
        self.max_context_tokens = max_context_tokens
        self.connected = False
        self.has_reported = False
        """Over this stream or an earlier one."""
        self.draining = False
        self.sequence_slots = 0
        self.running_sequences = 0
        self.kv_blocks_total = 0
        self.kv_blocks_free = 0
        self.block_size = 1
        self.generated_tokens = 0
        self.adapters: Mapping[AdapterUid, Residency] = {}
        self.prefetches: dict[AdapterUid, None] = {}
        """Sent and not yet answered by residency."""
        self.running: dict[RequestId, _Running] = {}
        self.granted: dict[RequestId, Ticket] = {}
        """Granted and not yet reported."""
        self.counters: dict[FlowKey, FlowTokens] = {}
        self._granted_sequences = 0
        self._granted_blocks = 0
        self._assigned: dict[AdapterUid, int] = {}
        """Live tickets by adapter."""

    # ---- room

    @property
    def serving(self) -> bool:
        return self.connected and not self.draining

    @property
    def used_sequences(self) -> int:
        return self.running_sequences + self._granted_sequences

    @property
    def free_sequences(self) -> int:
        return max(0, self.sequence_slots - self.used_sequences)

    @property
    def free_blocks(self) -> int:
        return max(0, self.kv_blocks_free - self._granted_blocks)

    def blocks_for(self, request: QueuedRequest) -> int:
        """KV blocks to begin with: the prompt and the first token, and one more for each further choice."""
        return -(-(request.prompt_tokens + 1) // self.block_size) + request.sequences - 1

    def has_room_for(self, request: QueuedRequest) -> bool:
        return (
            self.free_sequences >= request.sequences
            and self.free_blocks >= self.blocks_for(request)
            and self.could_ever_run(request)
        )

    def could_ever_run(self, request: QueuedRequest) -> bool:
        """Whether it could if it were empty: slots, and KV for one choice at its longest (its last token has none)."""
        longest = request.prompt_tokens + request.max_new_tokens // request.sequences
        kv_tokens = max(request.prompt_tokens, min(longest, self.max_context_tokens) - 1)
        return (
            self.sequence_slots >= request.sequences
            and self.kv_blocks_total >= self.blocks_for(request)
            and self.kv_blocks_total * self.block_size >= kv_tokens
        )

    def residency(self, adapter_uid: AdapterUid) -> Residency:
        found = self.adapters.get(adapter_uid, Residency.ABSENT)
        if found is Residency.ABSENT and (adapter_uid in self._assigned or adapter_uid in self.prefetches):
            return Residency.ARRIVING
        return found

    # ---- grants

    def grant(self, ticket: Ticket) -> None:
        assert ticket.request.request_id not in self.granted
        self.granted[ticket.request.request_id] = ticket
        self._granted_sequences += ticket.request.sequences
        self._granted_blocks += self.blocks_for(ticket.request)
        self._assign(ticket, +1)

    def drop_grant(self, ticket: Ticket) -> None:
        """A grant that came to nothing, or whose end was reported together with its start."""
        self._take_grant(ticket)
        self._assign(ticket, -1)

    def start(self, started: StartedRequest) -> Ticket | None:
        """The worker reported a request as running. Returns its ticket where it was granted from here."""
        known = self.running.get(started.request_id)
        if known is not None:
            return known.ticket
        ticket = self.granted.get(started.request_id)
        if ticket is not None:
            self._take_grant(ticket)
        self.running[started.request_id] = _Running(started.flow, started.sequences, ticket)
        return ticket

    def finish(self, request_id: RequestId) -> Ticket | None:
        """The worker reported a request's end. Returns its ticket where it was granted from here."""
        running = self.running.pop(request_id, None)
        if running is not None:
            if running.ticket is not None:
                self._assign(running.ticket, -1)
            return running.ticket
        ticket = self.granted.get(request_id)
        if ticket is not None:
            self.drop_grant(ticket)
        return ticket

    def tickets(self) -> list[Ticket]:
        """Of all live grants."""
        return [r.ticket for r in self.running.values() if r.ticket is not None] + list(self.granted.values())

    def _take_grant(self, ticket: Ticket) -> None:
        del self.granted[ticket.request.request_id]
        self._granted_sequences -= ticket.request.sequences
        self._granted_blocks -= self.blocks_for(ticket.request)

    def _assign(self, ticket: Ticket, change: int) -> None:
        uid = ticket.request.adapter_uid
        if uid is None:
            return
        count = self._assigned.get(uid, 0) + change
        if count:
            self._assigned[uid] = count
        else:
            del self._assigned[uid]

    # ---- reports

    def fold_capacity(self, report: WorkerReport) -> None:
        """Takes over everything of a report but its requests and counters."""
        if report.block_size != self.block_size:
            self.block_size = max(1, report.block_size)
            self._granted_blocks = sum(self.blocks_for(t.request) for t in self.granted.values())
        self.sequence_slots = report.sequence_slots
        self.running_sequences = report.running_sequences
        self.kv_blocks_total = report.kv_blocks_total
        self.kv_blocks_free = report.kv_blocks_free
        self.draining = report.draining
        self.generated_tokens = report.generated_tokens
        if report.adapters is not None:
            self.adapters = report.adapters
            for uid in [uid for uid in self.prefetches if report.adapters.get(uid, 0) >= Residency.HOST]:
                del self.prefetches[uid]
        self.has_reported = True
        if report.snapshot:
            self.connected = True

    def fold_counters(self, report: WorkerReport, *, known: bool) -> list[tuple[FlowKey, int, int]]:
        """What was computed since the last report: (flow, prompt tokens, output tokens).

        Args:
            known: whether this worker has reported here before. What it did before its first report is not ours to
                count. Counters that fell back belong to a new process and count from zero.
        """
        restarted = any(
            tokens.prompt_tokens < before.prompt_tokens or tokens.output_tokens < before.output_tokens
            for flow, tokens in report.flows.items()
            if (before := self.counters.get(flow)) is not None
        )
        if restarted:
            self.counters.clear()
        done: list[tuple[FlowKey, int, int]] = []
        for flow, tokens in report.flows.items():
            before = self.counters.get(flow, FlowTokens(0, 0))
            self.counters[flow] = tokens
            prompt = tokens.prompt_tokens - before.prompt_tokens
            output = tokens.output_tokens - before.output_tokens
            if known and (prompt or output):
                done.append((flow, prompt, output))
        return done

    def check_invariants(self) -> None:
        assert self._granted_sequences == sum(t.request.sequences for t in self.granted.values())
        assert self._granted_blocks == sum(self.blocks_for(t.request) for t in self.granted.values())
        counts: dict[AdapterUid, int] = {}
        for ticket in self.tickets():
            assert ticket.worker_id == self.worker_id
            if ticket.request.adapter_uid is not None:
                counts[ticket.request.adapter_uid] = counts.get(ticket.request.adapter_uid, 0) + 1
        assert counts == self._assigned


class Fleet:
    """All workers that stand in the coordination store, in the order in which they joined."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerView] = {}

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def workers(self) -> Iterable[WorkerView]:
        return self._workers.values()

    def get(self, worker_id: WorkerId) -> WorkerView | None:
        return self._workers.get(worker_id)

    def join(self, worker_id: WorkerId, address: str, device: str, max_context_tokens: int) -> WorkerView:
        assert worker_id not in self._workers
        view = self._workers[worker_id] = WorkerView(worker_id, address, device, max_context_tokens)
        return view

    def leave(self, worker_id: WorkerId) -> WorkerView | None:
        return self._workers.pop(worker_id, None)

    def any_free_slot(self) -> bool:
        return any(w.serving and w.free_sequences for w in self._workers.values())

    def any_serving(self) -> bool:
        return any(w.serving for w in self._workers.values())

    def all_connected(self) -> bool:
        return all(w.connected for w in self._workers.values())

    def could_ever_run(self, request: QueuedRequest) -> bool:
        return any(w.serving and w.could_ever_run(request) for w in self._workers.values())
