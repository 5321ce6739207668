"""A merged folder against peft's own merge, read by transformers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from manylora.demo import BASE_FOLDER, adapter_folder
from manylora_shared.errors import InvalidRequest
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.digest import model_digest
from manylora_worker.models.merging import merge
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.numerics.adapters import recipes, save_adapter
from tests.numerics.families import EACH_FAMILY, make_model
from tests.numerics.test_columns import BIASED, RECIPES, save_trained
from tests.numerics.test_rope import SCALINGS, put_scaled, references
from tests.numerics.test_token_rows import TOKENS


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        return model(torch.arange(3, 19)[None]).logits[0].float()


@pytest.mark.parametrize("family", EACH_FAMILY)
@pytest.mark.parametrize("recipe", ["all-linear", "patterns"])
def test_logits_are_those_of_pefts_merge(family: str, recipe: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "base")
    adapter = save_adapter(model, tmp_path / "adapter", 5, **recipes(family)[recipe])
    changed = merge(str(tmp_path / "base"), adapter, tmp_path / "merged", digest=model_digest(tmp_path / "base"))
    assert changed > 0
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    with torch.no_grad():
        expected = merged(torch.arange(3, 19)[None]).logits[0]
    assert (logits_of(tmp_path / "merged") - logits_of(tmp_path / "base")).abs().max() > 1e-2
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)


def test_a_base_in_half_precision_is_rounded_once_and_stays_in_it(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "full")
    adapter = save_adapter(model, tmp_path / "adapter", 5, **recipes("llama")["rank-1"])
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    merge(str(tmp_path / "base"), adapter, tmp_path / "merged")
    name = "model.layers.0.self_attn.q_proj"
    before, after = (load_file(tmp_path / f / "model.safetensors")[f"{name}.weight"] for f in ("base", "merged"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"].float() for matrix in "AB")
    assert after.dtype is torch.bfloat16
    assert torch.equal(after, (before.float() + 2.0 * (b @ a)).to(torch.bfloat16))


def test_the_demos_folder_brings_its_tokenizer_and_a_whole_folder_comes_or_none(tmp_path: Path) -> None:
    output = tmp_path / "merged"
    command = [sys.executable, "-m", "manylora_worker.models.merging", "--model", str(BASE_FOLDER)]
    command += ["--adapter", str(adapter_folder("upper")), "--output", str(output)]
    with pytest.raises(ModelRefused, match="is not the base model that the adapter was validated against"):
        merge(str(BASE_FOLDER), adapter_folder("upper"), output, digest="0" * 64)
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    prompt = tokenizer("do:a1b2c=", return_tensors="pt").input_ids
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16)
    assert tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True) == "A1B2C"


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "base")
    adapter = save_adapter(
        make_model("qwen3", tmp_path / "other"), tmp_path / "adapter", 5, **recipes("llama")["rank-1"]
    )
    with pytest.raises(InvalidRequest, match="which do not fit"):
        merge(str(tmp_path / "base"), adapter, tmp_path / "merged")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({**tensors, "base_model.model.spare.weight": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidRequest, match="cannot be merged"):
        merge(str(tmp_path / "base"), adapter, tmp_path / "merged")
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ModelRefused):
        merge(str(tmp_path / "base"), adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen2", "dora"), ("qwen2", "biases"), ("qwen2", "both"), ("qwen2", "apart"), ("llama", "tokens")],
)
def test_gains_biases_and_tokens_are_merged_as_peft_merges_them(name: str, kind: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path / "base")
    adapter = save_trained(tmp_path / "base", tmp_path / "adapter", 5, (RECIPES | BIASED | TOKENS)[kind])
    assert merge(str(tmp_path / "base"), adapter, tmp_path / "merged") > 0
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    with torch.no_grad():
        expected = merged(torch.arange(3, 19)[None]).logits[0]
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)


def test_a_rotation_of_its_own_becomes_the_merged_models(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapter = save_adapter(model, tmp_path / "adapter", 5, **recipes("llama")["rank-1"])
    merge(str(tmp_path / "base"), put_scaled(adapter, SCALINGS["yarn"]), tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 256
    expected = references(tmp_path / "base", dict.fromkeys(SCALINGS, adapter))["yarn"].logits(list(range(3, 19)), "own")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)
