"""Every step that can come finds a graph that was captured at start, with room for it."""

from __future__ import annotations

import random

import pytest
from manylora_worker.kinds.api import Sampling

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.kernels.lora import TILE_ROWS
from manylora_worker.models.cuda.kernels.sampling import SamplingPlan
from manylora_worker.models.cuda.steps.graph_shapes import (
    BY_ROW,
    MASKED,
    MIXED_ROWS,
    NO_LORA,
    decode_shape,
    decode_shapes,
    draw_shapes,
    has_graph,
    mixed_shape,
    mixed_shapes,
    room_for_prefill_tiles,
)

pytestmark = pytest.mark.kernels

_SAMPLINGS = [
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=0, temperature=0.0, top_logprobs=0),
    Sampling(seed=0),
    Sampling(seed=0, top_logprobs=20),
    Sampling(seed=0, top_k=3),
    Sampling(seed=0, top_p=0.5, min_p=0.1, top_logprobs=2),
]


@pytest.mark.parametrize("max_sequences", [1, 3, 8, 64, 100, 256])
def test_decodes(max_sequences: int) -> None:
    captured = set(decode_shapes(max_sequences))
    for rows in range(1, max_sequences + 1):
        for tiles in (NO_LORA, *range(1, rows + 1)):
            for sampling in _SAMPLINGS:
                needed = SamplingPlan.of([sampling])
                assert has_graph(needed)
                shape = decode_shape(rows, tiles, needed, max_sequences)
                assert shape in captured
                assert shape.rows >= rows
                assert shape.plan is not None
                assert shape.plan.covers(needed)
                assert (shape.lora_tiles == NO_LORA) == (tiles == NO_LORA)
                assert tiles == NO_LORA or shape.lora_tiles == BY_ROW or shape.lora_tiles >= tiles
        scaled = decode_shape(rows, rows, SamplingPlan(), max_sequences, columns=True)
        assert scaled in captured
        assert scaled == (shape.rows, BY_ROW, None, True)


@pytest.mark.parametrize("max_sequences", [1, 3, 8, 64, 100, 256])
def test_rows_with_masks_are_drawn_apart(max_sequences: int) -> None:
    captured, draws = set(decode_shapes(max_sequences)), set(draw_shapes(max_sequences))
    for rows in range(1, max_sequences + 1):
        layers = decode_shape(rows, NO_LORA, None, max_sequences)
        assert layers in captured
        assert layers.plan is None
        assert layers.rows in draws
    for sampling in _SAMPLINGS:
        needed = SamplingPlan.of([sampling], has_masks=True)
        assert not has_graph(needed)
        assert MASKED.covers(needed) == (sampling.top_logprobs is None)


@pytest.mark.parametrize(("max_rows", "max_sequences"), [(1, 1), (48, 8), (512, 64), (2112, 256)])
def test_steps_with_prompts(max_rows: int, max_sequences: int) -> None:
    captured = set(mixed_shapes(max_rows, max_sequences))
    rng = random.Random(0)
    without = 0
    for _ in range(3000):
        num_decodes = rng.randint(0, min(max_sequences, max_rows))
        chunks = [rng.randint(2, 40) for _ in range(rng.randint(1, 8))]
        rows, runs = num_decodes + sum(chunks), num_decodes + len(chunks)
        if rows > max_rows or runs > max_sequences:
            continue
        tiles = rng.choice([NO_LORA, rng.randint(1, rows // TILE_ROWS + runs)])
        shape = mixed_shape(rows, num_decodes, len(chunks), tiles, max_rows, max_sequences)
        if shape is None:
            assert rows > max((each for each in MIXED_ROWS if each <= max_rows), default=0)
            without += 1
            continue
        assert shape in captured
        assert shape.rows >= max(rows, shape.decode_rows)
        assert num_decodes <= shape.decode_rows
        assert room_for_prefill_tiles(shape.rows) >= len(chunks)
        assert tiles == NO_LORA or shape.lora_tiles >= tiles
    assert without < 1500


def test_a_large_step_has_none() -> None:
    assert mixed_shape(max(MIXED_ROWS) + 1, 0, 9, NO_LORA, 4096, 64) is None
