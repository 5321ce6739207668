"""Weights kept in FP8: what they stand for, and engines that serve them with adapters on top."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.fp8 import Fp8Linear, Fp8Weight, joined, quantize
from manylora_worker.models.torch.decoder import trusted_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.numerics.adapters import Reference
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import Driver, Stream, make_runner
from tests.numerics.quantizing import check_with_adapter, ship, shipped_family
from tests.numerics.two_ranks import check_logprobs, shared_by_two

PROMPT = list(range(3, 20))


def test_by_output() -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 40) * torch.logspace(-6, 3, 12)[:, None]
    weight[3] = 0
    found = quantize(weight)
    half_step = weight.abs() / 16  # of three bits behind the leading one
    least = weight.abs().amax(1, keepdim=True) / 448 * 2**-10  # half of the smallest step
    assert ((found.dequantized(torch.float32) - weight).abs() <= torch.maximum(half_step, least) * 1.001).all()
    assert found.num_bytes == 12 * 40 + 12 * 4


def test_groups_of_inputs() -> None:
    codes = torch.ones(2, 5).to(torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 3)
    assert weight.dequantized(torch.float32).tolist() == [[1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
    both = joined([(codes, weight.scales), (codes, weight.scales * 2)], 3, codes.device)
    assert both.dequantized(torch.float32)[3].tolist() == [6, 6, 6, 8, 8]


def reference_of(folder: Path) -> PreTrainedModel:
    """With the weights that FP8 by output stands for, by the test's own code."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for path, module in model.named_modules():
        if path.endswith("_proj"):
            scales = module.weight.data.abs().amax(1, keepdim=True) / 448
            module.weight.data = (module.weight.data / scales).to(torch.float8_e4m3fn).float() * scales
    return model


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2", marks=pytest.mark.wide)])
def test_an_engine_in_fp8_equals_the_weights_it_stands_for(family_of: FamilyOf, name: str) -> None:
    family = family_of(name)
    loaded = load_model(str(family.folder), quantization="fp8")
    assert trusted_weights(loaded) is not None
    check_with_adapter(loaded, reference_of(family.folder), family.adapters["all-linear"], atol=1e-3)


@pytest.mark.wide
def test_two_ranks_have_the_weights_of_one(family_of: FamilyOf, tmp_path: Path) -> None:
    family = family_of("llama")
    reference = Reference(reference_of(family.folder).eval(), family.adapters)
    check_logprobs(replace(family, reference=reference), tmp_path, "cpu", 1e-3, quantization="fp8")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "name"), [("llama", "fp8-16"), ("llama", "fp8-channel"), ("llama", "fp8-tensor"), ("phi3", "fp8-16")]
)
def test_two_ranks_keep_what_is_shipped(family_of: FamilyOf, tmp_path: Path, model: str, name: str) -> None:
    family = shipped_family(family_of(model), tmp_path / f"tiny-{model}", name)
    check_logprobs(family, tmp_path, "cpu", 1e-3, quantization="fp8")


def test_blocks_that_two_ranks_would_tear_are_refused(family_of: FamilyOf, tmp_path: Path) -> None:
    family = shipped_family(family_of("llama"), tmp_path / "tiny-llama", "fp8")
    torn = r"--tensor-parallel 2: model.layers.0.mlp.down_proj: 48 of its 96 inputs a rank are no whole groups of 32"
    with pytest.raises(ModelRefused, match=torn), shared_by_two(family, tmp_path, "cpu", quantization="fp8"):
        pass


@pytest.mark.parametrize("name", ["fp8", "fp8-channel", "fp8-tensor"])
def test_codes_that_are_shipped_are_kept(family_of: FamilyOf, tmp_path: Path, name: str) -> None:
    stands_for = ship(family_of("llama").folder, tmp_path / "tiny", name)
    loaded = load_model(str(tmp_path / "tiny"), quantization="fp8")
    q, k, v = (stands_for[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qkv")
    fused = loaded.model.model.layers[1].self_attn.q_proj.linear.base
    assert isinstance(fused, Fp8Linear)
    assert torch.equal(fused.weight.dequantized(torch.float32), torch.cat((q, k, v)))
    rebuilt = load_model(str(tmp_path / "tiny"))
    found, expected = (Driver(make_runner(each)).logits([Stream(PROMPT)])[0] for each in (loaded, rebuilt))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_4_bits_do_not_become_fp8(family_of: FamilyOf, tmp_path: Path) -> None:
    ship(family_of("llama").folder, tmp_path / "tiny", "awq")
    with pytest.raises(ModelRefused, match="without --quantization fp8"):
        load_model(str(tmp_path / "tiny"), quantization="fp8")
