"""Where keys and values lie in the arena, and what clearing and copying blocks do."""

from __future__ import annotations

import pytest
import torch
from manylora_worker.models.layers.kv_cache import KvCache, KvGeometry

GEOMETRY = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4)


def cache(*, marks_free: bool = False) -> KvCache:
    return KvCache(
        GEOMETRY, num_blocks=5, block_size=2, dtype=torch.float32, device=torch.device("cpu"), marks_free=marks_free
    )


def filled() -> KvCache:
    """Each token's keys are its layer, block and offset as a number, its values that negated."""
    found = cache()
    for layer in range(3):
        for block in range(5):
            for offset in range(2):
                rows = torch.tensor([found.token_row(block, offset)])
                value = torch.full((1, 8), 1.0 + 100 * layer + 10 * block + offset)
                found.write(layer, rows, value, -value)
    return found


def test_a_budget_holds_whole_blocks() -> None:
    assert GEOMETRY.token_bytes(torch.bfloat16) == 2 * 3 * 8 * 2
    block_bytes = 16 * GEOMETRY.token_bytes(torch.bfloat16)
    assert GEOMETRY.blocks_in(3 * block_bytes - 1, 16, torch.bfloat16) == 2
    with pytest.raises(ValueError, match="holds nothing"):
        KvCache(GEOMETRY, num_blocks=0, block_size=2, dtype=torch.float32, device=torch.device("cpu"))


def test_every_token_has_a_place_of_its_own_in_every_layer() -> None:
    found = filled()
    blocks = [4, 0, 2]
    rows = torch.tensor([found.block_row(block) for block in blocks])
    for layer in range(3):
        keys, values = found.gather(layer, rows)
        expected = [[1.0 + 100 * layer + 10 * block + offset for offset in range(2)] for block in blocks]
        assert keys.view(3, 2, 8)[:, :, 0].tolist() == expected
        assert torch.equal(values, -keys)
    assert not (found.flat == 0).any()


def test_clearing_and_copying_take_whole_blocks_and_no_others() -> None:
    found = filled()
    before = found.by_block.clone()
    found.copy_blocks(torch.tensor([0, 1]), torch.tensor([1, 4]))
    assert torch.equal(found.by_block[[1, 4]], before[[0, 1]]), "all is read before anything is written"
    found.clear_blocks(torch.tensor([3]))
    assert not found.by_block[3].any()
    assert torch.equal(found.by_block[[0, 2]], before[[0, 2]])


def test_free_blocks_can_be_marked_so_that_reading_them_shows() -> None:
    found = cache(marks_free=True)
    assert found.flat.isnan().all()
    found.zero_blocks(torch.tensor([2]))
    assert not found.by_block[2].isnan().any()
    found.clear_blocks(torch.tensor([2]))
    assert found.by_block[2].isnan().all()
