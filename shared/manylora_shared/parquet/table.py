"""Rows and sums of the usage ledger as Parquet's bytes, and back."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

_MOST = (1 << 63) - 1  # what a sum passes, of operations alone, becomes a float


def encoded(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """All have the names of the first."""
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    for name, values in columns.items():
        if any(isinstance(value, int) and value > _MOST for value in values):
            columns[name] = [float(value) for value in values]
    told = io.BytesIO()
    pq.write_table(pa.table(columns), told)
    return told.getvalue()


def decoded(data: bytes) -> list[dict[str, Any]]:
    """Raises ValueError where it is no Parquet."""
    found: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    return found
