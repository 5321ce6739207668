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
from manylora_worker.models.checkpoint import ModelRefused, Quantization
from manylora_worker.models.layers.delta_net import find_delta_nets
from manylora_worker.models.layers.lora_linear import LoraLinear
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.torch.eager_check import check_against_eager
from manylora_worker.weights.coverage import coverage_of
from manylora_worker.weights.source import read_adapter
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.numerics.adapters import save_adapter
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import (
    LIMITS,
    NEVER_STACK,
    Driver,
    Stream,
    make_runner,
    mixed_streams,
    prompts,
    put_adapter,
)
from tests.numerics.mixtures import OWN_PATTERNS, check_mixed_batch, make_mixture
from tests.numerics.quantizing import FORMATS, ship
from tests.numerics.test_checkpoint import PROMPT, logits_of, published
from tests.numerics.test_engine_against_peft import TOLERANCE, check_next_logits

FAMILY = "qwen3_5_text"


def test_mixed_batch_logits(family_of: FamilyOf) -> None:
    check_next_logits(family_of, FAMILY, NEVER_STACK, num_blocks=300)


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


@pytest.mark.parametrize(
    ("name", "quantization"), [("fp8", "none"), ("fp8", "fp8"), ("gptq", "none"), ("gptq", "int4")]
)
def test_the_text_part_of_a_quantized_model_of_text_and_images(
    name: str, quantization: Quantization, tmp_path: Path
) -> None:
    """Beside it stand images' layers and a draft's, which are not read. Of what reads one input of a delta net a part
    is quantized.
    """
    reference = published("qwen3.5", tmp_path / "plain", of=AutoModelForImageTextToText)
    folder = tmp_path / "qwen"
    stands_for = ship(tmp_path / "plain", folder, name)
    weights = load_file(folder / "model.safetensors")
    for path in [path for path in weights if path.endswith(".in_proj_qkv.weight")]:
        parts, stands_for[path] = FORMATS[name][1](weights.pop(path).float())
        weights |= {f"{path.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    reference.load_state_dict(stands_for, strict=False)
    whole = [path for path in weights if re.search(r"in_proj_[zab]\.", path)]
    assert all(path.startswith("model.language_model.layers.") for path in whole)
    assert any(path.startswith("model.visual.") for path in weights)
    own = {path: each for path, each in weights.items() if ".layers.3." in path}
    drafts = {path.replace("model.language_model", "mtp"): each.clone() for path, each in own.items()}
    save_file(weights | drafts, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if name == "fp8":
        config["quantization_config"]["modules_to_not_convert"] = [path.removesuffix(".weight") for path in whole]
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(str(folder), quantization=quantization)
    driver = Driver(make_runner(loaded))
    kept = sum(isinstance(module, QuantizedLinear) for module in loaded.model.modules())
    assert bool(kept) == (quantization != "none")
    loras = [module for module in loaded.model.modules() if isinstance(module, LoraLinear)]
    inputs = [each.base for each in loras if each.site.slots[0].path.endswith("in_proj_qkv")]
    assert inputs
    assert not any(isinstance(each, QuantizedLinear) for each in inputs), "as it was rebuilt"
    torch.testing.assert_close(driver.logits([Stream(PROMPT)])[0], logits_of(reference, PROMPT), atol=1e-3, rtol=0)
    if name == "fp8":
        config["quantization_config"]["modules_to_not_convert"] = []
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelRefused, match=r"model\.layers\.0\.linear_attn\.in_proj_\w+: is not quantized"):
            load_model(str(folder), quantization=quantization)


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
