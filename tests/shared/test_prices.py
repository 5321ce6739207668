from __future__ import annotations

from datetime import UTC, datetime

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.ledger.prices import NO_PRICES, parse_prices
from manylora_shared.ledger.row import UsageRow

_LIST = """
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
- from: 2026-12-01
  million_completion_tokens: 1
"""


def _row(day: str) -> UsageRow:
    return UsageRow(
        request_id="r",
        tenant="a",
        prompt_tokens=3_000_000,
        cached_tokens=1_000_000,
        completion_tokens=500_000,
        kv_byte_seconds=5 * 3600 * 10**9,
        adapter_byte_seconds=3600 * 10**9,
        adapter_loads=1,
        ended_unix_s=datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp(),
    )


def test_versions_of_a_time() -> None:
    prices = parse_prices(_LIST)

    def days(since: str, until: str) -> list[str]:
        bounds = [datetime.fromisoformat(each).replace(tzinfo=UTC).timestamp() for each in (since, until)]
        return [each.day for each in prices.between(*bounds)]

    assert days("2026-11-01", "2026-12-01") == ["2026-11-01"]
    assert days("2026-11-15", "2026-12-02") == ["2026-11-01", "2026-12-01"]
    assert days("2026-12-01", "2027-01-01") == ["2026-12-01"]
    assert days("2026-10-01", "2026-11-01") == []
    assert len(prices.between(0.0, None)) == 2
    assert NO_PRICES.between(0.0, None) == ()


def test_a_request_costs_by_the_version_of_its_end() -> None:
    prices = parse_prices(_LIST)
    november, december = prices.priced(_row("2026-11-30")), prices.priced(_row("2026-12-01"))
    assert (november.price_list, november.price_nanos) == ("public@2026-11-01", 820_100_000)  # .4+.05+.3+.05+.02+.0001
    assert (december.price_list, december.price_nanos) == ("public@2026-12-01", 500_000_000)
    early = _row("2026-10-31")
    assert prices.priced(early) == early == NO_PRICES.priced(early)


def test_small_requests_cost_their_part() -> None:
    row = UsageRow(request_id="r", tenant="a", prompt_tokens=1, ended_unix_s=_row("2026-11-02").ended_unix_s)
    assert parse_prices(_LIST).priced(row).price_nanos == 200


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[", "is not YAML"),
        ("5", "prices: must be a mapping"),
        ("name: a\ncurrency: EUR\nversions: []", "versions: must be a list"),
        ("name: a\ncurrency: EUR\nversions: [{from: soon}]", r"versions\[0\].from: must be a day"),
        ("name: a\ncurrency: EUR\nversions: [{from: 2026-11-01, tokens: 1}]", r"versions\[0\].tokens: is none of"),
        (_LIST.replace("0.60", "-1"), r"versions\[0\].million_completion_tokens: must be a number"),
        (_LIST.replace("0.60", "1e-12"), "9 decimals"),
        (_LIST.replace("0.60", "nan"), "must be a number"),
        (_LIST.replace("2026-12-01", "2026-11-01"), r"versions\[1\].from: must be later"),
        (_LIST.replace("name: public", "name: ''"), "name: must be 1 to 64"),
    ],
)
def test_a_bad_list_is_refused_where_it_is_bad(text: str, where: str) -> None:
    with pytest.raises(InvalidRequest, match=where):
        parse_prices(text)
