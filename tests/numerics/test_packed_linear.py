"""PackedLinear gives what torch's own linear gives, for any number of rows, through few distinct shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from manylora_worker.models.layers.packed_linear import PackedLinear, can_pack, padded_rows

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this torch has no oneDNN operators"
)


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 48, 49, 127, 128, 129, 160, 161])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_linear(rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(40, 24), torch.randn(1, rows, 24)
    bias = torch.randn(40) if with_bias else None
    got = PackedLinear(weight, bias)(x)
    assert got.shape == (1, rows, 40)
    assert got.is_contiguous(), "adapters are added to it in place, as a matrix"
    torch.testing.assert_close(got, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


def test_rows_are_rounded_up_to_few_shapes() -> None:
    padded = [padded_rows(rows) for rows in range(1, 513)]
    assert all(rows <= p < rows + 32 for rows, p in enumerate(padded, 1))
    assert len(set(padded)) <= 52
