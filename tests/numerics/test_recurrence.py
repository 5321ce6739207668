"""States lie in the first blocks of their sequences' tables, cut anywhere, and nothing else is touched."""

from __future__ import annotations

import math

import pytest
import torch
from manylora_worker.models.layers.kv_cache import KvCache, KvGeometry, StateGeometry
from manylora_worker.models.layers.recurrence import StateRows, StepStates

STATE = StateGeometry(num_layers=3, matrices=(2, 3, 5), window=(7, 2))  # 44 floats a layer
GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=6, state=STATE)
BLOCK_SIZE = 2


def cache(dtype: torch.dtype) -> KvCache:
    """All free, and marked so."""
    return KvCache(
        GEOMETRY, num_blocks=30, block_size=BLOCK_SIZE, dtype=dtype, device=torch.device("cpu"), marks_free=True
    )


def states_of(found: KvCache, *rows: StateRows) -> StepStates:
    return StepStates(found, rows, torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "blocks"), [(torch.float32, 3), (torch.bfloat16, 6)])
def test_every_layer_of_every_sequence_has_a_place_of_its_own(dtype: torch.dtype, blocks: int) -> None:
    found = cache(dtype)
    assert found.state_blocks == GEOMETRY.state_blocks(BLOCK_SIZE, dtype) == blocks
    tables = [list(range(20, 20 + blocks))[::-1], list(range(3, 3 + blocks))]
    first = states_of(found, StateRows(0, 4, True, tables[0]), StateRows(4, 5, True, tables[1]))
    assert first.single_rows.tolist() == [4]
    for layer in range(3):
        held = first.read(layer)
        assert not held.matrices.any()
        assert not held.windows.any()
        for place in range(2):  # the one of one row stands first
            held.matrices[place] = 100 * layer + 10 * place + 1.0
            held.windows[place] = 100 * layer + 10 * place + 2.0
        first.write(held)
    later = states_of(found, StateRows(0, 2, False, tables[0]), StateRows(2, 4, False, tables[1]))
    for layer in range(3):
        held = later.read(layer)
        for place, mine in enumerate((1, 0)):
            assert (held.matrices[place] == 100 * layer + 10 * mine + 1.0).all()
            assert (held.windows[place] == 100 * layer + 10 * mine + 2.0).all()
    others = [block for block in range(30) if block not in (*tables[0], *tables[1])]
    assert found.by_block[others].isnan().all(), "another's block was written"


def test_a_first_chunk_reads_nothing_of_what_was_there() -> None:
    found = cache(torch.float32)
    old, new = StateRows(0, 1, True, [0, 1, 2]), StateRows(1, 2, True, [3, 4, 5])
    held = states_of(found, old).read(1)
    held.matrices.fill_(math.inf)
    states_of(found, old).write(held)
    again = states_of(found, StateRows(0, 1, True, [0, 1, 2]), new).read(1)
    assert not again.matrices.any()
    assert states_of(found, StateRows(0, 1, False, [0, 1, 2])).read(1).matrices.isinf().all()


def test_a_model_without_recurrent_layers_has_no_states() -> None:
    assert KvGeometry(2, 1, 6).state_blocks(BLOCK_SIZE, torch.float32) == 0
