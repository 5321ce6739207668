"""Price lists: a YAML file of versions, each from a moment on, and what they make of a row.

    name: public
    currency: EUR
    versions:
    - from: 2026-11-01
      million_prompt_tokens: 0.20
      million_cached_tokens: 0.05
      million_completion_tokens: 0.60
      gb_hour_kv: 0.01
      gb_hour_adapter: 0.02
      adapter_load: 0.0001

What is not given costs nothing. A request costs by the version of its end, in whole billionths of the currency, so
that sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import yaml

from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.row import NANOS, UsageRow

MAX_BYTES = 1 << 20
MAX_PRICE = Decimal(1_000_000)
_GB_HOUR = 10**9 * 3600


@dataclass(frozen=True)
class Prices:
    """Of one version, in billionths of the currency's unit."""

    from_unix_s: float
    day: str
    million_prompt_tokens: int = 0  # that were not cached
    million_cached_tokens: int = 0
    million_completion_tokens: int = 0
    gb_hour_kv: int = 0
    gb_hour_adapter: int = 0
    adapter_load: int = 0

    def of(self, row: UsageRow) -> int:
        """Rounded down, each part by itself."""
        prompt = (row.prompt_tokens - row.cached_tokens) * self.million_prompt_tokens // 10**6
        cached = row.cached_tokens * self.million_cached_tokens // 10**6
        completion = row.completion_tokens * self.million_completion_tokens // 10**6
        kv = row.kv_byte_seconds * self.gb_hour_kv // _GB_HOUR
        adapter = row.adapter_byte_seconds * self.gb_hour_adapter // _GB_HOUR
        return prompt + cached + completion + kv + adapter + row.adapter_loads * self.adapter_load


PRICED = tuple(field.name for field in fields(Prices) if field.name.count("_") and field.name != "from_unix_s")


@dataclass(frozen=True)
class PriceList:
    name: str
    currency: str
    versions: tuple[Prices, ...]  # by their moments

    def at(self, unix_s: float) -> Prices | None:
        """None: before the first."""
        return next((each for each in reversed(self.versions) if each.from_unix_s <= unix_s), None)

    def between(self, since_unix_s: float, until_unix_s: float | None) -> tuple[Prices, ...]:
        """Those in force at some time of it."""
        ends = [*(each.from_unix_s for each in self.versions[1:]), math.inf]
        until = math.inf if until_unix_s is None else until_unix_s
        return tuple(
            each
            for each, end in zip(self.versions, ends, strict=False)
            if each.from_unix_s < until and end > since_unix_s
        )

    def priced(self, row: UsageRow) -> UsageRow:
        prices = self.at(row.ended_unix_s)
        if prices is None:
            return row
        return row._replace(price_list=f"{self.name}@{prices.day}", price_nanos=prices.of(row))


NO_PRICES = PriceList("", "", ())


def parse_prices(text: str) -> PriceList:
    """Raises InvalidRequest, which says where."""
    if len(text.encode()) > MAX_BYTES:
        raise InvalidRequest.of("prices", f"has more than {MAX_BYTES} bytes")
    try:
        document = yaml.load(text, Loader=_Plain)
    except yaml.YAMLError as e:
        raise InvalidRequest.of("prices", f"is not YAML: {' '.join(str(e).split())}") from e
    given = _mapping(document, "prices", ("name", "currency", "versions"))
    versions = given.get("versions")
    if not isinstance(versions, list) or not versions:
        raise InvalidRequest.of("versions", "must be a list with an entry at least")
    found = tuple(_version(each, f"versions[{i}]") for i, each in enumerate(versions))
    for i, (one, next_one) in enumerate(pairwise(found), 1):
        if one.from_unix_s >= next_one.from_unix_s:
            raise InvalidRequest.of(f"versions[{i}].from", "must be later than the one's before")
    return PriceList(_text(given, "name"), _text(given, "currency"), found)


class _Plain(yaml.SafeLoader):
    """Scalars stay as they are written: a price is no binary fraction."""


_Plain.yaml_implicit_resolvers = {}


def _mapping(value: Any, where: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest.of(where, f"must be a mapping of {', '.join(names)}")
    for name in value:
        if name not in names:
            raise InvalidRequest.of(f"{where}.{str(name)[:40]}", f"is none of {', '.join(names)}")
    return value


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 64:
        raise InvalidRequest.of(name, "must be 1 to 64 characters")
    return value


def _version(value: Any, where: str) -> Prices:
    given = _mapping(value, where, ("from", *PRICED))
    return Prices(
        _moment(given.get("from"), f"{where}.from"),
        str(given.get("from")),
        **{name: _nanos(given[name], f"{where}.{name}") for name in PRICED if name in given},
    )


def _moment(value: Any, where: str) -> float:
    try:
        day = date.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidRequest.of(where, "must be a day such as 2026-11-01 (it begins in UTC)") from None
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _nanos(value: Any, where: str) -> int:
    try:
        price = Decimal(value)
        nanos = price * NANOS
        is_good = price.is_finite() and 0 <= price <= MAX_PRICE and nanos == nanos.to_integral_value()
    except (ArithmeticError, TypeError, ValueError):
        is_good = False
    if not is_good:
        raise InvalidRequest.of(where, f"must be a number from 0 to {MAX_PRICE} with 9 decimals at most")
    return int(nanos)
