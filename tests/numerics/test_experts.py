"""Mixtures of experts against transformers + peft, one request at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.composition import Part, key_of
from manylora_worker.models import experts as experts_module
from manylora_worker.models.build import _active_parameters, _planner
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.experts import find_experts
from manylora_worker.models.layers.mixture import LoraExperts
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import MLP, Reference, save_adapter
from tests.numerics.driver import Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.mixtures import OWN_PATTERNS, TOLERANCE, Mixture, check_mixed_batch, make_mixture

pytestmark = OWN_PATTERNS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return make_mixture(tmp_path_factory.mktemp("mixture"))


def test_a_mixed_batch_has_the_logits_and_greedy_tokens_of_each_alone(mixture: Mixture) -> None:
    check_mixed_batch(mixture)


def test_a_composition_is_the_weighted_sum(mixture: Mixture) -> None:
    """At one expert block behind which nothing else differs: the logits of A + 0.5 B lie where the parts' deltas do."""
    driver = Driver(make_runner(mixture.loaded, num_blocks=300))
    whole, half = (put_adapter(driver.runner, mixture.loaded, mixture.adapters[name]) for name in ("stacks", "stacks"))
    prompt = prompts(1, seed=3)[0]
    once, composed = driver.logits([Stream(prompt, whole), Stream(prompt, key_of([Part(half, 1.0)]))])
    torch.testing.assert_close(once, composed, atol=TOLERANCE, rtol=0)
    (scaled,) = driver.logits([Stream(prompt, key_of([Part(whole, 0.5)]))])
    halved = shutil.copytree(mixture.adapters["stacks"], mixture.folder.parent / "halved", dirs_exist_ok=True)
    config = json.loads((halved / "adapter_config.json").read_text())
    (halved / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] / 2}))
    uid = put_adapter(driver.runner, mixture.loaded, halved)
    torch.testing.assert_close(driver.logits([Stream(prompt, uid)])[0], scaled, atol=TOLERANCE, rtol=0)


def test_what_is_loaded(mixture: Mixture) -> None:
    loaded = mixture.loaded
    check_against_eager(loaded, _planner(loaded))
    assert trusted_weights(loaded) is not None
    assert sum(isinstance(module, LoraExperts) for module in loaded.model.modules()) == 2
    stack = "model.layers.0.mlp.experts"
    assert loaded.spec.experts.keys() == {stack, "model.layers.2.mlp.experts"}
    assert loaded.spec.modules[f"{stack}.7.down_proj"] == (40, 64)
    assert {slot.path for site in loaded.sites for slot in site.slots} == set(loaded.spec.modules)
    dense = 64 * (64 + 32 + 32) + 64 * 64
    active = 3 * dense + 3 * 64 * 96 + 2 * (64 * 8 + 3 * 3 * 64 * 40)
    assert _active_parameters(loaded.spec) == active


def test_blocks_that_compute_otherwise_stay_as_they_are(
    mixture: Mixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = experts_module.LoraRouter.forward

    def other(self: Any, x: torch.Tensor) -> Any:
        logits, shares, experts = chosen(self, x)
        return logits, shares * 1.1, experts

    monkeypatch.setattr(experts_module.LoraRouter, "forward", other)
    loaded = load_model(str(mixture.folder))
    assert not loaded.spec.experts
    assert "runs as transformers wrote it" in caplog.text
    assert len(find_experts(loaded.model)) == 2


@pytest.mark.parametrize("quantization", ["nf4", "fp8"])
def test_quantized_it_is_refused(mixture: Mixture, quantization: Any) -> None:
    with pytest.raises(ModelRefused, match=f"qwen3_moe: a mixture of experts .* --quantization {quantization}"):
        load_model(str(mixture.folder), quantization=quantization)


def test_mlp_names_are_those_of_experts(mixture: Mixture, tmp_path: Path) -> None:
    """peft 0.21 makes target_parameters of them, at twice the rank where gate and up are one."""
    model = AutoModelForCausalLM.from_pretrained(mixture.folder, dtype=torch.float32)
    folder = save_adapter(model, tmp_path / "mlp", 9, r=2, lora_alpha=3, target_modules=MLP)
    driver = Driver(make_runner(mixture.loaded))
    uid = put_adapter(driver.runner, mixture.loaded, folder)
    prompt = prompts(1, seed=4)[0]
    expected = Reference(model.eval(), {"mlp": folder}).logits(prompt, "mlp")[-1]
    torch.testing.assert_close(driver.logits([Stream(prompt, uid)])[0], expected, atol=TOLERANCE, rtol=0)
