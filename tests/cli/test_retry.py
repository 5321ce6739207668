"""Pauses between attempts, and the budget of repetitions."""

from __future__ import annotations

import random

import pytest
from manylora.client import (
    Client,
    RequestFailed,
    RetryBudget,
    RetryPolicy,
)
from manylora_shared.errors import Code, RpcError

from tests.cli.fake_server import FakeRouter


def test_backoff_grows_within_its_bounds() -> None:
    policy, rng = RetryPolicy(max_attempts=5, base_delay_s=1.0, max_delay_s=3.0), random.Random(1)
    unavailable = RpcError(Code.UNAVAILABLE, "")
    for attempt, (low, high) in enumerate([(0.5, 1), (1, 2), (1.5, 3), (1.5, 3)], 1):
        delay_s = policy.delay_s(unavailable, attempt, rng)
        assert delay_s is not None
        assert low <= delay_s <= high
    assert policy.delay_s(unavailable, 5, rng) is None
    assert policy.delay_s(unavailable, 1, rng, repeatable=False) is None
    hinted = policy.delay_s(RpcError(Code.RESOURCE_EXHAUSTED, "", retry_after_s=2.0), 1, rng, repeatable=False)
    assert hinted is not None
    assert 2.0 <= hinted <= 2.5
    assert policy.delay_s(RpcError(Code.RESOURCE_EXHAUSTED, "", retry_after_s=4.0), 1, rng) is None
    for hint_s, low, high in ((0.1, 0.5, 1.0), (2.0, 2.0, 2.5), (60.0, 3.0, 3.0)):
        waited = policy.delay_s(RpcError(Code.UNAVAILABLE, "", retry_after_s=hint_s), 1, rng)
        assert waited is not None
        assert low <= waited <= high


def test_the_retry_budget_bounds_what_is_added() -> None:
    budget = RetryBudget(RetryPolicy(budget_ratio=0.1, budget_attempts=3.0))
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
    added = 0
    for _ in range(1000):
        budget.on_call()
        while budget.spend():
            added += 1
    assert 99 <= added <= 100
    for _ in range(1000):
        budget.on_call()
    assert [budget.spend() for _ in range(4)] == [True, True, True, False], "what is saved up is bounded too"


async def test_a_client_stops_repeating_when_its_budget_is_spent(address: str, router: FakeRouter) -> None:
    router.failures_left = 10**9
    retry = RetryPolicy(max_attempts=3, base_delay_s=0.001, max_delay_s=1.0, budget_ratio=0.0, budget_attempts=4.0)
    async with Client(address, tenant="acme", retry=retry) as client:
        for _ in range(5):
            with pytest.raises(RequestFailed, match="UNAVAILABLE"):
                await client.complete("unavailable")
    assert len(router.requests) == 5 + 4
