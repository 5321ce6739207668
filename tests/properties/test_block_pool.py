"""BlockPool against a model that knows only sets of holders."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from manylora_shared.ids import TenantId
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.memory.block_pool import BlockPool

_ALL = [TenantId("a"), TenantId("b"), TenantId("c")]
_TENANTS = st.sampled_from(_ALL)
_GROUP, _MEMBERS = CacheScope("a", is_group=True), _ALL[:2]
"""A cache group with a tenant's name."""


def _scope(tenant_id: TenantId, *, in_group: bool) -> CacheScope:
    return _GROUP if in_group and tenant_id in _MEMBERS else CacheScope(tenant_id, is_group=False)


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables of blocks come, share and go; a shadow remembers what a model would find in each block."""

    tables = Bundle("tables")

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 5),
        max_idle=st.integers(1, 12),
        clears_freed=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, max_idle: int, clears_freed: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size, max_idle, clears_freed=clears_freed)
        self.clears_freed = clears_freed
        self.fresh: set[int] = set()
        self.num_blocks = num_blocks
        self.max_idle = max_idle
        self.names: dict[int, tuple[CacheScope, bytes]] = {}
        self.writers: dict[int, TenantId] = {}
        self.tables_held: dict[int, tuple[TenantId, list[int]]] = {}
        self.next_table = 0
        self.content: list[TenantId | None] = [None] * num_blocks
        self.copies: list[tuple[int, int, TenantId]] = []

    def _keep(self, tenant_id: TenantId, blocks: list[int]) -> int:
        self.next_table += 1
        self.tables_held[self.next_table] = (tenant_id, blocks)
        return self.next_table

    @rule(target=tables, tenant_id=_TENANTS, wanted=st.integers(0, 5))
    def allocate(self, tenant_id: TenantId, wanted: int) -> object:
        count = min(wanted, self.pool.num_free)
        held = {b for _, blocks in self.tables_held.values() for b in blocks}
        idle = {each: self.pool.idle_of(each) for each in _ALL}
        own_first = self.pool.held_by(tenant_id) + idle[tenant_id] + count > self.max_idle
        plain = self.pool.num_free - self.pool.num_idle
        taken = self.pool.allocate(tenant_id, count)
        for block_id in taken[plain:]:
            loser = self.writers[block_id]
            if own_first and idle[tenant_id]:
                assert loser == tenant_id
            else:
                assert idle[loser] == max(idle.values()), "one that keeps less lost a block"
            idle[loser] -= 1
        for block_id in taken:
            self.names.pop(block_id, None)
            self.writers[block_id] = tenant_id
        self.fresh.update(taken)
        assert len(set(taken)) == count
        assert not held & set(taken)
        return self._keep(tenant_id, taken)

    @rule(target=tables, table=tables)
    def fork(self, table: int) -> object:
        if table not in self.tables_held:
            return multiple()
        tenant_id, blocks = self.tables_held[table]
        self.pool.share(tenant_id, blocks)
        return self._keep(tenant_id, list(blocks))

    @rule(table=tables, index=st.integers(0, 4), key=st.sampled_from([b"1", b"2", b"3"]), in_group=st.booleans())
    def publish(self, table: int, index: int, key: bytes, in_group: bool) -> None:
        tenant_id, blocks = self.tables_held.get(table, (TenantId("a"), []))
        if index >= len(blocks) or blocks[index] in (*self.names, *self.pool.pending_clears()):
            return
        scope = _scope(tenant_id, in_group=in_group)
        holders = {holder for holder, held in self.tables_held.values() if blocks[index] in held}
        if not scope.is_group and holders != {self.writers[blocks[index]]}:
            return  # it was found in the group's cache
        self.pool.publish(blocks[index], scope, key)
        if self.pool.find_cached(scope, [key]) == [blocks[index]]:
            self.names[blocks[index]] = (scope, key)
        else:
            assert (scope, key) in self.names.values(), "a key that no block has was not given"

    @rule(table=tables, index=st.integers(0, 4))
    def unpublish(self, table: int, index: int) -> None:
        _, blocks = self.tables_held.get(table, (TenantId("a"), []))
        self.pool.unpublish(blocks[index : index + 1])
        for block_id in blocks[index : index + 1]:
            self.names.pop(block_id, None)

    @rule(tenant_id=st.none() | _TENANTS)
    def forget_computed(self, tenant_id: TenantId | None) -> None:
        num_free, before = self.pool.num_free, len(self.pool._cache.published_blocks())
        forgotten = self.pool.forget_computed(tenant_id)
        assert forgotten == before - len(self.pool._cache.published_blocks())
        kept = {block: name for block, name in self.names.items() if tenant_id not in (None, self.writers[block])}
        self.names = kept
        assert self.pool.num_free == num_free
        assert tenant_id is None or self.pool.idle_of(tenant_id) == 0
        assert tenant_id is not None or not self.pool._cache.published_blocks()
        assert self.pool._cache.published_blocks().keys() <= self.names.keys()

    @rule(
        target=tables,
        tenant_id=_TENANTS,
        keys=st.lists(st.sampled_from([b"1", b"2", b"3"]), max_size=3, unique=True),
        in_group=st.booleans(),
    )
    def take_cached(self, tenant_id: TenantId, keys: list[bytes], in_group: bool) -> object:
        scope = _scope(tenant_id, in_group=in_group)
        found = self.pool.find_cached(scope, keys)
        assert [self.names[block_id] for block_id in found] == [(scope, key) for key in keys[: len(found)]]
        free = self.pool.num_free - self.pool.num_idle_among(found)
        held = self.pool.held_by(tenant_id) + self.pool.num_new_among(tenant_id, found)
        self.pool.take_cached(tenant_id, found)
        assert (self.pool.num_free, self.pool.held_by(tenant_id)) == (free, held)
        return self._keep(tenant_id, found)

    @rule(table=consumes(tables))
    def free(self, table: int) -> None:
        self.pool.free(*self.tables_held.pop(table))

    @rule(table=tables, index=st.integers(0, 4))
    def copy_on_write(self, table: int, index: int) -> None:
        tenant_id, blocks = self.tables_held.get(table, (TenantId("a"), []))
        if index >= len(blocks) or not self.pool.is_shared(blocks[index]) or self.pool.num_free == 0:
            return
        source = blocks[index]
        if self.writers[source] != tenant_id:
            return  # nobody writes what another has computed
        if source in self.pool.pending_clears():
            return  # what is shared was computed
        if any(copy == source for _, copy in self.pool.pending_copies()):
            return  # a block is written, and shared again, only after the step that copied it
        blocks[index] = self.pool.copy_on_write(source)
        self.names.pop(blocks[index], None)
        self.writers[blocks[index]] = tenant_id
        self.copies.append((source, blocks[index], tenant_id))

    @rule()
    def step(self) -> None:
        """What a runner does: clear, copy, then each table's holder writes."""
        for block_id in self.pool.pending_clears():
            self.content[block_id] = None
        held = {b: self.writers[b] for _, blocks in self.tables_held.values() for b in blocks}
        for source, copy in self.pool.pending_copies():
            assert copy in held
            assert self.content[copy] in (None, held[copy])
            assert self.content[source] in (None, held[copy]), "a parked source was given away before it was copied"
            self.content[copy] = self.content[source]
        work = self.pool.take_work()
        self.pool.commit(work)
        due = set(self.pool.pending_clears())  # sources that came free with this step: the next one clears them
        assert due <= {source for source, _ in work.copies}
        assert self.clears_freed or not due
        if self.clears_freed:
            copied_into = {copy for _, copy in work.copies}
            for block_id in {*self.pool._free, *(self.fresh & held.keys())} - due - copied_into:
                assert self.content[block_id] is None, "a block keeps what it had when it was freed"
        self.fresh.clear()
        for block_id, tenant_id in held.items():
            assert self.content[block_id] in (None, tenant_id), "another tenant's content was not cleared"
            self.content[block_id] = tenant_id
        for tenant_id, blocks in self.tables_held.values():
            readable = _MEMBERS if tenant_id in _MEMBERS else [tenant_id]
            assert all(self.content[block_id] in readable for block_id in blocks), "who is in no group reads another's"
        self.copies.clear()
        assert not self.pool.pending_copies()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        held: dict[int, int] = {}
        by_tenant: dict[TenantId, set[int]] = {}
        for tenant_id, blocks in self.tables_held.values():
            for block_id in blocks:
                held[block_id] = held.get(block_id, 0) + 1
                by_tenant.setdefault(tenant_id, set()).add(block_id)
        for block_id, count in held.items():
            assert self.pool.is_shared(block_id) == (count > 1)
        for tenant_id in _ALL:
            assert self.pool.idle_of(tenant_id) <= self.max_idle
            assert self.pool.held_by(tenant_id) == len(by_tenant.get(tenant_id, ()))
        assert self.pool.num_held == len(held)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for tenant_id, blocks in self.tables_held.values():
                self.pool.free(tenant_id, blocks)
            self.pool.commit(self.pool.take_work())
            self.pool.check_invariants()
            assert self.pool.num_free == self.num_blocks


TestBlockPool = pytest.mark.long(BlockPoolMachine.TestCase)
TestBlockPool.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)


def test_blocks_of_one_tenant_are_not_cleared_for_it_and_are_for_another() -> None:
    pool = BlockPool(1, 4)
    one, other = TenantId("one"), TenantId("other")
    pool.free(one, pool.allocate(one, 1))
    (block_id,) = pool.allocate(one, 1)
    assert pool.pending_clears() == []
    pool.free(one, [block_id])
    assert pool.allocate(other, 1) == [block_id]
    assert pool.pending_clears() == [block_id]
    pool.commit(pool.take_work())
    assert pool.pending_clears() == []


def test_a_clear_that_was_not_committed_stays_due() -> None:
    pool = BlockPool(1, 4)
    one, other = TenantId("one"), TenantId("other")
    pool.free(one, pool.allocate(one, 1))
    pool.free(other, pool.allocate(other, 1))  # the step that should have cleared it failed
    assert pool.pending_clears() == []
    assert pool.allocate(other, 1) == pool.pending_clears()


def test_a_copys_source_stays_parked_until_the_step_is_done() -> None:
    pool = BlockPool(3, 4)
    tenant = TenantId("one")
    (source,) = pool.allocate(tenant, 1)
    pool.share(tenant, [source])
    copy = pool.copy_on_write(source)
    pool.free(tenant, [source])
    assert pool.num_free == 1
    assert source not in pool.allocate(TenantId("other"), 1)
    assert pool.pending_copies() == [(source, copy)]
    pool.check_invariants()
    pool.commit(pool.take_work())
    assert pool.num_free == 1
    pool.check_invariants()


def test_a_step_in_flight_keeps_its_work_from_the_next_and_gives_it_back_if_it_fails() -> None:
    pool = BlockPool(4, 4)
    other, tenant = TenantId("other"), TenantId("one")
    pool.free(other, pool.allocate(other, 1))
    (crossing,) = pool.allocate(tenant, 1)
    (source,) = pool.allocate(tenant, 1)
    pool.share(tenant, [source])
    copy = pool.copy_on_write(source)
    pool.free(tenant, [source])
    failing = pool.take_work()
    assert (failing.clears, failing.copies) == ([crossing], [(source, copy)])
    pool.check_invariants()
    behind = pool.take_work()
    assert (behind.clears, behind.copies) == ([], [])
    assert source not in pool.allocate(tenant, pool.num_free), "the step in flight copies it"
    pool.reject(failing)
    pool.commit(behind)
    assert pool.pending_clears() == [crossing]
    assert pool.allocate(tenant, 1) == [source]
    pool.check_invariants()


def test_a_block_counts_for_each_tenant_that_holds_it_until_that_one_gives_it_up() -> None:
    pool = BlockPool(2, 4, max_idle_blocks=2)
    one, other, third = TenantId("one"), TenantId("other"), TenantId("third")
    group = CacheScope("g", is_group=True)
    table = pool.allocate(one, 1)
    pool.publish(table[0], group, b"key")
    assert pool.find_cached(CacheScope("g", is_group=False), [b"key"]) == [], "a tenant with the group's name"
    pool.take_cached(other, pool.find_cached(group, [b"key"]))
    assert (pool.held_by(one), pool.held_by(other), pool.num_held, pool.num_free) == (1, 1, 1, 1)
    assert not pool.is_freed_by_holder(table[0])
    assert pool.is_given_up_by_holder(one, table[0])
    pool.free(one, table)
    assert (pool.held_by(one), pool.held_by(other), pool.num_held, pool.num_free) == (0, 1, 1, 1)
    assert pool.find_cached(group, [b"key"]) == table, "it is there as long as anybody holds it"
    assert pool.pending_clears() == []
    pool.check_invariants()
    pool.free(other, table)
    assert (pool.idle_of(one), pool.idle_of(other), pool.num_free) == (1, 0, 2)
    pool.allocate(third, 2)
    assert pool.pending_clears() == table, "what is cleared is what somebody else has written"
    pool.check_invariants()
