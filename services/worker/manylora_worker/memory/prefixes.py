"""What a sequence finds in the prefix cache, and leaves there."""

from __future__ import annotations

from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.prefix_cache import PrefixKeys


class Prefixes:
    """keys: None: there is no cache."""

    def __init__(self, pool: BlockPool, keys: PrefixKeys | None) -> None:
        assert keys is None or not pool.state_blocks, "a prefix is of no use without its state"
        self._pool = pool
        self._keys = keys

    def find(self, sequence: Sequence) -> list[int]:
        """A swapped sequence goes on where it stood. What is cached has no logits: a prompt whose log-probabilities are
        asked for is found as far as they were computed.
        """
        keys, block_size = self._keys, self._pool.block_size
        if keys is None or sequence.group.has_left_scope:
            return []
        most = sequence.num_tokens - 1 if sequence.swap is None else sequence.num_computed_tokens
        if sequence.group.is_scoring:
            most = min(most, sequence.group.num_prompt_tokens_computed)
        chain = (keys.key_at(sequence, index, block_size) for index in range(most // block_size))
        return self._pool.find_cached(sequence.group.cache_scope, chain)

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        keys, block_size = self._keys, self._pool.block_size
        if keys is None or sequence.group.has_left_scope:
            return
        for index in range(start // block_size, end // block_size):
            key = keys.key_at(sequence, index, block_size)
            self._pool.publish(sequence.block_table[index], sequence.group.cache_scope, key)

    def withdraw(self, sequence: Sequence) -> None:
        self._pool.unpublish(sequence.block_table)
