"""A tenant's month as a page: one HTML file that needs nothing else and prints well. Every text in it is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from html import escape
from typing import Any

from manylora_shared.ledger.prices import NO_PRICES, PriceList
from manylora_shared.ledger.row import NANOS

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .25rem .6rem;
border-bottom: 1px solid #d8dde3 } th { font-weight: 600 } td.n, th.n { text-align: right;
font-variant-numeric: tabular-nums } tr.total td { font-weight: 600; border-top: 2px solid #1b1f24 }
.sum { font-size: 1.8rem; font-weight: 600 } small { color: #59636e } section { break-after: page }
section:last-child { break-after: auto } .bad { color: #a40e26 }
@media print { body { margin: 0; max-width: none } h2 { break-after: avoid } tr { break-inside: avoid } }
"""
_GB_HOUR = 3.6e12
_UNITS = {
    "million_prompt_tokens": "million prompt tokens that were not cached",
    "million_cached_tokens": "million cached tokens",
    "million_completion_tokens": "million completion tokens",
    "gb_hour_kv": "GB-hour of KV",
    "gb_hour_adapter": "GB-hour of adapters",
    "adapter_load": "load of an adapter",
}
_AMOUNTS = (
    ("requests", "requests"),
    ("prompt", "prompt_tokens"),
    ("cached", "cached_tokens"),
    ("completion", "completion_tokens"),
    ("KV GB-h", "kv_byte_seconds"),
    ("adapter GB-h", "adapter_byte_seconds"),
    ("loads", "adapter_loads"),
    ("price", "price"),
)


@dataclass(frozen=True)
class TenantMonth:
    """Sums as `manylora usage --by` gives them."""

    tenant: str
    total: Mapping[str, Any]
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # by what they are summed by


@dataclass(frozen=True)
class Reconciled:
    """Of one tenant and class, since the cluster's books began."""

    tenant: str
    qos_class: str
    ledger: int
    quotas: int | None  # None: the tenant is deleted, and its account with it
    lost: int  # in the ledger, of requests whose router died: no quota settled them

    @property
    def difference(self) -> int:
        return 0 if self.quotas is None else self.ledger - self.quotas


def usage_page(
    month: str,
    currency: str,
    months: Sequence[TenantMonth],
    books: Sequence[Reconciled] | None,
    prices: PriceList = NO_PRICES,
) -> str:
    """books: None: the caller's key does not see them. prices: the versions of that month."""
    sections = [_section(month, currency, each, books, prices) for each in months]
    body = "\n".join(sections) or f"<h1>{_text(month)}</h1><p>Nobody used anything.</p>"
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>Usage {_text(month)}</title>"
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def amount(name: str, value: float) -> str:
    """As people read it."""
    if name.endswith("_byte_seconds"):
        return f"{value / _GB_HOUR:,.4f}"
    return f"{value:,.4f}" if name == "price" else f"{value:,}"


def unit_price(nanos: int) -> str:
    return f"{Decimal(nanos) / NANOS:f}"


def unit_prices(prices: PriceList) -> list[tuple[str, list[str]]]:
    """By unit: its price in each version."""
    return [
        (unit, [unit_price(getattr(version, name)) for version in prices.versions]) for name, unit in _UNITS.items()
    ]


def _prices(prices: PriceList) -> str:
    head = "".join(f"<th class='n'>from {_text(each.day)}</th>" for each in prices.versions)
    lines = [
        "".join([f"<tr><td>{_text(unit)}</td>", *(f"<td class='n'>{each}</td>" for each in told), "</tr>"])
        for unit, told in unit_prices(prices)
    ]
    title = f"<h2>Unit prices: {_text(prices.name)}, {_text(prices.currency)}</h2>"
    return f"{title}<table><tr><th>unit</th>{head}</tr>{''.join(lines)}</table>"


def _section(
    month: str, currency: str, told: TenantMonth, books: Sequence[Reconciled] | None, prices: PriceList
) -> str:
    parts = [
        f"<section><h1>{_text(told.tenant)}</h1>",
        f"<small>usage in {_text(month)}, days in UTC</small>",
        f"<p class='sum'>{_text(amount('price', told.total['price']))} {_text(currency)}</p>",
    ]
    for by, rows in told.tables.items():
        parts += [f"<h2>By {_text(by.replace(',', ' and '))}</h2>", _table(by.split(","), rows, told.total)]
    if prices.versions:
        parts.append(_prices(prices))
    own = [each for each in books or () if each.tenant == told.tenant]
    if own:
        parts += ["<h2>Reconciled with the quotas, of all time</h2>", _books(own)]
    return "\n".join([*parts, "</section>"])


def _table(by: Sequence[str], rows: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in by)
    head += "".join(f"<th class='n'>{_text(name)}</th>" for name, _ in _AMOUNTS)
    lines = ["".join(f"<td>{_text(_word(name, row[name]))}</td>" for name in by) + _cells(row) for row in rows]
    end = f"<tr class='total'><td colspan='{len(by)}'>total</td>{_cells(total)}</tr>"
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + end + "</table>"


def _word(name: str, value: object) -> str:
    return str(value) or ("the base model" if name == "adapter" else "-")


def _cells(row: Mapping[str, Any]) -> str:
    return "".join(f"<td class='n'>{amount(name, row[name])}</td>" for _, name in _AMOUNTS)


def _books(own: Sequence[Reconciled]) -> str:
    lines = [
        f"<li>{_text(each.qos_class)}: {each.ledger:,} tokens in the ledger, {_settled(each)}"
        + (f"; {each.lost:,} more of requests whose router died" if each.lost else "")
        + "</li>"
        for each in own
    ]
    return f"<ul>{''.join(lines)}</ul>"


def _settled(each: Reconciled) -> str:
    if each.quotas is None:
        return "and no account of the quotas any more: the tenant is deleted"
    end = f", <b class='bad'>{each.difference:+,}</b>" if each.difference else ", equal"
    return f"{each.quotas:,} settled by the quotas{end}"


def _text(text: str) -> str:
    return escape(text, quote=True)
