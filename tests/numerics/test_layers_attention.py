"""The attention over gathered blocks: however the rows are parted, and in memory that is used again."""

from __future__ import annotations

import pytest
import torch
from manylora_worker.models.layers import kv_cache
from manylora_worker.models.layers.attention import AttentionStep, DecodeRow
from manylora_worker.models.layers.kv_cache import KvCache, KvGeometry
from torch import Tensor, nn

BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 4, 2, 4, 8
CONTEXTS = (90, 3, 88, 85, 1, 40, 38, 87)


@pytest.fixture
def cache() -> KvCache:
    geometry = KvGeometry(num_layers=2, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    made = KvCache(geometry, num_blocks=160, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"))
    made.flat.copy_(torch.randn(made.flat.shape, generator=torch.Generator().manual_seed(0)))
    return made


def attend(cache: KvCache, layer: int, window: int | None = None) -> Tensor:
    """One decode step of rows with these contexts, each with blocks of its own."""
    rng = torch.Generator().manual_seed(1)
    free = torch.randperm(160, generator=rng).tolist()
    tables = [[free.pop() for _ in range(-(-context // BLOCK_SIZE))] for context in CONTEXTS]
    decodes = [DecodeRow(row, context, tables[row]) for row, context in enumerate(CONTEXTS)]
    token_rows = [
        cache.token_row(table[(context - 1) // BLOCK_SIZE], (context - 1) % BLOCK_SIZE)
        for table, context in zip(tables, CONTEXTS, strict=True)
    ]
    step = AttentionStep(
        cache, token_rows=torch.tensor(token_rows), num_rows=len(CONTEXTS), decodes=decodes, prefills=[]
    )
    module = nn.Module()
    module.layer_idx = layer  # type: ignore[assignment]
    query = torch.randn(1, HEADS, len(CONTEXTS), HEAD_DIM, generator=rng)
    key, value = torch.randn(2, 1, KV_HEADS, len(CONTEXTS), HEAD_DIM, generator=rng)
    return step.attend(module, query, key, value, None, window, None, None, {})


@pytest.mark.parametrize("window", [None, 20])
def test_rows_attend_alike_however_they_are_parted(
    cache: KvCache, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = BLOCK_SIZE * KV_HEADS * HEAD_DIM * 4
    found = []
    for most_blocks in (1 << 20, 50, 25, 1):
        monkeypatch.setattr(kv_cache, "_GATHERED_BYTES", most_blocks * block_bytes)
        assert cache.most_gathered_blocks == most_blocks
        found.append(attend(cache, 1, window))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-6)


def test_what_is_gathered_is_the_blocks_and_nothing_of_a_call_before(cache: KvCache) -> None:
    everything = torch.arange(160) * 4
    whole = [x.clone() for x in cache.gather(0, everything)]
    for count in (160, 3, 1, 77):
        rows = torch.randperm(160, generator=torch.Generator().manual_seed(count))[:count]
        keys, values = cache.gather(0, rows * 4)
        assert torch.equal(keys, whole[0][rows])
        assert torch.equal(values, whole[1][rows])
    assert keys.data_ptr() == cache.gather(1, everything)[0].data_ptr(), "the memory is kept"
