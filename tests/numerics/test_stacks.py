"""Experts' weights that stay in codes: what they stand for, and engines that serve them with adapters on top."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models import experts as experts_module
from manylora_worker.models.build import _planner, weight_bytes
from manylora_worker.models.checkpoint import ModelRefused, Quantization
from manylora_worker.models.layers.mixture import LoraExperts
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.stacks import QuantizedStack, quantized_stack, rebuilt
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import ATTENTION, MLP
from tests.numerics.driver import Driver, Stream, make_runner
from tests.numerics.families import make_model
from tests.numerics.mixtures import OWN_PATTERNS, RECIPES, check_mixed_batch, make_mixture
from tests.numerics.quantizing import PROMPT, fp8, ship, to_fp8_by_output
from tests.numerics.test_checkpoint import logits_of
from tests.numerics.two_ranks import check_logprobs, mixture_family, shared_by_two

pytestmark = OWN_PATTERNS


def test_codes_with_the_experts_ahead() -> None:
    torch.manual_seed(0)
    codes = torch.randint(256, (3, 4, 8), dtype=torch.uint8)
    scales, shifts = torch.rand(3, 4, 2), torch.rand(3, 4, 2)
    stack = QuantizedStack((codes, scales, shifts), 8, torch.float32)
    assert (stack.shape, len(stack), stack.group_size) == ((3, 4, 16), 3, 8)
    assert stack.weight_bytes == 3 * 4 * 8 + 2 * 4 * 3 * 4 * 2
    high = (codes[2, 1, 0] >> 4).float() - 8
    assert stack[2][1, 0] == high * scales[2, 1, 0] + shifts[2, 1, 0]
    assert QuantizedStack((codes, scales, shifts * 0), 8, torch.float32).shifts is None


def test_fp8_by_output() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 6, 20) * torch.logspace(-3, 2, 6)[:, None]
    weight[1, 2] = 0
    stack = quantized_stack(weight)
    expected = fp8(weight, weight.abs().amax(2, keepdim=True).clamp_min(1e-30) / 448)[1]
    torch.testing.assert_close(torch.stack([stack[i] for i in range(3)]), expected)
    assert stack.weight_bytes == 3 * 6 * 20 + 4 * 3 * 6
    block = torch.nn.Module()
    block.down_proj = stack
    with rebuilt(block):
        torch.testing.assert_close(block.down_proj.data, expected)
    assert block.down_proj is stack


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "glm4_moe"])
def test_an_engine_in_fp8_equals_the_weights_it_stands_for(family: str, tmp_path: Path) -> None:
    recipes = dict(RECIPES)
    if family == "glm4_moe":  # whose router takes no adapter
        recipes["all-linear"] = {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]}
    mixture = make_mixture(tmp_path, family, recipes, quantization="fp8")
    experts = [each for each in mixture.loaded.model.modules() if isinstance(each, LoraExperts)]
    assert experts
    assert all(isinstance(stack, QuantizedStack) for each in experts for stack in (each.gate_up, each.down))
    check_against_eager(mixture.loaded, _planner(mixture.loaded))
    assert (trusted_weights(mixture.loaded) is None) == (family == "glm4_moe")
    check_mixed_batch(mixture, 1e-3)


@pytest.mark.parametrize(
    ("family", "shipped", "quantization"),
    [
        ("gemma4_moe", "", "fp8"), ("qwen3_next", "", "fp8"), ("qwen3_next", "gptq", "none"),
        ("qwen3_next", "gptq-sym", "int4"),
    ],
)  # fmt: skip
def test_other_mixtures(family: str, shipped: str, quantization: Quantization, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    make_model(family, plain)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    if shipped:
        stands_for = ship(plain, tmp_path / "shipped", shipped)
        assert reference.load_state_dict(stands_for, strict=False).unexpected_keys == []
    else:
        to_fp8_by_output(reference)
    folder = tmp_path / "shipped" if shipped else plain
    loaded = load_model(str(folder), quantization=quantization)
    (logits,) = Driver(make_runner(loaded)).logits([Stream(PROMPT)])
    torch.testing.assert_close(logits, logits_of(reference, PROMPT), atol=1e-3, rtol=0)


def test_codes_are_counted_among_the_weights(tmp_path: Path) -> None:
    loaded = make_mixture(tmp_path, recipes={}, quantization="fp8").loaded
    stacks = 2 * 8 * (3 * 48 * 64 + 4 * (2 * 48 + 64))
    dense = 3 * (64 * 128 + 64 * 64 + 4 * (128 + 64)) + 3 * 64 * 96 + 4 * (2 * 96 + 64)
    plain = 4 * (2 * 131 * 64 + 64 * (2 * 3 + 1) + 3 * 2 * 16 + 2 * 8 * 64)
    assert weight_bytes(loaded.model) == stacks + dense + plain


def test_experts_that_are_none_of_ours_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, shipped = make_mixture(tmp_path / "plain"), make_mixture(tmp_path / "shipped", shipped="fp8")
    ours = LoraExperts.forward
    monkeypatch.setattr(experts_module.LoraExperts, "forward", lambda *given: ours(*given) * 1.1)
    for folder in (mixture.folder, shipped.folder):
        told = r"qwen3_moe: --quantization fp8: model.layers.0.mlp.experts are no experts as we know them"
        with pytest.raises(ModelRefused, match=told):
            load_model(str(folder), quantization="fp8")


@pytest.mark.parametrize(("shipped", "quantization"), [("", "fp8"), ("fp8-8", "fp8"), ("awq-8", "int4")])
def test_two_ranks_have_the_weights_of_one(shipped: str, quantization: Quantization, tmp_path: Path) -> None:
    family = mixture_family(tmp_path / "made", shipped=shipped, quantization=quantization)
    check_logprobs(family, tmp_path, "cpu", 1e-3, quantization=quantization)


def test_blocks_that_two_ranks_would_tear_are_refused(tmp_path: Path) -> None:
    family = mixture_family(tmp_path / "made", shipped="fp8-16", quantization="fp8")
    torn = r"2: model.layers.0.mlp.experts.down_proj: 24 of its 48 inputs a rank are no whole groups of 16"
    with pytest.raises(ModelRefused, match=torn), shared_by_two(family, tmp_path, "cpu", quantization="fp8"):
        pass
