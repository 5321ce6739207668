"""A loaded transformers model read as a decoder of our own computes it.

No family is known by name: layers are read by which modules they have (layers.py); scale, window and soft cap come from
the loader's probe. `torch.decoder.trusted_weights` finds what a module tree does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manylora_worker.models.decoder.layers import read_layers
from manylora_worker.models.decoder.modules import norm_adds_one, projection_of, rms_norm
from manylora_worker.models.decoder.positions import query_scales, rope_tables
from manylora_worker.models.decoder.weights import (
    Activation,
    DecoderLayer,
    DecoderWeights,
    LayerInputs,
    SelfAttention,
)
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.probe import tokens_read
from manylora_worker.models.ranks.cuts import SharedHead
from manylora_worker.models.rope import scaled_frequencies

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class _Factors:
    """That a family has between its parts (Granite). Scaling what joins the residual by r is scaling all of the
    residual by 1 / r instead, which its norms take out again but for their eps; the last norm can scale the logits.
    """

    embedding: float
    residual: float
    logits: float

    @classmethod
    def of(cls, config: Any) -> _Factors:
        names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        return cls(*(float(getattr(config, name, 1.0)) for name in names))

    @property
    def are_none(self) -> bool:
        return (self.embedding, self.residual, self.logits) == (1.0, 1.0, 1.0)

    def embed(self, embed: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        return embed(token_ids) * (self.embedding / self.residual)

    def can_scale(self, layers: Sequence[DecoderLayer], *, adds_one: bool) -> bool:
        """Norms of what is not the residual would take the other eps, too."""
        others = [each for layer in layers for each in (layer.mixer_post_norm, layer.ffn_post_norm)]
        inner = [
            each
            for each in (layer.mixer for layer in layers)
            if isinstance(each, SelfAttention) and each.q_norm is not None
        ]
        bare = [layer for layer in layers if layer.input_norm is None or layer.ffn_norm is None]
        has_norms = bool(inner) or any(each is not None for each in others)
        return self.residual > 0 and self.logits > 0 and not bare and not adds_one and not has_norms


def read_decoder(loaded: LoadedModel) -> DecoderWeights | None:
    """Copies nothing. None where a part is of an unknown kind: the model then runs as transformers wrote it."""
    model = loaded.model
    config = model.config.get_text_config()
    body = model.get_decoder()
    head = model.get_output_embeddings()
    activation = _ACTIVATIONS.get(str(getattr(config, "hidden_act", getattr(config, "hidden_activation", ""))))
    if activation is None or not _is_plain_head(head):
        return None
    norm = rms_norm(getattr(body, "norm", None))
    rotary = getattr(body, "rotary_emb", None)
    if norm is None or not hasattr(body, "layers"):
        return None
    if rotary is None and any(traits.rotates for traits in loaded.attention_traits):
        return None
    if (tables := rope_tables(loaded, rotary, config)) is None:
        return None
    ropes, rope_of = tables
    found = read_layers(loaded, body.layers, rope_of, activation)
    layers = [layer for layer in found if layer is not None]
    factors, adds_one, embed = _Factors.of(config), norm_adds_one(body.norm), body.embed_tokens
    inputs, read = _layer_inputs(body), tokens_read(model)
    if read is None or len(layers) < len(found) or any((layer.input is None) != (inputs is None) for layer in layers):
        return None
    if not factors.are_none:
        if not factors.can_scale(layers, adds_one=adds_one):
            return None
        embed, norm = partial(factors.embed, embed), norm.float() / factors.logits
    return DecoderWeights(
        layers=layers,
        embed=embed,
        embed_scale=_scale_of(body.embed_tokens, loaded.dtype) * factors.embedding / factors.residual,
        final_norm=norm,
        head=head,
        ropes=ropes,
        scaled=partial(scaled_frequencies, config, device=loaded.device),
        hidden_size=config.hidden_size,
        eps=config.rms_norm_eps / factors.residual**2,
        norm_weight_plus_one=adds_one,
        activation=activation,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        group=loaded.group,
        inputs=inputs,
        read_as=_read_as(read, loaded),
        query_scales=query_scales(loaded, config),
    )


def _read_as(read: Mapping[int, int], loaded: LoadedModel) -> Tensor | None:
    table = torch.arange(loaded.spec.vocab_size, device=loaded.device)
    for token, other in read.items():
        table[token] = other
    return table if read else None


def _layer_inputs(body: nn.Module) -> LayerInputs | None:
    projection = projection_of(getattr(body, "per_layer_model_projection", None))
    norm = rms_norm(getattr(body, "per_layer_projection_norm", None))
    if projection is None or norm is None:
        return None
    factor, scale = (
        getattr(body, name, None) for name in ("per_layer_model_projection_scale", "per_layer_input_scale")
    )
    if not isinstance(factor, float) or not isinstance(scale, float):  # Gemma 3n's are tensors of other names
        return None
    return LayerInputs(body.embed_tokens_per_layer, projection, factor, norm, scale)


def _scale_of(embeddings: nn.Module, dtype: torch.dtype) -> float:
    scale = getattr(embeddings, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(dtype))


def _is_plain_head(head: nn.Module | None) -> bool:
    if isinstance(head, nn.Linear | PackedLinear):
        return head.bias is None
    return isinstance(head, SharedHead)
