"""What a decoder of our own computes: products, norms, and one shape a layer. read.py makes it of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from manylora_shared.stores.adapter_rope import RopeScaling
from torch import Tensor, nn

from manylora_worker.models.layers.lora_linear import LoraLinear
from manylora_worker.models.layers.mixture import LoraExperts, Routing
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.layers.recurrent import RecurrentLayer
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.ranks.cuts import SharedHead
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.weights.sites import Site

Activation = Literal["silu", "gelu", "gelu_tanh"]
ExpertActivation = Activation | Literal["clamped_swiglu"]  # the last one as layers.mixture.clamped_swiglu


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
    """Every row goes to it, too, times the sigmoid of the gate's one output, where it has a gate."""

    mlp: DenseMlp
    gate: Projection | None


@dataclass(frozen=True)
class DenseBranch:
    """An MLP beside the experts. Of the residual r as it is: post_norm(mlp(norm(r))) + experts_post_norm(experts(
    experts_norm(r))), and the router reads router_norm(r). All norms are vectors [hidden].
    """

    mlp: DenseMlp
    norm: Tensor
    post_norm: Tensor
    router_norm: Tensor
    experts_norm: Tensor
    experts_post_norm: Tensor


@dataclass(frozen=True)
class MixtureMlp:
    router: Projection
    experts: LoraExperts
    routing: Routing
    activation: ExpertActivation
    shared: SharedExpert | None = None
    branch: DenseBranch | None = None


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
class RecurrentMixer:
    """inputs: None: they are several products, and `net` alone computes the layer."""

    net: RecurrentLayer
    inputs: Projection | None
    out: Projection

    @property
    def has_kernels(self) -> bool:
        """LoRA's kernels write 8 outputs of a layer at once."""
        if not self.net.has_kernels or self.inputs is None:
            return False
        return not any(slot.start % 8 or slot.stop % 8 for slot in self.inputs.site.slots)


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
    mixer: SelfAttention | RecurrentMixer
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
    query_scales: Tensor | None = None  # float32 [positions], of rotated queries

    @property
    def vocab_size(self) -> int:
        num_rows: int = self.head.out_features
        return num_rows

    @property
    def attentions(self) -> Sequence[SelfAttention]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, SelfAttention)]

    @property
    def recurrent(self) -> Sequence[RecurrentMixer]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrentMixer)]

    @property
    def has_kernels(self) -> bool:
        """Whether the GPU's kernels compute all of it."""
        by_head = (each.q_norm is None or len(each.q_norm) == each.shape.head_dim for each in self.attentions)
        return all(by_head) and all(each.has_kernels for each in self.recurrent)
