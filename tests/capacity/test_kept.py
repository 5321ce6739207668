"""Bytes of quantized weights as a plan has them, against those of the worker's own formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from manylora.capacity.planning.kept import Kept, kept_of
from manylora.capacity.planning.parts import BadConfig, Product, parts_of
from manylora.capacity.planning.shapes import CONFIGS
from manylora_worker.models.cuda.kernels.nf4_format import Nf4Weight, quantize
from manylora_worker.models.quantized import fp8
from manylora_worker.models.quantized.int4 import Int4Weight
from manylora_worker.models.quantized.stacks import QuantizedStack, quantized_stack

LAYER = Product(512, 96, is_biased=True)
BIAS = 2 * 96
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def test_nf4_and_fp8_take_what_the_formats_have() -> None:
    weight = torch.randn(96, 512)
    assert Kept("none").num_bytes(LAYER) == 2 * 96 * 512 + BIAS
    assert Kept("nf4").num_bytes(LAYER) == quantize(weight).num_bytes + BIAS
    assert Kept("fp8").num_bytes(LAYER) == fp8.quantize(weight).num_bytes + BIAS
    codes = fp8.Fp8Weight(weight.to(torch.float8_e4m3fn), torch.ones(96, 4), 128)
    assert Kept("fp8", 128).num_bytes(LAYER) == codes.num_bytes + BIAS


@pytest.mark.parametrize("has_shifts", [False, True])
def test_int4_takes_codes_and_scales_twice(has_shifts: bool) -> None:
    """The checkpoint's own, and those of the kernels; both read the same codes."""
    scales = torch.ones(96, 4)
    shifts = torch.ones(96, 4) if has_shifts else None
    weight = Int4Weight(torch.zeros(96, 256, dtype=torch.uint8), scales, shifts, 128)
    kernels = Nf4Weight(weight.codes, scales.repeat_interleave(2, dim=1).contiguous())
    of_kernels = kernels.num_bytes + (0 if shifts is None else shifts.nbytes)
    kept = Kept("int4", 128, has_shifts)
    assert kept.read_bytes(LAYER) == of_kernels + BIAS
    assert kept.num_bytes(LAYER) == of_kernels + weight.num_bytes - weight.codes.nbytes + BIAS


def kept(quantization: str, **stated: Any) -> Kept:
    config = {**CONFIGS["llama-3.1-8b"], **({"quantization_config": stated} if stated else {})}
    return kept_of(config, parts_of(config), quantization)


def test_a_checkpoint_says_its_groups() -> None:
    assert kept("int4", **GPTQ) == Kept("int4", 128)
    assert kept("int4", **{**GPTQ, "sym": False}) == Kept("int4", 128, has_shifts=True)
    assert kept("int4", quant_method="awq", group_size=64) == Kept("int4", 64, has_shifts=True)
    packed = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": packed}}
    assert kept("int4", quant_method="compressed-tensors", config_groups=groups) == Kept("int4", 128)
    assert kept("fp8", quant_method="fp8", weight_block_size=[128, 128]) == Kept("fp8", 128)
    assert kept("fp8") == Kept("fp8")
    assert kept("none", **GPTQ) == Kept(), "rebuilt"


@pytest.mark.parametrize(
    ("quantization", "stated", "says"),
    [
        ("nf4", GPTQ, r"--quantization nf4: the weights are quantized already \(gptq\)"),
        ("int4", {**GPTQ, "group_size": 32}, "a GPU takes no groups of 32 inputs"),
        ("int4", {**GPTQ, "desc_act": True}, "not of neighbouring inputs"),
        ("int4", {**GPTQ, "group_size": 768}, r"a layer's 4096 inputs are no groups of 768"),
        ("none", {"quant_method": "bitsandbytes"}, "served on the CPU alone"),
        ("fp8", {"quant_method": "fp8", "ignored_layers": ["lm_head", 3]}, "3 names no module"),
        ("fp8", {"quant_method": "fp8", "ignored_layers": ["re:("]}, r"'\(' is no pattern"),
    ],
)
def test_what_is_not_planned_is_refused(quantization: str, stated: dict[str, Any], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        kept(quantization, **stated)


STACK = Product(512, 96, path="experts", site="experts", count=3, members=("gate_proj", "up_proj"))


@pytest.mark.parametrize("has_shifts", [False, True])
def test_experts_have_one_set_of_scales(has_shifts: bool) -> None:
    shifts = [torch.ones(3, 96, 4)] if has_shifts else []
    int4 = QuantizedStack([torch.zeros(3, 96, 256, dtype=torch.uint8), torch.ones(3, 96, 4), *shifts], 128, torch.float)
    kept = Kept("int4", 128, has_shifts)
    assert kept.num_bytes(STACK) == kept.read_bytes(STACK) == int4.weight_bytes
    assert Kept("nf4").num_bytes(STACK) == 3 * quantize(torch.randn(96, 512)).num_bytes, "an expert's as a layer's"
    assert Kept("fp8").num_bytes(STACK) == quantized_stack(torch.randn(3, 96, 512)).weight_bytes


def test_a_mixture_is_there_unquantized_before_it_is_in_fp8() -> None:
    """Shipped experts come in codes, other layers are rebuilt on the way."""
    made, shipped = Kept("fp8"), Kept("fp8", 128, is_shipped=True)
    assert made.load_bytes(STACK) == Kept().num_bytes(STACK)
    assert shipped.load_bytes(STACK) == shipped.num_bytes(STACK)
    assert shipped.load_bytes(LAYER) == shipped.num_bytes(LAYER)
    assert Kept("nf4").load_bytes(STACK) == Kept("nf4").num_bytes(STACK)
    assert Kept("nf4").load_bytes(LAYER) == Kept("nf4").num_bytes(LAYER)


def left(*entries: str, quantization: str = "fp8") -> set[str]:
    config = {**CONFIGS["30b-a3b"], "num_hidden_layers": 2}
    stated = {"quant_method": "fp8", "modules_to_not_convert": entries}
    return {path for path, _ in kept_of({**config, "quantization_config": stated}, parts_of(config), quantization).left}


def test_what_a_checkpoint_leaves_is_named_by_paths_and_patterns() -> None:
    """All that reads one input is rebuilt where a part of it is left. Routers are rebuilt always."""
    first = {f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    assert left("lm_head", "model.layers.0.mlp.gate") == set()
    assert left("model.layers.0.self_attn.k_proj") == first
    assert left("layers.0.self_attn.o_proj") == {"model.layers.0.self_attn.o_proj"}
    assert left(r"re:.*\.0\.self_attn\.v_proj$") == left("layers.0.*.v_proj") == first
    assert left("proj", "q") == set(), "a name is whole"
    assert left("model.layers.1.mlp.experts.127.up_proj") == {"model.layers.1.mlp.experts"}


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "experts on a GPU take no groups of 16 inputs"),
        ({**GPTQ, "group_size": 512}, "a layer's 768 inputs are no groups of 512"),
    ],
)
def test_groups_that_a_gpu_takes_of_no_expert_are_refused(stated: dict[str, Any], says: str) -> None:
    mixture = {**CONFIGS["30b-a3b"], "quantization_config": stated}
    with pytest.raises(BadConfig, match=says):
        kept_of(mixture, parts_of(mixture), "int4" if "bits" in stated else "fp8")
