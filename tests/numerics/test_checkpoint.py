"""What folders say of themselves: published ones are served as transformers computes them, the rest is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused, sampling_defaults
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.torch.decoder import trusted_weights
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from tests.numerics.adapters import save_adapter
from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import Driver, Stream, make_runner, put_adapter
from tests.numerics.published import PUBLISHED, PUBLISHED_HYBRIDS

PROMPT = [3 + 31 * k % 120 for k in range(60)]  # longer than any window

TEXT_PART = r".*language_model.*\.(q_proj|down_proj)"


def published(name: str, folder: Path, *, of: Any = AutoModelForCausalLM, **fields: Any) -> PreTrainedModel:
    """Writes random weights with the published config.json beside them; returns transformers' own eager model."""
    folder.mkdir()
    told = (PUBLISHED | PUBLISHED_HYBRIDS)[name]
    (folder / "config.json").write_text(json.dumps(told))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    of.from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(told | fields))
    model: PreTrainedModel = of.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1]
    return logits


def check_plain_and_adapted(loaded: LoadedModel, reference: PreTrainedModel, folder: Path) -> None:
    """Side by side, in chunks. folder: of an adapter; the reference is left without it."""
    driver = Driver(make_runner(loaded))
    streams = [Stream(PROMPT), Stream(PROMPT, put_adapter(driver.runner, loaded, folder))]
    for _ in range(5):
        driver.logits(streams, 11)
    plain, adapted = driver.logits(streams)
    torch.testing.assert_close(plain, logits_of(reference, PROMPT), atol=1e-4, rtol=0)
    wrapped = PeftModel.from_pretrained(reference, folder).eval()
    torch.testing.assert_close(adapted, logits_of(wrapped, PROMPT), atol=1e-4, rtol=0)
    wrapped.unload()
    assert not torch.allclose(plain, adapted, atol=1e-2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_are_served(tmp_path: Path, name: str) -> None:
    """In chunks, beside another sequence, far beyond the window."""
    reference = published(name, tmp_path / name)
    loaded = load_model(str(tmp_path / name))
    assert trusted_weights(loaded) is not None
    driver = Driver(make_runner(loaded))
    stream, other = Stream(PROMPT), Stream(PROMPT[::-1])
    for _ in range(5):
        driver.logits([stream, other], 11)
    found = driver.logits([stream, other])
    torch.testing.assert_close(found[0], logits_of(reference, PROMPT), atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], logits_of(reference, PROMPT[::-1]), atol=1e-4, rtol=0)
    assert loaded.spec.max_context_tokens == (128 if "longrope" in json.dumps(PUBLISHED[name]) else 256)


def test_a_head_that_the_whole_model_alone_says_is_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = PUBLISHED_HYBRIDS["qwen3.5"] | {"tie_word_embeddings": True}
    monkeypatch.setitem(PUBLISHED_HYBRIDS, "tied", told)
    reference = published("tied", tmp_path / "model", of=AutoModelForImageTextToText)
    loaded = load_model(str(tmp_path / "model"))
    found = Driver(make_runner(loaded)).logits([Stream(PROMPT)])[0]
    torch.testing.assert_close(found, logits_of(reference, PROMPT), atol=1e-4, rtol=0)


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    """As Qwen's model cards say it: max_position_embeddings stays."""
    rope = {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}
    reference = published("qwen2.5", tmp_path / "qwen", max_position_embeddings=64, rope_scaling=rope)
    loaded = load_model(str(tmp_path / "qwen"))
    assert loaded.spec.max_context_tokens == 256
    prompt = PROMPT * 4
    found = Driver(make_runner(loaded)).logits([Stream(prompt)])[0]
    torch.testing.assert_close(found, logits_of(reference, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("targets", [TEXT_PART, ["q_proj", "v_proj"], "all-linear"])
def test_the_text_part_of_a_model_of_text_and_images(tmp_path: Path, targets: Any) -> None:
    """Also by adapters of all of it: what they have for images is not computed."""
    reference = published("gemma-3-4b", tmp_path / "gemma")
    folder = save_adapter(reference, tmp_path / "adapter", 1, r=4, lora_alpha=8, target_modules=targets)
    assert ("vision" in str(load_file(folder / "adapter_model.safetensors").keys())) == (
        not str(targets).startswith(".")
    )
    loaded = load_model(str(tmp_path / "gemma"))
    assert not any("vision" in name for name, _ in loaded.model.named_modules())
    check_plain_and_adapted(loaded, reference, folder)


def folder_with(family: Family, tmp_path: Path, **fields: Any) -> Path:
    folder = tmp_path / "folder"
    shutil.copytree(family.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_model(str(folder), **options)
    return str(caught.value)


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "awq"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fp8"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
            "compressed-tensors",
        ),
        ({"quant_method": "frob", "bits": 3}, "frob"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "4bit fp4"),
        ({"bits": 2}, "unnamed method"),
        ("int4", "unnamed method"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_quantized_weights_are_refused(
    family_of: FamilyOf, tmp_path: Path, stated: Any, named: str, place: str
) -> None:
    fields = {place: {"quantization_config": stated} if place == "text_config" else stated}
    folder = folder_with(family_of("llama"), tmp_path, **fields)
    for quantization in ("none", "nf4"):
        message = refusal(folder, quantization=quantization)
        assert named in message
        assert "take the model's unquantized weights" in message


def in_nf4(folder: Path, *, double: bool, compute: torch.dtype) -> PreTrainedModel:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=compute
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=options, device_map={"": "cpu"}, dtype=torch.float32
    )
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model


@pytest.mark.parametrize("double", [True, False])
def test_weights_that_bitsandbytes_quantized_to_nf4(family_of: FamilyOf, tmp_path: Path, *, double: bool) -> None:
    """Computed in the type that the worker is told, not in the maker's."""
    dense, folder = family_of("llama").folder, tmp_path / "llama-bnb-4bit"
    in_nf4(dense, double=double, compute=torch.bfloat16).save_pretrained(folder)
    assert "--quantization nf4" in refusal(folder)
    found = Driver(make_runner(load_model(str(folder), quantization="nf4"))).logits([Stream(PROMPT)])[0]
    expected = logits_of(in_nf4(dense, double=double, compute=torch.float32), PROMPT)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_scales_that_nothing_names(family_of: FamilyOf, tmp_path: Path) -> None:
    folder = folder_with(family_of("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "q_proj.weight_scale_inv" in refusal(folder)


def test_weight_files_that_cannot_be_read(family_of: FamilyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(family_of("llama"), tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-1000], whole[:100], b"", b"\xff" * 64):
        file.write_bytes(content)
        assert str(file) in refusal(folder)
    file.write_bytes(whole)
    file.rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_files_that_the_user_may_not_read(family_of: FamilyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(family_of("llama"), tmp_path)
    original = Path.open
    for name in ("config.json", "model.safetensors"):

        def forbidden(path: Path, *arguments: Any, name: str = name, **options: Any) -> Any:
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *arguments, **options)

        monkeypatch.setattr(Path, "open", forbidden)
        message = refusal(folder)
        assert str(folder / name) in message
        assert "Permission denied" in message


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"model_type": "frobnicator"}', '{"model_type": 3}', "{}"])
def test_configs_that_say_nothing(family_of: FamilyOf, tmp_path: Path, text: str) -> None:
    folder = folder_with(family_of("llama"), tmp_path)
    (folder / "config.json").write_text(text)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"hidden_act": "frob"},
        {"model_type": ["llama"], "auto_map": {"AutoConfig": "x.y"}},
        {"num_hidden_layers": 1 << 60},
        {"text_config": {"num_hidden_layers": 1 << 60}},
    ],
)
def test_configs_that_no_model_is_built_from(family_of: FamilyOf, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = folder_with(family_of("llama"), tmp_path, **fields)
    assert str(folder) in refusal(folder)


def test_an_adapter_left_in_the_folder(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    folder = folder_with(family, tmp_path)
    for file in family.adapters["all-linear"].iterdir():
        if file.name.startswith("adapter_"):
            shutil.copy(file, folder)
    before = sorted(folder.iterdir())
    found = Driver(make_runner(load_model(str(folder)))).logits([Stream(PROMPT)])[0]
    torch.testing.assert_close(found, family.reference.logits(PROMPT, None)[-1], atol=1e-4, rtol=0)
    (folder / "adapter_config.json").write_text("{")
    load_model(str(folder))
    assert sorted(folder.iterdir()) == before


def test_a_device_that_is_not_there(family_of: FamilyOf) -> None:
    for device in ("cuda:99", "frob"):
        message = refusal(family_of("llama").folder, device=device)
        assert f"--device {device}" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ('{"eos_token_id": 1, "do_sample": true, "temperature": 1.0, "top_k": null}', {}),
        (
            '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05, "eta": 1}',
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05},
        ),
        ('{"temperature": -1, "top_p": 0, "top_k": 2.5, "min_p": "x", "repetition_penalty": true}', {}),
        ('{"temperature": 0}', {"temperature": 0}),
        (f'{{"temperature": 1{"0" * 400}, "top_p": NaN}}', {}),
    ],
)
def test_what_a_models_makers_recommend_of_sampling(tmp_path: Path, text: str, expected: dict[str, float]) -> None:
    if text:
        (tmp_path / "generation_config.json").write_text(text)
    assert sampling_defaults(tmp_path) == expected
