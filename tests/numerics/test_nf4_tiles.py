"""The CUDA kernel of tens of rows: its source on a CPU, how it cuts a product, and the product on a GPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import nf4_format, nf4_lookup, nf4_tiles
from manylora_worker.models.cuda.kernels.nf4 import Nf4Linear, Nf4Workspace
from manylora_worker.models.cuda.kernels.nf4_tiles import VARIANTS, Nf4Tiles, Variant, plan
from test_nf4 import TOLERANCE, relative_error

from tests.numerics.cuda_on_cpu import cuda_on_cpu

pytestmark = pytest.mark.kernels

# Less than a tile and less than a warp's outputs; tails of tiles and of parts; real ones.
SHAPES = [(8, 256), (200, 768), (320, 5376), (6144, 4096), (4096, 14336), (28672, 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_rows", [17, 32, 33, 64, 65, 100, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_tens_of_rows(shape: tuple[int, int], num_rows: int, pdl: bool) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
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
    assert workspace.hopper.takes(num_rows, shape[1], shape[0])
    parts = layer.parts(x, pdl=pdl)
    assert parts.dtype == (torch.bfloat16 if len(parts) == 1 else torch.float32)
    assert relative_error(parts.float().sum(0), expected) <= TOLERANCE
    assert torch.equal(parts, layer.parts(x, pdl=pdl))
    assert torch.equal(layer.parts(x.flip(0), pdl=pdl).flip(1), parts)  # a row does not depend on the others


RUN_ON_CPU = """
extern "C" void run(const u8* x, const u8* codes, const float* absmax, const u16* bias, float* out, int rows,
                    int out_features, int num_blocks, int parts, int part_blocks) {
    u16* rounded = parts == 1 ? (u16*)out : nullptr;
    kernel = [=] { nf4_tiles(x, codes, absmax, bias, out, rounded, rows, out_features, num_blocks, part_blocks); };
    run_blocks({unsigned((out_features + TILE - 1) / TILE), unsigned(parts), 1}, NUM_THREADS);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.columns} columns")
def test_the_cuda_kernel_on_a_cpu(variant: Variant, tmp_path: Path) -> None:
    run = cuda_on_cpu(nf4_tiles.source(variant, nf4_lookup.PAIR_BITS) + RUN_ON_CPU, tmp_path).run
    torch.manual_seed(variant.columns)
    # A tile and a part of one; a shorter tile behind a whole one; a shorter part behind more blocks than stages.
    for out_features, in_features, part_blocks in ((40, 256, 2), (variant.tile + 24, 768, 6), (40, 1536, 8)):
        for rows in (variant.columns // 2 + 1, variant.columns):
            weight = nf4_format.quantize(torch.randn(out_features, in_features).bfloat16())
            x, bias = torch.randn(rows, in_features).bfloat16(), torch.randn(out_features).bfloat16()
            num_blocks = in_features // 128
            parts = -(-num_blocks // part_blocks)
            dtype = torch.bfloat16 if parts == 1 else torch.float32
            out = torch.full((parts, rows, out_features), float("nan"), dtype=dtype)
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, weight.codes, weight.absmax, bias, out)]
            run(*pointers, rows, out_features, num_blocks, parts, part_blocks)
            expected = torch.nn.functional.linear(
                x.double(), nf4_format.dequantize_reference(weight).double(), bias.double()
            )
            assert relative_error(out.float().sum(0), expected) <= TOLERANCE


def test_every_variant_fits_a_multiprocessor() -> None:
    assert all(variant.shared_bytes <= 227 * 1024 for variant in VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.columns} columns")
@pytest.mark.parametrize(("out_features", "num_blocks"), [(8, 2), (6144, 32), (4096, 112), (28672, 32), (100, 210)])
def test_parts_cover_the_inputs_once(variant: Variant, out_features: int, num_blocks: int) -> None:
    how = plan(variant, variant.columns, out_features, num_blocks, processors=132)
    assert (how.tiles - 1) * variant.tile < out_features <= how.tiles * variant.tile
    assert (how.parts - 1) * how.part_blocks < num_blocks <= how.parts * how.part_blocks
    assert how.part_blocks % 2 == 0


def test_parts_fill_the_processors_and_are_read_again() -> None:
    of_64, of_128 = VARIANTS[1:]
    assert plan(of_64, 64, 4096, 112, processors=132).parts == 8  # 16 tiles
    assert plan(of_64, 64, 28672, 32, processors=132).parts == 1  # 112
    assert plan(of_128, 128, 28672, 32, processors=132).parts == 1  # 224: lora_tiles.cu reads one part alone


def test_takes_what_the_kernel_can_cut() -> None:
    assert Nf4Tiles.takes(128, 256)
    assert not Nf4Tiles.takes(129, 256)
    assert not Nf4Tiles.takes(64, 384)
