"""How long a step of an engine takes: a curve that was measured, or scaled from one that was.

base(rows)                                  between measured points; beyond the last along the last two
+ kv_token_ms * (tokens of KV - context * rows)    what contexts are longer than those measured
+ adapter_ms + row_ms * rows + rank_ms * (sum of the distinct adapters' ranks) + max_rank_ms * greatest rank
+ prompt_token_ms * prompt tokens           prompts share the step with those that decode
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manylora.capacity.planning.shapes import GPUS, SHAPES, CannotPlan, Gpu, Shape

_ATTENTION_SHARE = 0.8  # of the read ceiling, that reading KV reaches
_REFERENCE = ("H200", "llama-3.1-8b")  # the pair of which most was measured
_KERNEL_TERMS = ("adapter_ms", "max_rank_ms")  # of each layer's launches, whatever they read


@dataclass(frozen=True)
class Curve:
    """points: rows and milliseconds of a decode step without adapters at `context` tokens. origin: what was measured
    and what is estimated. service_ms: of the first token, in router, scheduler and on the way. is_ahead: a step is
    submitted while the one before runs.
    """

    gpu: Gpu
    shape: Shape
    points: Sequence[tuple[int, float]]
    context: int
    kv_token_ms: float
    adapter_ms: float
    row_ms: float
    rank_ms: float
    max_rank_ms: float
    prompt_token_ms: float
    adapter_prompt_token_ms: float
    service_ms: float
    load_host_mb_s: float
    load_device_mb_s: float
    is_measured: bool
    origin: str
    is_ahead: bool = True

    def base_ms(self, rows: int) -> float:
        """A step of prompts alone reads the weights, too: it counts as one of a row."""
        points = self.points
        if rows <= points[0][0]:
            return points[0][1]
        at = min(bisect.bisect_left(points, (rows, 0.0)), len(points) - 1)
        (first, low), (last, high) = points[max(0, at - 1)], points[at]
        return high if last == first else low + (high - low) * (rows - first) / (last - first)

    def step_ms(
        self,
        rows: int,
        kv_tokens: int,
        *,
        sum_ranks: int = 0,
        max_rank: int = 0,
        prompt_tokens: int = 0,
    ) -> float:
        """rows: that decode. kv_tokens: that they attend to."""
        found = self.base_ms(rows) + self.kv_token_ms * (kv_tokens - self.context * rows)
        if max_rank:
            found += self.adapter_ms + self.row_ms * rows
            found += self.rank_ms * sum_ranks + self.max_rank_ms * max_rank
        prompt_ms = self.adapter_prompt_token_ms if max_rank else self.prompt_token_ms
        return max(found, self.points[0][1] / 2) + prompt_ms * prompt_tokens


def curve_of(document: Mapping[str, Any]) -> Curve:
    """One entry of the packaged curves, or of plan_check.py, whose GPU and shape may be told with their sizes."""
    values = dict(document)
    gpu, shape = values.pop("gpu"), values.pop("shape")
    gpu = Gpu(**gpu) if isinstance(gpu, dict) else GPUS[gpu]
    shape = Shape(**shape) if isinstance(shape, dict) else SHAPES[shape]
    points = [(int(rows), float(ms)) for rows, ms in values.pop("points")]
    return Curve(gpu=gpu, shape=shape, points=points, **values)


def find_curve(curves: Sequence[Curve], gpu: Gpu, shape: Shape) -> Curve:
    """The measured one, or one that is scaled from the nearest."""
    for curve in curves:
        if (curve.gpu.name, curve.shape) == (gpu.name, shape):
            return replace(curve, shape=shape)
    nearest = [c for c in curves if c.shape == shape] or [c for c in curves if c.gpu.name == gpu.name] or list(curves)
    if not nearest:
        raise CannotPlan("there is no measured curve")
    return scaled(max(nearest, key=lambda c: (c.gpu.name, c.shape.name) == _REFERENCE), gpu, shape)


def floor_ms(gpu: Gpu, shape: Shape, rows: int, context: int) -> float:
    """The time to read weights and KV once, or to multiply, whichever is longer."""
    read = 2 * shape.step_elements + rows * context * shape.kv_token_bytes
    return max(read / gpu.read_tb_s / 1e9, 2 * shape.step_elements * rows / gpu.matrix_tflops / 1e9)


def scaled(curve: Curve, gpu: Gpu, shape: Shape) -> Curve:
    """By a roofline: what the step of the measured pair takes beyond its floor, by layers, and the new pair's floor."""
    layers = shape.layers / curve.shape.layers

    def point(rows: int, ms: float) -> tuple[int, float]:
        beyond = ms - floor_ms(curve.gpu, curve.shape, rows, curve.context)
        return rows, floor_ms(gpu, shape, rows, curve.context) + beyond * layers

    read = curve.gpu.read_tb_s / gpu.read_tb_s
    multiplied = shape.step_elements / curve.shape.step_elements * curve.gpu.matrix_tflops / gpu.matrix_tflops
    ranks = shape.rank_bytes / curve.shape.rank_bytes * read
    return replace(
        curve,
        gpu=gpu,
        shape=shape,
        points=[point(rows, ms) for rows, ms in curve.points],
        kv_token_ms=kv_token_ms(gpu, shape),
        rank_ms=curve.rank_ms * ranks,
        row_ms=curve.row_ms * ranks,
        **{name: getattr(curve, name) * layers for name in _KERNEL_TERMS},
        prompt_token_ms=curve.prompt_token_ms * multiplied,
        adapter_prompt_token_ms=curve.adapter_prompt_token_ms * multiplied,
        is_measured=False,
        origin=f"estimated: scaled by bytes and multiplications from {curve.shape.name} on {curve.gpu.name}",
    )


def with_fp8_kv(curve: Curve) -> Curve:
    """By half the bytes of KV that a step reads. Raises CannotPlan."""
    if not curve.gpu.has_fp8:
        raise CannotPlan(f"--kv-cache-dtype fp8: {curve.gpu.name} has no FP8, and workers refuse it there")
    saved_ms = curve.kv_token_ms / 2
    return replace(
        curve,
        shape=replace(curve.shape, kv_element_bytes=1),
        points=[(rows, ms - rows * curve.context * saved_ms) for rows, ms in curve.points],
        kv_token_ms=curve.kv_token_ms - saved_ms,
        is_measured=False,
        origin=f"{curve.origin}; of KV in fp8 estimated: by half its bytes",
    )


def kv_token_ms(gpu: Gpu, shape: Shape) -> float:
    return shape.kv_token_bytes / (gpu.read_tb_s * _ATTENTION_SHARE) / 1e9
