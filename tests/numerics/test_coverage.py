"""What an adapter changes, told layer by layer; no tensor of its file is used silently by nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from manylora_worker.weights.coverage import coverage_of
from manylora_worker.weights.source import AdapterInvalid, read_adapter
from safetensors.torch import load_file, save_file

from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import LIMITS


def test_modules_ranks_and_tensors_are_those_of_the_file(family_of: FamilyOf) -> None:
    family = family_of("llama")
    folder, base = family.adapters["patterns"], family.loaded.adapter_base()
    coverage = coverage_of(folder, read_adapter(folder, base, LIMITS).layout, base)
    tensors = load_file(folder / "adapter_model.safetensors")
    ranks = {name: tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_A.weight")}
    told = {f"base_model.model.{m.path}.lora_A.weight": m.rank for m in coverage.modules}
    assert told == ranks
    assert len(set(ranks.values())) > 1
    assert (coverage.num_tensors, coverage.num_left_out, coverage.left_out) == (len(tensors), 0, ())
    assert coverage.num_layers == len(base.modules)
    assert [m.path for m in coverage.modules] == sorted(m.path for m in coverage.modules)


def test_tensors_of_parts_that_no_text_goes_through_are_named(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    folder = tmp_path / "adapter"
    shutil.copytree(family.adapters["all-linear"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    extra = {
        f"base_model.model.vision.{name.partition('.model.')[2]}": tensor.clone() for name, tensor in tensors.items()
    }
    save_file({**tensors, **extra}, folder / "adapter_model.safetensors")
    base = replace(family.loaded.adapter_base(), left_out=("vision",))
    coverage = coverage_of(folder, read_adapter(folder, base, LIMITS).layout, base)
    assert (coverage.num_tensors, coverage.num_left_out) == (2 * len(tensors), len(tensors))
    assert coverage.left_out == tuple(sorted(extra)[:16])


def test_a_tensor_that_nothing_uses_is_an_error(family_of: FamilyOf, tmp_path: Path) -> None:
    """Whatever a reader let through."""
    family = family_of("llama")
    folder, base = family.adapters["all-linear"], family.loaded.adapter_base()
    layout = read_adapter(folder, base, LIMITS).layout
    other = tmp_path / "adapter_model.safetensors"
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({**tensors, "base_model.model.spare.lora_A.weight": next(iter(tensors.values())).clone()}, other)
    with pytest.raises(AdapterInvalid) as error:
        coverage_of(tmp_path, layout, base)
    assert [v.field for v in error.value.violations] == ["base_model.model.spare.lora_A.weight"]
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
