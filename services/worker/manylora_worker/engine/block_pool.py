"""Who holds which KV block.

Owns every block's reference count, the tenant that last held it, and two lists of work for the model runner: blocks to
zero because they come from another tenant, and blocks to copy because a shared one is about to be written. Written by
EngineCore and StepPlanner alone, on the engine's thread. Knows ids and tenants, never tensors.

Blocks have one size, so nothing fragments: any free block serves any sequence.

    free --allocate--> held (1 reference) --share--> held (n) --free, n times--> free
                                                      the copy source of a step stays *parked* until `commit`

Invariants (`check_invariants`): a block is free, parked or held, exactly one of them; a tenant's count is the number of
blocks with references that it owns; a held block is never shared between tenants.
"""

from __future__ import annotations

from collections.abc import Iterable

from manylora_shared.ids import TenantId


class BlockPool:
    """A fixed number of blocks of `block_size` tokens.

    Work for the runner collects in `pending_clears` and `pending_copies` until `commit` says that a step did it. A step
    that failed is not committed: its clears stay due, and its copies vanish when their targets are freed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._owner: list[TenantId | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held_by: dict[TenantId, int] = {}
        self._unclean: dict[int, None] = {}
        self._copies: dict[int, int] = {}
        self._copies_from: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with references."""
        return sum(self._held_by.values())

    def held_by(self, tenant_id: TenantId) -> int:
        """Blocks that count against the tenant; one that several of its sequences share counts once."""
        return self._held_by.get(tenant_id, 0)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_shared(self, block_id: int) -> bool:
        return self._references[block_id] > 1

    def is_freed_by_holder(self, block_id: int) -> bool:
        """Whether the block is free at once when one holder lets go: nobody else holds it, and no copy of it is due."""
        return self._references[block_id] == 1 and block_id not in self._copies_from

    def owner_of(self, block_id: int) -> TenantId | None:
        """The tenant that holds the block, or the last one that did; None where nobody ever has."""
        return self._owner[block_id]

    def allocate(self, tenant_id: TenantId, count: int) -> list[int]:
        """Takes `count` free blocks (ask `num_free` first), each with one reference."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block_id in taken:
            previous = self._owner[block_id]
            if previous is not None and previous != tenant_id:
                self._unclean[block_id] = None
            self._owner[block_id] = tenant_id
            self._references[block_id] = 1
        self._held_by[tenant_id] = self._held_by.get(tenant_id, 0) + count
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each; sharing stays inside the owning tenant."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is not held"
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is not held"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._forget(block_id)

    def copy_on_write(self, block_id: int) -> int:
        """Trades one reference of a shared block for a block of its own; the content is copied by the coming step.

        The source keeps its content until `commit`, even where its other holders free it before.
        """
        assert self.is_shared(block_id), f"block {block_id} can be written in place"
        tenant_id = self._owner[block_id]
        assert tenant_id is not None
        (copy,) = self.allocate(tenant_id, 1)
        self._copies[copy] = block_id
        self._copies_from[block_id] = self._copies_from.get(block_id, 0) + 1
        self._references[block_id] -= 1
        return copy

    def pending_clears(self) -> list[int]:
        """Held blocks that still have another tenant's content: to be zeroed before anything else."""
        return [block_id for block_id in self._unclean if self._references[block_id] > 0]

    def pending_copies(self) -> list[tuple[int, int]]:
        """(from, to), to be copied after the clears and before the pass."""
        return [(source, copy) for copy, source in self._copies.items()]

    def commit(self) -> None:
        """The step did all that is pending."""
        for block_id in self.pending_clears():
            del self._unclean[block_id]
        for copy in list(self._copies):
            self._drop_copy(copy)

    def check_invariants(self) -> None:
        free = set(self._free)
        parked = {source for source in self._copies_from if self._references[source] == 0}
        held = {block_id for block_id, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held
        assert not free & parked
        assert len(free) + len(held) + len(parked) == self.num_blocks, "a block is lost"
        assert all(count >= 0 for count in self._references)
        counts: dict[TenantId, int] = {}
        for block_id in held:
            owner = self._owner[block_id]
            assert owner is not None
            counts[owner] = counts.get(owner, 0) + 1
        assert counts == self._held_by, "the tenants' counts are wrong"
        sources: dict[int, int] = {}
        for copy, source in self._copies.items():
            assert self._references[copy] > 0, "a copy is due into a block that nobody holds"
            assert self._owner[copy] == self._owner[source]
            sources[source] = sources.get(source, 0) + 1
        assert sources == self._copies_from
        assert not parked & self._unclean.keys(), "a copy's source is about to be cleared"

    def _forget(self, block_id: int) -> None:
        """The last reference is gone."""
        owner = self._owner[block_id]
        assert owner is not None
        self._held_by[owner] -= 1
        if self._held_by[owner] == 0:
            del self._held_by[owner]
        if block_id in self._copies:
            self._drop_copy(block_id)
        if block_id not in self._copies_from:
            self._free.append(block_id)

    def _drop_copy(self, copy: int) -> None:
        source = self._copies.pop(copy)
        self._copies_from[source] -= 1
        if self._copies_from[source] == 0:
            del self._copies_from[source]
            if self._references[source] == 0:
                self._free.append(source)
