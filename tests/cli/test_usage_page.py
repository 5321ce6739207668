from __future__ import annotations

from typing import Any

from manylora.reports.usage_page import Reconciled, TenantMonth, amount, usage_page
from manylora_shared.ledger.prices import PriceList, Prices


def _sum(**words: Any) -> dict[str, Any]:
    amounts = {
        "requests": 3,
        "prompt_tokens": 1_234_567,
        "cached_tokens": 1,
        "completion_tokens": 2,
        "kv_byte_seconds": 7_200_000_000_000,
        "adapter_byte_seconds": 0,
        "adapter_loads": 1,
        "price": 12.5,
    }
    return {**words, **amounts}


def test_a_tenants_month() -> None:
    tables = {"day": [_sum(day="2026-11-25")], "adapter,version": [_sum(adapter="", version="")]}
    months = [TenantMonth("acme", _sum(tenant="acme"), tables), TenantMonth("<b>", _sum(tenant="<b>"))]
    books = [Reconciled("acme", "batch", 10, 10, 0), Reconciled("acme", "standard", 12, 10, 7)]
    gone = usage_page("2026-11", "EUR", months[:1], [Reconciled("acme", "batch", 10, None, 0)])
    assert "no account of the quotas any more: the tenant is deleted</li>" in gone
    page = usage_page("2026-11", "EUR", months, books)
    assert page.count("<section>") == 2
    assert "12.5000 EUR" in page
    assert "<td>2026-11-25</td><td class='n'>3</td><td class='n'>1,234,567</td>" in page
    assert "<h2>By adapter and version</h2>" in page
    assert "<td>the base model</td><td>-</td>" in page
    assert "10 tokens in the ledger, 10 settled by the quotas, equal" in page
    assert "<b class='bad'>+2</b>; 7 more of requests whose router died" in page
    assert "<h1>&lt;b&gt;</h1>" in page
    assert "Nobody used anything" in usage_page("2026-11", "", [], None)


def test_unit_prices_of_a_months_versions() -> None:
    versions = (
        Prices(1.0, "2026-10-01", million_prompt_tokens=200_000_000),
        Prices(2.0, "2026-11-20", million_prompt_tokens=1_500_000_000, adapter_load=100_000),
    )
    page = usage_page("2026-11", "EUR", [TenantMonth("acme", _sum())], None, PriceList("<public>", "EUR", versions))
    assert "<h2>Unit prices: &lt;public&gt;, EUR</h2>" in page
    assert "<th class='n'>from 2026-10-01</th><th class='n'>from 2026-11-20</th>" in page
    cells = "</td><td class='n'>0.2</td><td class='n'>1.5</td></tr>"
    assert f"million prompt tokens that were not cached{cells}" in page
    assert "load of an adapter</td><td class='n'>0</td><td class='n'>0.0001</td></tr>" in page
    assert "Unit prices" not in usage_page("2026-11", "EUR", [TenantMonth("acme", _sum())], None)


def test_amounts_are_as_people_read_them() -> None:
    assert (amount("kv_byte_seconds", 3.6e12), amount("price", 0.00012), amount("requests", 1234)) == (
        "1.0000",
        "0.0001",
        "1,234",
    )
