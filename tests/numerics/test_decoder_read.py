"""What is not read as a decoder of known parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.build import _planner
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

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
