"""A decoder's pass in torch's own operators, for models whose layers are known (models/decoder). It owns only norm
weights; products and their LoRA are the loaded model's modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora_worker.models.checkpoint import said
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.models.decoder.weights import (
    Activation,
    DecoderLayer,
    DecoderWeights,
    DenseBranch,
    DenseMlp,
    LayerInput,
    MixtureMlp,
    Projection,
    RecurrentMixer,
    SelfAttention,
)
from manylora_worker.models.layers.attention import STEP_KEYWORD, AttentionStep
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.layers.lora_linear import Segment
from manylora_worker.models.layers.mixture import chosen_experts, exact_logits
from manylora_worker.models.layers.recurrent import RecurrentLayer
from manylora_worker.models.layers.token_rows import StepTokens
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.torch.inputs import one_chunk
from manylora_worker.models.torch.layer_inputs import InputOfLayer, TokenInputs

_LOG = logging.getLogger(__name__)
_CHECKED_TOKENS = 8
# what a part of another kind under a known name does to its reader: no table of families tells them all
_NOT_AS_NAMED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MISROUTED_TOKENS = 2  # left out: of two experts that score alike, rounding takes one here and the other there
_KNOWN_ROPES = 256  # each takes some hundred bytes
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class _Product:
    # LoraLinear.forward without a module call's cost, a fifth of a step of one row.

    def __init__(self, projection: Projection) -> None:
        linear = projection.linear
        self._base: Callable[[Tensor], Tensor] = linear.base.forward
        if projection.weight is not None:
            self._base = partial(F.linear, weight=projection.weight, bias=projection.bias)
        self._site, self._switch, self._reduce = linear.site, linear.switch, linear.reduce

    def __call__(self, x: Tensor) -> Tensor:
        outputs = self._base(x)
        if self._switch.batch is not None:
            self._switch.batch.add(self._site, x, outputs)
        if self._reduce is not None:
            self._reduce(outputs)
        return outputs


class HeadLora:
    """Of a step's rows with adapters that change the output head. site: its index."""

    def __init__(self, site: int, segments: Sequence[Segment]) -> None:
        parts = [(s, ((s.adapter, s.weight), *s.others)) for s in segments]
        self._parts = [
            (segment.first_row, segment.last_row, adapter.sites[site], weight)
            for segment, adapters in parts
            for adapter, weight in adapters
            if site in adapter.sites
        ]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, rows: Tensor, normed: Tensor, logits: Tensor) -> None:
        """rows: of the step, whose logits these are, changed in place."""
        for first, last, weights, weight in self._parts:
            own = ((rows >= first) & (rows < last)).nonzero()[:, 0]
            if len(own):
                product = (normed[own] @ weights.a_t) @ weights.slots[0].b
                logits.index_add_(0, own, product, alpha=weight)


@dataclass(frozen=True)
class ScaledRows:
    """Of a step, those whose adapters rotate positions in their own way."""

    rows: Tensor  # int64 [n]
    frequencies: Tensor  # [n, rotated / 2]
    factors: Tensor  # [n, 1]


@dataclass(frozen=True)
class _Step:
    """written: keys and values of the step's tokens, by attention, of those that another reads, too."""

    ropes: Sequence[tuple[Tensor, Tensor]]  # cos and sin of each of the decoder's
    query_scales: Tensor | None  # [T, 1, 1]
    attention: AttentionStep
    written: dict[int, tuple[Tensor, Tensor]]


_Mixer = Callable[[Tensor, _Step], Tensor]  # of normed rows, what joins the residual


@dataclass(frozen=True)
class _Layer:
    """Norm weights are float32, with Gemma's one added."""

    mixer: _Mixer
    mlp: Callable[[Tensor], Tensor]
    input_norm: Tensor | None
    mixer_post_norm: Tensor | None
    ffn_norm: Tensor | None
    ffn_post_norm: Tensor | None
    input: InputOfLayer | None
    scale: float


class _Attention:
    # q_norm, k_norm: over a head, or over all heads together. is_read: by another, too

    def __init__(
        self, weights: SelfAttention, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, *, is_read: bool
    ) -> None:
        shape = weights.shape
        self._weights, self._eps, self._is_read = weights, eps, is_read
        self._qkv, self._o = _Product(weights.qkv), _Product(weights.o)
        self._rotated_heads = (shape.num_heads, shape.num_kv_heads if weights.kv_products else 0)
        self._head_norms: Tensor | None = None  # [query and key heads, head_dim]: of every head that is rotated
        self._wide_norms: tuple[Tensor, Tensor] | None = None
        norms = [each for each in (q_norm, k_norm) if each is not None]
        if any(len(each) != shape.head_dim for each in norms):
            self._wide_norms = (norms[0], norms[1])
        elif norms:
            by_kind = zip(norms, self._rotated_heads, strict=False)  # a layer that makes no keys has no norm of them
            self._head_norms = torch.cat([each.expand(count, -1) for each, count in by_kind])

    def __call__(self, x: Tensor, step: _Step) -> Tensor:
        weights, shape = self._weights, self._weights.shape
        rotated, values, gates = self._parts(self._qkv(x))
        heads = rotated.unflatten(1, (-1, shape.head_dim))
        if self._wide_norms is not None:
            widths = [each.shape[0] for each in self._wide_norms]
            parts = zip(rotated.split_with_sizes(widths, 1), self._wide_norms, strict=True)
            heads = torch.cat([_norm(*each, self._eps) for each in parts], 1).view(heads.shape)
        if self._head_norms is not None:
            heads = (_norm(heads, None, self._eps) * self._head_norms).to(heads.dtype)
        queries, keys = _rotate(heads, *step.ropes[weights.rope]).split_with_sizes(self._rotated_heads, 1)
        if step.query_scales is not None:
            queries = queries * step.query_scales
        if weights.norms_values:
            values = _norm(values.unflatten(1, (-1, shape.head_dim)), None, self._eps).flatten(1)
        own = (keys.flatten(1), values) if weights.kv_products else step.written[weights.kv_of]
        if self._is_read:
            step.written[weights.index] = own
        attended = step.attention.attend_rows(
            weights.index,
            queries.unflatten(1, (shape.num_kv_heads, -1)),
            *own,
            shape.scale,
            shape.window,
            shape.softcap,
            weights.sinks,
        ).flatten(1)
        return self._o(attended if gates is None else attended * gates.sigmoid())

    def _parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is rotated, the values, and the gates."""
        weights, shape = self._weights, self._weights.shape
        if weights.kv_products < 2:  # the keys, where there are any, are the values
            return qkv, qkv[:, shape.num_heads * shape.head_dim :], None
        rest = shape.num_kv_heads * shape.head_dim
        if not shape.is_gated:
            return *qkv.split_with_sizes((qkv.shape[1] - rest, rest), 1), None
        both, keys, values = qkv.split_with_sizes((qkv.shape[1] - 2 * rest, rest, rest), 1)
        queries, gates = both.view(-1, shape.num_heads, 2, shape.head_dim).unbind(2)
        return torch.cat((queries.flatten(1), keys), 1), values, gates.flatten(1)


def _recurring(layer: RecurrentLayer) -> _Mixer:
    def mix(x: Tensor, step: _Step) -> Tensor:
        return step.attention.recur(layer, x[None])[0]

    return mix


class TorchDecoder:
    def __init__(self, weights: DecoderWeights) -> None:
        self._weights = weights
        self._read_again = {each.kv_of for each in weights.attentions if each.kv_of != each.index}
        self._layers = [self._layer(layer) for layer in weights.layers]
        self._final_norm = self._norm_weight(weights.final_norm)
        self._inputs = None
        if weights.inputs is not None:
            norm = partial(self._norm, weight=self._norm_weight(weights.inputs.norm))
            self._inputs = TokenInputs(weights.inputs, _Product(weights.inputs.projection), norm)
        self.scaled = lru_cache(_KNOWN_ROPES)(weights.scaled)

    def layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionStep,
        scaled: ScaledRows | None = None,
        tokens: StepTokens | None = None,
    ) -> Tensor:
        """token_ids, positions: [T] -> [T, hidden], for `head`."""
        weights = self._weights
        if weights.read_as is not None:
            token_ids = weights.read_as[token_ids]
        # The embedding's rows are copies, so that the residual may be added to in place.
        residual = weights.embed(token_ids)
        if tokens is not None:
            tokens.embed(token_ids, residual, weights.embed_scale)
        inputs = None if self._inputs is None else self._inputs(token_ids, residual)
        ropes = [_rope_rows(*table, positions, residual.dtype, scaled) for table in weights.ropes]
        scales = weights.query_scales
        scales = None if scales is None else scales[positions, None, None].to(residual.dtype)
        step = _Step(ropes, scales, attention, {})
        for i, layer in enumerate(self._layers):
            normed = self._normed(residual, layer.input_norm)
            product = layer.mixer(normed, step)
            if layer.mixer_post_norm is not None:
                product = self._norm(product, layer.mixer_post_norm)
            residual.add_(product)
            product = layer.mlp(self._normed(residual, layer.ffn_norm))
            if layer.ffn_post_norm is not None:
                product = self._norm(product, layer.ffn_post_norm)
            residual.add_(product)
            if layer.input is not None and inputs is not None:
                residual.add_(layer.input(residual, inputs[:, i]))
            if layer.scale != 1.0:
                residual.mul_(layer.scale)
        return residual

    def head(self, residual: Tensor, logit_rows: Tensor, adapted: Sequence[HeadLora | StepTokens] = ()) -> Tensor:
        """-> logits [len(logit_rows), vocab]."""
        weights = self._weights
        normed = self._norm(residual.index_select(0, logit_rows), self._final_norm)
        logits: Tensor = weights.head(normed)
        for each in adapted:
            each.add(logit_rows, normed, logits)
        softcap = weights.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def _mlp(self, mlp: DenseMlp | MixtureMlp) -> Callable[[Tensor], Tensor]:
        if isinstance(mlp, DenseMlp):
            activation = _ACTIVATIONS[self._weights.activation]
            return partial(_dense, _Product(mlp.gate_up), _Product(mlp.down), activation)
        is_exact = mlp.routing.is_sigmoid
        router = partial(exact_logits, mlp.router.linear) if is_exact else _Product(mlp.router)
        mixture = partial(_mixture, router, mlp)
        if mlp.branch is not None:
            return self._branched(mixture, mlp.branch)
        if mlp.shared is None:
            return mixture
        gate = None if mlp.shared.gate is None else _Product(mlp.shared.gate)
        return partial(_beside_shared, mixture, self._mlp(mlp.shared.mlp), gate)

    def _branched(self, mixture: Callable[..., Tensor], branch: DenseBranch) -> Callable[[Tensor], Tensor]:
        norm, post_norm, router_norm, experts_norm, experts_post_norm = (
            partial(self._norm, weight=self._norm_weight(each))
            for each in (
                branch.norm, branch.post_norm, branch.router_norm, branch.experts_norm, branch.experts_post_norm
            )
        )  # fmt: skip
        dense = self._mlp(branch.mlp)

        def both(residual: Tensor) -> Tensor:
            experts = experts_post_norm(mixture(experts_norm(residual), router_norm(residual)))
            return post_norm(dense(norm(residual))).add_(experts)

        return both

    def _input(self, given: LayerInput) -> InputOfLayer:
        return InputOfLayer(
            _Product(given.gate),
            _ACTIVATIONS[self._weights.activation],
            _Product(given.projection),
            partial(self._norm, weight=self._norm_weight(given.norm)),
        )

    def _normed(self, residual: Tensor, weight: Tensor | None) -> Tensor:
        return residual if weight is None else self._norm(residual, weight)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return _norm(x, weight, self._weights.eps)

    def _layer(self, layer: DecoderLayer) -> _Layer:
        return _Layer(
            mixer=self._mixer(layer.mixer),
            mlp=self._mlp(layer.mlp),
            input_norm=_optional(layer.input_norm, self._norm_weight),
            mixer_post_norm=_optional(layer.mixer_post_norm, self._norm_weight),
            ffn_norm=_optional(layer.ffn_norm, self._norm_weight),
            ffn_post_norm=_optional(layer.ffn_post_norm, self._norm_weight),
            input=None if layer.input is None else self._input(layer.input),
            scale=layer.scale,
        )

    def _mixer(self, mixer: SelfAttention | RecurrentMixer) -> _Mixer:
        if isinstance(mixer, RecurrentMixer):
            return _recurring(mixer.net)
        q_norm, k_norm = (_optional(each, self._norm_weight) for each in (mixer.q_norm, mixer.k_norm))
        return _Attention(mixer, q_norm, k_norm, self._weights.eps, is_read=mixer.index in self._read_again)

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return weight.detach().float() + (1.0 if self._weights.norm_weight_plus_one else 0.0)


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    # RMS over the last dimension, in float32
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def _dense(gate_up: _Product, down: _Product, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = gate_up(x).chunk(2, 1)
    return down(activation(gate).mul_(up))


def _mixture(router: Callable[[Tensor], Tensor], mlp: MixtureMlp, x: Tensor, routed: Tensor | None = None) -> Tensor:
    # routed: what the router reads; None: x
    logits = router(x if routed is None else routed)
    shares, experts = chosen_experts(logits, mlp.routing)
    result: Tensor = mlp.experts(x, experts, shares)
    return result


def _beside_shared(
    mixture: Callable[[Tensor], Tensor], shared: Callable[[Tensor], Tensor], gate: _Product | None, x: Tensor
) -> Tensor:
    return mixture(x).add_(shared(x) if gate is None else gate(x).sigmoid() * shared(x))


def trusted_weights(loaded: LoadedModel) -> DecoderWeights | None:
    """None: run the model as it is. The comparison with transformers' pass finds code of a family's own between known
    parts.
    """
    try:
        weights = read_decoder(loaded)
        difference = 0.0 if weights is None else _difference(loaded, TorchDecoder(weights))
    except torch.OutOfMemoryError:
        raise
    except _NOT_AS_NAMED as error:
        _LOG.warning(
            "%s: its parts are not what a decoder's of their names are (%s): it runs as transformers wrote it",
            loaded.spec.model_type, said(error),
        )  # fmt: skip
        return None
    tolerance = 1e-3 if loaded.dtype is torch.float32 else 0.05
    if not difference <= tolerance:  # not a number: neither
        _LOG.warning(
            "%s: read as a decoder, its logits are off by a share of %.3g: it runs as transformers wrote it",
            loaded.spec.model_type, difference,
        )  # fmt: skip
        return None
    return weights


def _difference(loaded: LoadedModel, decoder: TorchDecoder) -> float:
    kv, device = loaded.spec.kv, loaded.device
    num_blocks = 1 + kv.state_blocks(_CHECKED_TOKENS, loaded.dtype)
    cache = KvCache(kv, num_blocks=num_blocks, block_size=_CHECKED_TOKENS, dtype=loaded.dtype, device=device)
    rows = torch.arange(_CHECKED_TOKENS, device=device)
    token_ids = rows * (loaded.spec.vocab_size // _CHECKED_TOKENS)
    positions = rows + (rows >= _CHECKED_TOKENS // 2) * (loaded.spec.max_context_tokens - _CHECKED_TOKENS)  # both ends
    with torch.inference_mode():
        found = decoder.head(decoder.layers(token_ids, positions, one_chunk(cache)), rows).float()
        output = loaded.model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **{STEP_KEYWORD: one_chunk(cache)}
        )
        expected = output.logits[0].float()
    off, size = (found - expected).norm(dim=1), expected.norm(dim=1)
    if loaded.spec.experts and loaded.dtype is not torch.float32 and off.isfinite().all():
        nearest = (off / size.clamp_min(1e-12)).argsort()[:-_MISROUTED_TOKENS]
        off, size = off[nearest], size[nearest]
    return float(off.norm() / size.norm())


def _optional(weight: Tensor | None, form: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if weight is None else form(weight)


def _rope_rows(
    cos: Tensor, sin: Tensor, positions: Tensor, dtype: torch.dtype, scaled: ScaledRows | None
) -> tuple[Tensor, Tensor]:
    """[T, 1, rotated] each: cos twice, and sin with the sign of each half."""
    cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    if scaled is not None:
        angles = positions[scaled.rows, None].float() * scaled.frequencies
        cos.index_copy_(0, scaled.rows, angles.cos() * scaled.factors)
        sin.index_copy_(0, scaled.rows, angles.sin() * scaled.factors)
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat((cos, cos), dim=1).unsqueeze(1), torch.cat((-sin, sin), dim=1).unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, head_dim]; dimensions behind `rotated` stay."""
    rotated = cos.shape[2]
    turned = x[..., :rotated]
    result = torch.addcmul(turned * cos, torch.roll(turned, rotated // 2, -1), sin)
    return result if rotated == x.shape[2] else torch.cat((result, x[..., rotated:]), dim=2)
