"""The prefill kernel alone against plain torch: in Triton's interpreter or, marked gpu, compiled for bf16 too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.attention import PagedLayout, attend_prefill, prefill_block_m
from manylora_worker.models.decoder.weights import AttentionShape
from manylora_worker.models.layers.fp8_codes import FP8

from tests.numerics.interpreter import DEVICES, INTERPRETED

pytestmark = pytest.mark.kernels

PLAIN = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SHAPES = {
    "plain": PLAIN,
    "96 wide": replace(PLAIN, head_dim=96),
    "128 wide": replace(PLAIN, head_dim=128),
    "256 wide": replace(PLAIN, head_dim=256),
    "512 wide": replace(PLAIN, head_dim=512),
    "512 wide in a window": replace(PLAIN, head_dim=512, window=20),
    "window": replace(PLAIN, window=20),
    "softcap": replace(PLAIN, softcap=2.5),
    "sinks": replace(PLAIN, window=20, has_sinks=True),
}
BLOCK_SIZE = 16
CHUNKS = ((0, 5), (0, 70), (16, 40), (37, 1), (130, 64), (3, 130))  # of a sequence each: first position, tokens
MORE_CHUNKS = ((0, 1024), (1000, 300))


def pages(lengths: list[int], shape: AttentionShape, scales: tuple[float, float], dtype: torch.dtype) -> tuple[
    torch.Tensor, torch.Tensor, list[torch.Tensor]
]:  # fmt: skip
    """A cache that is NaN where no token stands, block tables, and each sequence's keys and values as float32."""
    most = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.randperm(len(lengths) * most).to(torch.int32).view(len(lengths), most)
    width = (shape.num_kv_heads, shape.head_dim)
    cache = torch.full((tables.numel(), 2, BLOCK_SIZE, *width), float("nan"))
    written = []
    for sequence, length in enumerate(lengths):
        codes = torch.randn(2, length, *width)
        codes = (codes / torch.tensor(scales).view(2, 1, 1, 1)).to(dtype).float()
        for first in range(0, length, BLOCK_SIZE):
            part = codes[:, first : first + BLOCK_SIZE]
            cache[tables[sequence, first // BLOCK_SIZE], :, : part.shape[1]] = part
        written.append(codes * torch.tensor(scales).view(2, 1, 1, 1))
    return cache.flatten().to(dtype), tables, written


def expected_of(
    q: torch.Tensor, written: torch.Tensor, start: int, shape: AttentionShape, sinks: torch.Tensor | None
) -> torch.Tensor:
    count = q.shape[0]
    keys, values = written[:, : start + count].repeat_interleave(shape.num_heads // shape.num_kv_heads, 2)
    scores = torch.einsum("nhd,thd->hnt", q.float().view(count, shape.num_heads, -1), keys) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    here, there = torch.arange(start, start + count)[:, None], torch.arange(start + count)
    hidden = (there > here) | (there <= here - (shape.window or 1 << 30))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, count, 1)), 2)
    return torch.einsum("hnt,thd->nhd", scores.softmax(2)[..., : start + count], values).flatten(1)


def check(name: str, kept: torch.dtype, dtype: torch.dtype, device: str, chunks: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(0)
    shape = SHAPES[name]
    scales = (0.125, 4.0) if kept is FP8 else (1.0, 1.0)
    cache, tables, written = pages([start + count for start, count in chunks], shape, scales, kept)
    sinks = 3 * torch.randn(shape.num_heads) if shape.has_sinks else None
    rows = sum(count for _, count in chunks)
    # as long as narrower heads beside these allow: programs share a tile, its last one not full
    q, most = torch.randn(rows, shape.num_heads * shape.head_dim).to(dtype), max(64, prefill_block_m(shape))
    tiles, expected, row = [], [], 0
    for sequence, (start, count) in enumerate(chunks):
        expected.append(expected_of(q[row : row + count], written[sequence], start, shape, sinks))
        tiles += [[row + i, min(most, count - i), start + i, sequence] for i in range(0, count, most)]
        row += count
    size = 2 * BLOCK_SIZE * shape.num_kv_heads * shape.head_dim
    out = torch.full_like(q, float("nan")).to(device)
    attend_prefill(
        q.to(device), cache.to(device), out, tables=tables.to(device), num_tiles=len(tiles) + 1,
        tiles=torch.tensor([*tiles, [0] * 4], dtype=torch.int32, device=device), tile_rows=most, shape=shape,
        layout=PagedLayout(BLOCK_SIZE, size, size // 2 // BLOCK_SIZE, size // 2, shape.head_dim),
        sinks=None if sinks is None else sinks.to(device), scales=scales,
    )  # fmt: skip
    wanted = torch.cat(expected)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-2
    assert (out.cpu().float() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_attend_to_what_they_may_see(name: str, kept: torch.dtype, device: str) -> None:
    check(name, kept, torch.float32, device, CHUNKS)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize("kept", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_products_of_bf16(name: str, kept: torch.dtype) -> None:
    """As a worker runs it: tiles of the matrix unit, loads ahead, long contexts."""
    check(name, kept, torch.bfloat16, "cuda", (*CHUNKS, *MORE_CHUNKS, *((200 * i, 256) for i in range(12))))
