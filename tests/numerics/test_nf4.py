"""The 4-bit products in Triton against bitsandbytes: within bf16, and dequantized bit for bit.

Runs in Triton's interpreter on the CPU (TRITON_INTERPRET=1 before the first import of the kernels) and, marked gpu, as
compiled code. The interpreter cannot run the kernels' PTX: test_nf4_lookup.py executes that.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import nf4, nf4_format
from manylora_worker.models.cuda.kernels.nf4 import Nf4Linear, Nf4Workspace
from manylora_worker.models.cuda.kernels.nf4_format import Nf4Weight
from test_nf4_format import weight_of

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantizes_bit_for_bit(shape: tuple[int, int], device: str) -> None:
    weight = nf4_format.quantize(random_weight(*shape, seed=3))
    out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    result = nf4.dequantize(moved(weight, device), Nf4Workspace(torch.device(device)).codebook, out)
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
