"""Steps of several ranks: what two GPUs were measured to take, and what is made of it for others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from manylora.capacity.files import packaged_curves
from manylora.capacity.planning.curve import Curve, find_curve, floor_ms, with_quantization
from manylora.capacity.planning.shapes import CONFIGS, GPUS, SHAPES, CannotPlan, shape_of
from manylora.capacity.planning.sums import WORKERS_SUM_BY, sums_us, with_ranks
from manylora_worker.models import build
from manylora_worker.models.ranks import follower
from manylora_worker.models.ranks.group import RankGroup

from bench import curves as made
from bench import shapes as bench_shapes
from tests.capacity.test_curve import predicted

PACKAGED = packaged_curves()
REFERENCE = "llama-3.1-8b"
MEASURED = [
    (gpu, line)
    for gpu, machine in made.MACHINES.items()
    for line in made.lines(machine, "engine-two-gpus.jsonl")
    if line.get("tensor_parallel") == 2 and line["case"].startswith("decode")
]


def config_of(shape: str) -> Mapping[str, Any]:
    return CONFIGS[shape] if shape in CONFIGS else bench_shapes.SHAPES[shape]().to_dict()


def shared(gpu: str, shape: str, ranks: int = 2, sum_by: str = WORKERS_SUM_BY, kind: str = "none") -> Curve:
    config = config_of(shape)
    whole = find_curve(PACKAGED, GPUS[gpu], shape_of(config, shape))
    if kind != "none":
        whole = with_quantization(whole, shape_of(config, shape, kind), PACKAGED)
    return with_ranks(whole, shape_of(config, shape, kind, ranks=ranks), PACKAGED, sum_by)


def off_by(line: made.Line) -> float:
    """How far a plan of two GPUs may be off, of what was measured."""
    if line["shape"] == REFERENCE and line["quantization"] == "none":
        return 0.05 if line["adapters"] else 0.001
    off = {REFERENCE: 0.13, "llama-70b": 0.08, "30b-a3b": 0.1, "qwen3.5-9b": 0.12, "granite-4.0-h-small": 0.24}
    return off[line["shape"]]


def test_workers_sum_as_the_plan_takes_them_to() -> None:
    sources = [Path(module.__file__ or "").read_text() for module in (build, follower)]
    assert all("RankGroup(" in each and "is_symmetric" not in each for each in sources)
    by_default = inspect.signature(RankGroup).parameters["is_symmetric"].default
    assert by_default == (WORKERS_SUM_BY == "two-shot")


def test_a_rank_reads_what_the_bench_says() -> None:
    """Which counted the tensors that a rank had on its GPU."""
    assert MEASURED
    for gpu, line in MEASURED:
        rows = line["batch"]
        shape = shape_of(config_of(line["shape"]), "of a rank", line["quantization"], ranks=2)
        if line["case"] == "decode-base":
            assert floor_ms(GPUS[gpu], shape, rows, line["context"]) == pytest.approx(line["floor_ms"], rel=0.01), line


def test_two_gpus_are_what_was_measured_and_other_models_near_it() -> None:
    """Others' steps are made of one GPU's and of what two took more with the 8B; nothing was fitted to their own."""
    for gpu, line in MEASURED:
        curve = shared(gpu, line["shape"], sum_by=line["all_reduce"], kind=line["quantization"])
        assert predicted(curve, line) == pytest.approx(line["ms_per_step"], rel=off_by(line)), line
        assert not curve.is_measured


def test_prompts_of_two_gpus_are_near_what_was_measured() -> None:
    found = [
        (gpu, line)
        for gpu, machine in made.MACHINES.items()
        for line in made.lines(machine, "engine-two-gpus.jsonl")
        if line["case"].startswith("prefill") and line["context"] == 512
    ]
    assert found
    for gpu, line in found:
        curve = shared(gpu, line["shape"])
        a_token = curve.adapter_prompt_token_ms if line["adapters"] else curve.prompt_token_ms
        assert a_token == pytest.approx(1e3 / line["tokens_per_s"], rel=0.04), line


def test_sums_take_longer_with_more_bytes() -> None:
    for gpu in ("H100", "H200"):
        table = sums_us(GPUS[gpu], PACKAGED, WORKERS_SUM_BY)
        assert [us for _, us in table] == sorted(us for _, us in table)
        assert shared(gpu, REFERENCE).origin.endswith(f"sums over the ranks as on two {gpu}")


def test_more_ranks_have_less_each_and_sum_longer() -> None:
    two, four, eight = (shared("H100", "llama-70b", ranks) for ranks in (2, 4, 8))
    assert two.base_ms(8) > four.base_ms(8) > eight.base_ms(8) > two.base_ms(8) / 4
    assert two.prompt_token_ms > four.prompt_token_ms > eight.prompt_token_ms > two.prompt_token_ms / 4
    assert four.shape.kv_token_bytes * 2 == two.shape.kv_token_bytes
    assert four.kv_token_ms == pytest.approx(two.kv_token_ms / 2)
    assert four.load_host_mb_s / four.shape.rank_bytes == pytest.approx(two.load_host_mb_s / two.shape.rank_bytes)
    assert four.origin.endswith("as on two H100, more of which were not measured")


def test_quantized_weights_and_mixtures_are_shared_too() -> None:
    mixture = SHAPES["30b-a3b"]
    whole = with_quantization(
        find_curve(PACKAGED, GPUS["H100"], mixture), shape_of(CONFIGS[mixture.name], mixture.name, "fp8"), PACKAGED
    )
    half = with_ranks(whole, shape_of(CONFIGS[mixture.name], mixture.name, "fp8", ranks=2), PACKAGED)
    for rows in (8, 64):
        floor = floor_ms(half.gpu, half.shape, rows, half.context)
        assert floor < half.base_ms(rows) < whole.base_ms(rows)
    assert half.shape.expert_bytes < 0.51 * whole.shape.expert_bytes
    assert (half.shape.quantization, half.shape.ranks) == ("fp8", 2)


def test_gpus_whose_links_were_not_measured_are_refused() -> None:
    with pytest.raises(CannotPlan, match="--tensor-parallel: not planned for on L40S"):
        shared("L40S", REFERENCE)
    with pytest.raises(CannotPlan, match="--tensor-parallel: sums by nccl were not measured on H200"):
        sums_us(GPUS["H200"], PACKAGED, "nccl")
