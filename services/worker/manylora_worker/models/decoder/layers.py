"""A model's layers, each by the modules that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from manylora_worker.models.decoder.modules import fused_projection, norm_adds_one, projection_of, rms_norm
from manylora_worker.models.decoder.weights import (
    Activation,
    AttentionShape,
    DecoderLayer,
    DenseBranch,
    DenseMlp,
    LayerInput,
    MixtureMlp,
    Projection,
    RecurrentMixer,
    SelfAttention,
    SharedExpert,
)
from manylora_worker.models.layers.delta_net import DELTA_INPUTS
from manylora_worker.models.layers.mixture import LoraExperts, LoraRouter, Routing
from manylora_worker.models.layers.recurrent import RecurrentLayer
from manylora_worker.models.loader import LoadedModel

_KNOWN_LAYER_PARTS = frozenset(
    {
        "self_attn",
        "linear_attn",
        "mamba",
        "block_sparse_moe",
        "mlp",
        "shared_mlp",
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
_BRANCH_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
_BRANCH_PARTS = frozenset({"router", "experts", *_BRANCH_NORMS})
_KNOWN_ATTENTION_PARTS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "v_norm", "rotary_emb"}
)
_QKV = ("q_proj", "k_proj", "v_proj")
_GATED_SHARED, _SHARED = "shared_expert", "shared_experts"
_SHARED_PARTS = frozenset({_GATED_SHARED, "shared_expert_gate", _SHARED})
_ACTIVATION_PARTS = frozenset({"act_fn", "activation_fn", "activation"})
_KNOWN_MLP_PARTS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"}) | _ACTIVATION_PARTS
_GRANITE_MLP_PARTS = frozenset({"input_linear", "output_linear"})


def read_layers(
    loaded: LoadedModel, layers: nn.Module, rope_of: Callable[[int, int], int], activation: Activation
) -> list[DecoderLayer | None]:
    found: list[DecoderLayer | None] = []
    attending = 0
    for index, layer in enumerate(layers.children()):
        mixer: SelfAttention | RecurrentMixer | None
        if getattr(layer, "self_attn", None) is not None:
            mixer = _read_attention(loaded, layer.self_attn, attending, rope_of(index, attending))
            attending += 1
        else:
            mixer = _read_recurrent(getattr(layer, "linear_attn", None) or getattr(layer, "mamba", None))
        mlp, norms = getattr(layer, "mlp", None) or getattr(layer, "shared_mlp", None), _layer_norms(layer)
        read_mlp = None if mlp is None else _read_mlp(mlp, activation)
        if getattr(layer, "block_sparse_moe", None) is not None:
            read_mlp = _read_beside(layer.block_sparse_moe, read_mlp, activation)
        parts = {name for name, _ in layer.named_children()} - _KNOWN_LAYER_PARTS
        is_known = not parts
        if parts == _BRANCH_PARTS and isinstance(read_mlp, DenseMlp) and norms is not None:
            branched = _read_branch(layer, read_mlp, norms[2], activation)
            read_mlp, norms, is_known = branched, (norms[0], norms[1], None, norms[3]), branched is not None
        if mixer is None or read_mlp is None or norms is None or not is_known:
            return [None]
        scale = float(getattr(layer, "layer_scalar", 1.0))
        found.append(DecoderLayer(mixer, read_mlp, *norms, _layer_input(layer), scale))
    return found


def _read_attention(loaded: LoadedModel, attention: nn.Module, index: int, rope: int) -> SelfAttention | None:
    if {name for name, _ in attention.named_children()} - _KNOWN_ATTENTION_PARTS:
        return None
    (qkv, kv_products), o = _attention_product(attention), projection_of(attention.o_proj)
    traits, places = loaded.attention_traits[index], loaded.spec.kv.places
    place = places[index]
    if qkv is None or o is None or place.is_own != (kv_products > 0) or not _knows_value_norm(attention):
        return None
    head_dim = place.head_dim
    gates = qkv.out_features // head_dim - traits.num_heads - kv_products * place.num_kv_heads
    q_norm = rms_norm(getattr(attention, "q_norm", None))
    k_norm = rms_norm(getattr(attention, "k_norm", None))
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


def _read_recurrent(layer: nn.Module | None) -> RecurrentMixer | None:
    net = None if layer is None else layer.forward
    if layer is None or not isinstance(net, RecurrentLayer):
        return None
    first = [projection_of(getattr(layer, "in_proj", None))]
    first += [fused_projection(layer, "", members) for members in DELTA_INPUTS]
    inputs, out = next((each for each in first if each is not None), None), projection_of(layer.out_proj)
    return None if out is None else RecurrentMixer(net, inputs, out)


def _attention_product(attention: nn.Module) -> tuple[Projection | None, int]:
    """And how many of keys and values it makes beside queries."""
    there = tuple(name for name in _QKV if getattr(attention, name, None) is not None)
    if there == _QKV[:1]:
        return projection_of(attention.q_proj), 0
    fused = fused_projection(attention, "qkv_proj", there) if there == _QKV[: len(there)] else None
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
        read, shared = projection_of(router.linear), _read_shared(mlp, activation)
        if read is None or (parts & _SHARED_PARTS and shared is None):
            return None
        own = "clamped_swiglu" if experts.is_clamped else activation
        return MixtureMlp(read, experts, router.routing, own, shared)
    if parts - _ACTIVATION_PARTS == _GRANITE_MLP_PARTS:
        gate_up, down = projection_of(mlp.input_linear), projection_of(mlp.output_linear)
    elif parts - _KNOWN_MLP_PARTS:
        return None
    else:
        gate_up = fused_projection(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
        down = projection_of(mlp.down_proj)
    return None if gate_up is None or down is None else DenseMlp(gate_up, down)


def _read_shared(mlp: nn.Module, activation: Activation) -> SharedExpert | None:
    gate = projection_of(getattr(mlp, "shared_expert_gate", None))
    expert = getattr(mlp, _SHARED if gate is None else _GATED_SHARED, None)
    read = None if expert is None else _read_mlp(expert, activation)
    if not isinstance(read, DenseMlp) or (gate is not None and gate.out_features != 1):
        return None
    return SharedExpert(read, gate)


def _read_beside(mixture: nn.Module, shared: DenseMlp | MixtureMlp | None, activation: Activation) -> MixtureMlp | None:
    """Granite 4's."""
    read = _read_mlp(mixture, activation)
    if not isinstance(read, MixtureMlp) or not isinstance(shared, DenseMlp):
        return None
    return replace(read, shared=SharedExpert(shared, None))


def _read_branch(layer: nn.Module, mlp: DenseMlp, norm: Tensor | None, activation: Activation) -> MixtureMlp | None:
    """Gemma 4's."""
    router, experts = layer.router, layer.experts
    projection, top_k = projection_of(getattr(router, "proj", None)), getattr(router.config, "top_k_experts", None)
    norms = [norm, *(rms_norm(getattr(layer, name)) for name in _BRANCH_NORMS)]
    factors: list[Any] = [getattr(router, name, None) for name in ("scale", "scalar_root_size", "per_expert_scale")]
    own = [each for each in norms if each is not None]
    if projection is None or not isinstance(experts, LoraExperts) or not isinstance(top_k, int):
        return None
    is_known = len(own) == len(norms) and not any(each is None for each in factors) and not experts.is_clamped
    if not is_known or norm_adds_one(layer.input_layernorm):  # the router's norm adds nothing
        return None
    scale, root, shares = factors
    before, after, experts_before, experts_after = own
    branch = DenseBranch(mlp, before, after, scale.detach() * root, experts_before, experts_after)
    routing = Routing(top_k, normalizes=True, scales=shares.detach().float())
    return MixtureMlp(projection, experts, routing, activation, branch=branch)


def _layer_norms(layer: nn.Module) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None:
    """Before and behind the attention, before and behind the MLP; None: not one of the known ways."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    found = [rms_norm(getattr(layer, name, None)) for name in names]
    there = [hasattr(layer, name) for name in names]
    if there != [each is not None for each in found]:
        return None
    before, after, before_ffn, after_ffn = found
    if there == [True, True, False, False]:
        return before, None, after, None
    return (before, after, before_ffn, after_ffn) if there in ([True] * 4, [False, True, False, True]) else None


def _layer_input(layer: nn.Module) -> LayerInput | None:
    gate = projection_of(getattr(layer, "per_layer_input_gate", None))
    projection = projection_of(getattr(layer, "per_layer_projection", None))
    norm = rms_norm(getattr(layer, "post_per_layer_input_norm", None))
    return None if gate is None or projection is None or norm is None else LayerInput(gate, projection, norm)
