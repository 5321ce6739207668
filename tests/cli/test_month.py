"""The month that `bench/month.py` makes up, as its bill has it."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
from manylora.reports.usage_report import _LINES
from manylora.reports.usage_rows import as_csv
from manylora_shared.ledger.prices import parse_prices
from manylora_shared.ledger.row import shown
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.sqlite import SqliteSink

from bench import month


def test_a_months_lines_are_its_rows_to_the_token(tmp_path: Path) -> None:
    month.write(tmp_path, 2_000)
    rows = list(month.rows(2_000, parse_prices(month.PRICES), random.Random(35)))
    assert {row.price_list for row in rows} == {"public@2026-10-01", "public@2026-10-16"}
    sink = SqliteSink(tmp_path / "usage.sqlite")
    sums = [{**each.group, **shown(each.totals)} for each in sink.sums(Query(), _LINES)]
    sink.close()
    lines = list(csv.DictReader(as_csv(sums).splitlines()))
    assert len(lines) > 500
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "unread_tokens", "decode_flops"):
        assert sum(int(line[name]) for line in lines) == sum(getattr(row, name) for row in rows)
    assert sum(float(line["price"]) for line in lines) == pytest.approx(sum(row.price_nanos for row in rows) / 1e9)
