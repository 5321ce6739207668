"""Checkpoints whose experts are quantized one by one: rebuilt or kept, they are what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused, Quantization
from manylora_worker.models.layers.mixture import LoraExperts
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.quantized.stacks import QuantizedStack
from manylora_worker.models.torch.decoder import trusted_weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.numerics.driver import Driver, Stream, make_runner
from tests.numerics.mixtures import OWN_PATTERNS, Mixture, check_mixed_batch, make_mixture
from tests.numerics.quantizing import PROMPT, check_with_adapter, ship
from tests.numerics.test_checkpoint import logits_of
from tests.numerics.test_delta_net import published

pytestmark = OWN_PATTERNS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return make_mixture(tmp_path_factory.mktemp("mixture"))


def reference_of(mixture: Mixture, stands_for: dict[str, torch.Tensor]) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        mixture.folder, dtype=torch.float32, attn_implementation="eager"
    )
    told = model.load_state_dict(stands_for, strict=False)
    assert told.unexpected_keys == []
    return model.eval()


def stacks_of(loaded: LoadedModel) -> list[QuantizedStack]:
    experts = [each for each in loaded.model.modules() if isinstance(each, LoraExperts)]
    return [stack for each in experts for stack in (each.gate_up, each.down) if isinstance(stack, QuantizedStack)]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("fp8", "none"), ("fp8-channel", "none"), ("fp8-tensor", "none"), ("awq", "none"), ("gptq", "none"),
        ("gptq-desc-act", "none"), ("fp8", "fp8"), ("fp8-channel", "fp8"), ("fp8-tensor", "fp8"), ("awq-16", "int4"),
        ("gptq-sym", "int4"),
    ],
)  # fmt: skip
def test_each_format_with_adapters_on_experts(
    mixture: Mixture, name: str, quantization: Quantization, tmp_path: Path
) -> None:
    stands_for = ship(mixture.folder, tmp_path / "tiny-qwen3_moe", name)
    loaded = load_model(str(tmp_path / "tiny-qwen3_moe"), quantization=quantization)
    assert trusted_weights(loaded) is not None
    experts = loaded.model.model.layers[2].mlp.experts
    for stack, stack_name in ((experts.gate_up, "gate_up_proj"), (experts.down, "down_proj")):
        found = torch.stack([stack[expert] for expert in range(8)])
        torch.testing.assert_close(found, stands_for[f"model.layers.2.mlp.experts.{stack_name}"])
    stacks = stacks_of(loaded)
    assert len(stacks) == (0 if quantization == "none" else 4)
    assert all((stack.shifts is None) == (name != "awq-16") for stack in stacks)
    check_with_adapter(loaded, reference_of(mixture, stands_for), mixture.adapters["all-linear"], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "quantization"), [("fp8", "none"), ("fp8", "fp8"), ("gptq", "none"), ("gptq-sym", "int4")]
)
def test_the_text_part_of_a_mixture_of_text_and_images(name: str, quantization: Quantization, tmp_path: Path) -> None:
    """As Qwen ships it: beside shared experts, routers and their gates that are as they were, and a draft's layers."""
    reference = published("qwen3.5-moe", tmp_path / "plain", of=AutoModelForImageTextToText)
    folder = tmp_path / "qwen"
    stands_for = ship(tmp_path / "plain", folder, name)
    assert reference.load_state_dict(stands_for, strict=False).unexpected_keys == []
    weights = load_file(folder / "model.safetensors")
    own = {path: each for path, each in weights.items() if ".layers.3." in path}
    assert any(".experts.1.up_proj." in path for path in own)
    save_file(
        weights | {path.replace("model.language_model", "mtp"): each.clone() for path, each in own.items()},
        folder / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    if name == "fp8":
        left = (".in_proj_", ".shared_expert_gate", ".mlp.gate.")
        plain = [path.removesuffix(".weight") for path in weights if any(each in path for each in left)]
        config["quantization_config"]["modules_to_not_convert"] = plain
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(str(folder), quantization=quantization)
    is_kept = quantization != "none"
    assert len(stacks_of(loaded)) == 8 * is_kept
    shared = loaded.model.model.layers[0].mlp.shared_expert.down_proj.base
    assert isinstance(shared, QuantizedLinear) == is_kept
    (logits,) = Driver(make_runner(loaded)).logits([Stream(PROMPT)])
    torch.testing.assert_close(logits, logits_of(reference, PROMPT), atol=1e-3, rtol=0)


def test_an_adapter_that_names_a_shared_experts_layers(tmp_path: Path) -> None:
    """A stack in codes has the name of one of them, and is no module."""
    mixture = make_mixture(tmp_path, "qwen3_5_moe_text", shipped="gptq-sym", quantization="int4")
    assert len(stacks_of(mixture.loaded)) == 6
    check_mixed_batch(mixture, 1e-3)


@pytest.fixture
def shipped(mixture: Mixture, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """In FP8, and its tensors."""
    ship(mixture.folder, tmp_path / "shipped", "fp8")
    return tmp_path / "shipped", load_file(tmp_path / "shipped" / "model.safetensors")


def refusal(folder: Path, tensors: dict[str, torch.Tensor], **options: Quantization) -> str:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused) as caught:
        load_model(str(folder), **options)
    return str(caught.value)


def test_what_does_not_fit_is_named(shipped: tuple[Path, dict[str, torch.Tensor]], mixture: Mixture) -> None:
    folder, tensors = shipped
    path = "model.layers.2.mlp.experts"
    absent = {name: each for name, each in tensors.items() if not name.startswith(f"{path}.3.up_proj.")}
    assert f"{path}.3.up_proj: is missing" in refusal(folder, absent)
    assert f"{path}.3.up_proj: is missing" in refusal(folder, absent, quantization="fp8")
    biased = tensors | {f"{path}.3.up_proj.bias": torch.ones(48)}
    assert f"{path}.3.up_proj: has a bias, as the model's experts have none" in refusal(folder, biased)
    small = tensors | {f"{path}.3.up_proj.weight": tensors[f"{path}.3.up_proj.weight"][:32].contiguous()}
    small[f"{path}.3.up_proj.weight_scale_inv"] = small[f"{path}.3.up_proj.weight_scale_inv"][:1].contiguous()
    for quantization in ("none", "fp8"):
        told = refusal(folder, small, quantization=quantization)  # type: ignore[arg-type]
        assert f"{path}.3.up_proj: is a matrix of [32, 64], in place of [48, 64]" in told
    stack = {f"{path}.gate_up_proj": torch.zeros(8, 96, 64).to(torch.float8_e4m3fn)}
    of_experts = (f"{path}.{expert}.{each}_proj." for expert in range(8) for each in ("gate", "up"))
    others = {name: each for name, each in tensors.items() if not name.startswith(tuple(of_experts))}
    assert f"{path}.gate_up_proj: is float8_e4m3fn, and no layer's" in refusal(folder, others | stack)
    plain = load_file(mixture.folder / "model.safetensors")
    one = {name: each for name, each in tensors.items() if not name.startswith(f"{path}.3.up_proj.")}
    one[f"{path}.3.up_proj.weight"] = plain[f"{path}.3.up_proj.weight"]
    assert f"{path}.3.up_proj: is not quantized" in refusal(folder, one)


def test_a_stack_of_which_a_part_is_not_quantized_is_rebuilt(
    shipped: tuple[Path, dict[str, torch.Tensor]], mixture: Mixture
) -> None:
    folder, tensors = shipped
    path, plain = "model.layers.2.mlp.experts", load_file(mixture.folder / "model.safetensors")
    del tensors[f"{path}.3.up_proj.weight_scale_inv"]
    tensors[f"{path}.3.up_proj.weight"] = plain[f"{path}.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [f"{path}.3.up_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    kept, whole = (load_model(str(folder), quantization=each) for each in ("fp8", "none"))  # type: ignore[arg-type]
    assert len(stacks_of(kept)) == 3
    experts = kept.model.model.layers[2].mlp.experts
    assert torch.equal(experts.gate_up[3][48:], plain[f"{path}.3.up_proj.weight"])
    assert torch.equal(experts.gate_up, whole.model.model.layers[2].mlp.experts.gate_up)


def test_routers_that_are_quantized_are_rebuilt(
    shipped: tuple[Path, dict[str, torch.Tensor]], mixture: Mixture
) -> None:
    folder, tensors = shipped
    path = "model.layers.2.mlp.gate"
    codes = (tensors[f"{path}.weight"] * 4).to(torch.float8_e4m3fn)
    tensors |= {f"{path}.weight": codes, f"{path}.weight_scale_inv": torch.full((1, 2), 0.25)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(folder), quantization="fp8")
    assert torch.equal(loaded.model.model.layers[2].mlp.gate.linear.base.weight, codes.float() / 4)
