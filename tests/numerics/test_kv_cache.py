"""Where keys and values lie in the arena, and what clearing and copying blocks do."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from manylora_worker.models.layers.kv_cache import KvCache, KvGeometry, LayerKv

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


def test_layers_of_different_heads_stand_in_rows_of_one_width() -> None:
    """The third reads what the first wrote."""
    geometry = KvGeometry.of([(2, 4), (1, 12), (2, 4)], [0, 1, 0])
    assert geometry.row_elements == 4
    assert geometry.token_bytes(torch.float32) == 2 * 4 * (8 + 12)
    assert geometry.places == (LayerKv(0, 2, 2, 4), LayerKv(2, 3, 1, 12), LayerKv(0, 2, 2, 4, is_own=False))
    found = KvCache(geometry, num_blocks=5, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
    rows = torch.tensor([found.token_row(3, 0), found.token_row(3, 1), found.token_row(1, 0)])
    by_layer = [torch.randn(3, width) for width in (8, 12, 8)]
    for layer, keys in enumerate(by_layer):
        found.write(layer, rows, keys, -keys)
    for layer, keys in enumerate([*by_layer[:2], by_layer[0]]):
        got_keys, got_values = found.gather(layer, torch.tensor([found.block_row(3), found.block_row(1)]))
        assert torch.equal(got_keys.view(4, -1)[:3], keys)
        assert torch.equal(got_values, -got_keys)
    assert found.by_block[[0, 2, 4]].count_nonzero() == 0


def test_layers_that_are_alike_have_a_row_each() -> None:
    assert KvGeometry.of([(2, 4)] * 3, [0, 1, 2]) == GEOMETRY
    assert KvGeometry.of([(2, 4)] * 3, [0, 1, 1]).num_layers == 2, "two keep any"


def test_a_draft_models_rows_stand_behind_the_models_in_each_block() -> None:
    small = KvGeometry(num_layers=2, num_kv_heads=3, head_dim=2)
    both = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4, beside=small)
    # 48 elements of a token, then 24, and as many as fill rows of 8 and of 6: 72 are both
    assert (both.first_beside, both.token_elements) == (48, 72)
    cache = KvCache(both, num_blocks=3, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
    beside = cache.beside()
    for each, width in ((cache, 8), (beside, 6)):
        for layer in range(each.geometry.num_layers):
            rows = torch.tensor([each.token_row(block, offset) for block in range(3) for offset in range(2)])
            written = torch.full((6, width), float(width + layer))
            each.write(layer, rows, written, -written)
    for each, width in ((cache, 8), (beside, 6)):
        for layer in range(each.geometry.num_layers):
            keys, values = each.gather(layer, torch.tensor([each.block_row(block) for block in range(3)]))
            assert (keys == width + layer).all()
            assert (values == -(width + layer)).all()
    beside.zero_blocks(torch.tensor([1]))
    assert (cache.by_block[1].view(-1)[:96] != 0).all(), "the model's own are touched"
    assert (cache.by_block[1].view(-1)[96:] == 0).all()
    cache.clear_blocks(torch.tensor([2]))
    assert (cache.by_block[2] == 0).all(), "the draft model's stay behind"


def test_codes_of_fp8_are_written_and_read_with_their_layers_scales() -> None:
    geometry = dataclasses.replace(GEOMETRY, scales=((2.0, 0.5), (64.0, 1.0), (1.0, 1.0)))
    assert geometry.token_bytes(torch.bfloat16) == GEOMETRY.token_bytes(torch.bfloat16) // 2
    made = KvCache(
        geometry, num_blocks=4, block_size=2, dtype=torch.float32, device=torch.device("cpu"), marks_free=True
    )
    assert made.flat.isnan().all(), "a free block is none as adapters' weights"
    assert made.kept.float().isnan().all(), "nor as keys and values"
    width = geometry.row_elements
    keys, values = 100 * torch.randn(3, width), torch.randn(3, width)
    keys[0, :2] = torch.tensor([1e9, math.nan])
    rows = torch.tensor([made.token_row(2, 0), made.token_row(2, 1), made.token_row(0, 1)])
    kept = made.write(1, rows, keys, values)
    read = [each.clone() for each in made.read(1, kept)]
    expected = (
        64 * (keys / 64).clamp(-448, 448).to(torch.float8_e4m3fn).float(),
        values.to(torch.float8_e4m3fn).float(),
    )
    assert expected[0][0, 0] == 64 * 448
    assert made.cuts is not None
    assert int(made.cuts.count) == 1
    gathered = made.gather(1, torch.tensor([made.block_row(2), made.block_row(0)]))
    for found, again, want in zip(read, gathered, expected, strict=True):
        torch.testing.assert_close(found, want, atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(again.view(4, width)[[0, 1, 3]], want, atol=0, rtol=0, equal_nan=True)
    made.zero_blocks(torch.tensor([2, 3]))
    assert not made.by_block[2:].any()
    made.clear_blocks(torch.tensor([2]))
    assert (made.by_block[2] == 0xFF).all()
