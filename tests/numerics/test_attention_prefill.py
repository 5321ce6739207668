"""Attention of prompts against plain torch, heads of every width: in Triton's interpreter or, marked gpu, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.attention import PagedLayout, attend_prefill, prefill_block_m
from manylora_worker.models.decoder_weights import AttentionShape

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels

BLOCK_SIZE = 16
CHUNKS = ((0, 70), (37, 45))  # of two sequences: first position, tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head_dim", "window"), [(32, None), (256, 20), (512, None), (512, 20)])
def test_prompts_see_what_is_before_them(head_dim: int, window: int | None, device: str) -> None:
    """A tile is as long as the widest heads beside these allow: programs share it, its last one not full."""
    heads, kv_heads = 4, 2
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, window)
    tile_rows = 64 if head_dim > 128 else 128
    assert (prefill_block_m(shape) < tile_rows) == (head_dim > 256)
    generator = torch.Generator().manual_seed(head_dim)
    width, rows = kv_heads * head_dim, sum(count for _, count in CHUNKS)
    num_blocks = 2 * -(-max(first + count for first, count in CHUNKS) // BLOCK_SIZE)
    cache = torch.full((num_blocks, 2, BLOCK_SIZE, width), 1e4, dtype=dtype)
    tables = torch.randperm(num_blocks, generator=generator).view(2, -1).int()
    q, expected, tiles, row = torch.randn(rows, heads * head_dim, generator=generator).to(dtype), [], [], 0
    for sequence, (first, count) in enumerate(CHUNKS):
        seen = torch.randn(2, first + count, kv_heads, head_dim, generator=generator).to(dtype)
        for token in range(first + count):
            cache[tables[sequence, token // BLOCK_SIZE], :, token % BLOCK_SIZE] = seen[:, token].flatten(1)
        keys, values = seen.float().repeat_interleave(heads // kv_heads, 2)
        own = q[row : row + count].float().view(count, heads, head_dim)
        scores = torch.einsum("qhd,thd->hqt", own, keys) * shape.scale
        at, to = torch.arange(first, first + count)[:, None], torch.arange(first + count)
        hidden = (to > at) | (to <= at - (window or 1 << 20))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
        expected.append(torch.einsum("hqt,thd->qhd", weights, values).flatten(1))
        for start in range(0, count, tile_rows):
            tiles.append([row + start, min(tile_rows, count - start), first + start, sequence])
        row += count
    out = torch.full_like(q, 7.0, device=device)
    attend_prefill(
        q.to(device), cache.flatten().to(device), out, tables=tables.to(device),
        tiles=torch.tensor([*tiles, [0] * 4], dtype=torch.int32, device=device), num_tiles=len(tiles) + 1,
        tile_rows=tile_rows, shape=shape,
        layout=PagedLayout(BLOCK_SIZE, 2 * BLOCK_SIZE * width, width, BLOCK_SIZE * width, head_dim),
    )  # fmt: skip
    tolerance = 1e-4 if device == "cpu" else 2e-2
    torch.testing.assert_close(out.cpu().float(), torch.cat(expected), atol=tolerance, rtol=tolerance)
