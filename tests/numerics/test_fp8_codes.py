"""All 256 codes against torch's own conversion."""

from __future__ import annotations

import pytest
import torch
from manylora_worker.models.layers.fp8_codes import FP8, codes_of, numbers_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_is_its_number(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    numbers = every[(every & 0x7F) != 0x7F]
    for codes in (numbers, every):  # without a NaN, and with both
        out, scratch = (torch.empty(len(codes), dtype=each) for each in (dtype, torch.int16))
        found = numbers_of(codes, 0.25, out, scratch)
        expected = codes.view(FP8).float() * 0.25
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num().float(), expected.nan_to_num())
        assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_number_becomes_the_nearest_code_and_at_most_the_largest(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1e-5, 8.3, -8.7, 1791.0, 1793.0, -60000.0, float("inf"), float("nan")]).to(dtype)
    expected = torch.tensor([0.0, -0.0, 0.0, 8.0, -9.0, 1792.0, 1792.0, -1792.0, 1792.0, float("nan")])
    found = codes_of(x, 4.0).float() * 4
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
