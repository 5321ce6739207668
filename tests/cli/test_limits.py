"""What numbers options take."""

from __future__ import annotations

import math

import pytest
import typer
from manylora.cli.commands.limits import MAX_UINT32, MAX_UINT64, finite
from manylora.v1 import admin_pb2


def test_what_a_field_holds() -> None:
    admin_pb2.RetireAdapterRequest(number=MAX_UINT32)
    admin_pb2.ApplyTenantRequest(expected_version=MAX_UINT64)
    with pytest.raises(ValueError, match="out of range"):
        admin_pb2.RetireAdapterRequest(number=MAX_UINT32 + 1)
    with pytest.raises(ValueError, match="out of range"):
        admin_pb2.ApplyTenantRequest(expected_version=MAX_UINT64 + 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    assert (finite(None), finite(0.0), finite(-1e308)) == (None, 0.0, -1e308)
    with pytest.raises(typer.BadParameter, match="must be a finite number"):
        finite(value)
