"""Step curves: what was measured comes out again, and the estimate of another GPU against its measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from manylora.capacity.files import packaged_curves
from manylora.capacity.planning.curve import Curve, curve_of, find_curve, scaled
from manylora.capacity.planning.shapes import GPUS, SHAPES

from bench import curves as made

CURVES = {curve.gpu.name: curve for curve in packaged_curves()}
SHAPE = SHAPES["llama-3.1-8b"]


def measured(gpu: str) -> list[made.Line]:
    found = [line for name in made.ENGINE_FILES for line in made.lines(made.MACHINES[gpu], name)]
    return [line for line in found if line["case"] in (*made.ADAPTER_CASES, "decode-base")]


def predicted(curve: Curve, line: made.Line) -> float:
    _, _, ranks, greatest = made.features(line) if line["adapters"] else (0, 0, 0, 0)
    rows = line["batch"]
    return curve.step_ms(rows, rows * line["context"], sum_ranks=int(ranks), max_rank=int(greatest))


def test_the_packaged_curves_are_what_the_results_say() -> None:
    """Else `python -m bench.curves` writes them anew. The way through the services differs from run to run."""
    found = json.loads(made.written(list(made.curves())))
    for kept, new in zip(json.loads(made.CURVES.read_text()), found, strict=True):
        assert kept.keys() == new.keys()
        for name, value in new.items():
            within = 1.0 if name == "service_ms" else 1e-3
            assert kept[name] == (pytest.approx(value, rel=within) if isinstance(value, float) else value), name


@pytest.mark.parametrize("gpu", list(CURVES))
def test_a_curve_gives_the_measured_steps_again(gpu: str) -> None:
    for line in measured(gpu):
        assert predicted(CURVES[gpu], line) == pytest.approx(line["ms_per_step"], rel=0.05), line


@pytest.mark.parametrize(("gpu", "other"), [("H100", "H200"), ("H200", "H100")])
def test_a_curve_scaled_to_the_other_gpu_is_near_its_measurement(gpu: str, other: str) -> None:
    estimate = scaled(CURVES[other], GPUS[gpu], SHAPE)
    assert not estimate.is_measured
    assert other in estimate.origin
    for line in measured(gpu):
        within = 0.15 if line["batch"] > 64 else 0.08
        assert predicted(estimate, line) == pytest.approx(line["ms_per_step"], rel=within), line


def test_the_measured_pair_is_found_and_others_are_estimated() -> None:
    assert find_curve(packaged_curves(), GPUS["H100"], SHAPE) == CURVES["H100"]
    folder = find_curve(packaged_curves(), GPUS["H100"], replace(SHAPE, name="my-llama"))
    assert (folder.is_measured, folder.shape.name) == (True, "my-llama"), "a folder of the same shape was measured, too"
    qwen = find_curve(packaged_curves(), GPUS["H100"], SHAPES["qwen3-8b"])
    assert qwen.origin == "estimated: scaled by bytes and multiplications from llama-3.1-8b on H100"
    small = find_curve(packaged_curves(), GPUS["L4"], SHAPE)
    assert small.base_ms(1) > 10 * CURVES["H200"].base_ms(1)  # 4.57 to 0.27 TB/s


def test_a_step_grows_with_all_that_it_does() -> None:
    curve = CURVES["H200"]
    base = curve.step_ms(32, 32 * 256)
    assert curve.step_ms(64, 64 * 256) > base
    assert curve.step_ms(32, 32 * 4096) > base
    assert curve.step_ms(32, 32 * 256, prompt_tokens=512) == pytest.approx(base + 512 * curve.prompt_token_ms)
    one = curve.step_ms(32, 32 * 256, sum_ranks=16, max_rank=16)
    assert base < one < curve.step_ms(32, 32 * 256, sum_ranks=16 * 32, max_rank=16)
    assert one < curve.step_ms(32, 32 * 256, sum_ranks=64, max_rank=64)


def test_a_curve_of_ones_own_names_its_gpu_and_shape_with_their_sizes() -> None:
    kept = json.loads(made.CURVES.read_text())[0]
    own = {**kept, "gpu": asdict(GPUS["H100"]), "shape": asdict(SHAPE)}
    assert curve_of(own) == curve_of(kept) == CURVES["H100"]
