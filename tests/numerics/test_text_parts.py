"""Models of text and images that transformers has no class of the text alone for: their text part is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.checkpoint import renamed, renamings
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.torch.decoder import trusted_weights
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.numerics.adapters import save_adapter
from tests.numerics.driver import Driver, Stream, make_runner, put_adapter
from tests.numerics.test_checkpoint import PROMPT, check_plain_and_adapted, logits_of, published
from tests.numerics.test_shipped import ship


@pytest.mark.parametrize(
    "name", ["mistral-small-3.2", "ministral-3-8b", "qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"]
)
def test_the_text_part(name: str, tmp_path: Path) -> None:
    """By our decoder, with adapters of its linear layers and of the text's alone."""
    reference = published(name, tmp_path / "model", of=AutoModelForImageTextToText)
    loaded = load_model(str(tmp_path / "model"))
    assert not any("vis" in path for path, _ in loaded.model.named_modules())
    weights = trusted_weights(loaded)
    assert weights is not None
    assert weights.has_kernels
    for seed, targets in enumerate((r".*language_model.*\.(q_proj|o_proj)", ["q_proj", "v_proj"])):
        folder = save_adapter(reference, tmp_path / f"adapter-{seed}", seed, r=4, lora_alpha=8, target_modules=targets)
        check_plain_and_adapted(loaded, reference, folder)


@pytest.mark.parametrize(("name", "older"), [("mistral-small-3.2", "language_model.model"), ("qwen2.5-vl-7b", "model")])
def test_adapters_that_an_older_transformers_named(name: str, older: str, tmp_path: Path) -> None:
    """All linear layers, images' among them."""
    reference = published(name, tmp_path / "model", of=AutoModelForImageTextToText)
    loaded = load_model(str(tmp_path / "model"))
    targets = ["q_proj", "o_proj", "gate_proj", "fc1"]
    folder = save_adapter(reference, tmp_path / "adapter", 1, r=4, lora_alpha=8, target_modules=targets)
    wrapped = PeftModel.from_pretrained(reference, folder).eval()
    expected = logits_of(wrapped, PROMPT)
    wrapped.unload()
    assert not torch.allclose(expected, logits_of(reference, PROMPT), atol=1e-2)
    file, prefix = folder / "adapter_model.safetensors", "base_model.model."
    told = {
        prefix + key.removeprefix(prefix).replace("model.language_model", older).replace("model.vis", "vis"): each
        for key, each in load_file(file).items()
    }
    assert not any(key.removeprefix(prefix).startswith(("model.language_model", "model.vis")) for key in told)
    save_file(told, file, metadata={"format": "pt"})
    driver = Driver(make_runner(loaded))
    adapted = driver.logits([Stream(PROMPT, put_adapter(driver.runner, loaded, folder))])[0]
    torch.testing.assert_close(adapted, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "shipped", "quantization"),
    [
        ("mistral-small-3.2", "gptq", "int4"), ("ministral-3-8b", "fp8", "fp8"), ("qwen2.5-vl-7b", "fp8", "none"),
        ("qwen3-vl-30b-a3b", "fp8", "fp8"),
    ],
)  # fmt: skip
def test_the_text_part_of_a_quantized_one(name: str, shipped: str, quantization: Any, tmp_path: Path) -> None:
    """Layers have older names in the folder than in transformers' model; images' may be quantized, or not."""
    reference = published(name, tmp_path / "plain", of=AutoModelForImageTextToText)
    stands_for = ship(tmp_path / "plain", tmp_path / "model", shipped)
    weights = {renamed(key, renamings(reference)): weight for key, weight in stands_for.items()}
    strange = reference.load_state_dict(weights, strict=False).unexpected_keys
    assert not [key for key in strange if ".experts." not in key]
    loaded = load_model(str(tmp_path / "model"), quantization=quantization)
    kept = sum(isinstance(module, QuantizedLinear) for module in loaded.model.modules())
    assert kept == (0 if quantization == "none" else 6 if "a3b" in name else 12)
    if "a3b" not in name:  # whose experts are stacked in the reference
        found = Driver(make_runner(loaded)).logits([Stream(PROMPT)])[0]
        torch.testing.assert_close(found, logits_of(reference, PROMPT), atol=1e-4, rtol=0)
