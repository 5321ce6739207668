from __future__ import annotations

import pytest
import torch
from manylora_worker.models.decoder import read
from manylora_worker.models.decoder.positions import query_scales
from manylora_worker.models.torch.decoder import trusted_weights
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from tests.numerics.conftest import FamilyOf


def test_queries_are_scaled_by_their_positions(family_of: FamilyOf) -> None:
    loaded, other = family_of("ministral3").loaded, family_of("mistral").loaded
    positions = torch.arange(loaded.spec.longest)
    expected = get_llama_4_attn_scale(positions[None], 0.5, 8)[0, 0, :, 0]
    config = loaded.model.config.get_text_config()
    torch.testing.assert_close(query_scales(loaded, config), expected, atol=0, rtol=0)
    assert query_scales(other, other.model.config.get_text_config()) is None
    assert "scales queries" in loaded.adapter_base().rope.problem


@pytest.mark.parametrize("far", [0.0, 1.5])
def test_what_a_model_does_with_far_positions_is_compared(
    family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch, far: float
) -> None:
    """Near ones would not tell: there the scale is 1."""
    loaded = family_of("ministral3").loaded
    assert trusted_weights(loaded) is not None
    wrong = query_scales(loaded, loaded.model.config.get_text_config())
    assert wrong is not None
    wrong = torch.where(torch.arange(len(wrong)) < 8, wrong, far)
    monkeypatch.setattr(read, "query_scales", lambda *_: wrong)
    assert trusted_weights(loaded) is None
