"""What numbers options take."""

from __future__ import annotations

import math

import typer

# Of a request's fields: protobuf raises ValueError for more.
MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_PERCENT = 100


def finite(value: float | None) -> float | None:
    """An option's callback."""
    # Without it `nan` passes min and max, and `inf` what has only a min.
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, not {value}")
    return value
