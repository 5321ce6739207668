"""Which graphs there are: a few sizes of steps, all captured when the worker starts. A step runs in the smallest with
room for it; missing rows are padding, missing tiles end at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from manylora_shared.sampling import MAX_TOP_LOGPROBS

from manylora_worker.models.cuda.kernels.lora import TILE_ROWS
from manylora_worker.models.cuda.kernels.sampling import SamplingPlan

BY_ROW = 0
NO_LORA = -1  # in place of a number of LoRA tiles

GREEDY = SamplingPlan()
SAMPLING_PLANS = (  # what a captured step can do about sampling, cheapest first
    GREEDY,
    SamplingPlan(draws=True),
    SamplingPlan(draws=True, cuts=True),
    SamplingPlan(draws=True, cuts=True, top_logprobs=MAX_TOP_LOGPROBS),
)
# The draw by itself, behind the layers alone: masks are made meanwhile.
MASKED = SamplingPlan(draws=True, cuts=True, masks=True)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)

# of the graphs for steps with prompts; a larger step takes the device longer than its launch takes the host
MIXED_ROWS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)


class DecodeShape(NamedTuple):
    """A graph for steps that only decode. plan: of the draw; None: it is not included."""

    rows: int
    lora_tiles: int  # room for so many, BY_ROW or NO_LORA
    plan: SamplingPlan | None
    columns: bool = False  # an adapter may have gains and shifts: by row, and without the draw


class MixedShape(NamedTuple):
    """A graph for steps with prompts, without head and draw."""

    rows: int
    decode_rows: int
    lora_tiles: int
    columns: bool = False


def bucket_of(rows: int, largest: int) -> int:
    return min(largest, next(bucket for bucket in (*BUCKETS, largest) if bucket >= rows))


def has_graph(needed: SamplingPlan) -> bool:
    return any(plan.covers(needed) for plan in SAMPLING_PLANS)


def decode_shape(
    rows: int, lora_tiles: int, needed: SamplingPlan | None, max_sequences: int, *, columns: bool = False
) -> DecodeShape:
    bucket = bucket_of(rows, max_sequences)
    if columns:
        return DecodeShape(bucket, BY_ROW, None, columns)
    tiles = NO_LORA if lora_tiles == NO_LORA else _tiles_of(lora_tiles, bucket)
    plan = None if needed is None else next(plan for plan in SAMPLING_PLANS if plan.covers(needed))
    return DecodeShape(bucket, tiles, plan)


def draw_shapes(max_sequences: int) -> Sequence[int]:
    """Rows of the graphs that draw alone."""
    return sorted({bucket_of(rows, max_sequences) for rows in range(1, max_sequences + 1)})


def decode_shapes(max_sequences: int) -> Iterator[DecodeShape]:
    for bucket in draw_shapes(max_sequences):
        by_tile = {_tiles_of(tiles, bucket) for tiles in range(1, bucket + 1)}
        for lora_tiles in sorted({NO_LORA, BY_ROW, *by_tile}):
            yield from (DecodeShape(bucket, lora_tiles, plan) for plan in (*SAMPLING_PLANS, None))
        yield DecodeShape(bucket, BY_ROW, None, columns=True)


def mixed_shape(
    rows: int,
    decode_rows: int,
    prefill_tiles: int,
    lora_tiles: int,
    max_rows: int,
    max_sequences: int,
    *,
    columns: bool = False,
) -> MixedShape | None:
    """None: the step is too large for any."""
    fitting = next((each for each in MIXED_ROWS if rows <= each <= max_rows), None)
    if fitting is None or prefill_tiles > room_for_prefill_tiles(fitting):
        return None
    decodes = next(each for each in _decode_rows(fitting, max_sequences) if each >= decode_rows)
    if lora_tiles == NO_LORA:
        return MixedShape(fitting, decodes, NO_LORA)
    sizes = _lora_tiles(fitting, max_sequences)
    tiles = next((each for each in (sizes[-1:] if columns else sizes) if each >= lora_tiles), None)
    return None if tiles is None else MixedShape(fitting, decodes, tiles, columns)


def mixed_shapes(max_rows: int, max_sequences: int) -> Iterator[MixedShape]:
    for rows in (each for each in MIXED_ROWS if each <= max_rows):
        for decode_rows in _decode_rows(rows, max_sequences):
            for lora_tiles in (NO_LORA, *_lora_tiles(rows, max_sequences)):
                yield MixedShape(rows, decode_rows, lora_tiles)
            yield MixedShape(rows, decode_rows, _lora_tiles(rows, max_sequences)[-1], columns=True)


def room_for_prefill_tiles(rows: int) -> int:
    return rows // 64 + 32


def _tiles_of(tiles: int, bucket: int) -> int:
    if 2 * tiles > bucket:
        return BY_ROW
    return next(capacity for capacity in (max(1, bucket // 8), bucket // 2) if tiles <= capacity)


def _decode_rows(rows: int, max_sequences: int) -> list[int]:
    return sorted({0, min(rows, 64, max_sequences), min(rows, max_sequences)})


def _lora_tiles(rows: int, max_sequences: int) -> list[int]:
    # each sequence may have its own adapter, and begins a tile
    return sorted({rows // TILE_ROWS + min(rows, 32), rows // TILE_ROWS + min(rows, max_sequences)})
