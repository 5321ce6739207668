"""What is used most of late, and that no tenant fills the list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manylora_scheduler.gates.recent_use import (
    HALF_LIFE_S,
    MAX_TENANTS,
    OF_POOL,
    OF_TENANT,
    TOP,
    TOP_OF_TENANT,
    AdapterUse,
    UseShares,
)
from manylora_shared.composition import Part, key_of
from manylora_shared.coordination.pool import MAX_POOLS
from manylora_shared.ids import AdapterUid, TenantId

A, B = TenantId("a"), TenantId("b")


def test_late_uses_count_more() -> None:
    use = AdapterUse()
    for _ in range(4):
        use.used(A, AdapterUid("old"), 0.0)
    for _ in range(3):
        use.used(A, AdapterUid("new"), HALF_LIFE_S)
    assert use.top(HALF_LIFE_S) == [(A, "new"), (A, "old")]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 80), st.floats(0, 100)), max_size=300))
def test_no_tenant_fills_the_list_and_the_best_come_first(uses: list[tuple[int, int, float]]) -> None:
    use, now = AdapterUse(), 0.0
    for tenant, adapter, wait_s in uses:
        now += wait_s
        use.used(TenantId(f"t{tenant}"), AdapterUid(f"u{tenant}-{adapter}"), now)
    top = use.top(now)
    assert len(top) == len(set(top)) <= TOP
    tenants = [tenant for tenant, _ in top]
    assert all(tenants.count(tenant) <= TOP_OF_TENANT for tenant in tenants)
    assert all(len(mine) <= OF_TENANT for mine in use._scores.values())
    if uses:
        assert top


def test_shares_are_of_a_pools_own_requests_of_late() -> None:
    shares = UseShares()
    for _ in range(60):
        shares.asked("p", A, AdapterUid("u"), 0.0)
    assert shares.shares(0.0) == [], "too few to say anything"
    for uid in (None, key_of([Part(AdapterUid("u")), Part(AdapterUid("v"))]), AdapterUid("v")):
        for _ in range(20):
            shares.asked("p", A, uid, 0.0)
            shares.asked("q", B, uid, 0.0)
    found = shares.shares(0.0)
    assert [(use.pool, use.adapter_uid, round(use.share, 2)) for use in found] == [("p", "u", 0.5), ("p", "v", 0.17)]
    for number in range(700):
        shares.asked("p", A, AdapterUid(f"rare{number}"), HALF_LIFE_S)
    assert len(shares._scores["p"]) <= 2 * OF_POOL
    assert shares.shares(HALF_LIFE_S)[0].share < 0.05


def test_what_is_known_is_bounded() -> None:
    use = AdapterUse()
    for number in range(MAX_TENANTS + 10):
        use.used(TenantId(f"t{number}"), AdapterUid("u"), 0.0)
    assert len(use._scores) == MAX_TENANTS
    assert TenantId("t0") not in use._scores


def test_a_pool_that_was_asked_little_of_late_makes_room_for_a_new_one() -> None:
    shares, one = UseShares(), key_of([Part(AdapterUid("u"), 1.0)])
    for number in range(MAX_POOLS):
        shares.asked(f"p{number}", TenantId("t"), one, 0.0)
    shares.asked("p0", TenantId("t"), one, 0.0)
    for _ in range(200):
        shares.asked("new", TenantId("t"), one, 1.0)
    assert [use.pool for use in shares.shares(1.0)] == ["new"]
    assert len(shares._totals) == len(shares._scores) == MAX_POOLS
    assert "p0" in shares._totals
