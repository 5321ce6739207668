from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.experts_product import grouped_product, tile_pairs
from manylora_worker.models.cuda.kernels.experts_route import TILE_FIELDS, Groups, group, most_tiles
from manylora_worker.models.decoder_weights import ExpertActivation
from manylora_worker.models.layers.mixture import clamped_swiglu

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels
ON_GPU = [(rows, 128, 8, 2048, 768) for rows in (1, 40, 500, 2000)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize(("rows", "count", "top_k", "hidden", "width"), [(21, 3, 2, 72, 40), *ON_GPU])
def test_products_with_each_pairs_expert(
    rows: int, count: int, top_k: int, hidden: int, width: int, activation: ExpertActivation, device: str
) -> None:
    if device == "cpu" and hidden > 100:
        pytest.skip("a real shape takes minutes in the interpreter")
    torch.manual_seed(rows)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    biases = torch.randn(count, 2 * width, device=device), torch.randn(count, hidden, device=device)
    of_both, of_down = (None, None) if activation == "silu" else (each.to(dtype) for each in biases)
    gate_up = (torch.randn(count, 2 * width, hidden, device=device) * hidden**-0.5).to(dtype)
    down = (torch.randn(count, hidden, width, device=device) * width**-0.5).to(dtype)
    chosen = torch.rand(rows, count, device=device).topk(top_k).indices.flatten().int()
    chosen[-top_k:] = count  # the last row is not there
    pairs, block_m = len(chosen), tile_pairs(rows * top_k, count)
    tiles = torch.zeros(most_tiles(pairs, count, block_m), TILE_FIELDS, dtype=torch.int32, device=device)
    groups = Groups(torch.zeros_like(chosen), tiles, torch.zeros(1, dtype=torch.int32, device=device), block_m)
    group(chosen, groups, num_experts=count, pdl=False)
    both = torch.full((pairs, 2 * width), 7.0, device=device, dtype=dtype)
    gated, outputs = both[:, :width].clone(), torch.full((pairs, hidden), 7.0, device=device, dtype=dtype)
    grouped_product(x, gate_up, both, groups, bias=of_both, pairs_a_row=top_k, halves=2, pdl=False)
    grouped_product(x, gate_up, gated, groups, bias=of_both, pairs_a_row=top_k, gates=activation, halves=2, pdl=False)
    grouped_product(gated, down, outputs, groups, bias=of_down, pairs_a_row=1, pdl=False)
    for expert in range(count):
        own = (chosen == expert).nonzero()[:, 0]
        wide = x[own // top_k].float() @ gate_up[expert].float().T
        if of_both is not None:
            wide += of_both[expert].float()
        tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.02}
        torch.testing.assert_close(both[own].float(), wide, **tolerance)
        first, second = wide.chunk(2, 1)
        joined = F.silu(first) * second if activation == "silu" else clamped_swiglu(first, second)
        torch.testing.assert_close(gated[own].float(), joined, **tolerance)
        made = gated[own].float() @ down[expert].float().T
        if of_down is not None:
            made += of_down[expert].float()
        torch.testing.assert_close(outputs[own].float(), made, **tolerance)
    assert (both[-top_k:] == 7.0).all()
    assert (outputs[-top_k:] == 7.0).all()
