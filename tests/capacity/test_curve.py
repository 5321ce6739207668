"""Step curves: what was measured comes out again, and the estimate of another GPU against its measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from manylora.capacity.files import packaged_curves
from manylora.capacity.planning.curve import Curve, curve_of, find_curve, floor_ms, scaled, with_quantization
from manylora.capacity.planning.shapes import CONFIGS, GPUS, SHAPES, CannotPlan, shape_of

from bench import curves as made

PACKAGED = {(curve.gpu.name, curve.shape.name): curve for curve in packaged_curves()}
SHAPE = SHAPES["llama-3.1-8b"]
CURVES = {gpu: curve for (gpu, shape), curve in PACKAGED.items() if shape == SHAPE.name}


def measured(gpu: str, shape: str = SHAPE.name) -> list[made.Line]:
    found = [line for name in made.ENGINE_FILES for line in made.lines(made.MACHINES[gpu], name)]
    cases = (*made.ADAPTER_CASES, "decode-base")
    plain = [line for line in found if line["quantization"] == "none"]
    return [line for line in plain if line["case"] in cases and line["shape"] == shape]


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


@pytest.mark.parametrize(("gpu", "shape"), list(PACKAGED))
def test_a_curve_gives_the_measured_steps_again(gpu: str, shape: str) -> None:
    assert measured(gpu, shape)
    for line in measured(gpu, shape):
        assert predicted(PACKAGED[gpu, shape], line) == pytest.approx(line["ms_per_step"], rel=0.05), line


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


def test_a_floor_is_that_of_the_bench() -> None:
    """It has experts that rows reach, states, and KV of the layers that attend."""
    for gpu, shape in PACKAGED:
        for line in measured(gpu, shape):
            if line["case"] == "decode-base" and line["batch"] <= 64:
                found = floor_ms(GPUS[gpu], SHAPES[shape], line["batch"], line["context"])
                assert found == pytest.approx(line["floor_ms"], rel=0.01), line


def test_a_model_is_scaled_from_one_of_its_kind() -> None:
    """Few rows reach few experts, however many were measured."""

    def origin(gpu: str, shape: str, **other: object) -> str:
        return find_curve(packaged_curves(), GPUS[gpu], shape_of(CONFIGS[shape] | other, "mine")).origin

    assert origin("H200", "80b-a3b").endswith("from 30b-a3b on H200")
    assert origin("H200", "qwen3.5-9b", intermediate_size=4096).endswith("from qwen3.5-9b on H200")
    assert origin("L40S", "qwen3-8b").endswith("from llama-3.1-8b on H200")
    assert origin("H100", "80b-a3b").endswith("from 30b-a3b on H100")
    curve = PACKAGED["H100", "30b-a3b"]
    straight = curve.base_ms(1) + (curve.base_ms(8) - curve.base_ms(1)) * 3 / 7
    assert curve.base_ms(4) > 1.05 * straight
    alone = curve.step_ms(0, 0, prompt_tokens=1)
    assert curve.step_ms(0, 0, prompt_tokens=256) > alone + 15, "all experts"


MEASURED = [
    *(("H100", SHAPE.name, kind, f"engine-{kind}.jsonl") for kind in ("fp8", "int4", "nf4")),
    *(("H200", SHAPE.name, kind, f"engine-{kind}.jsonl") for kind in ("int4", "nf4")),
    ("H100", "30b-a3b", "fp8", "engine-mixture.jsonl"),
    *(("H200", "30b-a3b", kind, "engine-mixture.jsonl") for kind in ("fp8", "int4", "nf4")),
]


@pytest.mark.parametrize(("gpu", "shape", "kind", "file"), MEASURED)
def test_quantized_steps_are_those_that_were_measured(gpu: str, shape: str, kind: str, file: str) -> None:
    packaged = PACKAGED[gpu, shape]
    curve = with_quantization(packaged, shape_of(CONFIGS[shape], shape, kind), packaged_curves())
    assert (curve.is_measured, curve.shape.quantization) == (True, kind)
    assert f"of weights in {kind} measured" in curve.origin
    cases = ("decode-base", "decode-distinct")
    lines = [line for line in made.lines(made.MACHINES[gpu], file) if line["case"] in cases]
    plain = {(line["case"], line["batch"]): line for line in lines if line["quantization"] == "none"}
    own = [line for line in lines if line["quantization"] == kind]
    assert own
    for line in own:
        beside = plain.get((line["case"], line["batch"]))  # bf16 of the same run, where it has that
        times = 1.0 if beside is None else beside["ms_per_step"] / predicted(packaged, beside)
        assert times * predicted(curve, line) == pytest.approx(line["ms_per_step"], rel=0.1), line


def test_quantized_steps_of_another_pair_are_estimated_from_them() -> None:
    def quantized(gpu: str, shape: str, kind: str) -> Curve:
        curve = find_curve(packaged_curves(), GPUS[gpu], SHAPES[shape])
        return with_quantization(curve, shape_of(CONFIGS[shape], shape, kind), packaged_curves())

    hybrid = quantized("H100", "qwen3.5-9b", "fp8")
    assert not hybrid.is_measured
    assert hybrid.origin.endswith("of weights in fp8 estimated from llama-3.1-8b on H100")
    plain = PACKAGED["H100", "qwen3.5-9b"]
    assert 0.4 * plain.base_ms(1) < hybrid.base_ms(1) < 0.8 * plain.base_ms(1)
    assert quantized("L40S", "llama-3.1-8b", "fp8").base_ms(1) < find_curve(
        packaged_curves(), GPUS["L40S"], SHAPE
    ).base_ms(1)
    for gpu, kind in (("A100", "fp8"), ("L40S", "int4")):
        with pytest.raises(CannotPlan, match=f"--quantization {kind}: not planned for on {gpu}"):
            quantized(gpu, "llama-3.1-8b", kind)


@pytest.mark.parametrize("kind", ["fp8", "int4", "nf4"])
def test_experts_in_codes_unpack_as_those_of_the_measured_mixture(kind: str) -> None:
    """By those that rows reach. What prompts alone reach is read and unpacked, too."""
    gpu = "H100" if kind == "fp8" else "H200"
    of = PACKAGED[gpu, "30b-a3b"]
    like = with_quantization(of, shape_of(CONFIGS[of.shape.name], of.shape.name, kind), packaged_curves())
    plain = find_curve(packaged_curves(), GPUS[gpu], SHAPES["80b-a3b"])
    own = shape_of(CONFIGS["80b-a3b"], "80b-a3b", kind)
    curve = with_quantization(plain, own, packaged_curves())
    assert (curve.is_measured, curve.shape.experts) == (False, 512)
    assert curve.origin.endswith(f"of weights in {kind} estimated from 30b-a3b on {gpu}")

    def unpacked(quantized: Curve, bf16: Curve, rows: int) -> float:
        saved = floor_ms(GPUS[gpu], bf16.shape, rows, 256) - floor_ms(GPUS[gpu], quantized.shape, rows, 256)
        return quantized.base_ms(rows) - bf16.base_ms(rows) + saved

    for rows in (1, 8, 64):
        reached = plain.shape.reached_bytes(rows) / of.shape.reached_bytes(rows)
        assert unpacked(curve, plain, rows) == pytest.approx(reached * unpacked(like, of, rows), rel=1e-6), rows
        assert unpacked(curve, plain, rows) > 0, "unpacking takes time"
    more = curve.step_ms(1, 256, prompt_tokens=64) - curve.step_ms(1, 256) - 64 * curve.prompt_token_ms
    share = plain.shape.idle_share(1) - plain.shape.idle_share(65)
    read = own.expert_bytes * share / GPUS[gpu].read_tb_s / 1e9
    whole = unpacked(like, of, 64) * plain.shape.expert_bytes / of.shape.reached_bytes(64)
    assert more == pytest.approx(read + share * whole, rel=1e-6)


def test_few_rows_of_a_mixture_in_fp8_take_less_than_in_bf16() -> None:
    plain = PACKAGED["H100", "30b-a3b"]
    curve = with_quantization(plain, shape_of(CONFIGS["30b-a3b"], "30b-a3b", "fp8"), packaged_curves())
    for rows in (1, 8, 32, 64):
        assert curve.base_ms(rows) < plain.base_ms(rows), rows
