"""The 4-bit products against bitsandbytes: codes and scales bit for bit, products within bf16.

Runs in Triton's interpreter on the CPU (TRITON_INTERPRET=1 before the first import of the kernels) and, marked gpu, as
compiled code. The interpreter cannot run the kernels' PTX, so that is proven apart, by executing it here.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import cuda_module, nf4, nf4_format, nf4_lookup, nf4_rows
from manylora_worker.models.cuda.kernels.cuda_module import CudaUnavailable
from manylora_worker.models.cuda.kernels.nf4 import Nf4Linear, Nf4Workspace
from manylora_worker.models.cuda.kernels.nf4_format import Nf4Weight
from manylora_worker.models.cuda.kernels.nf4_rows import VARIANTS, Nf4Rows, plan

from tests.numerics.interpreter import DEVICES, INTERPRETED

pytestmark = pytest.mark.kernels

SHAPES = [(64, 64), (7, 192), (130, 448), (66, 1024)]
"""(out, in): one block, less than a tile of outputs, no multiple of one; inputs of 64 but of no tile; whole tiles."""
TOLERANCE = 1e-2


def random_weight(out_features: int, in_features: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(out_features, in_features, generator=generator) * 0.05).bfloat16()


def moved(weight: Nf4Weight, device: str) -> Nf4Weight:
    return Nf4Weight(weight.codes.to(device), weight.absmax.to(device))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(result).all()
    return float((result.float() - expected.float()).abs().max() / expected.float().abs().max())


def bitsandbytes_state(weight: torch.Tensor, *, double: bool) -> tuple[Any, torch.Tensor, Any]:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
    return functional, packed, state


def weight_of(packed: torch.Tensor, state: Any) -> Nf4Weight:
    """What bitsandbytes has: a Linear4bit's `weight.data` and `weight.quant_state`."""
    out_features, in_features = state.shape
    absmax = state.absmax
    if state.state2 is not None:
        nested = state.state2
        absmax = nf4_format.nested_absmax(absmax, nested.absmax, nested.code, state.offset, nested.blocksize)
    return Nf4Weight(
        packed.view(torch.uint8).reshape(out_features, in_features // 2),
        absmax.float().reshape(out_features, in_features // nf4.BLOCK_SIZE),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 4096)], ids=str)
def test_quantizes_as_bitsandbytes_does(shape: tuple[int, int], double: bool, dtype: torch.dtype) -> None:
    weight = random_weight(*shape, seed=sum(shape)).to(dtype)
    weight[0, :64] = 0  # a block without a scale
    weight[-1, -64:] *= 1e-3
    functional, packed, state = bitsandbytes_state(weight, double=double)
    theirs = weight_of(packed, state)
    ours = nf4_format.quantize(weight, double=double)
    assert torch.equal(ours.codes, theirs.codes)
    if double:
        # float64 takes its portable code, which rounds to the nearest as its CUDA code does. Its C++ for the CPU reads
        # the map through a table of 65,536 steps, and is one code off near a midpoint, once in some hundred scales.
        plain_absmax = bitsandbytes_state(weight, double=False)[2].absmax
        offset = plain_absmax.mean()
        code_map = functional.create_dynamic_map()
        shifted = plain_absmax - offset
        exact_codes, scales = torch.ops.bitsandbytes.quantize_blockwise.default(shifted.double(), code_map, 256)
        exact = nf4_format.nested_absmax(exact_codes, scales, code_map, offset)
        assert torch.equal(ours.absmax.reshape(-1), exact)
        own_codes = nf4_format._quantize_scales(shifted)[0].int()
        off = (own_codes - state.absmax.int()).abs()
        assert off.max() <= 1
        assert off.sum() <= 2 + len(off) // 100
    else:
        assert torch.equal(ours.absmax, theirs.absmax)
    assert torch.equal(nf4_format.dequantize_reference(theirs, dtype), functional.dequantize_4bit(packed, state))


def test_the_dynamic_map_is_theirs() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    assert torch.equal(nf4_format.dynamic_map(), functional.create_dynamic_map())


def test_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="96 inputs"):
        nf4_format.quantize(random_weight(2, 96, seed=0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantizes_bit_for_bit(shape: tuple[int, int], device: str) -> None:
    weight = nf4_format.quantize(random_weight(*shape, seed=3))
    out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    result = nf4.dequantize(moved(weight, device), Nf4Workspace(torch.device(device)), out)
    assert torch.equal(result.cpu(), nf4_format.dequantize_reference(weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 33, 64, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int], num_rows: int, device: str) -> None:
    torch.manual_seed(num_rows * 1000 + sum(shape))
    weight = nf4_format.quantize(torch.randn(shape).bfloat16())
    x = torch.randn(num_rows, shape[1]).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if (num_rows + shape[0]) % 2 else None
    expected = torch.nn.functional.linear(
        x.double(), nf4_format.dequantize_reference(weight).double(), None if bias is None else bias.double()
    )
    workspace = Nf4Workspace(torch.device(device))
    workspace.parts.fill_(float("nan"))
    arguments = (moved(weight, device), workspace, None if bias is None else bias.to(device))
    results = [Nf4Linear(arguments[0], arguments[2], workspace)(x.to(device)[None])[0]]
    for product, limit in ((nf4.product_by_reduction, 4), (nf4.product_by_tiles, 64)):
        if num_rows <= limit:
            out = torch.full((num_rows, shape[0]), float("nan"), dtype=torch.bfloat16, device=device)
            results.append(product(x.to(device), *arguments, out))
    for result in results:
        assert relative_error(result.cpu(), expected) <= TOLERANCE
    assert not workspace.arrivals.any()  # ready for the next product


# Tails of chunks and of parts, one tile and many, inputs too long for one part.
ROWS_SHAPES = [(64, 256), (16, 3584), (128, 1024), (304, 2048), (6144, 4096), (4096, 14336), (48, 28672)]


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("shape", ROWS_SHAPES, ids=str)
def test_products_of_few_rows(shape: tuple[int, int], num_rows: int, pdl: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    torch.manual_seed(num_rows * 1000 + sum(shape))
    workspace = Nf4Workspace(torch.device("cuda"))
    assert workspace.rows is not None  # torch's CUDA wheels bring the compiler
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.columns} columns")
def test_the_cuda_kernel_on_a_cpu(variant: nf4_rows.Variant, tmp_path: Path) -> None:
    """The source itself, with fibers for threads (cuda_on_cpu.h): every index, wait and barrier of it."""
    shim = Path(__file__).with_name("cuda_on_cpu.h")
    (tmp_path / "kernel.cc").write_text(
        "\n".join([f'#include "{shim}"', nf4_rows.source(variant, nf4_lookup.PAIR_BITS), RUN_ON_CPU])
    )
    library = tmp_path / "kernel.so"
    subprocess.run(
        ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", tmp_path / "kernel.cc", "-o", library], check=True
    )
    run = ctypes.CDLL(str(library)).run
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


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 17, 32])
@pytest.mark.parametrize(("out_features", "num_blocks"), [(16, 4), (6144, 64), (4096, 224), (48, 448), (28672, 128)])
def test_parts_cover_the_inputs_once(rows: int, out_features: int, num_blocks: int) -> None:
    how = plan(rows, out_features, num_blocks, processors=132)
    assert (how.parts - 1) * how.variant.part_blocks < num_blocks <= how.parts * how.variant.part_blocks
    assert how.parts * how.members <= 132
    assert how.members <= out_features // 16
    assert rows <= how.variant.columns


def test_takes_what_the_kernel_can_cut() -> None:
    assert Nf4Rows.takes(1, 256, 16)
    assert not Nf4Rows.takes(33, 256, 16)
    assert not Nf4Rows.takes(1, 192, 16)
    assert not Nf4Rows.takes(1, 256, 24)


def test_without_a_compiler_triton_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_rows(self: Nf4Rows, values: object, device: torch.device) -> None:
        raise CudaUnavailable("libnvrtc.so.13 is not installed")

    monkeypatch.setattr(Nf4Rows, "__init__", no_rows)
    assert Nf4Rows.where_it_runs(nf4_lookup.PAIR_BITS, torch.device("cuda")) is None
    assert "libnvrtc.so.13 is not installed" in caplog.text
    assert Nf4Rows.where_it_runs(nf4_lookup.PAIR_BITS, torch.device("cpu")) is None


def test_a_build_without_cuda_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CudaUnavailable, match="without CUDA"):
        cuda_module.compile_cubin("", "nothing", "sm_90")


@pytest.mark.gpu
def test_a_source_that_does_not_compile_says_why() -> None:
    with pytest.raises(CudaUnavailable, match="undefined_name"):
        cuda_module.compile_cubin('extern "C" __global__ void f() { undefined_name(); }', "f", "sm_90")


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    torch.manual_seed(5)
    weight = moved(nf4_format.quantize(torch.randn(96, 512).bfloat16()), device)
    workspace = Nf4Workspace(torch.device(device))
    x = torch.randn(16, 512).bfloat16().to(device)
    whole = nf4.product_by_tiles(x, weight, workspace)
    for row in (0, 5, 15):
        assert torch.equal(nf4.product_by_tiles(x[row : row + 1], weight, workspace)[0], whole[row])
    assert torch.equal(nf4.product_by_tiles(x.flip(0), weight, workspace).flip(0), whole)
    four = nf4.product_by_reduction(x[:4], weight, workspace)
    assert torch.equal(nf4.product_by_reduction(x[:4].flip(0), weight, workspace).flip(0), four)


@pytest.mark.gpu
def test_products_in_a_graph() -> None:
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    torch.manual_seed(6)
    workspace = Nf4Workspace(torch.device("cuda"))
    layers = [Nf4Linear.from_weight(torch.randn(o, 1024).bfloat16().cuda(), None, workspace) for o in (1024, 4096)]
    for num_rows in (1, 16, 64, 100):
        x = torch.randn(num_rows, 1024).bfloat16().cuda()
        expected = [layer(x) for layer in layers]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [layer(x) for layer in layers]
        for _ in range(3):
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_layer_is_what_a_linear4bit_is() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    plain = torch.nn.Linear(192, 7, dtype=torch.bfloat16)
    theirs = bitsandbytes.nn.Linear4bit(192, 7, compute_dtype=torch.bfloat16, quant_type="nf4")
    theirs.load_state_dict(plain.state_dict())
    theirs = theirs.to("cpu")
    workspace = Nf4Workspace(torch.device("cpu"))
    ours = Nf4Linear.from_weight(plain.weight.data, plain.bias, workspace)
    expected_weight = weight_of(theirs.weight.data, theirs.weight.quant_state)
    assert torch.equal(ours._weight.codes, expected_weight.codes)
    assert torch.equal(ours._weight.absmax, expected_weight.absmax)
    if INTERPRETED:
        x = torch.randn(8, 192).bfloat16()
        expected = torch.nn.functional.linear(
            x.float(),
            bitsandbytes.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state).float(),
            plain.bias.detach().float(),
        )
        assert relative_error(ours(x), expected) <= TOLERANCE


@pytest.mark.parametrize("tiles", [1, 2, 64, 96, 264, 1000])
@pytest.mark.parametrize("num_blocks", [1, 3, 64, 224])
def test_splits_cover_the_inputs_once(tiles: int, num_blocks: int) -> None:
    splits, per_split = nf4._split(tiles, num_blocks, 4)
    assert (splits - 1) * per_split < num_blocks <= splits * per_split
    if splits > 1:
        assert per_split % 4 == 0
        assert tiles <= nf4._PROGRAMS_WANTED
        for tile in nf4._PRODUCT_TILES:
            room = Nf4Workspace(torch.device("cpu")).parts.numel()
            assert splits * tile.rows * tiles * tile.outs <= room


# ---- the PTX


def run_ptx(asm: str, inputs: dict[str, int]) -> dict[str, int]:
    """Executes the straight-line integer PTX of the lookup; floating-point lines are left to the caller."""
    values = dict(inputs)

    def value(operand: str) -> int:
        return int(operand, 16) if operand.startswith("0x") else int(operand) if operand.isdigit() else values[operand]

    def permute(a: int, b: int, selector: int) -> int:
        source = (a | b << 32).to_bytes(8, "little")
        nibbles = [selector >> 4 * i & 0xF for i in range(4)]
        chosen = [source[n & 7] if n < 8 else 0xFF * (source[n & 7] >> 7) for n in nibbles]
        return int.from_bytes(bytes(chosen), "little")

    for line in asm.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        operands = re.findall(r"[$\w]+", rest)
        target, *sources = operands or [""]
        if name == "and.b32":
            values[target] = value(sources[0]) & value(sources[1])
        elif name == "shr.b32":
            values[target] = value(sources[0]) >> value(sources[1])
        elif name == "lop3.b32":
            assert value(sources[3]) == 0xEA
            values[target] = value(sources[0]) & value(sources[1]) | value(sources[2])
        elif name == "prmt.b32":
            values[target] = permute(*(value(source) for source in sources))
        elif name == "mov.b32":
            low, high, source = operands
            values[low], values[high] = value(source) & 0xFFFF, value(source) >> 16
        else:
            assert name in ("", ".reg", "cvt.rn.bf16x2.f32", "mul.rn.bf16x2"), name
    return values


@pytest.mark.parametrize("seed", range(40))
def test_the_lookup_in_ptx(seed: int) -> None:
    codes = torch.randint(16, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    packed = bytes(high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True))
    word = int.from_bytes(packed, "little")
    registers = [f"${9 + i}" for i in range(4)]
    inputs = {"$8": word, **dict(zip(registers, nf4_lookup.register_words(nf4_lookup.REPEATED_BITS), strict=True))}
    bits = run_ptx(nf4_lookup._floats_asm(), inputs)
    floats = torch.tensor([bits[f"${i}"] for i in range(8)], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert floats.tolist() == [nf4_lookup.REDUCTION_CODEBOOK[code] for code in codes]
    inputs.update(zip(registers, nf4_lookup.register_words(nf4_lookup.PAIR_BITS), strict=True))
    bits = run_ptx(nf4_lookup._scaled_pairs_asm(), inputs)
    pairs = torch.tensor([bits[f"${i}"] for i in range(8)], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(pairs, torch.tensor(nf4_format.CODEBOOK)[codes].bfloat16())


def test_the_reductions_codebook_is_within_half_a_step_of_bf16() -> None:
    for value, used in zip(nf4_format.CODEBOOK, nf4_lookup.REDUCTION_CODEBOOK, strict=True):
        assert abs(used - value) <= abs(value) * 2**-8
