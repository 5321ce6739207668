"""What a request may come to need, and what is refused because it never could have it."""

from __future__ import annotations

import pytest
from manylora_shared.errors import InvalidRequest, QuotaExceeded
from manylora_worker.engine.request_bounds import RequestBounds
from manylora_worker.memory.tenant_shares import TenantShare, TenantShares

from tests.worker.pure.rooms import A, request_of


def bounds(
    *, context: int = 100, slots: int = 4, blocks: int = 50, shares: TenantShares | None = None
) -> RequestBounds:
    return RequestBounds(context, slots, blocks, 4, shares or TenantShares(blocks))


@pytest.mark.parametrize(("prompt", "max_tokens", "blocks"), [(4, 1, 1), (4, 2, 2), (4, 5, 2), (4, 6, 3), (90, 50, 25)])
def test_the_last_token_needs_no_kv_and_nothing_passes_the_context(prompt: int, max_tokens: int, blocks: int) -> None:
    assert bounds().longest_blocks(request_of(prompt=prompt, max_tokens=max_tokens)) == blocks


def test_output_ends_with_the_context() -> None:
    assert bounds().max_output_tokens(request_of(prompt=90, max_tokens=50)) == 10
    assert bounds().max_output_tokens(request_of(prompt=10, max_tokens=50)) == 50


def test_what_fits_exactly_is_accepted_and_one_more_is_not() -> None:
    bounds(blocks=5).check(request_of(prompt=10, max_tokens=11))
    with pytest.raises(InvalidRequest, match="up to 22 tokens, the worker can hold 20"):
        bounds(blocks=5).check(request_of(prompt=10, max_tokens=12))
    bounds().check(request_of(prompt=99))
    with pytest.raises(InvalidRequest, match="no room in the model's context"):
        bounds().check(request_of(prompt=100))
    bounds().check(request_of(n=4))
    with pytest.raises(InvalidRequest, match="5 choices"):
        bounds().check(request_of(n=5))


def test_what_was_emitted_before_counts() -> None:
    bounds().check(request_of(prompt=90, emitted=(1,) * 7))
    with pytest.raises(InvalidRequest, match="emitted tokens"):
        bounds().check(request_of(max_tokens=8, emitted=(1,) * 8))
    with pytest.raises(InvalidRequest, match="no room"):
        bounds().check(request_of(prompt=93, max_tokens=8, emitted=(1,) * 7))


def test_a_tenants_cap_refuses_what_the_model_could_run() -> None:
    shares = TenantShares(50)
    shares.set(A, TenantShare(hard_blocks=3))
    asked = request_of(prompt=8, max_tokens=6)
    bounds(shares=shares).check_model(asked)
    with pytest.raises(QuotaExceeded):
        bounds(shares=shares).check(asked)


def test_only_a_request_with_an_adapter_may_pass_the_models_context() -> None:
    """Which one stretches it, and how far, its router knows."""
    stretched = RequestBounds(100, 4, 50, 4, TenantShares(50), longest_context_tokens=150)
    with pytest.raises(InvalidRequest, match="no room in the model's context of 100"):
        stretched.check(request_of(prompt=100))
    stretched.check(request_of(prompt=149, adapter="a"))
    assert stretched.max_output_tokens(request_of(prompt=140, max_tokens=50, adapter="a")) == 10
    with pytest.raises(InvalidRequest, match="no room in the model's context of 150"):
        stretched.check(request_of(prompt=150, adapter="a"))
