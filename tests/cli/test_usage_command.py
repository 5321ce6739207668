"""`usage`: rows and sums, in each form."""

from __future__ import annotations

import csv
from pathlib import Path

from manylora_shared.parquet.table import decoded

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_each_request_is_a_row_and_all_pages_are_read(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("usage", "--tenant", "acme", "--since", "2026-11-25", "--format", "json")
    assert [row["request_id"] for row in out.json] == ["r0", "r1", "r2"]
    assert (out.json[0]["prompt_tokens"], out.json[0]["completion_tokens"], out.json[0]["price"]) == (1234, 56, 0.0015)
    assert out.json[0]["class"] == ""
    assert router.usage_asked[0].tenant_id == "acme"
    assert router.usage_asked[0].since_unix_s == 1_795_564_800.0
    table = (await manylora("usage")).stdout
    assert "2026-11-25 00:00:00" in table
    assert (await manylora("usage", "--json")).json == out.json


async def test_sums(manylora: Manylora, router: FakeRouter) -> None:
    out = await manylora("usage", "--by", "tenant,day", "--until", "2026-12")
    assert (list(router.usage_asked[0].by), router.usage_asked[0].until_unix_s) == (["tenant", "day"], 1_796_083_200.0)
    assert "price EUR" in out.stdout
    assert "1,234" in out.stdout
    assert "2.000000" in out.stdout  # GB-hours of KV
    (row,) = (await manylora("usage", "--by", "total", "--format", "json")).json
    assert router.usage_asked[-1].total
    assert (row["requests"], row["prompt_tokens"]) == (3, 1234)


async def test_csv_and_parquet(manylora: Manylora, tmp_path: Path) -> None:
    out = await manylora("usage", "--by", "tenant", "--format", "csv")
    (row,) = csv.DictReader(out.stdout.splitlines())
    assert (row["tenant"], row["prompt_tokens"], row["price"]) == ("acme", "1234", "0.0015")
    rows = list(csv.DictReader((await manylora("usage", "--format", "csv")).stdout.splitlines()))
    assert rows[0]["adapter"] == "'=upper"  # no formula of a spreadsheet
    path = tmp_path / "usage.parquet"
    assert (await manylora("usage", "--format", "parquet", "--output", str(path))).exit_code == 0
    assert [row["request_id"] for row in decoded(path.read_bytes())] == ["r0", "r1", "r2"]


async def test_what_is_asked_wrongly_is_told(manylora: Manylora, tmp_path: Path) -> None:
    for arguments, told in (
        (("--by", "colour"), "day, month, total"),
        (("--since", "soon"), "--since: 'soon' is no time"),
        (("report", "--month", "9999-12"), "--month: '9999-12' ends after the last date"),
        (("report", "--month", "10000-01"), "--month: '10000-01' is no month"),
        (("--format", "csv", "--output", str(tmp_path / "no" / "file")), "--output:"),
    ):
        out = await manylora("usage", *arguments)
        assert out.exit_code == 2
        assert told in out.stderr
