"""Requests with their choices, and the worker's pure parts around one block pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.kinds.sequence import GroupTimes, Sequence, SequenceGroup, SequenceStatus
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.block_tables import BlockTables
from manylora_worker.memory.prefix_cache import PrefixKeys
from manylora_worker.memory.prefixes import Prefixes
from manylora_worker.memory.swapping import Swapper
from manylora_worker.memory.tenant_shares import TenantShares
from manylora_worker.planning.parking import Parking
from manylora_worker.planning.unit_queue import UnitQueue

A, B = TenantId("a"), TenantId("b")
BLOCK = 4


def request_of(
    name: str = "r",
    *,
    tenant: TenantId = A,
    prompt: int = 8,
    max_tokens: int = 8,
    n: int = 1,
    qos_class: QosClass = QosClass.STANDARD,
    emitted: tuple[int, ...] = (),
    adapter: str | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        tenant_id=tenant,
        qos_class=qos_class,
        adapter_uid=None if adapter is None else AdapterUid(adapter),
        prompt_token_ids=tuple(range(prompt)),
        max_tokens=max_tokens,
        sampling=Sampling(seed=1),
        n=n,
        emitted=(emitted,) if emitted else (),
    )


def group_of(request: EngineRequest, arrival: int = 1) -> SequenceGroup:
    """Its choices wait for blocks."""
    scope = CacheScope(request.tenant_id, is_group=False)
    group = SequenceGroup(request, scope, arrival, GroupTimes(added_s=0.0))
    for choice in range(request.n):
        sequence = Sequence(arrival * 64 + choice, group, choice, request.max_tokens)
        sequence.move_to(SequenceStatus.WAITING)
        group.sequences.append(sequence)
    return group


@dataclass
class Rooms:
    """What StepPlanner decides over, without it."""

    num_blocks: int = 20
    has_cache: bool = False
    shares: TenantShares = field(init=False)
    pool: BlockPool = field(init=False)
    prefixes: Prefixes = field(init=False)
    tables: BlockTables = field(init=False)
    swapper: Swapper = field(init=False)
    queue: UnitQueue = field(init=False)
    parking: Parking = field(init=False)
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.shares = TenantShares(self.num_blocks)
        self.pool = BlockPool(self.num_blocks, BLOCK, self.num_blocks if self.has_cache else 0)
        self.prefixes = Prefixes(self.pool, PrefixKeys(bytes(32), "m") if self.has_cache else None)
        self.tables = BlockTables(self.pool, self.prefixes)
        self.swapper = Swapper(None, self.pool, self.shares)
        self.queue = UnitQueue(self.shares)
        self.parking = Parking(self.pool, self.tables, self.swapper, self.prefixes, self.queue)

    def waiting(self, tenant: TenantId = A, prompt: int = 8, n: int = 1) -> Sequence:
        self.arrivals += 1
        request = request_of(f"r{self.arrivals}", tenant=tenant, prompt=prompt, n=n)
        (sequence, *_) = group_of(request, self.arrivals).sequences
        self.parking.enqueue(sequence)
        return sequence

    def parked(self, tenant: TenantId = A, prompt: int = 8) -> Sequence:
        """With the blocks of its prompt."""
        sequence = self.waiting(tenant, prompt)
        self.parking.admit(sequence)
        self.queue.requeue(sequence)
        return sequence

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.queue.check_invariants()


def compute(sequence: Sequence, num_tokens: int) -> None:
    """A step that is over by now."""
    sequence.advance(num_tokens, samples=False)
    sequence.num_steps_in_flight -= 1
