"""DoRA, biases on B and trained biases: beside plain rows in one batch, each as transformers and peft compute it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from manylora_worker.models.loader import load_model
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.reader_pool import ReaderProcesses
from manylora_worker.weights.source import AdapterInvalid, read_adapter
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import ATTENTION, MLP, Reference
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import ALWAYS_STACK, LIMITS, Driver, Stream, make_runner, prompts, put_adapter

# peft warns that a bias on B cannot be merged where the layer has none, and takes such a bias for a broken matrix
pytestmark = [
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings(r"ignore:Adapter 'default'. \d+ LoRA tensor"),
]
TOLERANCE = 1e-4
RECIPES: dict[str, dict[str, Any]] = {
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP, "use_dora": True},
    "some": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True},
    "low": {"r": 4, "lora_alpha": 12, "target_modules": ["v_proj", "up_proj"], "lora_bias": True},
}
BIASED: dict[str, dict[str, Any]] = {
    "biases": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"], "bias": "all"},
    "both": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"], "bias": "all", "use_dora": True},
}
INPUTS: dict[str, dict[str, Any]] = {
    "inputs": {
        "r": 4, "lora_alpha": 8, "use_dora": True,
        "target_modules": ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"],
    },
}  # fmt: skip


def save_trained(family_folder: Path, folder: Path, seed: int, recipe: dict[str, Any]) -> Path:
    """All that it trains is drawn anew."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(family_folder, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **recipe))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(std=0.15)
            elif "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias") and parameter.requires_grad:
                parameter.normal_(std=0.3)
            elif "trainable_tokens" in name:
                parameter.normal_(std=0.5)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


def reference(family_folder: Path, folder: Path) -> Reference:
    """Of a model of its own: peft leaves trained biases in it."""
    model = AutoModelForCausalLM.from_pretrained(family_folder, dtype=torch.float32, attn_implementation="eager")
    return Reference(model.eval(), {"own": folder})


@pytest.mark.parametrize("name", [
    "llama", "qwen2", *(pytest.param(each, marks=pytest.mark.wide) for each in ("gemma2", "granite", "gemma4_text")),
])  # fmt: skip
def test_gains_and_shifts_beside_plain_rows(family_of: FamilyOf, tmp_path: Path, name: str) -> None:
    """granite runs as transformers wrote it."""
    family = family_of(name)
    recipes = {**RECIPES, **{"qwen2": BIASED, "gemma4_text": INPUTS}.get(name, {})}
    folders = {
        kind: save_trained(family.folder, tmp_path / kind, seed, recipe)
        for seed, (kind, recipe) in enumerate(recipes.items())
    }
    runner = make_runner(family.loaded, num_blocks=300, product_flops=ALWAYS_STACK)
    driver = Driver(runner)
    streams: list[tuple[Stream, Reference, str | None]] = []
    for seed, (kind, folder) in enumerate(folders.items()):
        uid = put_adapter(runner, family.loaded, folder)
        oracle = reference(family.folder, folder)
        streams += [(Stream(prompt, uid), oracle, "own") for prompt in prompts(2, seed=seed)]
        assert_differs(oracle, streams[-1][0].prompt, kind)
    plain = {each: put_adapter(runner, family.loaded, family.adapters[each]) for each in ("all-linear", "all-linear-b")}
    for seed, adapter in enumerate((None, "all-linear", "all-linear-b", None)):
        prompt = prompts(1, seed=40 + seed)[0]
        streams.append((Stream(prompt, plain[adapter] if adapter else None), family.reference, adapter))
    for _ in range(2):
        logits = driver.logits([stream for stream, _, _ in streams])
        for row, (stream, oracle, adapter) in zip(logits, streams, strict=True):
            torch.testing.assert_close(row, oracle.logits(stream.tokens, adapter)[-1], atol=TOLERANCE, rtol=0)
        for stream, _, _ in streams:
            stream.output.append(stream.prompt[0])


def assert_differs(oracle: Reference, prompt: list[int], kind: str) -> None:
    """From LoRA's product alone: so the test above can fail."""
    with_all = oracle.logits(prompt, "own")[-1]
    for module in oracle._wrapped.modules():
        variants = getattr(module, "lora_variant", None)
        if variants:
            kept = dict(variants)
            variants.clear()
            module._kept = kept
    without = oracle.logits(prompt, "own")[-1]
    for module in oracle._wrapped.modules():
        if hasattr(module, "_kept"):
            module.lora_variant.update(module._kept)
    if "dora" in kind:
        assert (with_all - without).abs().max() > 100 * TOLERANCE


def test_a_base_in_four_bits(family_of: FamilyOf, tmp_path: Path) -> None:
    """Norms of what the base computes with: NF4's weights, as peft takes them apart."""
    pytest.importorskip("bitsandbytes")
    family = family_of("qwen2")
    folder = save_trained(family.folder, tmp_path / "dora", 3, RECIPES["dora"])
    loaded = load_model(str(family.folder), quantization="nf4")
    runner = make_runner(loaded)
    prompt = prompts(1, seed=2)[0]
    got = Driver(runner).logits([Stream(prompt, put_adapter(runner, loaded, folder))])[0]
    oracle = reference_in_four_bits(family.folder, folder)
    torch.testing.assert_close(got, oracle.logits(prompt, "own")[-1], atol=1e-3, rtol=0)


def reference_in_four_bits(family_folder: Path, folder: Path) -> Reference:
    from transformers import BitsAndBytesConfig

    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    model = AutoModelForCausalLM.from_pretrained(
        family_folder, dtype=torch.float32, attn_implementation="eager", quantization_config=options, device_map="cpu"
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its repacking fails on these shapes
    return Reference(model.eval(), {"own": folder})


def test_readers_in_processes_read_the_same(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("qwen2")
    folder = save_trained(family.folder, tmp_path / "both", 1, BIASED["both"])
    base = family.loaded.adapter_base()
    expected = read_adapter(folder, base, LIMITS)
    assert {vector.kind.value for vector in expected.extras.vectors} == {"magnitude", "bias"}
    pool = ReaderProcesses(base, LIMITS, HostMemory(1 << 20))
    try:
        found = pool.read(folder, expected.uid)
        assert (found.layout, found.extras) == (expected.layout, expected.extras)
        assert torch.equal(found.buffer, expected.buffer)
        pool.free(found)
    finally:
        pool.close()


def changed(folder: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> Path:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    weights = load_file(folder / WEIGHTS_NAME)
    for key, tensor in (tensors or {}).items():
        if tensor is None:
            del weights[key]
        else:
            weights[key] = tensor
    save_file(weights, folder / WEIGHTS_NAME)
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("kind", "tensors", "config", "problem"), [
    ("dora", {f"{Q}.lora_magnitude_vector": None}, {}, "use_dora: model.layers.0.self_attn.q_proj have none"),
    ("dora", {}, {"use_dora": False}, "is there, but use_dora does not say so"),
    ("dora", {f"{Q}.lora_magnitude_vector": torch.ones(3)}, {}, "has shape [3], but [64] fits"),
    ("dora", {f"{Q}.lora_magnitude_vector": torch.full((64,), torch.nan)}, {}, "its magnitude holds NaN"),
    ("dora", {}, {"lora_bias": True}, "lora_bias: goes not with use_dora"),
    ("dora", {}, {"bias": "some"}, "bias: must be one of none, lora_only, all, not 'some'"),
    ("dora", {f"{Q}.bias": torch.ones(64)}, {"bias": "all"}, f"{Q}.bias: its layer has none"),
    ("low", {f"{Q}.lora_B.bias": torch.ones(64)}, {}, "belongs to a layer without LoRA"),
    ("low", {"base_model.model.model.norm.bias": torch.ones(64)}, {"bias": "all"}, "has no linear layer model.norm"),
])  # fmt: skip
def test_what_is_refused(
    family_of: FamilyOf,
    tmp_path: Path,
    kind: str,
    tensors: dict[str, torch.Tensor | None],
    config: dict[str, Any],
    problem: str,
) -> None:
    family = family_of("llama")
    folder = changed(save_trained(family.folder, tmp_path / kind, 0, RECIPES[kind]), tensors, **config)
    with pytest.raises(AdapterInvalid) as refused:
        read_adapter(folder, family.loaded.adapter_base(), LIMITS)
    assert any(problem in f"{v.field}: {v.description}" for v in refused.value.violations), refused.value.violations


def test_where_outputs_cannot_be_scaled_it_is_said(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    folder = save_trained(family.folder, tmp_path / "dora", 0, RECIPES["dora"])
    base = replace(family.loaded.adapter_base(), vectors_problem="is not served with --tensor-parallel")
    with pytest.raises(AdapterInvalid, match="use_dora: is not served with --tensor-parallel"):
        read_adapter(folder, base, LIMITS)
