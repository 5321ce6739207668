"""One worker as the scheduler sees it: what it said last, and what was granted to it since. Pure.

Room is always its word minus those grants. Written by the core, and by its `Fleet`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from manylora_shared.composition import uids_of
from manylora_shared.ids import AdapterKey, AdapterUid, RequestId, TenantId, WorkerId

from manylora_scheduler.core.reports import (
    ABSENT,
    NO_LOAD,
    TO_EVERYBODY,
    FlowLoad,
    Owner,
    Residency,
    ToldOwner,
    WorkerReport,
)
from manylora_scheduler.core.request import FlowKey, QueuedRequest, Ticket

# A worker's standing. Bits: an enum's are combined by calls.
AWAY = 0
CONNECTED = 1
SERVING = 2
OPEN = 4
SPARE = 8
IS_FULL = CONNECTED | SERVING
IS_OPEN = IS_FULL | OPEN


class Holders:
    """Of each adapter the workers that have it or will, in the order in which they came to it."""

    def __init__(self) -> None:
        self._workers: dict[AdapterUid, dict[WorkerId, WorkerView]] = {}

    def of(self, uid: AdapterUid) -> Collection[WorkerView]:
        found = self._workers.get(uid)
        return found.values() if found is not None else ()

    def note(self, uid: AdapterUid, worker: WorkerView) -> None:
        if worker.has_or_awaits(uid):
            self.add(uid, worker)
        else:
            self.forget(uid, worker)

    def add(self, uid: AdapterUid, worker: WorkerView) -> None:
        found = self._workers.get(uid)
        if found is None:
            self._workers[uid] = {worker.worker_id: worker}
        else:
            found[worker.worker_id] = worker

    def forget(self, uid: AdapterUid, worker: WorkerView) -> None:
        found = self._workers.get(uid)
        if found is not None and found.pop(worker.worker_id, None) is not None and not found:
            del self._workers[uid]

    def uids_of(self, worker: WorkerView) -> set[AdapterUid]:
        return {uid for uid, workers in self._workers.items() if worker.worker_id in workers}


class WorkerView:
    """Takes requests while it is connected (the present stream brought a snapshot) and not draining. One that is
    dedicated *serves* nobody in the fair queue's order: `Dispatch.next_own` gives it its owner's requests.
    """

    __slots__ = ("_assigned", "_front", "_granted_blocks", "_granted_sequences", "_holders", "_holds_longest",
                 "_loads", "_max_sequences", "_output_tokens", "_prefetches", "_ranks",
                 "adapters", "address", "block_size", "can_merge",
                 "connected", "device", "draining", "granted", "has_reported",
                 "held_by_tenant", "held_sequences", "kv_blocks_free", "kv_blocks_total", "max_context_tokens",
                 "merge_problem", "owner",
                 "place", "running", "running_sequences", "sequence_slots",
                 "standing", "told_owner", "worker_id")  # fmt: skip

    def __init__(
        self, worker_id: WorkerId, address: str, device: str, max_context_tokens: int, holders: Holders
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.device = device
        self.max_context_tokens = max_context_tokens
        self.connected = False
        self.has_reported = False
        self.draining = False
        self.can_merge = False
        self.owner: Owner | None = None  # as it was decided; written by the core, as the next one
        self.told_owner: ToldOwner = TO_EVERYBODY
        self.merge_problem = ""  # why it did not become its last owner's; for a status
        self.sequence_slots = 0
        self.running_sequences = 0
        self.kv_blocks_total = 0
        self.kv_blocks_free = 0
        self.block_size = 1
        self.adapters: dict[AdapterUid, Residency] = {}
        self._prefetches: dict[AdapterUid, None] = {}  # sent and not yet answered by residency
        self.running: dict[RequestId, Ticket | None] = {}  # None: an earlier leader granted it
        self.granted: dict[RequestId, Ticket] = {}
        self._output_tokens: dict[FlowKey, int] = {}  # cumulative, as of its last report
        self._holders = holders
        self._granted_sequences = 0
        self._granted_blocks = 0
        self._max_sequences = 0
        self._loads: dict[FlowKey, FlowLoad] = {}
        self.held_sequences = 0
        self.held_by_tenant: dict[TenantId, int] = {}  # for reading
        self._front: FlowKey | None = None
        self._assigned: dict[AdapterUid, int] = {}  # live tickets by adapter
        self._ranks: dict[int, int] = {}  # live sequences by their adapter's rank
        self._holds_longest = False  # its KV holds a sequence that is as long as its context can be
        self.standing = AWAY  # as of its last `Fleet.update`, which alone writes it, and place.
        self.place = NOWHERE

    # ---- room

    @property
    def serving(self) -> bool:
        return self.connected and not self.draining and self.is_everybodys

    @property
    def is_everybodys(self) -> bool:
        told, is_ready, _ = self.told_owner
        return self.owner is None and told is None and is_ready

    @property
    def serves_owner(self) -> bool:
        told, is_ready, _ = self.told_owner
        return self.owner is not None and told == self.owner and is_ready and self.connected and not self.draining

    @property
    def used_sequences(self) -> int:
        return self.running_sequences + self._granted_sequences

    @property
    def slotted_sequences(self) -> int:
        # Held sequences neither use a slot nor could.
        return self.running_sequences + self._granted_sequences - self.held_sequences

    @property
    def free_sequences(self) -> int:
        free = min(self.sequence_slots - self.slotted_sequences, self.spare_sequences)
        return free if free > 0 else 0

    @property
    def spare_sequences(self) -> int:
        """More sequences that it takes, in slots or parked."""
        return max(self._max_sequences, self.sequence_slots) - self.running_sequences - self._granted_sequences

    def spare_for(self, held: int) -> int:
        """Of `spare_sequences`, for a tenant with so many held ones: half of all places beyond the slots stay for those
        that have none. Held sequences end when they please, and would keep everybody else out meanwhile.
        """
        kept = (self._max_sequences - self.sequence_slots) // 2 if held and self.parks else 0
        return self.spare_sequences - kept

    @property
    def parks(self) -> bool:
        return self._max_sequences > self.sequence_slots

    def load_of(self, flow: FlowKey) -> FlowLoad:
        return self._loads.get(flow, NO_LOAD)

    def granted_to(self, flow: FlowKey) -> int:
        """Sequences that are granted and not reported yet."""
        return sum(ticket.request.sequences for ticket in self.granted.values() if ticket.request.flow == flow)

    def share_of(self, flow: FlowKey, weight_of: Callable[[FlowKey], int]) -> int:
        """The flow's slots by weight, among the flows that have sequences there or are granted."""
        sharing = {ticket.request.flow for ticket in self.granted.values()}
        sharing.update(other for other, load in self._loads.items() if load.unheld)
        sharing.add(flow)
        return self.sequence_slots * weight_of(flow) // sum(map(weight_of, sharing))

    def held_flows(self) -> list[FlowKey]:
        return [flow for flow, load in self._loads.items() if load.held]

    def front(self, tag_of: Callable[[FlowKey], int]) -> FlowKey | None:
        """The flow with a slot that has the greatest tag."""
        if self._front is None:
            self._front = max(self.slotted_flows(), key=tag_of, default=None)
        return self._front

    def slotted_flows(self) -> list[FlowKey]:
        return [flow for flow, load in self._loads.items() if load.slotted]

    @property
    def free_blocks(self) -> int:
        free = self.kv_blocks_free - self._granted_blocks
        return free if free > 0 else 0

    def blocks_for(self, request: QueuedRequest) -> int:
        """KV blocks to begin with: for the prompt and the first token, and one more for each further choice."""
        return -(-(request.prompt_tokens + 1) // self.block_size) + request.sequences - 1

    def can_take(self, request: QueuedRequest) -> bool:
        # An earlier attempt that is still here has to end first.
        sequences, request_id = request.sequences, request.request_id
        free = self.sequence_slots - self.running_sequences - self._granted_sequences
        if self.held_sequences:
            # Others may use the slots of held sequences; to their own tenant they count as used.
            own = self.held_by_tenant.get(request.flow.tenant_id, 0)
            free = min(free + self.held_sequences - own, self.spare_for(own))
        # The blocks are `blocks_for`'s: this is asked twice a decision.
        return (
            free >= sequences
            and self.kv_blocks_free - self._granted_blocks
            >= -(-(request.prompt_tokens + 1) // self.block_size) + sequences - 1
            and request_id not in self.granted
            and request_id not in self.running
            and (self._holds_longest or self._could_end(request))
        )

    def place_ticket(self, ticket: Ticket) -> WorkerView | None:
        # The fair queue asks this where no other worker is open.
        return self if self.can_take(ticket.request) else None

    def can_hold(self, request: QueuedRequest) -> bool:
        """Beyond the room that is free: parked, or waiting for blocks that others give up."""
        request_id = request.request_id
        return (
            self.parks
            and self.spare_sequences >= request.sequences
            and request_id not in self.granted
            and request_id not in self.running
            and self.could_ever_run(request)
        )

    def has_blocks_for(self, request: QueuedRequest) -> bool:
        return self.free_blocks >= self.blocks_for(request)

    def could_ever_run(self, request: QueuedRequest) -> bool:
        """If it were empty: slots, and KV for one choice at its longest (its last token has none)."""
        return (
            self.sequence_slots >= request.sequences
            and self.kv_blocks_total >= self.blocks_for(request)
            and (self._holds_longest or self._could_end(request))
        )

    def _could_end(self, request: QueuedRequest) -> bool:
        longest = request.prompt_tokens + request.max_new_tokens // request.sequences
        if longest > self.max_context_tokens:
            longest = self.max_context_tokens
        return self.kv_blocks_total * self.block_size >= longest - 1

    def nearness(self, key: AdapterKey) -> int:
        """The sum of its adapters' residencies: greater is nearer."""
        return sum(map(self.residency, uids_of(key)))

    def residency(self, adapter_uid: AdapterUid) -> Residency:
        found = self.adapters.get(adapter_uid, ABSENT)
        if not found and self.has_or_awaits(adapter_uid):
            return Residency.ARRIVING
        return found

    def slowed_by(self, rank: int) -> int:
        """Sequences whose steps would take longer: of lower ranks than all so far, or this one beside a higher."""
        ranks = self._ranks
        if not ranks:
            return 0
        highest = max(ranks)
        return int(highest > rank) if highest >= rank else sum(ranks.values())

    def has_or_awaits(self, uid: AdapterUid) -> bool:
        return bool(self.adapters.get(uid)) or uid in self._assigned or uid in self._prefetches

    def standing_now(self) -> int:
        if not self.connected:
            return AWAY
        if self.draining or not self.is_everybodys:
            return CONNECTED
        slots, most = self.sequence_slots, self._max_sequences
        used = self.running_sequences + self._granted_sequences
        if most <= slots:
            return IS_OPEN if used < slots else IS_FULL
        if used >= most:
            return IS_FULL
        return IS_OPEN | SPARE if used - self.held_sequences < slots else IS_FULL | SPARE

    def place_now(self) -> FleetPlace:
        standing = self.standing
        if not standing & (OPEN | SPARE):
            return NOWHERE
        spare = self.spare_sequences if standing & SPARE else 0
        if not standing & OPEN:
            return FleetPlace(spare=spare)
        free_blocks, slotted = self.free_blocks, self.slotted_sequences
        # Free blocks change with every report: eighths are fine enough.
        eighths = 8 * free_blocks // max(1, self.kv_blocks_total)
        load = (slotted / self.sequence_slots, -eighths, self.worker_id, self)
        return FleetPlace(slotted, load, free_blocks * self.block_size, spare)

    # ---- grants

    def grant(self, ticket: Ticket) -> None:
        request = ticket.request
        assert request.request_id not in self.granted
        self.granted[request.request_id] = ticket
        ticket.blocks = blocks = self.blocks_for(request)
        self._granted_blocks += blocks
        self._granted_sequences += request.sequences
        if rank := request.adapter_rank:
            self._ranks[rank] = self._ranks.get(rank, 0) + request.sequences
        for uid in uids_of(request.adapter_uid) if request.adapter_uid is not None else ():
            count = self._assigned.get(uid)
            if count is None:
                self._assigned[uid] = 1
                self._holders.add(uid, self)
            else:
                self._assigned[uid] = count + 1

    def drop_grant(self, ticket: Ticket) -> None:
        # The grant came to nothing, or its end was reported together with its start.
        request = ticket.request
        del self.granted[request.request_id]
        self._granted_sequences -= request.sequences
        self._granted_blocks -= ticket.blocks
        self._unassign(ticket)

    def start(self, request_id: RequestId) -> Ticket | None:
        """Returns its ticket where it was granted from here."""
        ticket = self.granted.pop(request_id, None)
        if ticket is None:
            return self.running.setdefault(request_id, None)
        self._granted_sequences -= ticket.request.sequences
        self._granted_blocks -= ticket.blocks
        self.running[request_id] = ticket
        return ticket

    def finish(self, request_id: RequestId) -> Ticket | None:
        if request_id in self.running:
            ticket = self.running.pop(request_id)
            if ticket is not None:
                self._unassign(ticket)
            return ticket
        ticket = self.granted.get(request_id)
        if ticket is not None:
            self.drop_grant(ticket)
        return ticket

    def tickets(self) -> list[Ticket]:
        return [ticket for ticket in self.running.values() if ticket is not None] + list(self.granted.values())

    def _unassign(self, ticket: Ticket) -> None:
        key, rank = ticket.request.adapter_uid, ticket.request.adapter_rank
        if rank:
            self._ranks[rank] -= ticket.request.sequences
            if not self._ranks[rank]:
                del self._ranks[rank]
        for uid in uids_of(key) if key is not None else ():
            count = self._assigned[uid]
            if count > 1:
                self._assigned[uid] = count - 1
            else:
                del self._assigned[uid]
                if uid not in self.adapters:
                    self._holders.note(uid, self)

    # ---- prefetches

    @property
    def num_prefetches(self) -> int:
        return len(self._prefetches)

    def send_prefetch(self, uid: AdapterUid) -> None:
        self._prefetches[uid] = None
        self._holders.note(uid, self)

    def forget_prefetch(self, uid: AdapterUid) -> None:
        if uid in self._prefetches:
            del self._prefetches[uid]
            self._holders.note(uid, self)

    def disconnect(self) -> None:
        # Prefetches that were sent over the broken control stream may be lost.
        self.connected = False
        for uid in list(self._prefetches):
            self.forget_prefetch(uid)

    def leave(self) -> None:
        for uid in self._residents():
            self._holders.forget(uid, self)

    def _residents(self) -> set[AdapterUid]:
        return {*self.adapters, *self._assigned, *self._prefetches}

    # ---- reports

    def fold_capacity(self, report: WorkerReport, *, with_loads: bool = True) -> None:
        """Takes over all but requests and counters; without loads every sequence counts as one that uses a slot."""
        if report.block_size != self.block_size:
            self.block_size = max(1, report.block_size)
            for ticket in self.granted.values():
                ticket.blocks = self.blocks_for(ticket.request)
            self._granted_blocks = sum(ticket.blocks for ticket in self.granted.values())
        self.sequence_slots = report.sequence_slots
        self._max_sequences = report.max_sequences
        self.running_sequences = report.running_sequences
        if with_loads:
            self._fold_loads(report)
        self.kv_blocks_total = report.kv_blocks_total
        self.kv_blocks_free = report.kv_blocks_free
        self._holds_longest = report.kv_blocks_total * self.block_size >= self.max_context_tokens - 1
        self.draining = report.draining
        if report.snapshot:
            self._fold_adapters({**dict.fromkeys(self.adapters, ABSENT), **report.adapters})
        elif report.adapters:
            self._fold_adapters(report.adapters)
        self.has_reported = True
        if report.snapshot:
            self.connected = True

    def _fold_adapters(self, changed: Mapping[AdapterUid, Residency]) -> None:
        adapters, holders, prefetches = self.adapters, self._holders, self._prefetches
        for uid, residency in changed.items():
            if residency is ABSENT:
                if adapters.pop(uid, None) is not None and not self.has_or_awaits(uid):
                    holders.forget(uid, self)
                continue
            if uid not in adapters and uid not in self._assigned:
                holders.add(uid, self)
            adapters[uid] = residency
            if prefetches:
                prefetches.pop(uid, None)

    def _fold_loads(self, report: WorkerReport) -> None:
        self._front = None
        if report.snapshot:
            self._loads.clear()
            self.held_by_tenant.clear()
            self.held_sequences = 0
        if not report.loads:
            return
        for flow, load in report.loads.items():
            before = self._loads.pop(flow, NO_LOAD)
            if load != NO_LOAD:
                self._loads[flow] = load
            if load.held != before.held:
                self._fold_held(flow.tenant_id, load.held - before.held)

    def _fold_held(self, tenant_id: TenantId, more: int) -> None:
        self.held_sequences += more
        held = self.held_by_tenant.get(tenant_id, 0) + more
        if held:
            self.held_by_tenant[tenant_id] = held
        else:
            del self.held_by_tenant[tenant_id]

    def fold_outputs(self, report: WorkerReport) -> list[tuple[FlowKey, int]]:
        """Tokens by flow since the last report; nothing for the first. Counters that fell back count from zero."""
        before, grown = self._output_tokens, []
        if report.snapshot and any(
            flow not in report.flows or report.flows[flow].output_tokens < tokens for flow, tokens in before.items()
        ):
            before.clear()
        for flow, (_, output_tokens) in report.flows.items():
            more = output_tokens - before.get(flow, 0)
            if more < 0:
                before.clear()
                grown = [(flow, tokens.output_tokens) for flow, tokens in report.flows.items()]
                before.update(grown)
                break
            grown.append((flow, more))
            before[flow] = output_tokens
        return grown if self.has_reported else []

    def check_invariants(self) -> None:
        assert self._granted_sequences == sum(t.request.sequences for t in self.granted.values())
        assert all(t.blocks == self.blocks_for(t.request) for t in self.granted.values())
        assert self._granted_blocks == sum(t.blocks for t in self.granted.values())
        assert self.held_sequences == sum(load.held for load in self._loads.values())
        tenants = {flow.tenant_id for flow in self.held_flows()}
        assert self.held_by_tenant == {
            tenant: sum(load.held for flow, load in self._loads.items() if flow.tenant_id == tenant)
            for tenant in tenants
        }
        counts: dict[AdapterUid, int] = {}
        ranks: dict[int, int] = {}
        for ticket in self.tickets():
            if rank := ticket.request.adapter_rank:
                ranks[rank] = ranks.get(rank, 0) + ticket.request.sequences
            assert ticket.worker_id == self.worker_id
            for uid in uids_of(ticket.request.adapter_uid) if ticket.request.adapter_uid is not None else ():
                counts[uid] = counts.get(uid, 0) + 1
        assert counts == self._assigned
        assert ranks == self._ranks
        assert ABSENT not in self.adapters.values()
        held = {uid for uid in self._residents() if self.residency(uid) is not ABSENT}
        assert self._holders.uids_of(self) == held


class FleetPlace(NamedTuple):
    slotted_sequences: int = 0  # while it is open
    load: Load | None = None  # None: it is not open
    free_kv: int = 0
    spare: int = 0


# (part of the slots that is used, eighths of the KV that are free (negated), id, worker)
Load = tuple[float, int, WorkerId, WorkerView]


NOWHERE = FleetPlace()
