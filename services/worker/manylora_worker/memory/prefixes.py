"""What a sequence can begin with because it was computed before, and what it leaves for others to find.

The one way between those who own the parts: PublicPrefixes has what all tenants find, PrefixKeys names a tenant's own
blocks, BlockPool keeps what is published, a Sequence has its table. Without keys there is no prefix cache: nothing is
found, nothing is published. Which idle block goes is BlockPool's.
"""

from __future__ import annotations

from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.prefix_cache import PrefixKeys
from manylora_worker.memory.public_prefixes import PUBLIC, PublicPrefixes


class Prefixes:
    """keys: None: there is no prefix cache."""

    def __init__(self, pool: BlockPool, keys: PrefixKeys | None, public: PublicPrefixes) -> None:
        self._pool = pool
        self._keys = keys
        self._public = public

    def find(self, sequence: Sequence) -> list[int]:
        """The longest chain of full blocks that the sequence can begin with: public ones, then its tenant's own. A
        swapped one goes on where it stood."""
        keys, block_size = self._keys, self._pool.block_size
        if keys is None:
            return []
        most = sequence.num_tokens - 1 if sequence.swap is None else sequence.num_computed_tokens
        num_blocks = most // block_size
        found = self._public.find(sequence, num_blocks)
        if sequence.tenant_id == PUBLIC:
            return found
        chain = (keys.key_at(sequence, index, block_size) for index in range(len(found), num_blocks))
        return found + self._pool.find_cached(sequence.tenant_id, chain)

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Lets lookups find the blocks that the KV of tokens [start, end) has filled: the tenant's, or all tenants'
        where it is nobody's request."""
        keys, block_size = self._keys, self._pool.block_size
        if keys is None:
            return
        if sequence.tenant_id == PUBLIC:
            self._public.publish(sequence, start, end)
            return
        for index in range(start // block_size, end // block_size):
            block_id = sequence.block_table[index]
            if self._pool.owner_of(block_id) == sequence.tenant_id:  # what it found may be public
                self._pool.publish(block_id, keys.key_at(sequence, index, block_size))

    def withdraw(self, sequence: Sequence) -> None:
        """No lookup finds the sequence's blocks any more; but public ones that it only found."""
        if sequence.tenant_id == PUBLIC:
            self._public.withdraw(sequence.group.request.request_id)
        else:
            self._pool.unpublish(sequence.block_table)
