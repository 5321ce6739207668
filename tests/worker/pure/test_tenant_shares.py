"""What each tenant may have of the worker: weights, caps, reserves, and its cache."""

from __future__ import annotations

import pytest
from manylora_shared.errors import QuotaExceeded
from manylora_shared.ids import QosClass, TenantId
from manylora_shared.tenancy.policy import DEFAULT_WEIGHTS, TenantPolicy, TenantQuotas
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.memory.tenant_shares import TenantShare, TenantShares

from tests.worker.pure.rooms import A, B

MIB = 1 << 20


def test_bounds_are_rounded_down_to_whole_blocks_and_the_reserve_up() -> None:
    quotas = TenantQuotas(kv_hbm_mb=10, kv_hbm_mb_hard=11, kv_hbm_mb_reserve=10)
    share = TenantShare.of(TenantPolicy(A, quotas=quotas), block_bytes=3 * MIB)
    assert (share.soft_blocks, share.hard_blocks, share.reserve_blocks) == (3, 3, 4)
    plain = TenantShare.of(TenantPolicy(A), block_bytes=MIB)
    assert (plain.soft_blocks, plain.hard_blocks, plain.reserve_blocks) == (None, None, 0)


def test_whoever_has_no_policy_has_default_weights_and_the_whole_pool() -> None:
    shares = TenantShares(100)
    assert shares.weight((A, QosClass.INTERACTIVE)) == DEFAULT_WEIGHTS[QosClass.INTERACTIVE]
    assert shares.tenant_weight(A) == sum(DEFAULT_WEIGHTS.values())
    assert (shares.soft(A), shares.hard(A), shares.reserve(A)) == (100, 100, 0)
    assert (shares.has_caps, shares.has_soft) == (False, False)
    shares.set(A, TenantShare(soft_blocks=5))
    assert (shares.has_caps, shares.has_soft) == (False, True)
    shares.set(A, TenantShare(hard_blocks=5))
    assert (shares.has_caps, shares.has_soft) == (True, False)


def test_reserves_are_scaled_down_to_half_of_the_pool_together_and_grow_back() -> None:
    shares = TenantShares(100)
    shares.set(A, TenantShare(reserve_blocks=30))
    assert shares.reserve(A) == 30
    shares.set(B, TenantShare(reserve_blocks=70))
    assert (shares.reserve(A), shares.reserve(B)) == (15, 35)
    shares.set(B, None)
    assert (shares.reserve(A), shares.reserve(B)) == (30, 0)


def test_an_accepted_request_raises_a_cap_that_fell_below_it() -> None:
    shares = TenantShares(100)
    shares.set(A, TenantShare(hard_blocks=10))
    shares.accept(A, 25)
    assert shares.hard(A) == 25
    shares.accept(A, 10)
    assert shares.hard(A) == 10
    shares.accept(B, 25)
    assert shares.hard(B) == 100, "without a cap there is nothing to raise"


def test_a_refusal_says_whose_bound_it_is() -> None:
    shares = TenantShares(100)
    shares.set(A, TenantShare(hard_blocks=20, hard_mb=5))
    shares.set(B, TenantShare(reserve_blocks=40, reserve_mb=9))
    shares.check(A, 20, 16)
    with pytest.raises(QuotaExceeded, match="hard cap is 320") as error:
        shares.check(A, 21, 16)
    (breach,) = error.value.breaches
    assert (breach.quota, breach.limit, breach.tenant_id) == ("quotas.kv_hbm_mb_hard", 5, A)
    other = TenantId("other")
    shares.check(other, 60, 16)
    with pytest.raises(QuotaExceeded, match="other tenants' reserves leave 960") as error:
        shares.check(other, 61, 16)
    assert error.value.breaches[0].quota == "quotas.kv_hbm_mb_reserve"
    shares.check(B, 100, 16)  # its own reserve is nothing that keeps it out


def test_a_cache_is_the_tenants_own_unless_its_policy_names_a_group() -> None:
    shares = TenantShares(100)
    shares.set(A, TenantShare(cache_group="g"))
    assert shares.cache_scope(A) == CacheScope("g", is_group=True)
    assert shares.cache_scope(TenantId("g")) == CacheScope("g", is_group=False), "another than the group's"
