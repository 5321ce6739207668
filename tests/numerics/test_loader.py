"""What the loader refuses, what it reads off a model, and 4-bit weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import Driver, Stream, make_runner, put_adapter
from tests.numerics.families import FAMILIES

TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def edited(family: Family, tmp_path: Path, **fields: Any) -> Path:
    folder = tmp_path / "edited"
    shutil.copytree(family.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_spec(family_of: FamilyOf, name: str) -> None:
    family = family_of(name)
    spec = family.loaded.spec
    config = FAMILIES[name]()
    assert spec.model_type == config.model_type
    assert spec.source_name == spec.name == f"tiny-{name}"
    assert spec.vocab_size == config.vocab_size
    assert spec.eos_token_ids == (2,)
    assert spec.kv.num_layers == 3
    assert spec.kv.num_kv_heads == 2
    assert spec.max_context_tokens == (128 if name == "phi3" else 256)
    assert len(spec.modules) == 3 * {"phi3": 4, "granitemoehybrid": 6}.get(name, 7)
    assert len(family.loaded.sites) == 3 * 4
    assert "lm_head" in spec.head_modules
    assert {s.path for site in family.loaded.sites for s in site.slots} == set(spec.modules)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ([7, 2], 3, (7, 2)),
        ([7, 10**6, -1], 3, (7,)),
        (10**6, 3, (3,)),
        (None, [3, 4], (3, 4)),
        (None, None, ()),
    ],
)
def test_ends_that_are_no_token_are_dropped(
    family_of: FamilyOf, tmp_path: Path, caplog: pytest.LogCaptureFixture, generation: Any, config: Any, ends: Any
) -> None:
    folder = edited(family_of("llama"), tmp_path, eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_model(str(folder)).spec.eos_token_ids == ends
    assert ("1000000" in caplog.text) == ("1000000" in str(generation))


def test_digest_tells_weights_apart(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    assert load_model(str(family.folder), name="other").spec.digest == family.loaded.spec.digest
    folder = edited(family, tmp_path, rms_norm_eps=1e-5)
    assert load_model(str(folder)).spec.digest != family.loaded.spec.digest


def refusal(folder: Path | str) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_model(str(folder))
    return str(caught.value)


def test_dynamic_rope(family_of: FamilyOf, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "rope_type dynamic" in refusal(edited(family_of("llama"), tmp_path, rope_parameters=rope))


def test_own_code(family_of: FamilyOf, tmp_path: Path) -> None:
    message = refusal(edited(family_of("llama"), tmp_path, model_type="own", auto_map={"AutoModelForCausalLM": "x.Y"}))
    assert "auto_map" in message


def test_files_that_are_not_there(family_of: FamilyOf, tmp_path: Path) -> None:
    assert "neither a folder nor" in refusal("no/such-model")
    assert "config" in refusal(tmp_path)
    folder = edited(family_of("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors" in refusal(folder)


def test_weights_that_are_missing(family_of: FamilyOf, tmp_path: Path) -> None:
    assert "missing" in refusal(edited(family_of("qwen3"), tmp_path, num_hidden_layers=4, layer_types=None))


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_models_that_are_no_causal_language_models(tmp_path: Path) -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    assert "not a causal" in refusal(saved(t5, tmp_path / "t5"))
    classifier = LlamaForSequenceClassification(LlamaConfig(**TINY, pad_token_id=0))
    assert "missing" in refusal(saved(classifier, tmp_path / "classifier"))
    bert = BertLMHeadModel(BertConfig(**TINY, is_decoder=False))
    assert refusal(saved(bert, tmp_path / "bert"))


def test_nf4_equals_the_dequantized_model(family_of: FamilyOf) -> None:
    """The 4-bit engine against transformers' own 4-bit model, and one layer against its weight dequantized."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    family = family_of("llama")
    loaded = load_model(str(family.folder), quantization="nf4")
    driver = Driver(make_runner(loaded))
    uid = put_adapter(driver.runner, loaded, family.adapters["all-linear"])
    prompt = list(range(3, 20))
    base, adapted = driver.logits([Stream(prompt), Stream(prompt, uid)])
    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    quantized = AutoModelForCausalLM.from_pretrained(
        family.folder, quantization_config=options, device_map={"": "cpu"}, dtype=torch.float32
    )
    for module in quantized.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # its repacking fails on these shapes
    with torch.no_grad():
        expected = quantized(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(base, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(adapted, base, atol=1e-2)
    layer = loaded.model.get_submodule("model.layers.0.self_attn.q_proj").base
    x = torch.randn(5, 64)
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight), atol=1e-6, rtol=0)


def test_bfloat16(family_of: FamilyOf) -> None:
    family = family_of("llama")
    loaded = load_model(str(family.folder), dtype=torch.bfloat16)
    driver = Driver(make_runner(loaded))
    uid = put_adapter(driver.runner, loaded, family.adapters["all-linear"])
    prompt = list(range(3, 30))
    logits = driver.logits([Stream(prompt, uid), Stream(prompt)])
    for row, name in zip(logits, ("all-linear", None), strict=True):
        expected = family.reference.logits(prompt, name)[-1]
        assert torch.nn.functional.cosine_similarity(row, expected, dim=0) > 0.99
