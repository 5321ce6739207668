"""Weights kept in the 4 bits that AWQ and GPTQ ship: what they stand for, and engines that serve them with adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.int4 import Int4Linear, Int4Weight, joined
from manylora_worker.models.torch.decoder import trusted_weights
from transformers import AutoModelForCausalLM

from tests.numerics.conftest import FamilyOf
from tests.numerics.quantizing import check_with_adapter, ship, shipped_family
from tests.numerics.two_ranks import check_logprobs, shared_by_two

PROMPT = list(range(3, 20))


def test_what_codes_stand_for() -> None:
    codes = torch.tensor([[0x08, 0xF9]], dtype=torch.uint8)
    weight = Int4Weight(codes, torch.tensor([[2.0, 3.0]]), torch.tensor([[0.5, 0.0]]), 2)
    assert weight.dequantized(torch.float32).tolist() == [[-15.5, 0.5, 21.0, 3.0]]
    both = joined(
        [(codes, weight.scales, torch.zeros(1, 2)), (codes, weight.scales * 2, torch.zeros(1, 2))], codes.device
    )
    assert both.shifts is None
    assert both.group_size == 2
    assert both.dequantized(torch.float32).tolist() == [[-16.0, 0.0, 21.0, 3.0], [-32.0, 0.0, 42.0, 6.0]]


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-sym", "packed", "packed-zeros", "packed-channel"])
def test_an_engine_equals_the_weights_that_were_shipped(family_of: FamilyOf, tmp_path: Path, name: str) -> None:
    family = family_of("llama")
    stands_for = ship(family.folder, tmp_path / "tiny-llama", name)
    loaded = load_model(str(tmp_path / "tiny-llama"), quantization="int4")
    assert trusted_weights(loaded) is not None
    fused = loaded.model.model.layers[1].self_attn.q_proj.linear.base
    assert isinstance(fused, Int4Linear)
    assert (fused.weight.shifts is None) == (name in ("gptq-sym", "packed", "packed-channel"))
    q, k, v = (stands_for[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qkv")
    torch.testing.assert_close(fused.weight.dequantized(torch.float32), torch.cat((q, k, v)))
    torch.testing.assert_close(fused.dequantized(slice(3, 7), torch.float32), q[3:7])
    reference = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32, attn_implementation="eager")
    reference.load_state_dict(stands_for, strict=False)
    check_with_adapter(loaded, reference, family.adapters["all-linear"], atol=1e-4)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "awq-16"),
        *(
            pytest.param(*each, marks=pytest.mark.wide)
            for each in [("llama", "gptq-sym"), ("qwen3_5_wide", "gptq-sym")]
        ),
    ],
)
def test_two_ranks_have_the_weights_of_one(family_of: FamilyOf, tmp_path: Path, model: str, name: str) -> None:
    family = shipped_family(family_of(model), tmp_path / f"tiny-{model}", name)
    check_logprobs(family, tmp_path, "cpu", 1e-3, quantization="int4")


def test_groups_that_two_ranks_would_tear_are_refused(family_of: FamilyOf, tmp_path: Path) -> None:
    family = shipped_family(family_of("llama"), tmp_path / "tiny-llama", "awq")
    torn = r"--tensor-parallel 2: model.layers.0.mlp.down_proj: 48 of its 96 inputs a rank are no whole groups of 32"
    with pytest.raises(ModelRefused, match=torn), shared_by_two(family, tmp_path, "cpu", quantization="int4"):
        pass


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "this model is not quantized"),
        ("fp8", "start without --quantization int4"),
        ("gptq-desc-act", "groups are not of neighbouring inputs"),
        ("packed-actorder", "groups are not of neighbouring inputs"),
    ],
)
def test_what_is_not_kept_is_refused(family_of: FamilyOf, tmp_path: Path, name: str, told: str) -> None:
    folder = family_of("llama").folder
    if name:
        ship(folder, tmp_path / "tiny", name)
        folder = tmp_path / "tiny"
    with pytest.raises(ModelRefused, match=told):
        load_model(str(folder), quantization="int4")
