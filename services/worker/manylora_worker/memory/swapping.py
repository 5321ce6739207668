"""KV of sequences in host memory: who has it, whether that pays, and the copies under way (decision 21). Their blocks
go to nobody else, even if the sequence has ended.

    parked --leave--> LEAVING --copy over--> ON_HOST --bring_back--> ARRIVING --copy over--> parked
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from manylora_shared.ids import TenantId

from manylora_worker.kinds.api import HostKv, PendingCopy
from manylora_worker.kinds.sequence import Sequence, Swap, SwapStage
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.tenant_shares import TenantShares

_MOST_OF_ONE_TENANT = 2  # a tenant has at most one part in so many of all host blocks
_WEIGHT = 0.2  # of a new measurement in the average


class SwapCosts:
    """block_copy_s: of one block, out and in, until measured."""

    def __init__(self, block_copy_s: float) -> None:
        self._one_way_s = block_copy_s / 2
        self._prefill_tokens_per_s: float | None = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """None: not measured yet."""
        return self._prefill_tokens_per_s

    def copied(self, num_blocks: int, seconds: float) -> None:
        """One way."""
        if num_blocks:
            self._one_way_s += _WEIGHT * (seconds / num_blocks - self._one_way_s)

    def computed(self, num_prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Steps that mostly decode are left out."""
        if seconds <= 0 or 2 * num_prefill_tokens < num_tokens:
            return
        rate = num_tokens / seconds
        before = self._prefill_tokens_per_s
        self._prefill_tokens_per_s = rate if before is None else before + _WEIGHT * (rate - before)

    def swap_s(self, num_blocks: int) -> float:
        return 2 * num_blocks * self._one_way_s

    def recompute_s(self, num_tokens: int) -> float:
        if self._prefill_tokens_per_s is None:
            return float("inf") if num_tokens else 0.0
        return num_tokens / self._prefill_tokens_per_s


@dataclass(frozen=True)
class SwapCounts:
    """Since the engine's start."""

    swaps_out: int = 0
    swaps_in: int = 0
    blocks_out: int = 0
    blocks_in: int = 0

    def __add__(self, other: SwapCounts) -> SwapCounts:
        return SwapCounts(
            self.swaps_out + other.swaps_out,
            self.swaps_in + other.swaps_in,
            self.blocks_out + other.blocks_out,
            self.blocks_in + other.blocks_in,
        )


class HostBlocks:
    def __init__(self, num_blocks: int, shares: TenantShares, num_device_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._shares = shares
        self._num_device_blocks = num_device_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[TenantId, int] = {}
        self._reserves: Mapping[TenantId, int] = {}
        self._all_reserves = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def held_by(self, tenant_id: TenantId) -> int:
        return self._held.get(tenant_id, 0)

    def held(self) -> dict[TenantId, int]:
        return dict(self._held)

    def bound(self, tenant_id: TenantId) -> int:
        """The hard cap's part, at most half, less others' unused reserves."""
        return min(self.num_blocks // _MOST_OF_ONE_TENANT, self._part(self._shares.hard(tenant_id)))

    def has_room(self, tenant_id: TenantId, count: int) -> bool:
        kept = self._reserved() - self._unused_reserve(tenant_id)
        return count + kept <= self.num_free and self.held_by(tenant_id) + count <= self.bound(tenant_id)

    def allocate(self, tenant_id: TenantId, count: int) -> list[int]:
        assert self.has_room(tenant_id, count)
        self._held[tenant_id] = self.held_by(tenant_id) + count
        rest = len(self._free) - count
        taken = self._free[rest:][::-1]
        del self._free[rest:]
        return taken

    def free(self, tenant_id: TenantId, blocks: list[int]) -> None:
        self._free += reversed(blocks)
        self._held[tenant_id] -= len(blocks)
        assert self._held[tenant_id] >= 0
        if not self._held[tenant_id]:
            del self._held[tenant_id]

    def _reserved(self) -> int:
        reserves = self._shares.reserves
        if reserves is not self._reserves:
            self._reserves, self._all_reserves = reserves, sum(map(self._part, reserves.values()))
        used = sum(min(count, self._part(reserves.get(tenant_id, 0))) for tenant_id, count in self._held.items())
        return self._all_reserves - used

    def _unused_reserve(self, tenant_id: TenantId) -> int:
        return max(0, self._part(self._shares.reserve(tenant_id)) - self.held_by(tenant_id))

    def _part(self, device_blocks: int) -> int:
        return self.num_blocks * device_blocks // self._num_device_blocks


class Swapper:
    def __init__(self, host_kv: HostKv | None, pool: BlockPool, shares: TenantShares) -> None:
        self._host_kv = host_kv
        self._pool = pool
        self.host = HostBlocks(0 if host_kv is None else host_kv.num_blocks, shares, pool.num_blocks)
        self.costs = SwapCosts(0.0 if host_kv is None else host_kv.block_copy_s)
        # under way, oldest first, and how many blocks each copies
        self._copies: dict[Sequence, tuple[PendingCopy, int]] = {}
        self._leaving: frozenset[int] | None = None  # blocks that copies under way will free; None: to be found anew
        self._counts = SwapCounts()

    @property
    def num_copying(self) -> int:
        return len(self._copies)

    @property
    def copying(self) -> list[Sequence]:
        """Finished sequences included."""
        return list(self._copies)

    @property
    def counts(self) -> SwapCounts:
        return self._counts

    @property
    def num_leaving(self) -> int:
        """Blocks that copies under way will free."""
        return len(self._blocks_leaving()) if self._copies else 0

    def num_leaving_of(self, tenant_id: TenantId) -> int:
        return sum(
            self._pool.is_given_up_by_holder(tenant_id, block_id)
            for sequence in self._copies
            if sequence.tenant_id == tenant_id and self._is_leaving(sequence)
            for block_id in sequence.block_table
        )

    def num_leaving_among(self, block_ids: Iterable[int]) -> int:
        """How many will be free when copies are over, unless somebody takes them from the cache."""
        leaving = self._blocks_leaving()
        return sum(block_id in leaving for block_id in block_ids) if leaving else 0

    def _blocks_leaving(self) -> frozenset[int]:
        if self._leaving is None:
            self._leaving = frozenset(
                block_id
                for sequence in self._copies
                if self._is_leaving(sequence)
                for block_id in sequence.block_table
                if self._pool.is_freed_by_holder(block_id)
            )
        return self._leaving

    @staticmethod
    def _is_leaving(sequence: Sequence) -> bool:
        return sequence.swap is not None and sequence.swap.stage is SwapStage.LEAVING

    def pays(self, sequence: Sequence) -> bool:
        """A copy out and in is quicker than computing what nobody else holds, and has room."""
        num_blocks = self._num_computed_blocks(sequence)
        if not num_blocks or not self.host.has_room(sequence.tenant_id, num_blocks):
            return False
        lasting = self._pool.num_lasting(sequence.block_table) * self._pool.block_size
        again = max(0, sequence.num_computed_tokens - lasting)
        return self.costs.swap_s(num_blocks) < self.costs.recompute_s(again)

    def leave(self, sequence: Sequence) -> None:
        """The sequence holds its blocks until the copy is over."""
        assert self._host_kv is not None
        assert not sequence.num_steps_in_flight
        assert sequence.swap is None
        blocks = sequence.block_table[: self._num_computed_blocks(sequence)]
        host_blocks = self.host.allocate(sequence.tenant_id, len(blocks))
        sequence.swap = Swap(host_blocks, sequence.status)
        sequence.group.num_swaps += 1
        self._copies[sequence] = (self._host_kv.copy_out(blocks, host_blocks), len(blocks))
        self._leaving = None
        self._counts += SwapCounts(swaps_out=1, blocks_out=len(blocks))

    def bring_back(self, sequence: Sequence, num_cached_blocks: int) -> None:
        """Behind the blocks that were cached."""
        assert self._host_kv is not None
        assert sequence.swap is not None
        assert sequence.swap.stage is SwapStage.ON_HOST
        host_blocks = sequence.swap.host_blocks[num_cached_blocks:]
        blocks = sequence.block_table[num_cached_blocks : len(sequence.swap.host_blocks)]
        assert len(host_blocks) == len(blocks)
        self._pool.overwrite(blocks)
        sequence.swap.stage = SwapStage.ARRIVING
        self._leaving = None
        self._copies[sequence] = (self._host_kv.copy_in(host_blocks, blocks), len(blocks))
        self._counts += SwapCounts(swaps_in=1, blocks_in=len(blocks))

    def poll(self) -> list[Sequence]:
        """Whose copies are over; call `ended` for each."""
        over = [sequence for sequence, (copy, _) in self._copies.items() if copy.is_over()]
        self._leaving = None
        for sequence in over:
            copy, num_blocks = self._copies.pop(sequence)
            self.costs.copied(num_blocks, copy.seconds)
        return over

    def wait(self) -> None:
        for copy, _ in self._copies.values():
            copy.wait()

    def ended(self, sequence: Sequence) -> SwapStage:
        """Its copy is over. Returns the stage that ends."""
        assert sequence.swap is not None
        assert sequence not in self._copies
        stage = sequence.swap.stage
        assert stage is not SwapStage.ON_HOST
        if stage is SwapStage.LEAVING and not sequence.is_finished:
            sequence.swap.stage = SwapStage.ON_HOST
        else:
            self.forget(sequence)
        return stage

    def forget(self, sequence: Sequence) -> None:
        assert sequence not in self._copies
        if sequence.swap is not None:
            self.host.free(sequence.tenant_id, sequence.swap.host_blocks)
            sequence.swap = None

    def check_invariants(self, sequences: list[Sequence]) -> None:
        held: dict[TenantId, int] = {}
        taken: list[int] = []
        for sequence in sequences:
            assert sequence.is_copying == (sequence in self._copies)
            if sequence.swap is not None:
                taken += sequence.swap.host_blocks
                held[sequence.tenant_id] = held.get(sequence.tenant_id, 0) + len(sequence.swap.host_blocks)
        assert held == self.host.held(), "the tenants' counts of host blocks are wrong"
        assert len(set(taken)) == len(taken), "a host block has two owners"
        assert len(taken) + self.host.num_free == self.host.num_blocks, "a host block is lost"
        assert self._copies.keys() <= set(sequences), "a copy is nobody's"

    def _num_computed_blocks(self, sequence: Sequence) -> int:
        return self._pool.blocks_for(sequence.num_computed_tokens)
