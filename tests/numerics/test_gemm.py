"""Products of few rows on a GPU, against float64, and how they are split."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import gemm

from tests.numerics.interpreter import INTERPRETED

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (256, 512), (2048, 2048), (96, 160)]
"""(out, in): of Llama-3.1-8B, with its head; split in four; of no tile."""


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_parts_have_room_and_whole_tiles(n: int, k: int) -> None:
    splits = gemm._splits(n, k)
    assert splits == 1 or splits * n * gemm.MOST_SPLIT_ROWS <= gemm.PARTS_ELEMENTS
    assert splits == 1 or k % (splits * 128) == 0


@pytest.mark.parametrize("kib", [99, 227])
@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("programs", [96, 448])
def test_loads_under_way_have_room(kib: int, block_m: int, programs: int) -> None:
    stages = gemm._stages(block_m, programs, kib * 1024)
    assert stages * 2 * 128 * (64 + block_m) < kib * 1024
    assert (stages >= 6) == (kib == 227 and programs == 96), "alone on Hopper's processors it has twice as many"


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_on_the_device(n: int, k: int, has_bias: bool) -> None:
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    torch.manual_seed(n + k)
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    weight = torch.randn(n, k, device="cuda").bfloat16()
    bias = (10 * torch.randn(n, device="cuda")).bfloat16() if has_bias else None
    parts = torch.full((gemm.PARTS_ELEMENTS,), float("nan"), device="cuda")
    for rows in (1, 2, 17, 33, 64, 65):
        x = torch.randn(rows, k, device="cuda").bfloat16()
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        out = torch.full((rows, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        for _ in range(5):
            found = gemm.linear(x, weight, bias, out, parts, pdl=pdl).float().sum(0)
            assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-2
