"""What a quantization_config may say, and what is refused of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.quantized.schemes import Scheme, SchemeRefused, scheme_of

from tests.numerics.conftest import FamilyOf
from tests.numerics.quantizing import FORMATS, packs, ship
from tests.numerics.test_shipped import edited, refusal


@pytest.mark.parametrize(
    ("entry", "path", "skips"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
    ],
)
def test_modules_that_are_not_quantized(entry: str, path: str, skips: bool) -> None:
    assert Scheme("", "fp8", skipped=(entry,)).skips(path) is skips


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(SchemeRefused, match="no pattern"):
        Scheme("", "fp8", skipped=("re:(",)).skips("model")


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_another_shape(name: str) -> None:
    stated, write = FORMATS[name]
    parts, _ = write(torch.ones(64, 64))
    scale = next(part for part in parts if "scale" in part)
    with pytest.raises(SchemeRefused, match=r"layer\.0: "):
        scheme_of(stated).weight("layer.0", {**parts, scale: parts[scale].repeat(3, *[1] * (parts[scale].dim() - 1))})


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("fp8", {"weight_block_size": [64, 64]}, "do not fit blocks of 64 x 64"),
        ("fp8", {"modules_to_not_convert": ["model.layers.0.mlp"]}, "layers.0.mlp.down_proj: is quantized, though"),
        ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("fp8-channel", {"format": "pack-quantized"}, "num_bits 8: only 4 is read"),
        ("fp8-channel", {"format": "int-quantized"}, "only 'float-quantized' or 'pack-quantized' is read"),
        ("packed", {"format": "float-quantized"}, "num_bits 4: only 8 is read"),
        ("packed", packs("tensor"), "strategy 'tensor' of 4 bits: only group and channel are read"),
        ("packed", packs("group", group_size=32, symmetric=False), "has no weight_zero_point"),
        ("packed", packs("group", group_size=0), "group_size 0 is no number of inputs"),
        ("packed", packs("group", group_size=16), "do not fit groups of 16"),
        ("fp8-channel", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("awq", {"bits": 3}, "bits 3"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"group_size": 16}, "do not fit groups of 16"),
        ("gptq", {"bits": 8}, "bits 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"quant_method": "awq", "group_size": 64}, "do not fit"),
    ],
)
def test_what_is_not_as_it_says(family_of: FamilyOf, tmp_path: Path, name: str, fields: Any, said: str) -> None:
    ship(family_of("llama").folder, tmp_path / "shipped", name)
    edited(tmp_path / "shipped", **fields)
    assert said in refusal(tmp_path / "shipped")
