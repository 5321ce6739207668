"""The CUDA kernel of few rows: its source on a CPU, and how it cuts a product."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import nf4_format, nf4_lookup, nf4_rows
from manylora_worker.models.cuda.kernels.nf4 import Nf4Linear, Nf4Workspace
from manylora_worker.models.cuda.kernels.nf4_rows import VARIANTS, Nf4Rows, plan
from test_nf4 import TOLERANCE, relative_error

from tests.numerics.cuda_on_cpu import cuda_on_cpu

pytestmark = pytest.mark.kernels


# Tails of chunks and of parts, one tile and many, inputs too long for one part.
ROWS_SHAPES = [(64, 256), (16, 3584), (128, 1024), (304, 2048), (6144, 4096), (4096, 14336), (48, 28672)]


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("shape", ROWS_SHAPES, ids=str)
def test_products_of_few_rows(shape: tuple[int, int], num_rows: int, pdl: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    torch.manual_seed(num_rows * 1000 + sum(shape))
    workspace = Nf4Workspace(torch.device("cuda"))
    assert workspace.hopper is not None  # torch's CUDA wheels bring the compiler
    weight = nf4_format.quantize(torch.randn(shape, device="cuda").bfloat16())
    x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
    bias = torch.randn(shape[0], device="cuda").bfloat16() if num_rows % 2 else None
    expected = torch.nn.functional.linear(
        x.double(), nf4_format.dequantize_reference(weight).double(), None if bias is None else bias.double()
    )
    layer = Nf4Linear(weight, bias, workspace)
    parts = layer.parts(x, pdl=pdl)
    assert parts.dtype == torch.float32  # nf4_product.cu, not Triton
    assert relative_error(parts.sum(0), expected) <= TOLERANCE
    assert relative_error(layer(x), expected) <= TOLERANCE
    assert torch.equal(parts, layer.parts(x, pdl=pdl))
    if num_rows > 1:
        assert torch.equal(layer.parts(x.flip(0), pdl=pdl).flip(1), parts)  # a row does not depend on the others


RUN_ON_CPU = """
extern "C" void run(const u8* x, const u8* codes, const float* absmax, const u16* bias, float* out, int rows,
                    int out_features, int num_blocks, int parts, int members) {
    kernel = [=] { nf4_product(x, codes, absmax, bias, out, rows, out_features, num_blocks, parts); };
    run_blocks({unsigned(parts * members), 1, 1}, NUM_THREADS);
}
"""


def on_cpu(variant: nf4_rows.Variant, values: Sequence[int], folder: Path) -> Callable[..., object]:
    run: Callable[..., object] = cuda_on_cpu(nf4_rows.source(variant, values) + RUN_ON_CPU, folder).run
    return run


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.columns} columns")
def test_the_cuda_kernel_on_a_cpu(variant: nf4_rows.Variant, tmp_path: Path) -> None:
    run = on_cpu(variant, nf4_lookup.PAIR_BITS, tmp_path)
    torch.manual_seed(variant.columns)
    # One short part; several with a short one at the end, and more tiles than a round.
    for out_features, in_features, members in ((48, 256, 2), (16 * (variant.round_tiles + 2), 5376, 1)):
        for rows in {1, variant.columns // 2 + 1, variant.columns}:
            weight = nf4_format.quantize(torch.randn(out_features, in_features).bfloat16())
            x = torch.randn(rows, in_features).bfloat16()
            bias = torch.randn(out_features).bfloat16()
            num_blocks = in_features // 64
            parts = -(-num_blocks // variant.part_blocks)
            out = torch.full((parts, rows, out_features), float("nan"))
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, weight.codes, weight.absmax, bias, out)]
            run(*pointers, rows, out_features, num_blocks, parts, members)
            expected = torch.nn.functional.linear(
                x.double(), nf4_format.dequantize_reference(weight).double(), bias.double()
            )
            assert relative_error(out.sum(0), expected) <= TOLERANCE


def test_every_variant_fits_a_multiprocessor() -> None:
    assert all(variant.shared_bytes <= 227 * 1024 for variant in VARIANTS)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("out_features", "num_blocks"), [(16, 4), (6144, 64), (4096, 224), (48, 448), (28672, 128)])
def test_parts_cover_the_inputs_once(rows: int, out_features: int, num_blocks: int) -> None:
    how = plan(rows, out_features, num_blocks, processors=132)
    assert (how.parts - 1) * how.variant.part_blocks < num_blocks <= how.parts * how.variant.part_blocks
    assert how.parts * how.members <= 132
    assert how.members <= out_features // 16
    assert rows <= how.variant.columns


def test_takes_what_the_kernel_can_cut() -> None:
    assert Nf4Rows.takes(1, 256, 16)
    assert not Nf4Rows.takes(17, 256, 16)
    assert not Nf4Rows.takes(1, 192, 16)
    assert not Nf4Rows.takes(1, 256, 24)
