"""Whether the engine's parts agree on every sequence and block. Each check passes over all of them."""

from __future__ import annotations

from manylora_shared.ids import TenantId

from manylora_worker.adapters.cache import AdapterCache
from manylora_worker.engine.flights import Flights
from manylora_worker.engine.request_table import RequestTable
from manylora_worker.kinds.sequence import Sequence, SequenceStatus
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.swapping import Swapper
from manylora_worker.planning.step_planner import StepPlanner


def check_queues(requests: RequestTable, planner: StepPlanner) -> None:
    """Every sequence is where its status says."""
    requests.check_invariants()
    planner.check_invariants()
    everywhere = [*planner.running, *planner.parking.parked, *planner.parking.waiting]
    queued = {id(s) for s in everywhere}
    assert len(queued) == len(everywhere), "a sequence is queued twice"
    for sequence in requests.sequences:
        _check_sequence(sequence, is_queued=id(sequence) in queued)
        queued.discard(id(sequence))
    assert not queued, "a sequence of no request is queued"


def check_blocks(requests: RequestTable, pool: BlockPool) -> None:
    """Every held block is in a table, and counts for each tenant that holds it."""
    pool.check_invariants()
    held: dict[TenantId, set[int]] = {}
    for sequence in requests.sequences:
        tenant_id, table = sequence.tenant_id, sequence.block_table
        owners = [pool.owner_of(block_id) for block_id in table]
        foreign = next((i for i in reversed(range(len(table))) if owners[i] != tenant_id), -1) + 1
        assert not foreign or sequence.group.cache_scope.is_group
        assert foreign * pool.block_size <= sequence.num_computed_tokens or sequence.is_copying
        if table:
            held.setdefault(tenant_id, set()).update(table)
    assert {tenant_id: len(blocks) for tenant_id, blocks in held.items()} == pool.held()
    assert len(set().union(*held.values())) == pool.num_held, "a block is held by no sequence"
    for group in requests.groups:
        tables = [sequence.block_table for sequence in group.sequences]
        assert group.holding.num_held == len(set().union(*tables)), "the holding is not that of the tables"


def check_under_way(requests: RequestTable, flights: Flights, swapper: Swapper) -> None:
    """What steps and copies need is kept for them."""
    swapper.check_invariants(list(requests.sequences))
    in_flight: dict[Sequence, int] = {}
    for part in (part for flight in flights for part in flight.parts):
        sequence = part.scheduled.sequence
        in_flight[sequence] = in_flight.get(sequence, 0) + 1
        assert part.holding_id == sequence.holding_id, "a sequence lost its blocks to another in mid-step"
    assert all(s.num_steps_in_flight == in_flight.get(s, 0) for s in requests.sequences)
    assert all(s.num_pending_tokens <= s.num_steps_in_flight for s in requests.sequences)
    assert requests.lingering == {s for s in (*in_flight, *swapper.copying) if s.is_finished}


def check_adapters(requests: RequestTable, adapters: AdapterCache) -> None:
    """Requests past loading have their adapter, and nobody else."""
    adapters.check_invariants()
    loading = {group.request.request_id for group in requests.loading}
    with_adapter = [group for group in requests.groups if group.request.adapter_uid is not None]
    for group in with_adapter:
        waits = any(s.status is SequenceStatus.WAITING_ADAPTER for s in group.sequences)
        assert waits != adapters.uses(group.request.request_id)
        assert waits == (group.request.request_id in loading)
    assert adapters.num_holders == len(with_adapter), "an adapter is held by no request"


def _check_sequence(sequence: Sequence, *, is_queued: bool) -> None:
    computed = sequence.num_computed_tokens
    match sequence.status:
        case SequenceStatus.FINISHED:
            assert not is_queued
            assert not sequence.block_table or sequence.num_steps_in_flight or sequence.is_copying
        case SequenceStatus.ENDING:
            assert sequence.num_pending_tokens
            assert computed == sequence.num_tokens - 1
        case SequenceStatus.WAITING_ADAPTER:
            assert not is_queued
            assert computed == 0
            assert not sequence.block_table
        case SequenceStatus.WAITING:
            is_behind_leader = not sequence.group.is_forked and sequence is not sequence.group.leader
            assert is_queued != is_behind_leader
            assert computed == 0
            assert not sequence.block_table
        case SequenceStatus.SWAPPED:
            assert is_queued
            assert 0 < computed < sequence.num_tokens
            assert sequence.swap is not None
            assert bool(sequence.block_table) == sequence.is_copying
        case SequenceStatus.PREFILL:
            assert is_queued
            assert computed < sequence.num_tokens
        case SequenceStatus.DECODE:
            assert is_queued
            assert computed == sequence.num_tokens - 1
