"""Monthly caps: who is refused, until when, and what happens while the ledger cannot be read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from manylora.v1 import admin_pb2
from manylora_router.ledger.budgets import LOOK_S, Budgets
from manylora_shared.errors import Code, QuotaExceeded, RpcError, ServiceUnavailable
from manylora_shared.ids import TenantId
from manylora_shared.ledger.compute import Served
from manylora_shared.ledger.prices import parse_prices
from manylora_shared.ledger.row import NANOS, UsageRow
from manylora_shared.ledger.usage import Query, Sum
from manylora_shared.tenancy.policy import parse_policy
from router_fakes import ADMIN, RouterCluster, simulate, text_request, until

from tests.memory_ledger import MemoryLedger, RouterLedger

PRICES = parse_prices("name: p\ncurrency: EUR\nversions: [{from: 2026-01-01, million_prompt_tokens: 1}]\n")
ACME = TenantId("acme")
CAPPED = parse_policy("tenant_id: acme\nquotas: {monthly_spend: 5}\n")
LATE = datetime(2026, 11, 30, 23, 0, tzinfo=UTC).timestamp()


class Down(RouterLedger):
    is_down = False

    async def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        if self.is_down:
            raise ServiceUnavailable("the sink is gone")
        return await super().sums(query, by)


def spent(number: int, currency: float, at: float = LATE, tenant: str = "acme") -> UsageRow:
    return UsageRow(request_id=f"r{number}", tenant=tenant, ended_unix_s=at, price_nanos=round(currency * NANOS))


def test_a_tenant_is_refused_until_its_month_ends() -> None:
    now = LATE
    whole = MemoryLedger(lambda: now)
    whole.prices = PRICES
    ledger = Down(whole, "router-0", lambda _: Served())
    budgets = Budgets(ledger, lambda: [ACME])
    whole.rows = {
        each.request_id: each for each in (spent(0, 4.99), spent(1, 9, at=LATE - 40 * 86400), spent(2, 9, tenant="b"))
    }
    asyncio.run(budgets.look())
    budgets.check(CAPPED)
    whole.rows["r3"] = spent(3, 0.01)
    budgets.check(CAPPED)  # until it looks again
    asyncio.run(budgets.look())
    with pytest.raises(QuotaExceeded, match=r"quotas.monthly_spend: 5.00 of 5 EUR are spent") as error:
        budgets.check(CAPPED)
    assert (error.value.retry_after_s, error.value.breaches[0].quota) == (3600.0, "quotas.monthly_spend")
    budgets.check(replace(CAPPED, quotas=replace(CAPPED.quotas, monthly_spend=6)))

    ledger.is_down = True
    asyncio.run(budgets.look())
    with pytest.raises(QuotaExceeded):
        budgets.check(CAPPED)
    now = LATE + 3600.0
    budgets.check(CAPPED)  # a new month
    ledger.is_down = False
    asyncio.run(budgets.look())
    budgets.check(CAPPED)


def test_a_row_that_comes_late_counts_within_ten_minutes() -> None:
    now = LATE - 3600.0
    whole = MemoryLedger(lambda: now)
    whole.prices = PRICES
    budgets = Budgets(RouterLedger(whole, "router-0", lambda _: Served()), lambda: [ACME])
    asyncio.run(budgets.look())
    whole.rows = {"late": spent(0, 9, at=now - 500.0)}
    asyncio.run(budgets.look())
    budgets.check(CAPPED)
    now += 600.0
    asyncio.run(budgets.look())
    with pytest.raises(QuotaExceeded):
        budgets.check(CAPPED)


def test_without_a_ledger_nothing_is_asked() -> None:
    budgets = Budgets(None, lambda: [ACME])
    asyncio.run(budgets.look())
    budgets.check(CAPPED)


def test_a_spent_cap_refuses_requests_of_its_tenant_alone() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "quotas: {monthly_spend: 5}\n")
        await until(lambda: cluster.app.directory.capped() == [ACME])
        cluster.ledger.prices = PRICES
        assert (await cluster.ask(text_request("abcd"), x_tenant_id="acme")).error is None
        cluster.ledger.rows["r1"] = spent(1, 5.0, at=cluster.ledger.now_unix_s())
        await asyncio.sleep(LOOK_S + 1)
        answer = await cluster.ask(text_request("abcd"), x_tenant_id="acme")
        assert answer.error is not None
        assert answer.error.code is Code.RESOURCE_EXHAUSTED
        assert "5.00 of 5 EUR" in answer.error.message
        assert (await cluster.ask(text_request("abcd"), x_tenant_id="other")).error is None
        cluster.ledger.rows.pop("r1")

    simulate(test)


def test_a_cap_that_cannot_act_is_refused() -> None:
    async def test(cluster: RouterCluster) -> None:
        request = admin_pb2.ApplyTenantRequest(policy_yaml="tenant_id: acme\nquotas:\n  monthly_spend: 5\n")
        with pytest.raises(RpcError, match=r"line 3: cannot act: .* no price list"):
            await cluster.client.call(ADMIN["ApplyTenant"], request)
        cluster.ledger.prices = PRICES
        await cluster.client.call(ADMIN["ApplyTenant"], request)

    simulate(test)


async def test_a_router_that_cannot_hold_caps_says_so_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    whole, capped = MemoryLedger(lambda: LATE), [ACME]
    budgets = Budgets(RouterLedger(whole, "router-0", lambda _: Served()), lambda: capped)
    nothing = Budgets(None, lambda: capped)
    assert (budgets.without_effect, nothing.without_effect) == (1, 1)
    with caplog.at_level(logging.WARNING):
        for now in (0.0, 10.0, 599.0, 600.0):
            budgets._warn(now)
        nothing._warn(0.0)
    assert [record.getMessage().partition("no ")[2] for record in caplog.records] == [
        "effect: this router has no price list (--prices)",
        "effect: this router has no price list (--prices)",
        "effect: this router has no usage ledger (--ledger)",
    ]
    capped.clear()
    assert budgets.without_effect == 0
    capped.append(ACME)
    whole.prices = PRICES
    assert budgets.without_effect == 0


def test_the_status_names_routers_that_cannot_hold_caps() -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "quotas: {monthly_spend: 5}\n")
        await until(lambda: cluster.app.directory.capped() == [ACME])
        (router,) = (await cluster.client.call(ADMIN["GetStatus"], admin_pb2.GetStatusRequest())).routers
        assert (router.answered, router.caps_without_effect) == (True, 1)
        cluster.ledger.prices = PRICES
        await asyncio.sleep(1)
        (router,) = (await cluster.client.call(ADMIN["GetStatus"], admin_pb2.GetStatusRequest())).routers
        assert router.caps_without_effect == 0

    simulate(test)
