"""The gate kernel with LoRA against plain torch: in Triton's interpreter or, marked gpu, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.gate import gate
from manylora_worker.models.cuda.kernels.lora import (
    MAX_SLOTS,
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

WIDTH, CHUNKS = 64, 4
RANKS = (0, 8, 16, 40)
RUNS = ((0, 3, 0), (3, 4, 1), (7, 5, 2), (12, 11, 3))
"""First row, rows, adapter; 23 rows of 24."""
ROWS, ROWS_THERE = 24, 23


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("num_tiles", [0, 2, 6], ids=["by row", "some by tile", "by tile"])
def test_gate(num_tiles: int, parts: int, device: str) -> None:
    torch.manual_seed(num_tiles)
    arena = torch.randn(60_000) * 0.1
    sites = torch.zeros(len(RANKS), site_fields(CHUNKS), dtype=torch.int64)
    matrices: dict[tuple[int, int], torch.Tensor] = {}
    end = 0
    for adapter, rank in enumerate(RANKS):
        for slot in range(2):
            sites[adapter, slot] = rank
            for chunk in range(num_chunks(rank)):
                sites[adapter, part_field(slot, chunk, CHUNKS)] = part_word(min(16, rank - 16 * chunk))
            pieces = [torch.zeros(0, WIDTH)]
            for chunk in range(num_chunks(rank)):
                ranks = min(16, rank - 16 * chunk)
                sites[adapter, b_field(slot, chunk, CHUNKS)] = end
                pieces.append(arena[end : end + ranks * WIDTH].view(ranks, WIDTH))
                end += ranks * WIDTH + 8
            matrices[adapter, slot] = torch.cat(pieces)
    row_adapters = torch.zeros(ROWS, dtype=torch.int32)
    low_rank = torch.randn(2, ROWS, low_rank_columns(CHUNKS))
    gate_up = torch.randn(parts, ROWS, 2 * WIDTH)
    expected = torch.full((ROWS, WIDTH), 7.0)
    product, values = gate_up.sum(0), low_rank.sum(0).view(ROWS, MAX_SLOTS, -1)
    for first, count, adapter in RUNS:
        row_adapters[first : first + count] = adapter
        for row in range(first, first + count):
            wide = [
                product[row, slot * WIDTH : (slot + 1) * WIDTH]
                + values[row, slot, : RANKS[adapter]] @ matrices[adapter, slot]
                for slot in range(2)
            ]
            expected[row] = torch.nn.functional.silu(wide[0]) * wide[1]
    # A tile is of one adapter. Fewer tiles than runs are not all that a step has: then only their rows are computed.
    tiles = torch.zeros(8, 4, dtype=torch.int32)
    for i, (first, count, adapter) in enumerate(RUNS[:num_tiles] if num_tiles else RUNS):
        tiles[i] = torch.tensor([first, count, adapter, 0])
    if num_tiles == 2:
        expected[RUNS[2][0] :] = 7.0
    out = torch.full((ROWS, WIDTH), 7.0, device=device)
    lora = LoraRows(
        weights=arena.to(device),
        sites=sites.to(device),
        tiles=tiles.to(device),
        num_tiles=num_tiles,
        row_adapters=row_adapters.to(device),
        low_rank=low_rank.to(device),
        chunks=CHUNKS,
    )
    there = torch.tensor(ROWS_THERE, dtype=torch.int32, device=device)
    gate(gate_up.to(device), out, activation="silu", num_rows=there, lora=lora, num_slots=2, pdl=False)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_gelu(device: str) -> None:
    """By the error function, and by tanh, which is not the same."""
    torch.manual_seed(0)
    gate_up, there = torch.randn(1, 3, 2 * WIDTH, device=device), torch.tensor(3, dtype=torch.int32, device=device)
    first, up = gate_up[0].chunk(2, 1)
    for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        out = torch.empty(3, WIDTH, device=device)
        gate(gate_up, out, activation=activation, num_rows=there, lora=None, num_slots=2, pdl=False)
        expected = torch.nn.functional.gelu(first, approximate=approximate) * up
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
