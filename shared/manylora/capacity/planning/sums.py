"""How long a step of several ranks takes: what a rank reads and multiplies, and sums over the ranks.

Two GPUs were measured. What they took beyond a rank's own is put down to the sums, by their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from manylora.capacity.planning.curve import Curve, between, floor_ms
from manylora.capacity.planning.shapes import CONFIGS, CannotPlan, Gpu, Shape, shape_of

WORKERS_SUM_BY = "two-shot"  # what models/ranks/group.py takes where GPUs read one another's memory
_Table = list[tuple[int, float]]


def with_ranks(curve: Curve, shape: Shape, curves: Sequence[Curve], sum_by: str = WORKERS_SUM_BY) -> Curve:
    """curve: of the whole model on one GPU. shape: what each of several has of it. Raises CannotPlan."""
    table = sums_us(curve.gpu, curves, sum_by)
    multiplied = shape.row_elements / curve.shape.row_elements
    ranks = shape.rank_bytes / curve.shape.rank_bytes
    sums = shape.sums
    # Beyond the first point bytes cost; of more GPUs than two nothing was measured.
    steps, bytes_factor = math.log2(shape.ranks), 2 * (shape.ranks - 1) / shape.ranks

    how = f"a rank's bytes and multiplications, and sums over the ranks as on two {curve.gpu.name}"
    beyond_two = ", more of which were not measured" if shape.ranks > 2 else ""

    def sum_ms(rows: int) -> float:
        more = between(table, rows * shape.sum_row_bytes) - table[0][1]
        return sums * (table[0][1] * steps + more * bytes_factor) / 1e3

    (first, low), (last, high) = table[-2:]
    prompt_sum_ms = sums * bytes_factor * shape.sum_row_bytes * (high - low) / (last - first) / 1e3
    return replace(
        curve,
        shape=shape,
        points=[(rows, _alone_ms(curve, shape, rows) + sum_ms(rows)) for rows, _ in curve.points],
        kv_token_ms=curve.kv_token_ms * shape.kv_token_bytes / curve.shape.kv_token_bytes,
        rank_ms=curve.rank_ms * ranks,
        row_ms=curve.row_ms * ranks,
        prompt_token_ms=curve.prompt_token_ms * multiplied + prompt_sum_ms,
        adapter_prompt_token_ms=curve.adapter_prompt_token_ms * multiplied + prompt_sum_ms,
        load_host_mb_s=curve.load_host_mb_s * ranks,  # each rank reads the file, and keeps its share
        is_measured=False,
        origin=f"{curve.origin}; of {shape.ranks} ranks estimated: by {how}{beyond_two}",
        quantized={},
    )


def sums_us(gpu: Gpu, curves: Sequence[Curve], sum_by: str) -> _Table:
    """Bytes that are summed over two ranks, and microseconds. Raises CannotPlan."""
    own = next((each for each in curves if each.of_two and each.gpu.name == gpu.name), None)
    if own is None:
        raise CannotPlan(f"--tensor-parallel: not planned for on {gpu.name}, where several GPUs were not measured")
    if sum_by not in own.of_two:
        raise CannotPlan(f"--tensor-parallel: sums by {sum_by} were not measured on {gpu.name}")
    shape = shape_of(CONFIGS[own.shape.name], own.shape.name, ranks=2)
    beyond = [(rows, ms - _alone_ms(own, shape, rows)) for rows, ms in own.of_two[sum_by]]
    return [(rows * shape.sum_row_bytes, 1e3 * max(0.0, ms) / shape.sums) for rows, ms in beyond]


def _alone_ms(curve: Curve, shape: Shape, rows: int) -> float:
    """Of a rank without sums: as many launches, and of what more rows take beyond their bytes its multiplications."""
    beyond, launches = (
        curve.base_ms(number) - floor_ms(curve.gpu, curve.shape, number, curve.context)
        for number in (rows, curve.points[0][0])
    )
    multiplied = shape.row_elements / curve.shape.row_elements
    return floor_ms(curve.gpu, shape, rows, curve.context) + launches + (beyond - launches) * multiplied
