"""Models whose attention is not heard, or is not served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV4Config,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    PretrainedConfig,
    XmodConfig,
)

from tests.numerics.conftest import FamilyOf
from tests.numerics.families import _GRANITE4_H
from tests.numerics.test_loader import TINY, edited, refusal, saved


def test_bidirectional(family_of: FamilyOf, tmp_path: Path) -> None:
    message = refusal(edited(family_of("gemma3_text"), tmp_path, use_bidirectional_attention=True))
    assert "both directions" in message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4), "keeps a state"),
        (
            DeepseekV3Config(
                **TINY, num_key_value_heads=2, moe_intermediate_size=16, n_routed_experts=2, n_group=1, topk_group=1,
                num_experts_per_tok=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
                v_head_dim=8, first_k_dense_replace=2,
            ),
            "different head sizes",
        ),
        (
            Mamba2Config(
                vocab_size=40, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=4, n_groups=2
            ),
            "none of its layers attends",
        ),
        (GraniteMoeHybridConfig(**{**_GRANITE4_H, "layer_types": ["mamba"] * 4}), "none of its layers attends"),
        (XmodConfig(**TINY, is_decoder=True), "its pass over two tokens fails"),
        (DeepseekV4Config(**TINY, num_key_value_heads=1, head_dim=16), "of the kind heavily_compressed_attention"),
    ],
    ids=["mamba", "deepseek_v3", "mamba2", "granite of Mamba alone", "xmod", "deepseek_v4"],
)  # fmt: skip
def test_attention_that_cannot_be_served(tmp_path: Path, config: PretrainedConfig, expected: str) -> None:
    assert expected in refusal(saved(AutoModelForCausalLM.from_config(config), tmp_path / "model"))


@pytest.mark.parametrize("factor", [1.0, 8.0, 64.0, 250.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stretched_rotation_is_one(tmp_path: Path, factor: float, dtype: torch.dtype) -> None:
    """By a large factor its first steps are hardly any."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}
    config = LlamaConfig(**TINY, max_position_embeddings=1024, rope_parameters=rope, initializer_range=0.25)
    torch.manual_seed(0)
    loaded = load_model(str(saved(AutoModelForCausalLM.from_config(config), tmp_path / "model")), dtype=dtype)
    assert all(traits.rotates for traits in loaded.attention_traits)
    assert trusted_weights(loaded) is not None
