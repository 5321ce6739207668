"""Experts' weights that stay in codes: what they stand for, and engines that serve them with adapters on top."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from manylora_worker.models import experts as experts_module
from manylora_worker.models.build import _planner, weight_bytes
from manylora_worker.models.checkpoint import ModelRefused, Quantization
from manylora_worker.models.layers.mixture import LoraExperts
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.loading import experts_to_nf4
from manylora_worker.models.quantized.stacks import QuantizedStack, nf4_stack, quantized_stack, rebuilt, stacks_in
from manylora_worker.models.ranks.cuts import cut_linears
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.numerics.driver import Driver, Stream, make_runner
from tests.numerics.families import make_model
from tests.numerics.mixtures import OWN_PATTERNS, check_mixed_batch, make_mixture
from tests.numerics.quantizing import PROMPT, fp8, ship, to_fp8_by_output, to_nf4
from tests.numerics.test_checkpoint import in_nf4, logits_of
from tests.numerics.two_ranks import check_logprobs, mixture_family, shared_by_two

pytestmark = OWN_PATTERNS
CPU = torch.device("cpu")


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


def test_nf4_is_that_of_bitsandbytes_expert_by_expert() -> None:
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    torch.manual_seed(0)
    weight = torch.randn(3, 10, 192) * torch.logspace(-3, 2, 10)[:, None]
    stack = nf4_stack(weight, CPU, CPU)
    assert (stack.shape, len(stack), stack.dtype) == (weight.shape, 3, torch.float32)
    assert stack.weight_bytes == 3 * 10 * (192 // 2 + 4 * 192 // 64)
    for expert, own in enumerate(weight):
        packed, state = functional.quantize_4bit(own, blocksize=64, quant_type="nf4", compress_statistics=True)
        assert torch.equal(stack.codes[expert].flatten(), packed.flatten())
        expected = functional.dequantize_4bit(packed, state)
        assert (stack[expert] - expected).norm() < 0.01 * expected.norm()  # a scale's own code may be a neighbour
    with pytest.raises(ValueError, match="96 inputs"):
        nf4_stack(weight[:, :, :96], CPU, CPU)


@pytest.mark.parametrize("family", ["qwen3_moe_wide", "qwen3_5_moe_blocks", "gpt_oss_blocks"])
def test_an_engine_in_nf4_equals_the_weights_it_stands_for(family: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    mixture = make_mixture(tmp_path, family, quantization="nf4")
    experts = [each for each in mixture.loaded.model.modules() if isinstance(each, LoraExperts)]
    stacks = [stack for each in experts for stack in (each.gate_up, each.down)]
    assert stacks
    assert all(isinstance(stack, QuantizedStack) and stack.is_nf4 for stack in stacks)
    assert not any(path.endswith(("experts.down_proj", "experts.down")) for path in mixture.loaded.spec.other_modules)
    check_against_eager(mixture.loaded, _planner(mixture.loaded))
    check_mixed_batch(mixture, 1e-3)


def test_two_ranks_have_the_nf4_of_one() -> None:
    config = Qwen3MoeConfig(
        vocab_size=30, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=256, intermediate_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    experts_to_nf4(model, CPU, CPU)
    path, shares = "model.layers.0.mlp.experts", []
    whole = {name: torch.stack(list(stack)) for name, stack in stacks_in(model.get_submodule(path)).items()}
    for rank in (0, 1):
        own = copy.deepcopy(model)
        cut_linears(own, SimpleNamespace(rank=rank, size=2))  # type: ignore[arg-type]
        shares.append(stacks_in(own.get_submodule(path)))
    for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
        first, second = (torch.stack(list(share[name])) for share in shares)
        assert all(share[name].is_nf4 for share in shares)  # type: ignore[union-attr]
        if name == "gate_up_proj":  # each has half of the gates and half of the ups
            first, second = (torch.cat(each, 1) for each in zip(first.chunk(2, 1), second.chunk(2, 1), strict=True))
        assert torch.equal(torch.cat((first, second), dim), whole[name])
    config.moe_intermediate_size = 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    experts_to_nf4(model, CPU, CPU)
    with pytest.raises(ModelRefused, match=r"down_proj: 32 of its 64 inputs a rank are no whole groups of 64"):
        cut_linears(model, SimpleNamespace(rank=0, size=2))  # type: ignore[arg-type]


def test_a_mixture_that_bitsandbytes_has_quantized_is_refused(tmp_path: Path) -> None:
    make_model("qwen3_moe_wide", tmp_path / "plain")
    in_nf4(tmp_path / "plain", double=True, compute=torch.float32).save_pretrained(tmp_path / "shipped")
    with pytest.raises(ModelRefused, match=r"qwen3_moe: model\.layers\.0\.mlp\.experts: .* take the .* unquantized"):
        load_model(str(tmp_path / "shipped"), quantization="nf4")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "glm4_moe"])
def test_an_engine_in_fp8_equals_the_weights_it_stands_for(family: str, tmp_path: Path) -> None:
    mixture = make_mixture(tmp_path, family, quantization="fp8")
    experts = [each for each in mixture.loaded.model.modules() if isinstance(each, LoraExperts)]
    assert experts
    assert all(isinstance(stack, QuantizedStack) for each in experts for stack in (each.gate_up, each.down))
    check_against_eager(mixture.loaded, _planner(mixture.loaded))
    assert trusted_weights(mixture.loaded) is not None
    check_mixed_batch(mixture, 1e-3)


@pytest.mark.parametrize(
    ("family", "shipped", "quantization"),
    [
        ("gemma4_moe", "", "fp8"), ("qwen3_next", "", "fp8"), ("qwen3_next", "gptq", "none"),
        ("qwen3_next", "gptq-sym", "int4"), ("gemma4_moe_blocks", "", "nf4"),
    ],
)  # fmt: skip
def test_other_mixtures(family: str, shipped: str, quantization: Quantization, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    make_model(family, plain)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    if shipped:
        stands_for = ship(plain, tmp_path / "shipped", shipped)
        assert reference.load_state_dict(stands_for, strict=False).unexpected_keys == []
    elif quantization == "nf4":
        to_nf4(reference, plain)
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
