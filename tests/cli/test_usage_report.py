"""`usage report` and `usage reconcile`."""

from __future__ import annotations

import csv
from pathlib import Path

from manylora.client import QuotaStatus
from manylora.reports.usage_report import reconciled

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_a_months_report(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    lines, page = tmp_path / "bill.csv", tmp_path / "bill.html"
    out = await manylora("usage", "report", "--month", "2026-11", "--csv", str(lines), "--html", str(page))
    assert (out.exit_code, "1,234" in out.stdout, "price EUR" in out.stdout) == (0, True, True)
    asked = router.usage_asked[0]
    assert (list(asked.by), asked.since_unix_s, asked.until_unix_s) == (["tenant"], 1_793_491_200.0, 1_796_083_200.0)
    (row,) = csv.DictReader(lines.read_text().splitlines())
    assert (row["tenant"], row["day"], row["prompt_tokens"]) == ("acme", "2026-11-25", "1234")
    assert (row["price_list"], row["currency"]) == ("public@2026-11-20", "EUR")
    assert (row["unit_million_prompt_tokens"], row["unit_gb_hour_kv"], row["unit_adapter_load"]) == ("0.2", "2", "0")
    assert "unit prices of public, EUR" in out.stdout
    assert "<h1>acme</h1>" in page.read_text()
    assert "Reconciled with the quotas" in page.read_text()
    out = await manylora("usage", "report", "--month", "November")
    assert (out.exit_code, "--month: 'November' is no month" in out.stderr) == (2, True)


async def test_a_report_without_a_price_list(manylora: Manylora, router: FakeRouter, tmp_path: Path) -> None:
    router.has_no_prices = True
    lines = tmp_path / "bill.csv"
    out = await manylora("usage", "report", "--month", "2026-11", "--csv", str(lines))
    assert "unit price" not in out.stdout
    assert "unit_" not in lines.read_text()


async def test_books_that_differ_are_told(manylora: Manylora) -> None:
    out = await manylora("usage", "reconcile", "--json")
    assert out.exit_code == 1  # the fake's books are two stories
    assert {"tenant", "qos_class", "ledger", "quotas", "difference", "lost"} <= out.json["flows"][0].keys()
    assert "settled by quotas" in (await manylora("usage", "reconcile")).stdout


async def test_a_deleted_tenants_rows_are_no_difference(manylora: Manylora, router: FakeRouter) -> None:
    """Its quotas' account went with it, its rows stay: that failed for good."""
    router.tenants.clear()
    out = await manylora("usage", "reconcile", "--json")
    deleted = [flow for flow in out.json["flows"] if flow["quotas"] is None]
    assert [(flow["tenant"], flow["ledger"], flow["difference"]) for flow in deleted] == [("acme", 1290, 0)]
    assert "tenant deleted" in (await manylora("usage", "reconcile")).stdout


def test_lost_rows_are_of_no_quota() -> None:
    amounts = {"cached_tokens": 1, "completion_tokens": 5, "unread_tokens": 2}
    flow = {"tenant": "acme", "class": "batch"}
    sums = [
        {**flow, "outcome": "completed", "prompt_tokens": 4, **amounts},
        {**flow, "outcome": "cancelled", "prompt_tokens": 3, **amounts},
        {**flow, "outcome": "lost", "prompt_tokens": 9, **amounts},
    ]
    quotas = [QuotaStatus("acme", "batch", 0, 0, 19, None), QuotaStatus("other", "batch", 0, 0, 7, None)]
    acme, other = reconciled(sums, quotas)
    assert (acme.ledger, acme.quotas, acme.difference, acme.lost) == (19, 19, 0, 15)
    assert (other.ledger, other.difference) == (0, -7)
