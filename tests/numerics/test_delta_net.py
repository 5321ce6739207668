"""Gated delta nets beside attention (Qwen3.5) against transformers + peft: states go from chunk to chunk, and adapters
stand on every kind of layer that such a model has."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.config import WorkerConfig
from manylora_worker.hosting.engine import host
from manylora_worker.kinds.api import StepBatch
from manylora_worker.models.build import _planner, build_engine
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.layers.delta_net import find_delta_nets
from manylora_worker.models.loader import _check_states, load_model
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.torch.eager_check import check_against_eager
from manylora_worker.weights.coverage import coverage_of
from manylora_worker.weights.source import read_adapter
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.numerics.adapters import save_adapter
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import (
    LIMITS,
    NEVER_STACK,
    Driver,
    Stream,
    composed_streams,
    make_runner,
    mixed_streams,
    prompts,
    put_adapter,
)
from tests.numerics.mixtures import OWN_PATTERNS, check_mixed_batch, make_mixture
from tests.numerics.test_checkpoint import PROMPT, logits_of, published
from tests.numerics.test_engine_against_peft import TOLERANCE, assert_next_logits

FAMILY = "qwen3_5_text"


def test_mixed_batch_logits(family_of: FamilyOf) -> None:
    family = family_of(FAMILY)
    driver = Driver(make_runner(family.loaded, num_blocks=300, product_flops=NEVER_STACK))
    mixed = mixed_streams(family, driver)
    mixed += composed_streams(family, mixed)
    streams = [stream for stream, _ in mixed]
    assert_next_logits(family, mixed, driver.logits(streams))
    for step in range(2):
        for stream in streams:
            stream.output.append(stream.prompt[step % len(stream.prompt)])
        assert_next_logits(family, mixed, driver.logits(streams))


def test_greedy_tokens(family_of: FamilyOf) -> None:
    """Chunked prefill, arrivals in mid-flight: chunks and single tokens of many adapters share steps."""
    family = family_of(FAMILY)
    driver = Driver(make_runner(family.loaded, num_blocks=300), seed=1)
    mixed = mixed_streams(family, driver, seed=1)
    streams = [stream for stream, _ in mixed]
    for arrived in range(1, len(streams) + 1):
        driver.step([s for s in streams[:arrived] if len(s.output) < 6], 5)
    driver.run(streams, 6, prefill_tokens=5)
    for stream, adapter in mixed:
        assert stream.output == family.reference.greedy(stream.prompt, adapter, 6)


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_chunked_prefill_equals_whole(family_of: FamilyOf, chunk_tokens: int) -> None:
    family = family_of(FAMILY)
    driver = Driver(make_runner(family.loaded))
    prompt = prompts(1, seed=5, shortest=80, longest=80)[0]  # beyond what the rule takes at once
    whole = driver.logits([Stream(prompt)])
    chunked = Stream(prompt)
    while chunked.num_computed < len(prompt):
        logits = driver.logits([chunked], chunk_tokens)
    torch.testing.assert_close(logits, whole, atol=TOLERANCE, rtol=0)


def test_a_state_that_is_lost_is_felt(family_of: FamilyOf) -> None:
    """So the tests above can fail: the second chunk begins with another sequence's state."""
    driver = Driver(make_runner(family_of(FAMILY).loaded))
    prompt = prompts(1, seed=5, shortest=33, longest=33)[0]
    right, wrong, other = Stream(prompt), Stream(prompt), Stream(prompt[::-1])
    driver.logits([right, wrong, other], 20)
    wrong.blocks[: driver.runner.state_blocks] = other.blocks[: driver.runner.state_blocks]
    found = driver.logits([right, wrong])
    assert (found[0] - found[1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_the_text_part_of_a_model_of_text_and_images(name: str, tmp_path: Path) -> None:
    """Its weights are named as the whole model's."""
    reference = published(name, tmp_path / "qwen", of=AutoModelForImageTextToText)
    loaded = load_model(str(tmp_path / "qwen"))
    assert len(find_delta_nets(loaded.model)) == 3
    driver = Driver(make_runner(loaded))
    stream = Stream(PROMPT)
    driver.logits([stream], 11)
    assert "model.language_model.norm.weight" in load_file(tmp_path / "qwen" / "model.safetensors")
    torch.testing.assert_close(driver.logits([stream])[0], logits_of(reference, PROMPT), atol=1e-4, rtol=0)


def test_quantized_weights_of_a_model_of_text_and_images_are_refused(tmp_path: Path) -> None:
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    published("qwen3.5", tmp_path / "qwen", of=AutoModelForImageTextToText)
    config = tmp_path / "qwen" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantized}))
    with pytest.raises(ModelRefused, match=r"qwen3_5: .*the text part is not read from quantized weights"):
        load_model(str(tmp_path / "qwen"))


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("qwen3.5", AutoModelForImageTextToText),
        ("qwen3.5", AutoModelForCausalLM),
        ("qwen3.5-moe", AutoModelForImageTextToText),
        pytest.param("qwen3.5-moe", AutoModelForCausalLM, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_the_whole_model_and_of_its_text_part(name: str, of: Any, tmp_path: Path) -> None:
    """Whatever class a trainer loaded; what an adapter has for images is left out."""
    reference = published(name, tmp_path / "qwen", of=AutoModelForImageTextToText)
    trained = of.from_pretrained(tmp_path / "qwen", dtype=torch.float32)
    stacks = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} if "moe" in name else {}
    folder = save_adapter(trained, tmp_path / "adapter", 1, r=4, lora_alpha=8, target_modules="all-linear", **stacks)
    loaded = load_model(str(tmp_path / "qwen"))
    driver = Driver(make_runner(loaded))
    uid = put_adapter(driver.runner, loaded, folder)
    is_whole = of is AutoModelForImageTextToText
    wrapped = PeftModel.from_pretrained(reference if is_whole else trained, folder).eval()
    found = driver.logits([Stream(PROMPT, uid)])[0]
    torch.testing.assert_close(found, logits_of(wrapped, PROMPT), atol=5e-4, rtol=0)
    base = loaded.adapter_base()
    adapter = read_adapter(folder, base, LIMITS)
    coverage = coverage_of(folder, adapter.layout, base, adapter.extras)
    routers = {f"{path.removesuffix('experts')}gate" for path in loaded.spec.experts}
    ours = {re.sub(r"experts\.\d+", "experts.*", path) for path in loaded.spec.modules.keys() - routers}
    assert {module.path.replace(".language_model.", ".") for module in coverage.modules} == ours
    assert (coverage.num_left_out > 0) == is_whole
    assert all("visual" in name for name in coverage.left_out)


@OWN_PATTERNS
@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_next"])
def test_beside_experts(name: str, tmp_path: Path) -> None:
    """Adapters on delta nets, attention, shared experts and stacks."""
    mixture = make_mixture(tmp_path, name)
    check_mixed_batch(mixture, tolerance=5e-4)
    narrow = load_model(str(mixture.folder), dtype=torch.bfloat16)
    check_against_eager(narrow, _planner(narrow))


def test_what_is_not_there_yet_is_refused_by_name(family_of: FamilyOf) -> None:
    model = family_of(FAMILY).loaded.model
    group: Any = object.__new__(RankGroup)
    with pytest.raises(ModelRefused, match="recurrent layers: not with --tensor-parallel yet"):
        _check_states(model, group)


def test_a_guess_is_not_computed(family_of: FamilyOf) -> None:
    driver = Driver(make_runner(family_of(FAMILY).loaded))
    chunk = replace(driver.chunk(Stream(PROMPT)), num_guesses=1)
    with pytest.raises(AssertionError, match="cannot be taken back"):
        driver.runner.execute(StepBatch([chunk]))


def test_a_worker_has_no_prefix_cache_and_room_for_a_state(
    family_of: FamilyOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = WorkerConfig(
        model=str(family_of(FAMILY).folder), adapter_store=str(tmp_path), device="cpu", num_blocks=10, block_size=4
    )
    assert settings.prefix_cache_share > 0
    with caplog.at_level("INFO"):
        runtime, parts = host(settings, build_engine)
    assert runtime.model.max_context_tokens == 4 * (10 - 2)
    assert "no prefix cache, no speculation; a sequence's state takes 2 of 10 blocks, as 8 tokens do" in caplog.text
    parts.backend.close()
    with pytest.raises(ModelRefused, match="2 blocks hold no sequence: its state in recurrent layers takes 2"):
        build_engine(replace(settings, num_blocks=2))
