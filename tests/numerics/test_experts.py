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
from manylora_worker.models.layers.mixture import LoraExperts
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from manylora_worker.weights.source import AdapterInvalid, read_adapter
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import ATTENTION, MLP, Reference, save_adapter
from tests.numerics.driver import LIMITS, Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.mixtures import OWN_PATTERNS, RECIPES, TOLERANCE, Mixture, check_mixed_batch, make_mixture

pytestmark = OWN_PATTERNS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return make_mixture(tmp_path_factory.mktemp("mixture"))


def test_a_mixed_batch_has_the_logits_and_greedy_tokens_of_each_alone(mixture: Mixture) -> None:
    check_mixed_batch(mixture)


@pytest.mark.parametrize(
    "family", ["mixtral", "glm4_moe", "dots1", pytest.param("qwen2_moe", marks=pytest.mark.wide), "olmoe"]
)
def test_other_mixtures_that_our_decoder_runs(family: str, tmp_path: Path) -> None:
    other = make_mixture(tmp_path, family)
    weights = trusted_weights(other.loaded)
    assert weights is not None
    assert weights.has_kernels == (family != "olmoe")  # which norms all heads of a query together
    check_mixed_batch(other)


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
    assert loaded.spec.modules[f"{stack}.7.down_proj"] == (48, 64)
    assert {slot.path for site in loaded.sites for slot in site.slots} == set(loaded.spec.modules)
    dense = 64 * (64 + 32 + 32) + 64 * 64
    active = 3 * dense + 3 * 64 * 96 + 2 * (64 * 8 + 3 * 3 * 64 * 48)
    assert _active_parameters(loaded.spec) == active


@pytest.mark.parametrize("name", ["LoraRouter", "LoraExperts"])
def test_blocks_that_compute_otherwise_stay_as_they_are(
    mixture: Mixture, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts behind a router that is not ours are ours all the same."""
    ours = getattr(experts_module, name).forward

    def other(self: Any, x: torch.Tensor, *more: torch.Tensor) -> Any:
        found = ours(self, x, *more)
        return found * 1.1 if more else (found[0], found[1] * 1.1, found[2])

    monkeypatch.setattr(getattr(experts_module, name), "forward", other)
    loaded = load_model(str(mixture.folder))
    router = "model.layers.0.mlp.gate"
    assert (len(loaded.spec.experts), router in loaded.spec.modules) == (2 if name == "LoraRouter" else 0, False)
    what = f"the router of {router.removesuffix('.gate')}" if name == "LoraRouter" else router.removesuffix(".gate")
    assert f"{what} is none as we know it: it runs as transformers wrote it" in caplog.text
    check_against_eager(loaded, _planner(loaded))


def test_experts_without_whole_blocks_of_nf4_are_refused(mixture: Mixture) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    with pytest.raises(ModelRefused, match=r"layers\.0\.mlp\.experts\.down_proj: nf4: 48 inputs: .* blocks of 64"):
        load_model(str(mixture.folder), quantization="nf4")


def test_mlp_names_are_those_of_experts(mixture: Mixture, tmp_path: Path) -> None:
    """peft 0.21 makes target_parameters of them, at twice the rank where gate and up are one."""
    model = AutoModelForCausalLM.from_pretrained(mixture.folder, dtype=torch.float32)
    folder = save_adapter(model, tmp_path / "mlp", 9, r=2, lora_alpha=3, target_modules=MLP)
    driver = Driver(make_runner(mixture.loaded))
    uid = put_adapter(driver.runner, mixture.loaded, folder)
    prompt = prompts(1, seed=4)[0]
    expected = Reference(model.eval(), {"mlp": folder}).logits(prompt, "mlp")[-1]
    torch.testing.assert_close(driver.logits([Stream(prompt, uid)])[0], expected, atol=TOLERANCE, rtol=0)


def test_behind_a_router_that_is_not_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its adapters are on all but the router; one of the router is refused."""
    named = {"all-linear": {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]}}
    mixture = make_mixture(tmp_path, "dots1_in_groups", RECIPES | named)
    assert "the router of model.layers.1.mlp is none as we know it" in caplog.text
    check_mixed_batch(mixture)
    model = AutoModelForCausalLM.from_pretrained(mixture.folder, dtype=torch.float32)
    folder = save_adapter(model, tmp_path / "router", 9, r=2, target_modules=[], target_parameters=["gate.weight"])
    with pytest.raises(AdapterInvalid, match=r"the base model has no linear layer model\.layers\.1\.mlp\.gate"):
        read_adapter(folder, mixture.loaded.adapter_base(), LIMITS)
