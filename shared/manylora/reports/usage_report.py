"""What `manylora usage report` and `reconcile` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import typer
from manylora_shared.ledger.prices import PRICED, PriceList
from manylora_shared.ledger.row import LOST
from manylora_shared.ledger.usage import moment
from manylora_shared.ledger.usage import month as bounds_of

from manylora.cli.output import EXIT_FAILED, Target, print_json, print_table, say, usage_error
from manylora.client import Client, QuotaStatus, RequestFailed
from manylora.reports.usage_page import Reconciled, TenantMonth, amount, unit_price, unit_prices, usage_page
from manylora.reports.usage_rows import as_csv

_TABLES = ("day", "adapter,version", "class", "key")
_LINES = ("tenant", "day", "adapter", "version", "class", "key")
_SHOWN = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "kv_byte_seconds", "price")


async def report(target: Target, month: str, tenant: str, *, to_csv: Path | None, html: Path | None) -> None:
    since, until = bounds_of(month)
    between = {"tenant": tenant, "since_unix_s": since, "until_unix_s": until}
    async with target.client() as client:
        totals, currency = await client.usage.sums(["tenant"], **between)  # type: ignore[arg-type]
        lines, _ = await client.usage.sums(_LINES, **between)  # type: ignore[arg-type]
        prices = await client.usage.unit_prices(since_unix_s=since, until_unix_s=until)
        months = []
        for total in totals:
            own = {**between, "tenant": total["tenant"]}
            tables = {by: (await client.usage.sums(by.split(","), **own))[0] for by in _TABLES}
            months.append(TenantMonth(total["tenant"], total, tables))
        books = await _books(client, tenant) if html is not None else None
    if to_csv is not None:
        _write(to_csv, as_csv(priced(lines, prices)), "--csv")
    if html is not None:
        _write(html, usage_page(month, currency, months, books, prices), "--html")
    columns = ("tenant", "requests", "prompt", "cached", "completion", "KV GB-h", f"price {currency}".strip())
    rows = [(total["tenant"], *(amount(name, total[name]) for name in _SHOWN)) for total in totals]
    print_table(columns, rows, empty=f"no request ended in {month}")
    if prices.versions:
        typer.echo()
        days = [f"from {each.day}" for each in prices.versions]
        units = [(unit, *told) for unit, told in unit_prices(prices)]
        print_table((f"unit prices of {prices.name}, {prices.currency}", *days), units, empty="")


async def reconcile(target: Target, tenant: str, *, as_json: bool) -> None:
    """Ends with a failure where the books differ."""
    async with target.client() as client:
        books = await _books(client, tenant)
    if as_json:
        print_json({"flows": [{**vars(each), "difference": each.difference} for each in books]})
    else:
        columns = ("tenant", "class", "ledger", "settled by quotas", "difference", "lost with a router")
        cells = [
            (
                each.tenant,
                each.qos_class,
                f"{each.ledger:,}",
                *(("tenant deleted", "-") if each.quotas is None else (f"{each.quotas:,}", f"{each.difference:,}")),
                f"{each.lost:,}",
            )
            for each in books
        ]
        print_table(columns, cells, empty="nothing was settled yet")
    if any(each.difference for each in books):
        say("the ledger and the quotas differ; requests that end while this is read do, for a moment")
        raise typer.Exit(EXIT_FAILED)


async def _books(client: Client, tenant: str) -> list[Reconciled]:
    status = await client.status()
    sums, _ = await client.usage.sums(["tenant", "class", "outcome"], tenant=tenant)
    quotas = status.scheduler.quotas if status.scheduler is not None else ()
    told = [quota for quota in quotas if tenant in ("", quota.tenant_id)]
    return reconciled(sums, told, await _deleted(client, {each["tenant"] for each in sums}))


async def _deleted(client: Client, tenants: Set[str]) -> Set[str]:
    """Of those. A tenant's own key sees its tenant alone, which is there."""
    try:
        known = await client.tenants.list()
    except RequestFailed as e:
        if e.code != "PERMISSION_DENIED":
            raise
        return set()
    return tenants - {each.tenant_id for each in known}


def reconciled(
    sums: Sequence[Mapping[str, Any]], quotas: Sequence[QuotaStatus], deleted: Set[str] = frozenset()
) -> list[Reconciled]:
    """`sums`: by tenant, class and outcome. A deleted tenant's account goes with it, and its rows stay."""
    ledger: dict[tuple[str, str], int] = {}
    lost: dict[tuple[str, str], int] = {}
    for each in sums:
        books = lost if each["outcome"] == LOST else ledger
        flow = each["tenant"], each["class"]
        tokens = each["prompt_tokens"] - each["cached_tokens"] + each["completion_tokens"] + each["unread_tokens"]
        books[flow] = books.get(flow, 0) + tokens
    settled = {(quota.tenant_id, quota.qos_class): quota.settled_tokens for quota in quotas}
    return [
        Reconciled(*flow, ledger.get(flow, 0), settled.get(flow, None if flow[0] in deleted else 0), lost.get(flow, 0))
        for flow in sorted({*ledger, *lost, *settled})
    ]


def priced(lines: Sequence[Mapping[str, Any]], prices: PriceList) -> list[dict[str, Any]]:
    """Each day's with the unit prices of it, where there is a list."""
    if not prices.versions:
        return list(map(dict, lines))
    return [{**line, **_units(prices, moment(line["day"], "day"))} for line in lines]


def _units(prices: PriceList, unix_s: float) -> dict[str, str]:
    found = prices.at(unix_s)
    name = "" if found is None else f"{prices.name}@{found.day}"
    units = {f"unit_{each}": "" if found is None else unit_price(getattr(found, each)) for each in PRICED}
    return {"price_list": name, "currency": prices.currency, **units}


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise usage_error(f"{option}: {e}") from None
