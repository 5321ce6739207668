"""Inputs of single layers in torch's operators, against transformers' own."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.models.torch.layer_inputs import InputOfLayer, TokenInputs

from tests.numerics.conftest import FamilyOf


def test_as_transformers_makes_them(family_of: FamilyOf) -> None:
    loaded = family_of("gemma4_text").loaded
    weights = read_decoder(loaded)
    assert weights is not None
    assert weights.inputs is not None
    own, body = weights.inputs, loaded.model.get_decoder()
    norm = partial(F.rms_norm, normalized_shape=own.norm.shape, eps=weights.eps)
    inputs = TokenInputs(own, own.projection.linear, partial(norm, weight=own.norm))
    token_ids = torch.tensor([5, 130, 0, 77])
    with torch.inference_mode():
        embedded = body.embed_tokens(token_ids)
        found = inputs(token_ids, embedded)
        expected = body.project_per_layer_inputs(embedded, body.get_per_layer_inputs(token_ids, None))
        torch.testing.assert_close(found, expected)
        for i, layer in enumerate(weights.layers):
            assert layer.input is not None
            given = InputOfLayer(
                layer.input.gate.linear,
                partial(F.gelu, approximate="tanh"),
                layer.input.projection.linear,
                partial(norm, normalized_shape=layer.input.norm.shape, weight=layer.input.norm),
            )
            theirs = body.layers[i]
            gated = theirs.act_fn(theirs.per_layer_input_gate(embedded)) * found[:, i]
            expected = theirs.post_per_layer_input_norm(theirs.per_layer_projection(gated))
            torch.testing.assert_close(given(embedded, found[:, i]), expected)
