"""A decoder's pass in torch's own operators: what the CPU runs of a model whose layers are known (decoder_weights.py).

transformers' modules compute the same in two to three times as many operators, each of which costs a few microseconds
of Python and dispatch however few rows a step has. Here a norm is one call, keys and queries are rotated together, and
a residual is added in place.

TorchDecoder owns nothing but norm weights of its own form; products and their LoRA are the loaded model's modules.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora_worker.decoder_weights import DecoderLayer, DecoderWeights, read_decoder
from manylora_worker.engine.attention import STEP_KEYWORD, AttentionStep, PrefillRows
from manylora_worker.engine.kv_cache import KvCache
from manylora_worker.loader import LoadedModel

_LOG = logging.getLogger(__name__)
_CHECKED_TOKENS = 8


@dataclass(frozen=True)
class _Norms:
    """A layer's norm weights in float32, with Gemma's one added."""

    input: Tensor
    attention_post: Tensor | None
    ffn: Tensor
    ffn_post: Tensor | None
    heads: Tensor | None
    """[query and kv heads, head_dim]: of every head that is rotated."""


class TorchDecoder:
    """The model's pass over a flat batch of T tokens. Stateless between calls."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._weights = weights
        self._norms = [self._layer_norms(layer) for layer in weights.layers]
        self._final_norm = self._norm_weight(weights.final_norm)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep, logit_rows: Tensor) -> Tensor:
        """[len(logit_rows), vocab]: the logits of these rows. token_ids, positions: [T]."""
        weights = self._weights
        # The embedding's rows are copies, so that the residual may be added to in place.
        residual = weights.embed(token_ids)
        ropes = [_rope_rows(cos, sin, positions, residual.dtype) for cos, sin in weights.ropes]
        for i, (layer, norms) in enumerate(zip(weights.layers, self._norms, strict=True)):
            normed = self._norm(residual, norms.input)
            attended = self._attend(i, layer, norms, layer.qkv.linear(normed), ropes[layer.rope], attention)
            product = layer.o.linear(attended)
            if norms.attention_post is not None:
                product = self._norm(product, norms.attention_post)
            residual.add_(product)
            product = layer.down.linear(self._gate(layer, layer.gate_up.linear(self._norm(residual, norms.ffn))))
            if norms.ffn_post is not None:
                product = self._norm(product, norms.ffn_post)
            residual.add_(product)
        logits: Tensor = weights.head(self._norm(residual.index_select(0, logit_rows), self._final_norm))
        softcap = weights.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        norms: _Norms,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: AttentionStep,
    ) -> Tensor:
        """qkv: [T, (heads + 2 kv_heads) * head_dim] -> [T, heads * head_dim]."""
        shape = layer.attention
        num_rotated = shape.num_heads + shape.num_kv_heads
        rotated, values = qkv.split_with_sizes(
            (num_rotated * shape.head_dim, shape.num_kv_heads * shape.head_dim), dim=1
        )
        heads = rotated.view(-1, num_rotated, shape.head_dim)
        if norms.heads is not None:
            heads = self._norm(heads, None, norms.heads)
        queries, keys = _rotate(heads, *rope).split_with_sizes((shape.num_heads, shape.num_kv_heads), dim=1)
        attended = attention.attend_rows(
            index,
            queries.unflatten(1, (shape.num_kv_heads, -1)),
            keys.flatten(1),
            values,
            shape.scale,
            shape.window,
            shape.softcap,
        )
        return attended.flatten(1)

    def _gate(self, layer: DecoderLayer, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.split_with_sizes((layer.down.in_features,) * 2, dim=1)
        activated = F.silu(gate) if self._weights.activation == "silu" else F.gelu(gate, approximate="tanh")
        return activated.mul_(up)

    def _norm(self, x: Tensor, weight: Tensor | None, scale: Tensor | None = None) -> Tensor:
        """RMS norm over the last dimension, in float32. scale: a weight that differs between the rows of x."""
        normed = F.rms_norm(x.float(), x.shape[-1:], weight, self._weights.eps)
        if scale is not None:
            normed = normed * scale
        return normed.to(x.dtype)

    def _layer_norms(self, layer: DecoderLayer) -> _Norms:
        heads = None
        if layer.q_norm is not None and layer.k_norm is not None:
            shape = layer.attention
            q_norm, k_norm = self._norm_weight(layer.q_norm), self._norm_weight(layer.k_norm)
            heads = torch.stack([q_norm] * shape.num_heads + [k_norm] * shape.num_kv_heads)
        return _Norms(
            input=self._norm_weight(layer.input_norm),
            attention_post=None if layer.attention_post_norm is None else self._norm_weight(layer.attention_post_norm),
            ffn=self._norm_weight(layer.ffn_norm),
            ffn_post=None if layer.ffn_post_norm is None else self._norm_weight(layer.ffn_post_norm),
            heads=heads,
        )

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return weight.detach().float() + (1.0 if self._weights.norm_weight_plus_one else 0.0)


def trusted_weights(loaded: LoadedModel) -> DecoderWeights | None:
    """What the model's decoder computes, seen to agree with transformers' own pass; None: run the model as it is.

    The comparison finds what `read_decoder` cannot see: a family whose layers have known parts, and code of its own
    between them (Granite's factors, say).
    """
    weights = read_decoder(loaded)
    if weights is None:
        return None
    difference = _difference(loaded, TorchDecoder(weights))
    tolerance = 1e-3 if loaded.dtype is torch.float32 else 0.05
    if not difference <= tolerance:  # not a number: neither
        _LOG.warning(
            "%s: read as a decoder, its logits are off by a share of %.3g: it runs as transformers wrote it",
            loaded.spec.model_type, difference,
        )  # fmt: skip
        return None
    return weights


def _difference(loaded: LoadedModel, decoder: TorchDecoder) -> float:
    """|decoder's logits - transformers'| over |transformers'|, for a prompt of a few tokens."""
    device = loaded.device
    cache = KvCache(loaded.spec.kv, num_blocks=1, block_size=_CHECKED_TOKENS, dtype=loaded.dtype, device=device)
    rows = torch.arange(_CHECKED_TOKENS, device=device)
    token_ids = rows * (loaded.spec.vocab_size // _CHECKED_TOKENS)

    def attention() -> AttentionStep:
        prefill = PrefillRows(0, _CHECKED_TOKENS, start_position=0, block_table=[0])
        return AttentionStep(cache, token_rows=rows, num_rows=_CHECKED_TOKENS, decodes=[], prefills=[prefill])

    with torch.inference_mode():
        found = decoder.forward(token_ids, rows, attention(), rows).float()
        output = loaded.model(
            input_ids=token_ids[None], position_ids=rows[None], use_cache=False, **{STEP_KEYWORD: attention()}
        )
        expected = output.logits[0].float()
    return float((found - expected).norm() / expected.norm())


def _rope_rows(cos: Tensor, sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, 1, rotated] each: cos twice, and sin with the sign that the two halves take it with."""
    cos, sin = cos.index_select(0, positions).to(dtype), sin.index_select(0, positions).to(dtype)
    return torch.cat((cos, cos), dim=1).unsqueeze(1), torch.cat((-sin, sin), dim=1).unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, head_dim]; what of a head lies behind `rotated` stays."""
    rotated = cos.shape[2]
    turned = x[..., :rotated]
    result = torch.addcmul(turned * cos, torch.roll(turned, rotated // 2, -1), sin)
    return result if rotated == x.shape[2] else torch.cat((result, x[..., rotated:]), dim=2)
