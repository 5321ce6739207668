"""Codes and scales in 4 bits against bitsandbytes, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import nf4, nf4_format
from manylora_worker.models.cuda.kernels.nf4_format import Nf4Weight

pytestmark = pytest.mark.kernels

SHAPES = [(64, 64), (7, 192), (130, 448), (66, 1024)]
"""(out, in): one block, less than a tile of outputs, no multiple of one; inputs of 64 but of no tile; whole tiles."""


def random_weight(out_features: int, in_features: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(out_features, in_features, generator=generator) * 0.05).bfloat16()


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
