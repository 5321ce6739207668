"""What is not read as a decoder of known parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manylora_worker.models.build import _planner
from manylora_worker.models.decoder import positions, read
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3nTextConfig,
    GraniteMoeHybridConfig,
    PretrainedConfig,
)

from tests.numerics.adapters import save_adapter
from tests.numerics.conftest import FamilyOf
from tests.numerics.families import _SHAPE
from tests.numerics.test_checkpoint import check_plain_and_adapted


def test_products_that_are_not_fused_are_not_read(family_of: FamilyOf) -> None:
    """As in 4 bits on the CPU: q's product alone is not that of q, k and v."""
    assert read_decoder(load_model(str(family_of("llama").folder), quantization="nf4")) is None


@pytest.mark.parametrize("positions", ["rope", "nope"])
def test_granite_4_without_recurrent_layers(tmp_path: Path, positions: str) -> None:
    """With nothing that rotates, too; its MLP's layers have names of their own."""
    config = GraniteMoeHybridConfig(
        **_SHAPE, layer_types=["attention"] * 3, num_local_experts=0, shared_intermediate_size=96,
        position_embedding_type=positions, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=3.0,
        attention_multiplier=0.2, initializer_range=0.25,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path / "granite")
    folder = save_adapter(reference, tmp_path / "adapter", 1, r=4, lora_alpha=8, target_modules="all-linear")
    loaded = load_model(str(tmp_path / "granite"))
    weights = trusted_weights(loaded)
    assert weights is not None
    assert weights.has_kernels
    check_against_eager(loaded, _planner(loaded))
    check_plain_and_adapted(loaded, reference, folder)


def _gemma3n() -> PretrainedConfig:
    return Gemma3nTextConfig(
        **{**_SHAPE, "num_hidden_layers": 4}, head_dim=16, sliding_window=9, num_kv_shared_layers=2, laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=16, altup_num_inputs=2,
        vocab_size_per_layer_input=131, activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0], initializer_range=0.25,
    )  # fmt: skip


def _deepseek_v2() -> PretrainedConfig:
    return DeepseekV2Config(
        **{**_SHAPE, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=9, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        n_group=1, topk_group=1, initializer_range=0.25,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "targets"), [(_gemma3n, ["q_proj", "o_proj", "down_proj"]), (_deepseek_v2, ["q_b_proj", "kv_b_proj"])]
)
def test_parts_that_have_known_names_alone_run_as_transformers_wrote_them(
    tmp_path: Path, config: Callable[[], PretrainedConfig], targets: list[str]
) -> None:
    """Layer inputs that are scaled by tensors; a rotation by complex numbers."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path / "model")
    folder = save_adapter(reference, tmp_path / "adapter", 1, r=4, lora_alpha=8, target_modules=targets)
    loaded = load_model(str(tmp_path / "model"))
    check_against_eager(loaded, _planner(loaded))
    assert read_decoder(loaded) is None
    assert trusted_weights(loaded) is None
    check_plain_and_adapted(loaded, reference, folder)


def test_a_kind_of_layer_without_a_table_is_not_read(family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = family_of("gemma3_text").loaded
    config = loaded.model.config.get_text_config()
    assert positions.rope_tables(loaded, loaded.model.get_decoder().rotary_emb, config) is not None
    monkeypatch.setattr(config, "layer_types", ["chunked_attention"] * len(config.layer_types))
    assert positions.rope_tables(loaded, loaded.model.get_decoder().rotary_emb, config) is None


@pytest.mark.parametrize("error", [AttributeError("x"), IndexError("x"), RuntimeError("shapes"), AssertionError()])
def test_whatever_a_foreign_part_raises_is_told_and_the_model_runs(
    family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    loaded = family_of("llama").loaded
    monkeypatch.setattr(read, "read_layers", fail)
    assert trusted_weights(loaded) is None
    assert f"{type(error).__name__}: {error})" in caplog.text
    assert "runs as transformers wrote it" in caplog.text
    error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        trusted_weights(loaded)
