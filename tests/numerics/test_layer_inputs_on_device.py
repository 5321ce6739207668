"""The kernels of inputs of single layers against plain torch: in Triton's interpreter or, marked gpu, compiled."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.layer_inputs import gate_input, token_inputs
from manylora_worker.models.cuda.kernels.lora import (
    LoraRows,
    b_field,
    low_rank_columns,
    num_chunks,
    part_field,
    part_word,
    site_fields,
)

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels

RANKS = (0, 8, 40)
RUNS = ((0, 3, 0), (3, 4, 1), (7, 6, 2))
"""First row, rows, adapter; 13 rows of 14."""
ROWS, ROWS_THERE, CHUNKS = 14, 13, 4


@dataclass(frozen=True)
class Adapted:
    """LoRA on one product, and what it adds to each row of it."""

    lora: LoraRows
    added: torch.Tensor


def adapted(columns: int, num_tiles: int, device: str) -> Adapted:
    arena, end = torch.randn(30_000) * 0.1, 0
    sites = torch.zeros(len(RANKS), site_fields(CHUNKS), dtype=torch.int64)
    low_rank, row_adapters = torch.randn(2, ROWS, low_rank_columns(CHUNKS)), torch.zeros(ROWS, dtype=torch.int32)
    added, tiles = torch.zeros(ROWS, columns), torch.zeros(8, 4, dtype=torch.int32)
    for i, (first, count, adapter) in enumerate(RUNS):
        row_adapters[first : first + count] = adapter
        tiles[i] = torch.tensor([first, count, adapter, 0])
        sites[adapter, 0] = RANKS[adapter]
        for chunk in range(num_chunks(RANKS[adapter])):
            ranks = min(16, RANKS[adapter] - 16 * chunk)
            sites[adapter, part_field(0, chunk, CHUNKS)] = part_word(ranks)
            sites[adapter, b_field(0, chunk, CHUNKS)] = end
            b = arena[end : end + ranks * columns].view(ranks, columns)
            own = low_rank.sum(0)[first : first + count, 16 * chunk : 16 * chunk + ranks]
            added[first : first + count] += own @ b
            end += ranks * columns + 8
    on_device = (each.to(device) for each in (arena, sites, tiles))
    return Adapted(LoraRows(*on_device, num_tiles, row_adapters.to(device), low_rank.to(device), CHUNKS), added)


KINDS = pytest.mark.parametrize("num_tiles", [None, 0, 3], ids=["no LoRA", "by row", "by tile"])


@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_kernel_of_tokens(num_tiles: int | None, device: str) -> None:
    torch.manual_seed(0)
    layers, width = 3, 24
    adapter = None if num_tiles is None else adapted(layers * width, num_tiles, device)
    product, own, norm = torch.randn(2, ROWS, layers * width), torch.randn(ROWS, layers * width), torch.rand(width)
    projected = product.sum(0) + (0 if adapter is None else adapter.added)
    normed = F.rms_norm(projected.view(ROWS, layers, width) * 0.25, (width,), norm, 1e-5).flatten(1)
    expected = torch.cat((((normed + own) * 0.7)[:ROWS_THERE], own[ROWS_THERE:]))
    found = own.to(device)
    token_inputs(
        product.to(device), found, norm=norm.to(device), eps=1e-5, weight_plus_one=False, factor=0.25, scale=0.7,
        num_rows=torch.tensor(ROWS_THERE, dtype=torch.int32, device=device),
        lora=None if adapter is None else adapter.lora, pdl=False,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_kernel_of_a_layer(num_tiles: int | None, device: str) -> None:
    torch.manual_seed(1)
    width = 24
    adapter = None if num_tiles is None else adapted(width, num_tiles, device)
    product, inputs = torch.randn(2, ROWS, width), torch.randn(ROWS, 3 * width)
    gate = product.sum(0) + (0 if adapter is None else adapter.added)
    expected = F.gelu(gate, approximate="tanh") * inputs[:, width : 2 * width]
    expected[ROWS_THERE:] = 7.0
    out = torch.full((ROWS, width), 7.0, device=device)
    gate_input(
        product.to(device), inputs.to(device)[:, width : 2 * width], out, activation="gelu_tanh",
        num_rows=torch.tensor(ROWS_THERE, dtype=torch.int32, device=device),
        lora=None if adapter is None else adapter.lora, pdl=False,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
