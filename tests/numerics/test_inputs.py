"""From a batch to where every token stands: ordered by adapter, results in the batch's order."""

from __future__ import annotations

import pytest
import torch
from manylora_shared.ids import AdapterUid
from manylora_worker.kinds.api import Sampling, SequenceChunk, StepBatch
from manylora_worker.models.layers.kv_cache import KvCache, KvGeometry
from manylora_worker.models.torch.inputs import StepInputs, build_inputs, entered_blocks
from manylora_worker.weights.sites import DeviceAdapter

UP, DOWN = AdapterUid("a"), AdapterUid("b")
ADAPTERS = {uid: DeviceAdapter(uid, {}, 0) for uid in (UP, DOWN)}
BLOCK = 4


def chunk(
    sequence: int, start: int, count: int, *, uid: AdapterUid | None = None, samples: bool = True, first_block: int = 0
) -> SequenceChunk:
    blocks = -(-(start + count) // BLOCK)
    return SequenceChunk(
        sequence_id=sequence, token_ids=[100 * sequence + i for i in range(count)], start_position=start,
        block_table=list(range(first_block, first_block + blocks)), adapter_uid=uid, samples=samples,
        sampling=Sampling(seed=1), choice=0, output_index=0, prompt_token_ids=[], output_token_ids=[],
    )  # fmt: skip


def build(*chunks: SequenceChunk) -> StepInputs:
    geometry = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=2)
    cache = KvCache(geometry, num_blocks=64, block_size=BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    return build_inputs(StepBatch(chunks), cache, ADAPTERS, torch.device("cpu"))


def test_an_adapters_rows_are_consecutive_and_each_draws_from_its_own_last() -> None:
    found = build(chunk(1, 8, 1, uid=DOWN), chunk(2, 4, 1, uid=UP), chunk(3, 0, 2), chunk(4, 5, 1, uid=DOWN))
    assert found.token_ids.tolist() == [300, 301, 200, 100, 400]
    assert found.positions.tolist() == [0, 1, 4, 8, 5]
    assert [(s.first_row, s.last_row, s.adapter.uid) for s in found.segments] == [(2, 3, UP), (3, 5, DOWN)]
    assert [c.sequence_id for c in found.sampled] == [1, 2, 3, 4]
    assert found.logit_rows.tolist() == [3, 2, 1, 4]


def test_chunks_that_draw_nothing_have_no_row_of_logits() -> None:
    found = build(chunk(1, 0, 3, samples=False), chunk(2, 2, 1))
    assert [c.sequence_id for c in found.sampled] == [2]
    assert found.token_ids[found.logit_rows].tolist() == [200]
    assert found.num_rows == 4


def test_short_chunks_are_attended_token_by_token_and_long_ones_whole() -> None:
    found = build(chunk(1, 0, 3), chunk(2, 0, 100, first_block=10))
    assert [(row.row, row.context_tokens) for row in found.attention._decodes] == [(0, 1), (1, 2), (2, 3)]
    (prefill,) = found.attention._prefills
    assert (prefill.first_row, prefill.last_row, prefill.start_position) == (3, 103, 0)


def test_blocks_that_are_begun_and_left_partly_empty() -> None:
    def entered(start: int, count: int) -> list[int]:
        return entered_blocks([chunk(1, start, count)], BLOCK)

    assert entered(0, 4) == []
    assert entered(0, 5) == [1]
    assert entered(2, 1) == [], "it was begun before"
    assert entered(4, 1) == [1]
    assert entered(2, 7) == [2]


def test_an_adapter_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        build(chunk(1, 0, 1, uid=AdapterUid("c")))
