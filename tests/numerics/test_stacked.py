"""Adapters of experts one by one, as older files have them, and stacked ones; what of both is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.merging import merge
from manylora_worker.weights.coverage import coverage_of
from manylora_worker.weights.source import AdapterInvalid, AdapterLimits, read_adapter
from manylora_worker.weights.stacked import without_weights
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import save_adapter
from tests.numerics.families import make_model

LIMITS = AdapterLimits(max_rank=64)
STACK = "base_model.model.model.layers.{}.mlp.experts"
EXPERTS, RANK = 8, 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    folder = tmp_path_factory.mktemp("stacked") / "base"
    make_model("qwen3_moe", folder)
    return folder, load_model(str(folder))


@pytest.fixture
def stacked(base: tuple[Path, LoadedModel], tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base[0], dtype=torch.float32)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    return save_adapter(
        model, tmp_path / "stacked", 3, r=RANK, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters
    )


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))


def one_by_one(stacked: Path, folder: Path) -> Path:
    """The same update as files of transformers 4 have it: a module an expert. Gate and up have an A each."""
    tensors = load_file(stacked / "adapter_model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if "experts" not in key}
    for layer in (0, 2):
        stack = STACK.format(layer)
        inner, outer = ([tensors[f"{stack}{at}.lora_{m}.weight"] for m in "AB"] for at in (".base_layer", ""))
        for expert in range(EXPERTS):
            rows = slice(expert * RANK, (expert + 1) * RANK)
            gate, up = inner[1][:, expert::EXPERTS].chunk(2)
            pairs = {"gate_proj": (inner[0], gate), "up_proj": (inner[0], up),
                     "down_proj": (outer[0], outer[1][:, expert::EXPERTS])}  # fmt: skip
            for leaf, (a, b) in pairs.items():
                kept[f"{stack}.{expert}.{leaf}.lora_A.weight"] = a[rows].clone()
                kept[f"{stack}.{expert}.{leaf}.lora_B.weight"] = b.contiguous().clone()
    folder.mkdir()
    save_file(kept, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((stacked / "adapter_config.json").read_text())
    pattern = r".*(q_proj|experts\.\d+\.(gate|up|down)_proj)"
    edit(folder, target_modules=pattern, target_parameters=None)
    return folder


def refused(folder: Path, loaded: LoadedModel) -> dict[str, str]:
    with pytest.raises(AdapterInvalid) as caught:
        read_adapter(folder, loaded.adapter_base(), LIMITS)
    return {each.field: each.description for each in caught.value.violations}


def test_both_forms_are_read_as_one(base: tuple[Path, LoadedModel], stacked: Path, tmp_path: Path) -> None:
    loaded = base[1]
    single = one_by_one(stacked, tmp_path / "single")
    whole, parts = (read_adapter(folder, loaded.adapter_base(), LIMITS) for folder in (stacked, single))
    assert whole.layout == parts.layout
    assert torch.equal(whole.buffer, parts.buffer)
    for folder, adapter in ((stacked, whole), (single, parts)):
        coverage = coverage_of(folder, adapter.layout, loaded.adapter_base())
        told = {module.path: module.rank for module in coverage.modules}
        assert told["model.layers.2.mlp.experts.*.down_proj"] == RANK
        assert len(told) == 3 + 2 * 3
        assert coverage.num_layers == 3 * 4 + 3 + 2 * (1 + 3) + 1  # and the output head


@pytest.mark.parametrize("form", ["stacked", "single"])
def test_merged_weights_are_those_of_pefts_merge(
    base: tuple[Path, LoadedModel], stacked: Path, tmp_path: Path, form: str
) -> None:
    adapter = stacked if form == "stacked" else one_by_one(stacked, tmp_path / "single")
    assert merge(str(base[0]), adapter, tmp_path / "merged") > 0
    model = AutoModelForCausalLM.from_pretrained(base[0], dtype=torch.float32)
    expected = PeftModel.from_pretrained(model, stacked).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for (name, one), (_, other) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=name)


def test_some_experts_alone_leave_the_others_as_they_are(
    base: tuple[Path, LoadedModel], stacked: Path, tmp_path: Path
) -> None:
    loaded, single = base[1], one_by_one(stacked, tmp_path / "single")
    tensors = load_file(single / "adapter_model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if ".experts.3.down_proj." in key}
    save_file(kept, single / "adapter_model.safetensors")
    edit(single, target_modules=r".*experts\.3\.down_proj")

    def dirty(elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((elements,), float("nan"), dtype=dtype)

    adapter = read_adapter(single, loaded.adapter_base(), LIMITS, allocate=dirty)
    weights = adapter.on(torch.device("cpu")).experts
    assert len(weights) == 2
    for site in weights.values():
        assert [slot.b.any().item() for slot in site.slots] == [expert == 3 for expert in range(EXPERTS)]


def test_what_does_not_fit_is_named(base: tuple[Path, LoadedModel], stacked: Path) -> None:
    loaded = base[1]
    stack = STACK.format(0)
    edit(stacked, r=RANK + 1)
    assert f"[{EXPERTS * (RANK + 1)}, 48]" in refused(stacked, loaded)[f"{stack}.lora_A.weight"]
    edit(stacked, r=RANK, target_parameters=["experts.down_proj"])
    told = refused(stacked, loaded)
    assert "target_parameters does not target it" in told[f"{stack}.base_layer"]
    edit(stacked, target_parameters=["experts.gate_up_proj", "experts.down_proj", "input_layernorm.weight"])
    assert "no weight of a linear layer or of experts" in refused(stacked, loaded)["target_parameters"]
    edit(stacked, target_parameters="experts")
    assert "list of names" in refused(stacked, loaded)["target_parameters"]


def test_a_shared_experts_name_does_not_ask_for_the_experts_weights() -> None:
    """Unless those of one are there, or the name is an expert's alone."""
    shared, first, second = "mlp.shared_expert.down_proj", "mlp.experts.0.down_proj", "mlp.experts.1.down_proj"
    up = "mlp.experts.0.up_proj"

    def absent(*found: str) -> list[str]:
        return without_weights([shared, first, second, up], set(found), lambda path: ".experts." in path)

    assert absent(shared) == [up]
    assert absent(shared, first, up) == [second]
    assert absent(first, second, up) == [shared]
    assert absent() == [shared, first, second, up]
