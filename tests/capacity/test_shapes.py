"""What models and GPUs are, as a plan takes them."""

from __future__ import annotations

import pytest
from manylora.capacity.planning.shapes import CONFIGS, SHAPES, CannotPlan, gpu_of, shape_of

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_a_config_gives_the_bytes_of_the_model() -> None:
    shape = shape_of(LLAMA, "llama-3.1-8b")
    assert shape == SHAPES["llama-3.1-8b"]
    assert shape.kv_token_bytes == 131072
    assert shape.weight_bytes == pytest.approx(16.06e9, rel=0.001)
    assert 16 * shape.rank_bytes == pytest.approx(83.9e6, rel=0.001)  # the file of bench/adapter_reads.py


def test_a_config_without_a_size_is_refused_by_its_name() -> None:
    with pytest.raises(CannotPlan, match=r"folder: vocab_size: must be a whole number above 0, not None"):
        shape_of({name: value for name, value in LLAMA.items() if name != "vocab_size"}, "folder")


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("num_experts", "a mixture of experts"),
        ("linear_num_value_heads", "gated delta nets"),
        ("global_head_dim", "heads that differ"),
        ("per_layer_config", "layers that differ"),
    ],
)
def test_what_is_no_dense_model_is_refused_by_its_name(field: str, says: str) -> None:
    """The text part's fields count."""
    with pytest.raises(CannotPlan, match=f"folder: some_text: {says}.*: not planned for"):
        shape_of({"text_config": {**LLAMA, "model_type": "some_text", field: 8}}, "folder")


@pytest.mark.parametrize("value", [[], {}, 5, None, True])
def test_a_model_type_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(CannotPlan, match="folder: model_type: must be text, not"):
        shape_of({**LLAMA, "model_type": value}, "folder")


def test_a_model_whose_layers_keep_nothing_of_a_token_is_refused() -> None:
    with pytest.raises(CannotPlan, match="num_hidden_layers: none of 3 layers has keys and values: not planned for"):
        shape_of({**CONFIGS["qwen3.5-9b"], "num_hidden_layers": 3}, "folder")
    assert shape_of({**CONFIGS["qwen3.5-9b"], "num_hidden_layers": 4}, "folder").kv_token_bytes > 0


def test_gpus_are_found_in_any_case() -> None:
    assert gpu_of("h100").name == "H100"
    with pytest.raises(CannotPlan, match="'H900' is none of H100, H200"):
        gpu_of("H900")
