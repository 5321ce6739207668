"""What `manylora usage` writes: rows and sums of the usage ledger as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import enum
import io
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from manylora.cli.output import Target, print_table, usage_error, write

_GB_HOUR = 3.6e12
_ROW_COLUMNS = ("ended", "tenant", "adapter", "version", "class", "outcome", "prompt", "cached", "completion", "price")


class Format(enum.StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


async def show(
    target: Target,
    *,
    tenant: str,
    by: Sequence[str],
    is_total: bool,
    since_unix_s: float,
    until_unix_s: float,
    form: Format,
    output: Path | None,
) -> None:
    currency = ""
    async with target.client() as client:
        between = {"since_unix_s": since_unix_s, "until_unix_s": until_unix_s}
        if by or is_total:
            rows, currency = await client.usage.sums(by, tenant=tenant, **between)
        else:
            rows = [row async for row in client.usage.rows(tenant=tenant, **between)]
    if form is Format.TABLE:
        table(rows, by, currency, is_sum=bool(by) or is_total)
    elif form is Format.PARQUET:
        put(parquet(rows), output)
    else:
        put((as_json(rows) if form is Format.JSON else as_csv(rows)).encode(), output)


def table(rows: Sequence[Mapping[str, Any]], by: Sequence[str], currency: str, *, is_sum: bool) -> None:
    if not is_sum:
        print_table(_ROW_COLUMNS, [_row(row) for row in rows], empty="no request ended in that time")
        return
    price = f"price {currency}".strip()
    columns = (*by, "requests", "prompt", "cached", "completion", "unread", "KV GB-h", "adapter GB-h", "TFLOP", price)
    print_table(columns, [_sum(row, by) for row in rows], empty="no request ended in that time")


def as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(rows), ensure_ascii=False) + "\n"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """With a line of names."""
    told = io.StringIO()
    if rows:
        writer = csv.DictWriter(told, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return told.getvalue()


def parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        from manylora_shared.parquet.table import encoded
    except ImportError:
        raise usage_error("--format parquet: needs pyarrow; pip install 'manylora[parquet]'") from None
    return encoded(rows)


def put(data: bytes, output: Path | None) -> None:
    if output is not None:
        try:
            output.write_bytes(data)
        except OSError as e:
            raise usage_error(f"--output: {e}") from None
    elif sys.stdout.isatty() and b"\0" in data[:64]:
        raise usage_error("--format parquet: is no text; give --output FILE")
    elif b"\0" in data[:64]:
        sys.stdout.buffer.write(data)
    else:
        write(data.decode())


def _cell(value: Any) -> Any:
    """A spreadsheet takes a text that begins so for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    ended = datetime.fromtimestamp(row["ended_unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    words = (row[name] or "-" for name in ("tenant", "adapter", "adapter_version", "class", "outcome"))
    return (
        ended,
        *words,
        *(row[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")),
        f"{row['price']:.6f}",
    )


def _sum(row: Mapping[str, Any], by: Sequence[str]) -> tuple[object, ...]:
    counted = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "unread_tokens")
    return (
        *(row[name] or "-" for name in by),
        *(f"{row[name]:,}" for name in counted),
        f"{row['kv_byte_seconds'] / _GB_HOUR:.6f}",
        f"{row['adapter_byte_seconds'] / _GB_HOUR:.6f}",
        f"{(row['prefill_flops'] + row['decode_flops']) / 1e12:,.3f}",
        f"{row['price']:.6f}",
    )
