"""Checkpoints that ship quantized: what is loaded is what the format stands for, with adapters on top as PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.schemes import FP8
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from tests.numerics.conftest import FamilyOf
from tests.numerics.quantizing import FORMATS, check_with_adapter, ship

PROMPT = list(range(3, 20))


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_with_mixed_adapters(family_of: FamilyOf, tmp_path: Path, name: str) -> None:
    """Greedy tokens too, over the weights that the format stands for, written down by the test's own code."""
    family, folder = family_of("llama"), tmp_path / "tiny-llama"
    stands_for = ship(family.folder, folder, name)
    loaded = load_model(str(folder))
    q, k = (stands_for[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qk")
    fused = loaded.model.model.layers[1].self_attn.q_proj.linear.base.weight
    assert torch.equal(fused[: len(q) + len(k)], torch.cat((q, k)))
    reference = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32, attn_implementation="eager")
    reference.load_state_dict(stands_for, strict=False)
    check_with_adapter(loaded, reference, family.adapters["all-linear"], atol=1e-4)


def test_blocks_of_fp8_as_transformers_reads_them(family_of: FamilyOf, tmp_path: Path) -> None:
    stands_for = ship(family_of("llama").folder, tmp_path / "shipped", "fp8")
    options = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "shipped", dtype=torch.float32, quantization_config=options, device_map={"": "cpu"}
    )
    name = "model.layers.2.mlp.down_proj.weight"
    found = dict(theirs.named_parameters())[name]
    torch.testing.assert_close(found.float(), stands_for[name], atol=1e-2, rtol=1e-2)
    ours = load_model(str(tmp_path / "shipped")).model.model.layers[2].mlp.down_proj.base.weight
    assert torch.equal(ours, stands_for[name])


def edited(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_model(str(folder), **options)
    return str(caught.value)


def test_layers_that_are_not_quantized_are_named(family_of: FamilyOf, tmp_path: Path) -> None:
    family, folder = family_of("llama"), tmp_path / "shipped"
    ship(family.folder, folder, "fp8")
    tensors, plain = load_file(folder / "model.safetensors"), load_file(family.folder / "model.safetensors")
    path = "model.layers.0.mlp.up_proj"
    assert tensors[f"{path}.weight"].dtype == FP8
    del tensors[f"{path}.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{path}: is not a matrix" in refusal(folder)
    tensors[f"{path}.weight"] = plain[f"{path}.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{path}: is not quantized" in refusal(folder)
    edited(folder, modules_to_not_convert=[path, "lm_head"])
    load_model(str(folder))
    assert "not once more" in refusal(folder, quantization="nf4")
