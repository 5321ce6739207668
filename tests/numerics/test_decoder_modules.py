from __future__ import annotations

import pytest
from manylora_worker.models.decoder.modules import fused_projection, norm_adds_one, projection_of, rms_norm
from torch import nn

from tests.numerics.conftest import FamilyOf


@pytest.mark.parametrize(("name", "adds"), [("llama", False), ("gemma2", True)])
def test_what_a_norm_does_with_its_weight(family_of: FamilyOf, name: str, adds: bool) -> None:
    norm = family_of(name).loaded.model.get_decoder().norm
    assert norm_adds_one(norm) == adds
    assert rms_norm(norm) is norm.weight
    assert rms_norm(nn.LayerNorm(4)) is None


def test_products_of_several_layers(family_of: FamilyOf) -> None:
    attention = family_of("llama").loaded.model.get_decoder().layers[0].self_attn
    members = ("q_proj", "k_proj", "v_proj")
    fused = fused_projection(attention, "qkv_proj", members)
    assert fused is not None
    assert [slot.path.rpartition(".")[2] for slot in fused.site.slots] == list(members)
    assert fused_projection(attention, "qkv_proj", members[:2]) is None
    assert projection_of(nn.Linear(4, 4)) is None
