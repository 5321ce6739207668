"""Models whose attention is not heard, or is not served."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MambaConfig,
    PretrainedConfig,
)

from tests.numerics.conftest import FamilyOf
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
    ],
    ids=["mamba", "deepseek_v3"],
)  # fmt: skip
def test_attention_that_cannot_be_served(tmp_path: Path, config: PretrainedConfig, expected: str) -> None:
    assert expected in refusal(saved(AutoModelForCausalLM.from_config(config), tmp_path / "model"))
