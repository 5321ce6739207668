"""What stands in a sequence's block table, and so what its request holds. Only Parking writes it."""

from __future__ import annotations

from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.prefixes import Prefixes


class BlockTables:
    def __init__(self, pool: BlockPool, prefixes: Prefixes) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self.now = 0.0  # of the engine's step or command

    def missing(self, sequence: Sequence, end: int) -> int:
        """Blocks to take before writing tokens up to `end`."""
        missing = max(0, self._pool.blocks_for(end) - len(sequence.block_table))
        return missing + self._writes_shared_block(sequence)

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        index = self._pool.index_of(sequence.num_computed_tokens)
        return index < len(sequence.block_table) and self._pool.is_shared(sequence.block_table[index])

    def extend(self, sequence: Sequence, end: int) -> None:
        num_blocks = self.missing(sequence, end)
        index = self._pool.index_of(sequence.num_computed_tokens)
        if num_blocks and self._writes_shared_block(sequence):
            shared = sequence.block_table[index]
            copy = sequence.block_table[index] = self._pool.copy_on_write(shared)
            sequence.group.holding.give((shared,), 1, self.now)
            sequence.group.holding.take((copy,), 1, self.now)
            num_blocks -= 1
        else:  # a further choice whose siblings are gone writes the prompt's last token anew, in a block that is cached
            self._pool.unpublish(sequence.block_table[index : index + 1])
        if num_blocks:
            taken = self._pool.allocate(sequence.tenant_id, num_blocks)
            sequence.block_table += taken
            sequence.group.holding.take(taken, num_blocks, self.now)

    def fill(self, sequence: Sequence) -> int:
        """For all tokens. Returns how many blocks were cached."""
        cached = self._prefixes.find(sequence)
        num_blocks = self._pool.blocks_for(sequence.num_tokens) - len(cached)
        self._pool.take_cached(sequence.tenant_id, cached)
        sequence.block_table = cached + self._pool.allocate(sequence.tenant_id, num_blocks)
        sequence.group.holding.take(sequence.block_table, len(sequence.block_table), self.now)
        sequence.has_worked = False
        return len(cached)

    def share(self, leader: Sequence, sequence: Sequence, num_tokens: int) -> None:
        assert not self._pool.state_blocks, "each has a state of its own"
        shared = leader.block_table[: self._pool.blocks_for(num_tokens)]
        self._pool.share(sequence.tenant_id, shared)
        sequence.block_table = shared
        sequence.group.holding.take(shared, len(shared), self.now)
        sequence.block_keys = list(leader.block_keys)  # so far of prompt blocks alone
        sequence.num_computed_tokens = num_tokens

    def lose(self, sequence: Sequence) -> None:
        self._pool.free(sequence.tenant_id, sequence.block_table)
        sequence.group.holding.give(sequence.block_table, len(sequence.block_table), self.now)
        sequence.block_table = []
        sequence.num_holdings += 1
