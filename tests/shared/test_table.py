from __future__ import annotations

import pytest
from manylora_shared.parquet.table import decoded, encoded


def test_rows_come_back() -> None:
    rows = [
        {"tenant": "a", "prompt_tokens": 1, "price": 0.5, "flops": 1 << 70},
        {"tenant": "b", "prompt_tokens": 2, "price": 0.0, "flops": 0},
    ]
    assert decoded(encoded(rows)) == [{**row, "flops": float(str(row["flops"]))} for row in rows]
    assert decoded(encoded([])) == []
    with pytest.raises(ValueError, match=r"Parquet|magic"):
        decoded(b"no such thing")
