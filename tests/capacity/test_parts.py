"""What a plan takes of a model against what a worker that loads it has: weights, keys and values, states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manylora.capacity.planning import shapes
from manylora.capacity.planning.parts import BadConfig, parts_of
from manylora.capacity.planning.shapes import CONFIGS, CannotPlan, Shape, shape_of
from manylora_shared.composition import RANKS_AT_ONCE
from manylora_worker.config import WorkerConfig
from manylora_worker.models.build import _check_block
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.loader import LoadedModel, load_model
from manylora_worker.models.quantized.int4 import Int4Linear
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.quantized.stacks import QuantizedStack
from manylora_worker.models.torch import decoder
from manylora_worker.models.torch.kv_scales import with_fp8_kv
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.numerics.families import make_model
from tests.numerics.published import PUBLISHED_HYBRIDS
from tests.numerics.quantizing import ship
from tests.numerics.test_checkpoint import published

DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "ministral"),
    *("smollm3", "exaone4", "seed_oss", "granitemoehybrid", "cwm"),
)
MIXTURES = ("qwen3_moe", "gpt_oss", "mixtral", "qwen2_moe", "glm4_moe", "dots1")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granite4_h", "granite4_h_moe")
GEMMA4 = ("gemma4_text", "gemma4_wide")
NEW = ("gemma4_moe_wide", "ministral3")
WITHOUT_KERNELS = ("olmo2", "olmo3", "dots1_in_groups", "olmoe")


def shape(folder: Path, quantization: str = "none", ranks: int = 1) -> Shape:
    return shape_of(json.loads((folder / "config.json").read_text()), "tiny", quantization, ranks)


def made(family: str, folder: Path, quantization: str = "none") -> LoadedModel:
    make_model(family, folder)
    return load_model(str(folder), dtype=torch.bfloat16, quantization=quantization)  # type: ignore[arg-type]


def weight_bytes(loaded: LoadedModel) -> int:
    """As models/build.py counts them, and the biases that quantized layers have of their own."""
    kinds = PackedLinear | QuantizedLinear | QuantizedStack
    kept = [each for each in loaded.model.modules() if isinstance(each, kinds)]
    biases = sum(each.bias.nbytes for each in kept if getattr(each, "bias", None) is not None)
    # on a GPU 4 bits have scales of its kernels, too, and once more what their zeros are
    four = [each.weight for each in kept if isinstance(each, Int4Linear)]
    kernels = sum(each.codes.nbytes // 8 + (0 if each.shifts is None else each.shifts.nbytes) for each in four)
    return sum(p.nbytes for p in loaded.model.parameters()) + sum(each.weight_bytes for each in kept) + biases + kernels


def has_kernels(loaded: LoadedModel) -> bool:
    """Whether a GPU runs it by ours."""
    weights = decoder.read_decoder(loaded)  # type: ignore[attr-defined]
    return weights is not None and weights.has_kernels


def adapter_bytes(loaded: LoadedModel) -> int:
    """Of an adapter on all linear layers, experts and routers aside, for each of its rank."""
    names = ("mlp.gate", "mlp.router", "block_sparse_moe.router")
    own = [site for site in loaded.sites if not site.experts and not site.slots[0].path.endswith(names)]
    return 2 * sum(site.in_features + slot.stop - slot.start for site in own for slot in site.slots)


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES, *HYBRIDS, *GEMMA4, "gemma4_moe", "ministral3"])
def test_a_plan_has_the_memory_that_a_worker_takes(family: str, tmp_path: Path) -> None:
    loaded, found = made(family, tmp_path), shape(tmp_path)
    kv = loaded.spec.kv
    assert found.weight_bytes == weight_bytes(loaded)
    assert found.kv_token_bytes == kv.token_bytes(torch.bfloat16)
    assert found.state_bytes == (0 if kv.state is None else kv.state.size_bytes)
    assert found.state_tokens == 16 * kv.state_blocks(16, torch.bfloat16)
    assert found.rank_bytes == adapter_bytes(loaded)
    experts = loaded.spec.experts.values()
    assert (found.experts, found.top_k) == next(((e.experts, e.top_k) for e in experts), (0, 0))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_text", "qwen3_next", "gemma4_text"])
@pytest.mark.parametrize("max_rank", [4, 64])
def test_blocks_of_kv_in_fp8_are_those_that_a_worker_takes(family: str, max_rank: int, tmp_path: Path) -> None:
    loaded = with_fp8_kv(made(family, tmp_path))
    found = replace(shape(tmp_path), kv_element_bytes=1).block_tokens(max_rank)
    token_bytes = loaded.spec.kv.token_bytes(torch.bfloat16)

    def check(block_size: int) -> None:
        config = WorkerConfig(model="tiny", adapter_store="", block_size=block_size, max_lora_rank=max_rank)
        _check_block(loaded, config, token_bytes * block_size)

    check(found)
    assert RANKS_AT_ONCE == shapes.RANKS_AT_ONCE
    if found > 16:
        with pytest.raises(ModelRefused, match=f"set --block-size {found}$"):
            check(found // 2)
    assert shape(tmp_path).block_tokens(max_rank) == 16, "of bf16 any will do"


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES, *HYBRIDS, *GEMMA4, *NEW])
def test_what_is_planned_runs_by_kernels(family: str, tmp_path: Path) -> None:
    assert has_kernels(made(family, tmp_path))


@pytest.mark.parametrize("family", WITHOUT_KERNELS)
def test_a_model_that_runs_without_kernels_is_refused_by_name(family: str, tmp_path: Path) -> None:
    assert not has_kernels(made(family, tmp_path))
    with pytest.raises(CannotPlan, match=r"tiny: \w+: .*: not planned for"):
        shape(tmp_path)


@pytest.mark.parametrize(
    "family", ["llama", "seed_oss", "qwen3_5_text", "gemma4_text", "gemma4_moe", *MIXTURES, *HYBRIDS[1:]]
)
def test_weights_in_fp8_take_what_a_worker_keeps(family: str, tmp_path: Path) -> None:
    loaded = made(family, tmp_path, "fp8")
    assert shape(tmp_path, "fp8").weight_bytes == weight_bytes(loaded)


@pytest.mark.parametrize(
    ("family", "name", "quantization"),
    [
        ("qwen3_moe_wide", "fp8", "fp8"),
        ("qwen3_moe_wide", "fp8-channel", "fp8"),
        ("qwen3_moe_wide", "awq-64", "int4"),
        ("qwen3_moe_wide", "packed-channel", "int4"),
        ("qwen3_moe_wide", "awq-64", "none"),
        ("qwen3_next_wide", "fp8", "fp8"),
        ("qwen3_5_moe_wide", "fp8", "fp8"),
    ],
)
def test_experts_that_are_shipped_in_codes_take_what_a_worker_keeps(
    family: str, name: str, quantization: str, tmp_path: Path
) -> None:
    """What a checkpoint leaves as it is stays so, and what is one product with it."""
    make_model(family, tmp_path / "plain")
    left = ["in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate", "experts.3.up_proj", "mlp.gate"]
    ship(tmp_path / "plain", tmp_path / "shipped", name, ("_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"))
    config = tmp_path / "shipped" / "config.json"
    told = json.loads(config.read_text())
    if "next" in family or "3_5" in family:
        told["quantization_config"]["modules_to_not_convert"] = left
        weights = tmp_path / "shipped" / "model.safetensors"
        save_file(with_plain(weights, tmp_path / "plain" / "model.safetensors"), weights, metadata={"format": "pt"})
    config.write_text(json.dumps(told))
    loaded = load_model(str(tmp_path / "shipped"), dtype=torch.bfloat16, quantization=quantization)  # type: ignore[arg-type]
    found = shape(tmp_path / "shipped", quantization)
    assert found.weight_bytes == weight_bytes(loaded)
    stacks = [each for each in loaded.model.modules() if isinstance(each, QuantizedStack)]
    assert (found.expert_bytes < shape(tmp_path / "shipped").expert_bytes) == bool(stacks)


def with_plain(shipped: Path, plain: Path) -> dict[str, torch.Tensor]:
    """An expert's layer as it was."""
    of_each = (load_file(shipped), load_file(plain))
    first, second = ({name: each for name, each in found.items() if ".3.up_proj" in name} for found in of_each)
    assert second
    return {name: each for name, each in of_each[0].items() if name not in first} | second


TIED = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 131,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 10,
    },
}


def test_a_text_part_is_tied_where_the_whole_model_alone_says_so() -> None:
    """As the worker reads it; the text part's own word is before the whole model's."""
    untied = shape_of(TIED, "qwen").weight_bytes
    tied = shape_of(TIED | {"tie_word_embeddings": True}, "qwen").weight_bytes
    assert untied - tied == 2 * 64 * 131
    own = TIED["text_config"] | {"tie_word_embeddings": False}  # type: ignore[operator]
    assert shape_of(TIED | {"tie_word_embeddings": True, "text_config": own}, "qwen").weight_bytes == untied


@pytest.mark.parametrize(
    "name", ["mistral-small-3.2", "ministral-3-8b", "qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"]
)
def test_of_a_model_of_text_and_images_the_text_part_is_planned(name: str, tmp_path: Path) -> None:
    published(name, tmp_path / name, of=AutoModelForImageTextToText)
    loaded = load_model(str(tmp_path / name), dtype=torch.bfloat16)
    found = shape_of(PUBLISHED_HYBRIDS[name], name)
    assert has_kernels(loaded)
    assert found.weight_bytes == weight_bytes(loaded)
    assert found.kv_token_bytes == loaded.spec.kv.token_bytes(torch.bfloat16)
    assert found.rank_bytes == adapter_bytes(loaded)


def test_a_mixture_without_dense_layers_needs_no_width_of_them() -> None:
    """As Qwen3.5's are published."""
    told = {**PUBLISHED_HYBRIDS["qwen3.5-moe"]["text_config"], "linear_num_value_heads": 8}
    assert "intermediate_size" not in told
    assert parts_of(told).expert_elements == 4 * 8 * 3 * 64 * 40


def test_qwen3_next_is_as_large_as_its_name() -> None:
    """80B, of which a token goes through 3B; FP8 and two GPUs each halve it, nearly."""
    config = CONFIGS["80b-a3b"]
    found, fp8 = shape_of(config, "80b-a3b"), shape_of(config, "80b-a3b", "fp8")
    assert found.weight_bytes == pytest.approx(2 * 79.7e9, rel=0.01)
    assert found.row_elements == pytest.approx(3.6e9, rel=0.05)
    assert fp8.weight_bytes == pytest.approx(found.weight_bytes / 2, rel=0.02)
    assert shape_of(config, "80b-a3b", "fp8", ranks=2).weight_bytes == pytest.approx(fp8.weight_bytes / 2, rel=0.02)


def test_every_fourth_layer_attends_where_layers_are_not_named() -> None:
    assert parts_of(TIED).token_kv == 2 * 4 * 256


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types: must name each of 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: 'mamba' is not planned for"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim: must be a whole number above 0, not None"),
        ({"model_type": "mamba2"}, "mamba2: gated delta nets: not planned for"),
    ],
)
def test_what_is_not_known_is_named(told: dict[str, object], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        parts_of({"text_config": TIED["text_config"] | told})  # type: ignore[operator]
