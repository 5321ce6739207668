"""A loaded transformers model seen as what a decoder of our own computes: products, norms, and one shape a layer.

`read_decoder` knows no family by name: it reads which modules a layer has; scale, window and soft cap come from the
loader's probe. `torch.decoder.trusted_weights` finds what a module tree does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from manylora_shared.stores.adapter_rope import RopeScaling
from torch import Tensor, nn

from manylora_worker.models.layers.delta_net import DELTA_INPUTS, DeltaNet
from manylora_worker.models.layers.lora_linear import FusedMember, LoraLinear
from manylora_worker.models.layers.mixture import LoraExperts, LoraRouter
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.probe import tokens_read
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.ranks.cuts import SharedHead
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.rope import scaled_frequencies
from manylora_worker.weights.sites import Site

Activation = Literal["silu", "gelu", "gelu_tanh"]
ExpertActivation = Activation | Literal["clamped_swiglu"]  # the last one as layers.mixture.clamped_swiglu
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a row sees itself and the window - 1 positions before it
    softcap: float | None = None
    has_sinks: bool = False
    is_gated: bool = False  # behind each head's query stands a gate of what it attends to


@dataclass(frozen=True)
class Projection:
    """One matrix product with LoRA on top of it."""

    linear: LoraLinear
    weight: Tensor | None  # [out, in]; None where it is quantized or packed
    bias: Tensor | None
    quantized: QuantizedLinear | None  # a weight that the GPU's kernels multiply with as it is

    @property
    def site(self) -> Site:
        return self.linear.site

    @property
    def in_features(self) -> int:
        return self.site.in_features

    @property
    def out_features(self) -> int:
        return self.site.slots[-1].stop


@dataclass(frozen=True)
class DenseMlp:
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class SharedExpert:
    """Every row goes to it, too, times the sigmoid of the gate's one output."""

    mlp: DenseMlp
    gate: Projection


@dataclass(frozen=True)
class MixtureMlp:
    router: Projection
    experts: LoraExperts
    top_k: int
    normalizes: bool  # whether a row's shares add up to 1
    activation: ExpertActivation
    shared: SharedExpert | None = None


@dataclass(frozen=True)
class SelfAttention:
    index: int  # among the layers that attend
    qkv: Projection  # queries, and what `kv_products` counts
    o: Projection
    q_norm: Tensor | None  # [head_dim], or where it norms all heads together [heads * head_dim]
    k_norm: Tensor | None
    shape: AttentionShape
    rope: int  # index into DecoderWeights.ropes
    kv_of: int  # the index of the one whose keys and values it reads: its own, or one before it
    kv_products: int  # 2: keys and values; 1: keys that are the values, too, before norm and rotation; 0: another's
    norms_values: bool = False  # by head, without a weight
    sinks: Tensor | None = None  # [heads]


@dataclass(frozen=True)
class GatedDelta:
    """inputs: None: they are several products, and `net` alone computes the layer."""

    net: DeltaNet
    inputs: Projection | None
    out: Projection

    @property
    def has_kernels(self) -> bool:
        """LoRA's kernels write 8 outputs of a layer at once."""
        return self.inputs is not None and not any(slot.start % 8 or slot.stop % 8 for slot in self.inputs.site.slots)


@dataclass(frozen=True)
class LayerInput:
    """Joins the residual behind the MLP: norm(projection(activation(gate(residual)) * the layer's part of the token's
    `LayerInputs`)).
    """

    gate: Projection
    projection: Projection
    norm: Tensor


@dataclass(frozen=True)
class LayerInputs:
    """Of a token to each layer, [layers * width]: (norm(projection(embedding) * factor) + embed(token)) * scale, normed
    by layer.
    """

    embed: Callable[[Tensor], Tensor]
    projection: Projection
    factor: float
    norm: Tensor  # [width]
    scale: float

    @property
    def width(self) -> int:
        return len(self.norm)


@dataclass(frozen=True)
class DecoderLayer:
    mixer: SelfAttention | GatedDelta
    mlp: DenseMlp | MixtureMlp
    input_norm: Tensor | None  # None: the residual as it is
    mixer_post_norm: Tensor | None  # over the mixer's output, before it joins the residual
    ffn_norm: Tensor | None
    ffn_post_norm: Tensor | None
    input: LayerInput | None = None
    scale: float = 1.0  # of all the residual, behind the layer


@dataclass(frozen=True)
class DecoderWeights:
    layers: Sequence[DecoderLayer]
    embed: Callable[[Tensor], Tensor]
    embed_scale: float  # by which it multiplies the embeddings' rows
    final_norm: Tensor
    head: nn.Linear | PackedLinear | SharedHead  # without a bias
    ropes: Sequence[tuple[Tensor, Tensor]]  # cos and sin, float32 [positions, rotated / 2]
    scaled: Callable[[RopeScaling], tuple[Tensor, float]]  # see rope.scaled_frequencies; in place of the one of `ropes`
    hidden_size: int
    eps: float
    norm_weight_plus_one: bool
    activation: Activation
    logit_softcap: float | None
    group: RankGroup | None = None  # sums what `o` and `down` make; None: all of the model is here
    inputs: LayerInputs | None = None  # of single layers
    read_as: Tensor | None = None  # int64 [vocab]: the token that one is read as; None: each as itself

    @property
    def vocab_size(self) -> int:
        num_rows: int = self.head.out_features
        return num_rows

    @property
    def attentions(self) -> Sequence[SelfAttention]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, SelfAttention)]

    @property
    def deltas(self) -> Sequence[GatedDelta]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDelta)]

    @property
    def has_kernels(self) -> bool:
        """Whether the GPU's kernels compute all of it."""
        by_head = (each.q_norm is None or len(each.q_norm) == each.shape.head_dim for each in self.attentions)
        return all(by_head) and all(each.has_kernels for each in self.deltas)


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
            if isinstance(each, GatedDelta) or each.q_norm is not None
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
    norm = _rms_norm(getattr(body, "norm", None))
    if norm is None or not hasattr(body, "layers") or getattr(body, "rotary_emb", None) is None:
        return None
    ropes, rope_of = _rope_tables(loaded, body.rotary_emb, config)
    found = _read_layers(loaded, body.layers, rope_of, activation)
    layers = [layer for layer in found if layer is not None]
    factors, adds_one, embed = _Factors.of(config), _adds_one(body.norm), body.embed_tokens
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
    )


def _read_as(read: Mapping[int, int], loaded: LoadedModel) -> Tensor | None:
    table = torch.arange(loaded.spec.vocab_size, device=loaded.device)
    for token, other in read.items():
        table[token] = other
    return table if read else None


def _layer_inputs(body: nn.Module) -> LayerInputs | None:
    projection = _projection(getattr(body, "per_layer_model_projection", None))
    norm = _rms_norm(getattr(body, "per_layer_projection_norm", None))
    if projection is None or norm is None:
        return None
    factor, scale = body.per_layer_model_projection_scale, body.per_layer_input_scale
    assert isinstance(factor, float)
    assert isinstance(scale, float)
    return LayerInputs(body.embed_tokens_per_layer, projection, factor, norm, scale)


def _layer_input(layer: nn.Module) -> LayerInput | None:
    gate = _projection(getattr(layer, "per_layer_input_gate", None))
    projection = _projection(getattr(layer, "per_layer_projection", None))
    norm = _rms_norm(getattr(layer, "post_per_layer_input_norm", None))
    return None if gate is None or projection is None or norm is None else LayerInput(gate, projection, norm)


def _scale_of(embeddings: nn.Module, dtype: torch.dtype) -> float:
    scale = getattr(embeddings, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(dtype))


_KNOWN_LAYER_PARTS = frozenset(
    {
        "self_attn",
        "linear_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "resid_attn_dropout",
        "resid_mlp_dropout",
        "act_fn",
        "per_layer_input_gate",
        "per_layer_projection",
        "post_per_layer_input_norm",
    }
)
_KNOWN_ATTENTION_PARTS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "v_norm", "rotary_emb"}
)
_QKV = ("q_proj", "k_proj", "v_proj")
_SHARED_PARTS = frozenset({"shared_expert", "shared_expert_gate"})
_KNOWN_MLP_PARTS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"})


def _read_layers(
    loaded: LoadedModel, layers: nn.Module, rope_of: Callable[[int, int], int], activation: Activation
) -> list[DecoderLayer | None]:
    found: list[DecoderLayer | None] = []
    attending = 0
    for index, layer in enumerate(layers.children()):
        mixer: SelfAttention | GatedDelta | None
        if hasattr(layer, "self_attn"):
            mixer = _read_attention(loaded, layer.self_attn, attending, rope_of(index, attending))
            attending += 1
        else:
            mixer = _read_delta(getattr(layer, "linear_attn", None))
        mlp, norms = getattr(layer, "mlp", None), _layer_norms(layer)
        read_mlp = None if mlp is None else _read_mlp(mlp, activation)
        is_known = not {name for name, _ in layer.named_children()} - _KNOWN_LAYER_PARTS
        if mixer is None or read_mlp is None or norms is None or not is_known:
            return [None]
        scale = float(getattr(layer, "layer_scalar", 1.0))
        found.append(DecoderLayer(mixer, read_mlp, *norms, _layer_input(layer), scale))
    return found


def _read_attention(loaded: LoadedModel, attention: nn.Module, index: int, rope: int) -> SelfAttention | None:
    if {name for name, _ in attention.named_children()} - _KNOWN_ATTENTION_PARTS:
        return None
    (qkv, kv_products), o = _attention_product(attention), _projection(attention.o_proj)
    traits, places = loaded.attention_traits[index], loaded.spec.kv.places
    place = places[index]
    if qkv is None or o is None or place.is_own != (kv_products > 0) or not _knows_value_norm(attention):
        return None
    head_dim = place.head_dim
    gates = qkv.out_features // head_dim - traits.num_heads - kv_products * place.num_kv_heads
    q_norm = _rms_norm(getattr(attention, "q_norm", None))
    k_norm = _rms_norm(getattr(attention, "k_norm", None))
    if hasattr(attention, "q_norm"):
        wide = (traits.num_heads * head_dim, place.num_kv_heads * head_dim)
        shapes = [tuple(each.shape) for each in (q_norm, k_norm) if each is not None]
        if shapes not in ([(head_dim,)] * (2 if place.is_own else 1), [(each,) for each in wide]):
            return None
    if gates and (gates != traits.num_heads or kv_products < 2 or (q_norm is not None and len(q_norm) != head_dim)):
        return None
    shape = AttentionShape(
        num_heads=traits.num_heads,
        num_kv_heads=place.num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if traits.scaling is None else traits.scaling,
        window=traits.sliding_window,
        softcap=traits.softcap,
        has_sinks=traits.sinks is not None,
        is_gated=gates > 0,
    )
    return SelfAttention(
        index=index,
        qkv=qkv,
        o=o,
        q_norm=q_norm,
        k_norm=k_norm,
        shape=shape,
        rope=rope,
        kv_of=next(i for i, each in enumerate(places) if each.is_own and each.first == place.first),
        kv_products=kv_products,
        norms_values=hasattr(attention, "v_norm"),
        sinks=traits.sinks,
    )


def _read_delta(layer: nn.Module | None) -> GatedDelta | None:
    net = None if layer is None else layer.forward
    if layer is None or not isinstance(net, DeltaNet):
        return None
    fused = (_fused_projection(layer, "", members) for members in DELTA_INPUTS)
    inputs, out = next((each for each in fused if each is not None), None), _projection(layer.out_proj)
    return None if out is None else GatedDelta(net, inputs, out)


def _attention_product(attention: nn.Module) -> tuple[Projection | None, int]:
    """And how many of keys and values it makes beside queries."""
    there = tuple(name for name in _QKV if getattr(attention, name, None) is not None)
    if there == _QKV[:1]:
        return _projection(attention.q_proj), 0
    fused = _fused_projection(attention, "qkv_proj", there) if there == _QKV[: len(there)] else None
    return fused, len(there or _QKV) - 1


def _knows_value_norm(attention: nn.Module) -> bool:
    norm = getattr(attention, "v_norm", None)
    return norm is None or (type(norm).__name__.endswith("RMSNorm") and not list(norm.parameters()))


def _read_mlp(mlp: nn.Module, activation: Activation) -> DenseMlp | MixtureMlp | None:
    parts = {name for name, _ in mlp.named_children()}
    if parts - _SHARED_PARTS in ({"experts", "gate"}, {"experts", "router"}):
        router, experts = getattr(mlp, "gate", None) or mlp.router, mlp.experts
        if not isinstance(router, LoraRouter) or not isinstance(experts, LoraExperts):
            return None
        read, shared = _projection(router.linear), _read_shared(mlp, activation)
        if read is None or (parts & _SHARED_PARTS and shared is None):
            return None
        own = "clamped_swiglu" if experts.is_clamped else activation
        return MixtureMlp(read, experts, router.top_k, router.normalizes, own, shared)
    if parts - _KNOWN_MLP_PARTS:
        return None
    gate_up = _fused_projection(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    down = _projection(mlp.down_proj)
    return None if gate_up is None or down is None else DenseMlp(gate_up, down)


def _read_shared(mlp: nn.Module, activation: Activation) -> SharedExpert | None:
    expert, gate = getattr(mlp, "shared_expert", None), _projection(getattr(mlp, "shared_expert_gate", None))
    read = None if expert is None else _read_mlp(expert, activation)
    if not isinstance(read, DenseMlp) or gate is None or gate.out_features != 1:
        return None
    return SharedExpert(read, gate)


def _layer_norms(layer: nn.Module) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None:
    """Before and behind the attention, before and behind the MLP; None: not one of the known ways."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    found = [_rms_norm(getattr(layer, name, None)) for name in names]
    there = [hasattr(layer, name) for name in names]
    if there != [each is not None for each in found]:
        return None
    before, after, before_ffn, after_ffn = found
    if there == [True, True, False, False]:
        return before, None, after, None
    return (before, after, before_ffn, after_ffn) if there in ([True] * 4, [False, True, False, True]) else None


def _fused_projection(module: nn.Module, whole: str, members: Sequence[str]) -> Projection | None:
    """The model's or the loader's product that makes all of `members`, one after the other; None: there is none."""
    if whole and hasattr(module, whole):
        return _projection(getattr(module, whole))
    found = [getattr(module, member, None) for member in members]
    first = found[0]
    if not all(isinstance(member, FusedMember) for member in found) or not isinstance(first, FusedMember):
        return None
    leaves = tuple(slot.path.rpartition(".")[2] for slot in first.linear.site.slots)
    return _projection(first.linear) if leaves == tuple(members) else None


def _is_plain_head(head: nn.Module | None) -> bool:
    if isinstance(head, nn.Linear | PackedLinear):
        return head.bias is None
    return isinstance(head, SharedHead)


def _projection(module: nn.Module | None) -> Projection | None:
    if not isinstance(module, LoraLinear):
        return None
    base = module.base
    if type(base) is nn.Linear:
        return Projection(module, base.weight, base.bias, None)
    if isinstance(base, PackedLinear):
        return Projection(module, None, None, None)
    return Projection(module, None, None, base) if isinstance(base, QuantizedLinear) else None


def _rms_norm(module: nn.Module | None) -> Tensor | None:
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def _adds_one(norm: nn.Module) -> bool:
    """Gemma's norms scale by 1 + weight: seen by what a norm does to a constant input."""
    x = torch.ones(1, norm.weight.shape[0], dtype=torch.float32, device=norm.weight.device).to(norm.weight.dtype)
    with torch.inference_mode():
        scaled = norm(x)[0].float()
    weight = norm.weight.float()
    return bool((scaled - (1 + weight)).abs().sum() < (scaled - weight).abs().sum())


def _rope_tables(
    loaded: LoadedModel, rotary: nn.Module, config: Any
) -> tuple[list[tuple[Tensor, Tensor]], Callable[[int, int], int]]:
    """One table for all layers or one a layer type, one more where layers do not rotate, and the index of each layer's,
    by its own index and that among the layers that attend.
    A context may be longer than the model's with an adapter alone, whose own rotation stands in the last angle's place.
    """
    positions = torch.arange(loaded.spec.max_context_tokens, device=loaded.device)[None]
    if hasattr(rotary, "mrope_section"):  # of time, height and width, which are the same in a text
        positions = positions.expand(3, 1, -1)
    like = torch.empty(1, dtype=torch.float32, device=loaded.device)
    missing = loaded.spec.longest - loaded.spec.max_context_tokens
    types = getattr(rotary, "layer_types", None)

    def table(*layer_type: str) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = rotary(like, positions, *layer_type)
        is_half = cos.shape[-1] == len(getattr(rotary, "inv_freq", ()))  # gpt-oss has each angle once
        half = cos.shape[-1] if is_half else cos.shape[-1] // 2
        return _lengthened(cos[0, :, :half], missing), _lengthened(sin[0, :, :half], missing)

    names = [] if types is None else list(types)
    tables = [table(name) for name in names] or [table()]
    rotates = [traits.rotates for traits in loaded.attention_traits]
    if not all(rotates):
        cos, sin = tables[0]
        tables.append((torch.ones_like(cos), torch.zeros_like(sin)))

    def table_of(layer: int, attending: int) -> int:
        if not rotates[attending]:
            return len(tables) - 1
        return names.index(config.layer_types[layer]) if names else 0

    return tables, table_of


def _lengthened(table: Tensor, rows: int) -> Tensor:
    return torch.cat((table, table[-1:].expand(rows, -1))).contiguous()
