from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from manylora_worker.models import linears
from manylora_worker.models.linears import head_modules_of
from manylora_worker.models.loader import load_model
from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM

from tests.numerics.conftest import FamilyOf


def test_what_is_fused_does_not_stand_twice(family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that fills most of a device could not be loaded otherwise."""
    fused: list[weakref.ref[torch.Tensor]] = []
    fuse = linears._fuse

    def watched(parent: Any, path: str, members: Any, *rest: Any) -> Any:
        assert not any(weight() is not None for weight in fused)
        fused.extend(weakref.ref(getattr(parent, member).weight) for member in members)
        return fuse(parent, path, members, *rest)

    monkeypatch.setattr(linears, "_fuse", watched)
    load_model(str(family_of("llama").folder))
    assert len(fused) > 4


def test_layers_behind_the_rows_whose_logits_are_wanted_take_no_adapter() -> None:
    """Their rows are not a step's: they would get the adapter of another row."""
    config = ModernBertDecoderConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = ModernBertDecoderForCausalLM(config)
    assert {"lm_head.dense", "decoder", "model.embeddings.tok_embeddings"} == head_modules_of(model)
