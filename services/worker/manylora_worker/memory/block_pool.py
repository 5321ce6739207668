"""Who holds which KV block, by ids and tenants. EngineCore and StepPlanner write it.

A copy's source stays *parked* until its step is over; a published block stays *idle* (prefix_cache.py). A block's
*owner* is who it was allocated for last; *guests* share it by a cache group (decision 36).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from manylora_shared.ids import TenantId

from manylora_worker.kinds.flow import CacheScope
from manylora_worker.memory.prefix_cache import PrefixCache

_ADAPTERS = TenantId("")  # the owner of blocks that hold adapters, or did last


class BlockWork(NamedTuple):
    clears: SequenceOf[int] = ()  # before anything else
    copies: SequenceOf[tuple[int, int]] = ()  # (from, to), after the clears


class BlockPool:
    """A step ends with `commit`, or with `reject`: then its clears are due again, its copies are not."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_idle_blocks: int = 0,
        *,
        clears_freed: bool = False,
        num_lent: int = 0,
        state_blocks: int = 0,
    ) -> None:
        """num_lent: of further blocks, behind the others, that adapters have at first.
        state_blocks: those that a sequence's table begins with, which hold no tokens.
        """
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks  # without those that are lent
        self.block_size = block_size
        self.state_blocks = state_blocks
        total = num_blocks + num_lent
        self._lent = dict.fromkeys(range(num_blocks, total))
        self._clears_freed = clears_freed  # a block as soon as it is free
        self._references = [0] * total
        # references of others than the owner, of blocks that have any
        self._guests: dict[int, dict[TenantId, int]] = {}
        self._owner: list[TenantId | None] = [None] * num_blocks + [_ADAPTERS] * num_lent
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held_by: dict[TenantId, int] = {}
        self._unclean: dict[int, None] = {}
        self._copies: dict[int, int] = {}
        self._copies_from: dict[int, int] = {}  # copies of a block that are due, or in a step that is not over
        self._taken: list[BlockWork] = []
        self._overwritten: dict[int, None] = {}  # since the oldest work of `_taken` was taken
        self._cache = PrefixCache(max_idle_blocks)

    @property
    def num_free(self) -> int:
        """Idle ones included."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_idle(self) -> int:
        return self._cache.num_idle

    def idle_of(self, tenant_id: TenantId) -> int:
        return self._cache.idle_of(tenant_id)

    @property
    def num_held(self) -> int:
        return sum(count > 0 for count in self._references)

    def held_by(self, tenant_id: TenantId) -> int:
        """A shared block counts once."""
        return self._held_by.get(tenant_id, 0)

    def held(self) -> dict[TenantId, int]:
        return dict(self._held_by)

    def blocks_for(self, num_tokens: int) -> int:
        """Of a sequence, its state included."""
        return self.state_blocks + -(-num_tokens // self.block_size)

    def index_of(self, position: int) -> int:
        """In a sequence's table."""
        return self.state_blocks + position // self.block_size

    def tokens_in(self, num_blocks: int) -> int:
        """That a table of so many blocks has room for."""
        return max(0, num_blocks - self.state_blocks) * self.block_size

    def is_shared(self, block_id: int) -> bool:
        return self._references[block_id] > 1

    def is_freed_by_holder(self, block_id: int) -> bool:
        return self._references[block_id] == 1 and block_id not in self._copies_from

    def is_given_up_by_holder(self, tenant_id: TenantId, block_id: int) -> bool:
        return self._references_of(tenant_id, block_id) == 1

    def num_new_among(self, tenant_id: TenantId, block_ids: Iterable[int]) -> int:
        """Those that the tenant does not hold yet."""
        return sum(self._references_of(tenant_id, block_id) == 0 for block_id in block_ids)

    def owner_of(self, block_id: int) -> TenantId | None:
        return self._owner[block_id]

    def allocate(self, tenant_id: TenantId, count: int) -> list[int]:
        """Ask `num_free` first. The tenant's own idle blocks go before others' if it is above its cache share."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        if count == 0:
            return []
        rest = max(0, len(self._free) - count)
        taken = self._free[rest:][::-1]
        del self._free[rest:]
        footprint = self.held_by(tenant_id) + self._cache.idle_of(tenant_id) + count
        own_first = footprint > self._cache.max_idle_blocks
        while len(taken) < count:
            taken.append(self._cache.evict(tenant_id, own_first=own_first))
        for block_id in taken:
            previous = self._owner[block_id]
            if previous is not None and (previous != tenant_id or self._clears_freed):
                self._unclean[block_id] = None
            self._owner[block_id] = tenant_id
            self._references[block_id] = 1
        self._held_by[tenant_id] = self._held_by.get(tenant_id, 0) + count
        return taken

    def lend(self, count: int) -> list[int]:
        """Blocks that nobody holds, to adapters: as many as there are, `count` at most; prefixes make way."""
        due = {block_id for work in self._taken for block_id in work.clears}
        lent: list[int] = []
        kept: list[int] = []
        while len(lent) < count and self.num_free:
            block_id = self._free.pop() if self._free else self._cache.evict(_ADAPTERS, own_first=False)
            (kept if block_id in due else lent).append(block_id)
        self._free += kept
        for block_id in lent:
            self._unclean.pop(block_id, None)
            self._owner[block_id] = _ADAPTERS
            self._lent[block_id] = None
        self.num_blocks -= len(lent)
        return lent

    def take_back(self, block_ids: SequenceOf[int]) -> None:
        """Who gets one next clears it, as a block of another tenant."""
        for block_id in block_ids:
            del self._lent[block_id]
            self._give_away(block_id)
        self.num_blocks += len(block_ids)

    def share(self, tenant_id: TenantId, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert self._references_of(tenant_id, block_id) > 0, f"block {block_id} is not held"
            self._refer(tenant_id, block_id)

    def free(self, tenant_id: TenantId, block_ids: SequenceOf[int]) -> None:
        """The last is idle first, so prefixes are evicted from their ends."""
        for block_id in reversed(block_ids):
            assert self._references_of(tenant_id, block_id) > 0, f"block {block_id} is not held"
            self._drop(tenant_id, block_id)

    def find_cached(self, scope: CacheScope, keys: Iterable[bytes]) -> list[int]:
        """Up to the first key without a block."""
        found: list[int] = []
        for key in keys:
            block_id = self._cache.find(scope, key)
            if block_id is None or not (self._references[block_id] or self._cache.is_idle(block_id)):
                break  # a parked one is not there: it is being given up
            found.append(block_id)
        return found

    def num_idle_among(self, block_ids: Iterable[int]) -> int:
        return sum(self._references[block_id] == 0 for block_id in block_ids)

    def take_cached(self, tenant_id: TenantId, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self._references[block_id] == 0:
                self._cache.wake(block_id)
            self._refer(tenant_id, block_id)

    def publish(self, block_id: int, scope: CacheScope, key: bytes) -> None:
        """Nobody writes the block from now on."""
        owner = self._owner[block_id]
        assert self._references[block_id] > 0
        assert owner is not None
        assert block_id not in self._unclean
        self._cache.publish(scope, key, block_id, owner)

    def unpublish(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert self._references[block_id] > 0
            self._cache.unpublish(block_id)

    def forget_computed(self, tenant_id: TenantId | None = None) -> int:
        """No lookup finds any more what the tenant (None: anybody) has computed. Who holds such blocks keeps them.
        Returns how many blocks."""
        published = self._cache.published_blocks()
        forgotten = [block_id for block_id, (_, owner) in published.items() if tenant_id in (None, owner)]
        for block_id in forgotten:
            is_idle = self._cache.is_idle(block_id)
            if is_idle:
                self._cache.wake(block_id)
            self._cache.unpublish(block_id)
            if is_idle:
                self._give_away(block_id)
        return len(forgotten)

    def copy_on_write(self, block_id: int) -> int:
        """Trades a shared block for one of its own; the coming step copies the content."""
        assert self.is_shared(block_id), f"block {block_id} can be written in place"
        tenant_id = self._owner[block_id]
        assert tenant_id is not None
        (copy,) = self.allocate(tenant_id, 1)
        self._copies[copy] = block_id
        self._copies_from[block_id] = self._copies_from.get(block_id, 0) + 1
        self._drop(tenant_id, block_id)
        return copy

    def overwrite(self, block_ids: Iterable[int]) -> None:
        """Their owner replaces the whole content."""
        for block_id in block_ids:
            assert self._references[block_id] > 0
            self._unclean.pop(block_id, None)
            if self._taken:
                self._overwritten[block_id] = None

    def num_lasting(self, block_ids: Iterable[int]) -> int:
        """How many of a table's first blocks stay in the cache when this holder goes."""
        count = 0
        for block_id in block_ids:
            if self._references[block_id] < 2 or not self._cache.is_published(block_id):
                break
            count += 1
        return count

    def pending_clears(self) -> list[int]:
        return [block_id for block_id in self._unclean if self._clears_freed or self._references[block_id] > 0]

    def pending_copies(self) -> list[tuple[int, int]]:
        return [(source, copy) for copy, source in self._copies.items()]

    def take_work(self) -> BlockWork:
        work = BlockWork(self.pending_clears(), self.pending_copies())
        for block_id in work.clears:
            del self._unclean[block_id]
        self._copies.clear()
        if work.clears or work.copies:
            self._taken.append(work)
        return work

    def commit(self, work: BlockWork) -> None:
        if work.clears or work.copies:
            self._taken.remove(work)
            for source, _ in work.copies:
                self._drop_source(source)
            if not self._taken:
                self._overwritten.clear()

    def reject(self, work: BlockWork) -> None:
        """Nothing of the step may have been done."""
        self._unclean.update((block_id, None) for block_id in work.clears if block_id not in self._overwritten)
        self.commit(work)

    def check_invariants(self) -> None:
        self._cache.check_invariants()
        free = set(self._free)
        idle, published = self._cache.idle_blocks(), self._cache.published_blocks()
        parked = {source for source in self._copies_from if self._references[source] == 0}
        assert min(self._references) >= 0
        held = set(itertools.compress(range(len(self._references)), self._references))
        lent = self._lent.keys()
        assert not lent & (free | held | idle | parked), "a block of the adapters is used for KV"
        assert self.num_blocks + len(lent) == len(self._references)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held
        assert not free & parked
        assert not idle & (free | held | parked)
        assert len(free) + len(idle) + len(held) + len(parked) == self.num_blocks, "a block is lost"
        assert published.keys().isdisjoint(free)
        assert published.keys().isdisjoint(self._unclean)
        for block_id, (scope, tenant_id) in published.items():
            assert self._owner[block_id] == tenant_id
            assert scope.is_group or (scope.name == tenant_id and block_id not in self._guests)
        counts: dict[TenantId, int] = {}
        for block_id in held:
            owner, guests = self._owner[block_id], self._guests.get(block_id, {})
            assert owner is not None
            assert owner not in guests
            holders = [*guests, owner] if sum(guests.values()) < self._references[block_id] else [*guests]
            assert sum(self._references_of(holder, block_id) for holder in holders) == self._references[block_id]
            for holder in holders:
                counts[holder] = counts.get(holder, 0) + 1
        assert self._guests.keys() <= held
        assert all(count > 0 for guests in self._guests.values() for count in guests.values())
        assert counts == self._held_by, "the tenants' counts are wrong"
        sources: dict[int, int] = {}
        taken = [(copy, source) for work in self._taken for source, copy in work.copies]
        for copy, source in [*self._copies.items(), *taken]:
            assert self._references[copy] > 0, "a copy is due into a block that nobody holds"
            assert self._owner[copy] == self._owner[source]
            sources[source] = sources.get(source, 0) + 1
        assert sources == self._copies_from
        assert not parked & self._unclean.keys(), "a copy's source is about to be cleared"

    def _references_of(self, tenant_id: TenantId, block_id: int) -> int:
        guests = self._guests.get(block_id)
        if tenant_id != self._owner[block_id]:
            return 0 if guests is None else guests.get(tenant_id, 0)
        return self._references[block_id] - (0 if guests is None else sum(guests.values()))

    def _refer(self, tenant_id: TenantId, block_id: int) -> None:
        if self._references_of(tenant_id, block_id) == 0:
            self._held_by[tenant_id] = self._held_by.get(tenant_id, 0) + 1
        self._references[block_id] += 1
        if tenant_id != self._owner[block_id]:
            guests = self._guests.setdefault(block_id, {})
            guests[tenant_id] = guests.get(tenant_id, 0) + 1

    def _drop(self, tenant_id: TenantId, block_id: int) -> None:
        self._references[block_id] -= 1
        if tenant_id != self._owner[block_id]:
            guests = self._guests[block_id]
            guests[tenant_id] -= 1
            if guests[tenant_id] == 0:
                del guests[tenant_id]
            if not guests:
                del self._guests[block_id]
        if self._references_of(tenant_id, block_id) == 0:
            self._held_by[tenant_id] -= 1
            if self._held_by[tenant_id] == 0:
                del self._held_by[tenant_id]
        if self._references[block_id] == 0:
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        if block_id in self._copies:
            self._drop_copy(block_id)
        if block_id not in self._copies_from:
            self._put_back(block_id)

    def _put_back(self, block_id: int) -> None:
        given_up = self._cache.rest(block_id) if self._cache.is_published(block_id) else block_id
        if given_up is not None:
            self._give_away(given_up)

    def _give_away(self, block_id: int) -> None:
        self._free.append(block_id)
        if self._clears_freed:
            self._unclean[block_id] = None

    def _drop_copy(self, copy: int) -> None:
        self._drop_source(self._copies.pop(copy))

    def _drop_source(self, source: int) -> None:
        self._copies_from[source] -= 1
        if self._copies_from[source] == 0:
            del self._copies_from[source]
            if self._references[source] == 0:
                self._put_back(source)
