"""NF4's kernels with AWQ's and GPTQ's values: the CUDA source on a CPU, what is rebuilt, and both on a GPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.int4_product import VALUE_BITS, VALUES, Int4Kernels, Int4Product, group_sums
from manylora_worker.models.cuda.kernels.nf4 import TileWorkspace
from manylora_worker.models.cuda.kernels.nf4_rows import VARIANTS, Variant
from manylora_worker.models.quantized.int4 import Int4Linear, Int4Weight
from test_nf4 import TOLERANCE, relative_error
from test_nf4_rows import on_cpu

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels


def weight_of(shape: tuple[int, int], group_size: int, device: str, *, shifted: bool) -> Int4Weight:
    outputs, inputs = shape
    codes = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group_size) * 0.01
    shifts = (torch.randint(-7, 9, scales.shape) * scales).to(device) if shifted else None
    return Int4Weight(codes.to(device), scales.to(device), shifts, group_size)


def expected_of(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    bias = None if bias is None else bias.double()
    return torch.nn.functional.linear(x.double(), weight.dequantized(torch.float64), bias)


def test_values_are_exact_in_bf16() -> None:
    words = torch.tensor([bits - (1 << 16) if bits >> 15 else bits for bits in VALUE_BITS], dtype=torch.int16)
    assert words.view(torch.bfloat16).float().tolist() == list(VALUES) == [float(n) for n in range(-8, 8)]


class _RowsOnCpu:
    """HopperProducts of few rows by the source that a GPU compiles."""

    def __init__(self, variant: Variant, folder: Path) -> None:
        self._variant = variant
        self._run = on_cpu(variant, VALUE_BITS, folder)

    takes = staticmethod(lambda *_: True)

    def product(
        self, x: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None, **_: bool
    ) -> torch.Tensor:
        outputs, num_blocks = absmax.shape
        parts = -(-num_blocks // self._variant.part_blocks)
        out = torch.full((parts, len(x), outputs), float("nan"))
        pointers = [ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in (x, codes, absmax, bias, out)]
        self._run(*pointers, len(x), outputs, num_blocks, parts, 1)
        return out


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.columns} columns")
def test_products_of_few_rows_on_a_cpu(variant: Variant, shifted: bool, tmp_path: Path) -> None:
    torch.manual_seed(variant.columns)
    kernels = object.__new__(Int4Kernels)
    kernels.hopper = _RowsOnCpu(variant, tmp_path)  # type: ignore[assignment]
    for shape, group_size in (((48, 256), 64), ((32, 1024), 128), ((16, 5376), 5376)):
        weight = weight_of(shape, group_size, "cpu", shifted=shifted)
        x = torch.randn(variant.columns, shape[1]).bfloat16()
        bias = torch.randn(shape[0]).bfloat16()
        found = Int4Product(kernels, weight, bias)(x, pdl=False)
        assert relative_error(found.sum(0), expected_of(x, weight, bias)) <= TOLERANCE


class _NoProducts:
    takes = staticmethod(lambda *_: False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("num_rows", [1, 33])
def test_products_by_tiles(num_rows: int, shifted: bool, device: str) -> None:
    torch.manual_seed(num_rows)
    kernels = object.__new__(Int4Kernels)
    kernels.hopper = _NoProducts()  # type: ignore[assignment]
    kernels.workspace = TileWorkspace(torch.device(device), VALUES)
    for shape, group_size in (((48, 256), 64), ((130, 1280), 128)):
        weight = weight_of(shape, group_size, device, shifted=shifted)
        x = torch.randn(num_rows, shape[1], device=device).bfloat16()
        bias = torch.randn(shape[0], device=device).bfloat16() if num_rows > 1 else None
        found = Int4Product(kernels, weight, bias)(x, pdl=False)
        assert relative_error(found[0], expected_of(x, weight, bias)) <= TOLERANCE


def test_sums_of_groups() -> None:
    x = torch.arange(12.0).reshape(2, 6).bfloat16()
    assert group_sums(x, 3).tolist() == [[3.0, 12.0], [21.0, 30.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("group_size", [64, 128, 512])
def test_a_weight_that_is_rebuilt(group_size: int, shifted: bool, device: str) -> None:
    torch.manual_seed(group_size)
    kernels = object.__new__(Int4Kernels)
    kernels.workspace = TileWorkspace(torch.device(device), VALUES)
    weight = weight_of((48, 512), group_size, device, shifted=shifted)
    found = Int4Product(kernels, weight, None).rebuilt()
    assert found.dtype == torch.bfloat16
    # Rounded twice where there are shifts.
    whole = weight.dequantized(torch.float32)
    least = 0 if weight.shifts is None else weight.shifts.abs().max().item() * 2**-8
    assert ((found.float() - whole).abs() <= whole.abs() * 2**-8 + least).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 16, 32, 33, 64, 128, 300])
@pytest.mark.parametrize("shape", [(64, 256), (6144, 4096), (4096, 14336)], ids=str)
def test_products_on_a_gpu(shape: tuple[int, int], num_rows: int, shifted: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    torch.manual_seed(num_rows + sum(shape))
    weight = weight_of(shape, 128, "cuda", shifted=shifted)
    x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
    bias = torch.randn(shape[0], device="cuda").bfloat16() if num_rows % 2 else None
    layer = Int4Linear(weight, bias, Int4Kernels(torch.device("cuda")))
    for pdl in (False, True):
        parts = layer.parts(x, pdl=pdl)
        assert relative_error(parts.float().sum(0), expected_of(x, weight, bias)) <= TOLERANCE
    assert relative_error(layer(x[None])[0], expected_of(x, weight, bias)) <= TOLERANCE


def test_what_is_not_bf16_is_multiplied_with_a_rebuilt_weight() -> None:
    weight = weight_of((16, 256), 64, "cpu", shifted=True)
    kernels = object.__new__(Int4Kernels)
    layer = Int4Linear(weight, torch.randn(16), kernels)
    x = torch.randn(2, 3, 256)
    torch.testing.assert_close(layer(x).double(), expected_of(x, weight, layer.bias), rtol=1e-4, atol=1e-5)
    assert layer(x[:0]).shape == (0, 3, 16)


@pytest.mark.gpu
def test_a_captured_product_follows_its_input() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    kernels = Int4Kernels(torch.device("cuda"))
    layer = Int4Linear(weight_of((4096, 4096), 128, "cuda", shifted=True), None, kernels)
    x = torch.randn(4, 4096, device="cuda").bfloat16()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.normal_()
    graph.replay()
    assert torch.equal(y, layer(x))
