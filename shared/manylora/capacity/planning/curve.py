"""How long a step of an engine takes: a curve that was measured, or scaled from one that was.

base(rows)                                  between measured points; beyond the last along the last two
+ kv_token_ms * (tokens of KV - context * rows)    what contexts are longer than those measured
+ adapter_ms + row_ms * rows + rank_ms * (sum of the distinct adapters' ranks) + max_rank_ms * greatest rank
+ prompt_token_ms * prompt tokens           prompts share the step with those that decode
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manylora.capacity.planning.shapes import GPUS, SHAPES, CannotPlan, Gpu, Shape, shape_of

_ATTENTION_SHARE = 0.8  # of the read ceiling, that reading KV reaches
_REFERENCE = ("H200", "llama-3.1-8b")  # the pair of which most was measured
_FINE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_OLD_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "is_tied": "tie_word_embeddings",
}
_BY_KIND = ("quantized", "of_two")
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
    # by `--quantization`, rows and milliseconds of a step beyond those of bf16, less what fewer bytes save
    quantized: Mapping[str, Sequence[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    # by how two ranks sum, rows and milliseconds of their step
    of_two: Mapping[str, Sequence[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    unpack_ms: float = 0.0  # of all experts' codes, beyond reading them

    def base_ms(self, rows: int) -> float:
        """A step of prompts alone reads the weights, too: it counts as one of a row."""
        return between(self.points, rows)

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
        if prompt_tokens and self.shape.experts:
            found += self._more_experts_ms(max(1, rows), prompt_tokens)
        prompt_ms = self.adapter_prompt_token_ms if max_rank else self.prompt_token_ms
        return max(found, self.points[0][1] / 2) + prompt_ms * prompt_tokens

    def _more_experts_ms(self, rows: int, prompt_tokens: int) -> float:
        """Those that prompts alone go to are read, too."""
        shape = self.shape
        share = shape.idle_share(rows) - shape.idle_share(rows + prompt_tokens)
        return share * (shape.expert_bytes / self.gpu.read_tb_s / 1e9 + self.unpack_ms)


def between(points: Sequence[tuple[int, float]], rows: float) -> float:
    if rows <= points[0][0]:
        return points[0][1]
    at = min(bisect.bisect_left(points, (rows, 0.0)), len(points) - 1)
    (first, low), (last, high) = points[max(0, at - 1)], points[at]
    return high if last == first else low + (high - low) * (rows - first) / (last - first)


def curve_of(document: Mapping[str, Any]) -> Curve:
    """One entry of the packaged curves, or of plan_check.py, whose GPU and shape may be told with their sizes."""
    values = dict(document)
    gpu, shape = values.pop("gpu"), values.pop("shape")
    gpu = Gpu(**gpu) if isinstance(gpu, dict) else GPUS[gpu]
    shape = _told_shape(shape) if isinstance(shape, dict) else SHAPES[shape]
    points = _points(values.pop("points"))
    for name in _BY_KIND:
        values[name] = {kind: _points(own) for kind, own in values.get(name, {}).items()}
    return _fine(Curve(gpu=gpu, shape=shape, points=points, **values))


def _told_shape(told: Mapping[str, Any]) -> Shape:
    """Files of before told a dense model's sizes."""
    if "hidden" not in told:
        return Shape(**told)
    config = {key: told[name] for name, key in _OLD_NAMES.items()}
    return shape_of(config, told["name"])


def _points(told: Iterable[Sequence[float]]) -> list[tuple[int, float]]:
    return [(int(rows), float(ms)) for rows, ms in told]


def _fine(curve: Curve) -> Curve:
    """Experts that rows reach become more in no straight line: what lies between two points follows the floor."""
    shape, last = curve.shape, curve.points[-1][0]
    if not shape.experts:
        return curve
    beyond = [(rows, ms - floor_ms(curve.gpu, shape, rows, curve.context)) for rows, ms in curve.points]
    rows_of = sorted({rows for rows, _ in curve.points} | {rows for rows in _FINE if rows <= 4 * last})
    return replace(
        curve,
        points=[(n, floor_ms(curve.gpu, shape, n, curve.context) + between(beyond, n)) for n in rows_of],
    )


def find_curve(curves: Sequence[Curve], gpu: Gpu, shape: Shape) -> Curve:
    """The measured one, or one that is scaled from the nearest."""
    for curve in curves:
        if (curve.gpu.name, curve.shape) == (gpu.name, shape):
            return replace(curve, shape=shape)
    if not curves:
        raise CannotPlan("there is no measured curve")

    def nearness(curve: Curve) -> tuple[bool, ...]:
        experts, states = (a == b for a, b in zip(curve.shape.kind, shape.kind, strict=True))
        is_reference = (curve.gpu.name, curve.shape.name) == _REFERENCE
        return curve.shape == shape, experts, states, curve.gpu.name == gpu.name, is_reference

    return scaled(max(curves, key=nearness), gpu, shape)


def floor_ms(gpu: Gpu, shape: Shape, rows: int, context: int) -> float:
    """The time to read weights and KV once, or to multiply, whichever is longer."""
    read = shape.read_bytes(rows) + rows * context * shape.kv_token_bytes
    return max(read / gpu.read_tb_s / 1e9, 2 * shape.row_elements * rows / gpu.matrix_tflops / 1e9)


def scaled(curve: Curve, gpu: Gpu, shape: Shape) -> Curve:
    """By a roofline: the new pair's floor, and what the step of the measured pair takes beyond its own. Of that what
    one row takes counts by layers, for it is of launches, and what more rows take by multiplications.
    """
    layers = shape.layers / curve.shape.layers
    launches = curve.points[0][1] - floor_ms(curve.gpu, curve.shape, curve.points[0][0], curve.context)

    def point(rows: int, ms: float) -> tuple[int, float]:
        beyond = ms - floor_ms(curve.gpu, curve.shape, rows, curve.context) - launches
        return rows, floor_ms(gpu, shape, rows, curve.context) + launches * layers + beyond * multiplied

    read = curve.gpu.read_tb_s / gpu.read_tb_s
    multiplied = shape.row_elements / curve.shape.row_elements * curve.gpu.matrix_tflops / gpu.matrix_tflops
    ranks = shape.rank_bytes / curve.shape.rank_bytes * read
    estimate = replace(
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
        quantized={},
        of_two={},
    )
    return _fine(estimate)


def with_quantization(curve: Curve, shape: Shape, curves: Sequence[Curve]) -> Curve:
    """shape: the curve's, with quantized weights. By the bytes that it reads less, and what unpacking them took on the
    measured pair: of layers by multiplications, of a mixture by the experts that rows reach. Raises
    CannotPlan.
    """
    kind, gpu = shape.quantization, curve.gpu
    if (kind == "fp8" and not gpu.has_fp8) or (kind in ("int4", "nf4") and not gpu.is_hopper):
        raise CannotPlan(
            f"--quantization {kind}: not planned for on {gpu.name}, where it is refused or was not measured"
        )
    source = _unpacked_as(curve, kind, curves)
    is_own = (source.gpu.name, source.shape) == (gpu.name, curve.shape)
    tflops = source.gpu.matrix_tflops / gpu.matrix_tflops
    more = source.quantized[kind]

    def unpacked_ms(rows: int) -> float:
        if source.shape.experts:
            return between(more, rows) * curve.shape.reached_bytes(rows) / source.shape.reached_bytes(rows) * tflops
        return between(more, rows) * curve.shape.row_elements * layers

    def point(rows: int, ms: float) -> tuple[int, float]:
        saved_ms = floor_ms(gpu, curve.shape, rows, curve.context) - floor_ms(gpu, shape, rows, curve.context)
        return rows, ms - saved_ms + unpacked_ms(rows)

    # Beyond the rows that are multiplied with codes a layer's weight is rebuilt: a prompt's tokens are such rows. Of
    # a step's rows an expert has few.
    layers = tflops / source.shape.row_elements
    (first, low), (last, high) = more[-2], more[-1]
    token_ms = max(0.0, (high - low) / (last - first)) * curve.shape.row_elements * layers
    unpack_ms = 0.0
    if source.shape.experts:
        experts = curve.shape.expert_bytes / source.shape.reached_bytes(last)
        token_ms, unpack_ms = 0.0, high * experts * tflops
    how = "measured, with prompts estimated" if is_own else f"estimated from {source.shape.name} on {source.gpu.name}"
    return replace(
        curve,
        shape=shape,
        points=[point(rows, ms) for rows, ms in curve.points],
        prompt_token_ms=curve.prompt_token_ms + token_ms,
        adapter_prompt_token_ms=curve.adapter_prompt_token_ms + token_ms,
        unpack_ms=unpack_ms,
        is_measured=curve.is_measured and is_own,
        origin=f"{curve.origin}; of weights in {kind} {how}",
    )


def _unpacked_as(curve: Curve, kind: str, curves: Sequence[Curve]) -> Curve:
    """The measured pair whose weights in codes are nearest."""
    gpu, shape = curve.gpu.name, curve.shape
    measured = [c for c in curves if kind in c.quantized and (c.shape.experts > 0) == (shape.experts > 0)]
    if not measured:
        raise CannotPlan(f"--quantization {kind}: was not measured")
    return max(measured, key=lambda c: ((c.gpu.name, c.shape) == (gpu, shape), c.gpu.name == gpu))


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
