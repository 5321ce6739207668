"""Products with a weight in FP8 in Triton, against the dequantized weight's product in float64.

Runs in Triton's interpreter on the CPU and, marked gpu, as compiled code.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import fp8_product
from manylora_worker.models.quantized.fp8 import Fp8Linear, Fp8Weight, quantize

from tests.numerics.interpreter import DEVICES, INTERPRETED

pytestmark = pytest.mark.kernels

SHAPES = [(64, 128), (7, 192), (130, 1040), (96, 2048)]
"""(out, in): one tile; less than one of outputs; no multiple of one, inputs of 16; inputs that are split."""
REAL = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
"""Of Llama-3.1-8B: many programs share a processor."""
WHOLE = 1 << 20  # a group of all inputs
TOLERANCE = 1e-2


def weight_of(shape: tuple[int, int], group_size: int, device: str) -> Fp8Weight:
    weight = quantize(torch.randn(shape))
    if group_size < shape[1]:
        scales = torch.rand(shape[0], -(-shape[1] // group_size)) + 0.5
        weight = Fp8Weight(weight.codes, scales, group_size)
    return Fp8Weight(weight.codes.to(device), weight.scales.to(device), weight.group_size)


def check(result: torch.Tensor, x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> None:
    expected = torch.nn.functional.linear(
        x.double(), weight.dequantized(torch.float64), None if bias is None else bias.double()
    )
    assert torch.isfinite(result).all()
    assert float((result.double() - expected).abs().max() / expected.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group_size", [WHOLE, 128])
@pytest.mark.parametrize("num_rows", [1, 17, 64, 100, 600])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int], num_rows: int, group_size: int, device: str) -> None:
    torch.manual_seed(num_rows + sum(shape))
    weight = weight_of(shape, group_size, device)
    x = torch.randn(num_rows, shape[1], device=device).bfloat16()
    bias = torch.randn(shape[0], device=device).bfloat16() if num_rows % 2 else None
    assert fp8_product.takes(num_rows, weight, x.dtype) == (num_rows <= fp8_product.MOST_ROWS)
    parts = fp8_product.product(x, weight, bias, pdl=False)
    if num_rows == 1 and shape[1] == 2048:
        assert parts.shape[0] > 1
    check(parts.sum(0), x, weight, bias)
    if device == "cuda":
        assert torch.equal(Fp8Linear(weight, bias)(x[None])[0], parts.sum(0).to(x.dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_other_types_and_shapes_are_dequantized(device: str) -> None:
    torch.manual_seed(1)
    for shape, group_size, dtype in (((40, 128), 128, torch.float32), ((40, 96), 32, torch.bfloat16)):
        weight = weight_of(shape, group_size, device)
        x = torch.randn(3, shape[1], device=device, dtype=dtype)
        assert not fp8_product.takes(3, weight, dtype)
        check(fp8_product.product(x, weight, None, pdl=False)[0], x, weight, None)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    torch.manual_seed(5)
    weight = weight_of((96, 512), WHOLE, device)
    x = torch.randn(16, 512, device=device).bfloat16()
    whole = fp8_product.product(x, weight, None, pdl=False)
    assert torch.equal(fp8_product.product(x.flip(0).contiguous(), weight, None, pdl=False).flip(1), whole)
    assert torch.equal(fp8_product.product(x[5:6], weight, None, pdl=False)[:, 0], whole[:, 5])


@pytest.mark.parametrize("programs", [1, 64, 96, 448])
@pytest.mark.parametrize("k", [16, 128, 576, 4096, 14336])
def test_splits_cover_the_inputs_once(programs: int, k: int) -> None:
    splits, k_of_split = fp8_product.split(programs, k)
    assert (splits - 1) * k_of_split < k <= splits * k_of_split
    assert 1 <= splits <= 4
    assert k_of_split % 128 == 0


@pytest.mark.parametrize("kib", [99, 227], ids=["Ada", "Hopper"])
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_loads_under_way_fit_the_processor(block_m: int, kib: int) -> None:
    for outputs, grouped, programs in itertools.product((1024, 28672), (False, True), (16, 448)):
        tile = fp8_product._tile_of(block_m, outputs, grouped=grouped)
        stages = tile.stages(block_m, programs, kib * 1024)
        assert stages >= 2
        assert stages * tile.block_k * (tile.block_n + 2 * block_m) <= kib * 1024


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_the_sum_of_their_halves(device: str) -> None:
    torch.manual_seed(8)
    x = (torch.randn(5, 512) * torch.tensor([1.0, 1e-4, 3e4, 1e-20, 0.0])[:, None]).bfloat16().to(device)
    x[:, 7] *= 500  # the others are that much below a row's largest element
    halves, scales = fp8_product._halves(x, pdl=False)
    upper, lower = halves.float().unflatten(0, (-1, 2)).unbind(1)
    whole = (upper + lower / 16) * scales[:, None]
    largest = x.float().abs().amax(1)
    assert bool(((whole - x.float()).abs().amax(1) <= largest * 2**-20).all())
    assert float((whole == x.float()).float().mean()) >= 0.9
    if device == "cpu":  # where the interpreter refuses what is not finite
        return
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    halves, _ = fp8_product._halves(x, pdl=False)
    bad = halves.float().isnan().unflatten(0, (-1, 2)).any(1).any(1)
    assert bad.tolist() == [False, True, True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [WHOLE, 128])
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_products_of_a_real_shape_again_and_again(shape: tuple[int, int], group_size: int) -> None:
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    torch.manual_seed(7)
    weight = weight_of(shape, group_size, "cuda")
    whole = weight.dequantized(torch.float32)
    for num_rows in (1, 17, 33, 64, 100, 128, 256, 512):
        x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
        expected = x.float() @ whole.T
        for _ in range(20):
            worst = (fp8_product.product(x, weight, None, pdl=False).float().sum(0) - expected).abs().max()
            assert float(worst / expected.abs().max()) <= TOLERANCE


@pytest.mark.gpu
def test_products_in_a_graph() -> None:
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    torch.manual_seed(6)
    layers = [Fp8Linear(weight_of((n, 1024), group, "cuda"), None) for n, group in ((1024, WHOLE), (4096, 128))]
    for num_rows in (1, 16, 64, 200, 600):
        x = torch.randn(num_rows, 1024, device="cuda").bfloat16()
        expected = [layer(x) for layer in layers]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [layer(x) for layer in layers]
        for _ in range(3):
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
