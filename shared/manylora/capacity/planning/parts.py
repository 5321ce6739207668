"""What a model has by its Hugging Face config.json, of each family that a GPU runs by our kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class BadConfig(ValueError):
    """The message says which field is wrong, or what is not planned for."""


@dataclass(frozen=True)
class Product:
    """A linear layer: adapters stand on it, and `--quantization` changes it."""

    inputs: int
    outputs: int
    is_biased: bool = False


@dataclass
class Parts:
    # Of elements: `others` are read whole by each step (norms, routers, convolutions), `tables` by row, `experts` by
    # those that rows go to. `state` is of a sequence, in 32-bit floats.

    layers: int
    hidden: int
    vocab: int
    is_tied: bool
    products: list[Product] = field(default_factory=list)
    others: int = 0
    tables: int = 0
    token_kv: int = 0
    state: int = 0
    experts: int = 0
    num_experts: int = 0  # of a layer
    top_k: int = 0


@dataclass(frozen=True)
class _Family:
    # What config.json does not say, or not always. norms: of a layer, of the hidden size.

    norms: int = 2
    norms_heads: bool = False
    is_biased: bool = False
    biases_output: bool = True  # as the rest of the attention
    is_tied: bool = False
    head_dim: int = 0  # 0: hidden size by heads
    is_fused: bool = False  # one product for queries, keys and values, and one for gate and up
    is_gated: bool = False  # queries have a gate each
    has_experts: bool = False


_PLAIN = _Family()
_GEMMA = _Family(is_tied=True, head_dim=256)
_QWEN35 = _Family(norms_heads=True, head_dim=256, is_gated=True)
_GEMMA4 = "gemma4_text"
_GPT_OSS = "gpt_oss"
_FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "granite"), _PLAIN),
    "qwen2": _Family(is_biased=True, biases_output=False),
    "seed_oss": _Family(is_biased=True, biases_output=False, head_dim=128),
    "qwen3": _Family(norms_heads=True, head_dim=128),
    "smollm3": _Family(is_tied=True),
    "exaone4": _Family(norms_heads=True),
    "phi3": _Family(is_fused=True),
    "gemma": _GEMMA,
    "gemma2": _Family(norms=4, is_tied=True, head_dim=256),
    "gemma3_text": _Family(norms=4, norms_heads=True, is_tied=True, head_dim=256),
    _GEMMA4: _Family(norms=4, norms_heads=True, is_tied=True, head_dim=256),
    "qwen3_moe": _Family(norms_heads=True, has_experts=True),
    _GPT_OSS: _Family(is_biased=True, head_dim=64, has_experts=True),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": _Family(norms_heads=True, head_dim=256, is_gated=True, has_experts=True),
}
# of a family that is not among them: what its layers have that a dense model's have not
_UNLIKE = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "enable_moe_block": "a mixture of experts",
    "linear_num_value_heads": "gated delta nets",
    "global_head_dim": "heads that differ from layer to layer",
    "per_layer_config": "layers that differ",
}
_LINEAR, _FULL = "linear_attention", "full_attention"
_SLIDING = "sliding_attention"


def parts_of(config: Mapping[str, Any]) -> Parts:
    """Raises BadConfig."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise BadConfig(f"text_config: must be an object, not {text!r}")
    kind = text.get("model_type", "llama")
    family = _FAMILIES.get(kind)
    if family is None or text.get("enable_moe_block"):
        reason = next((reason for key, reason in _UNLIKE.items() if text.get(key)), "runs without our kernels on a GPU")
        raise BadConfig(f"{kind}: {reason}: not planned for")
    return _Reader(text, kind, family, _is_tied(config, text, family)).parts()


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any], family: _Family) -> bool:
    """The text part's word, else the whole model's."""
    told = [each["tie_word_embeddings"] for each in (text, config) if "tie_word_embeddings" in each]
    return bool(told[0]) if told else family.is_tied


class _Reader:
    def __init__(self, text: Mapping[str, Any], kind: str, family: _Family, is_tied: bool) -> None:
        self._text, self._kind, self._family = text, kind, family
        self._layers = self._number("num_hidden_layers")
        self._hidden = self._number("hidden_size")
        self._intermediate = self._number("intermediate_size")
        self._heads = self._number("num_attention_heads")
        self._kv_heads = self._number("num_key_value_heads", self._heads)
        self._head_dim = self._number("head_dim", family.head_dim or self._hidden // self._heads)
        self._found = Parts(self._layers, self._hidden, self._number("vocab_size"), is_tied)

    def parts(self) -> Parts:
        found = self._found
        found.others += self._hidden  # the last norm
        kinds = self._kinds()
        shared_from = self._layers - self._number("num_kv_shared_layers", 0, least=0)
        for layer, kind in enumerate(kinds):
            found.others += self._family.norms * self._hidden
            if kind == _LINEAR:
                self._delta_net()
            elif self._kind == _GEMMA4:
                self._unlike_attention(layer, kind, is_shared=layer >= shared_from)
            else:
                self._attention(self._kv_heads, self._head_dim)
            if self._has_experts(layer):
                self._mixture()
            else:
                doubles = self._text.get("use_double_wide_mlp") and layer >= shared_from > 0
                self._mlp(self._intermediate * (2 if doubles else 1))
        width = self._number("hidden_size_per_layer_input", 0 if self._kind != _GEMMA4 else 256, least=0)
        if width:
            self._layer_inputs(width)
        return found

    def _kinds(self) -> Sequence[str]:
        kinds = self._text.get("layer_types")
        if self._kind == _GEMMA4 and kinds is None:
            kinds = [_FULL if (i + 1) % 6 == 0 or i + 1 == self._layers else _SLIDING for i in range(self._layers)]
        if self._family.is_gated and kinds is None:
            every = self._number("full_attention_interval", 4)
            kinds = [_LINEAR if (i + 1) % every else _FULL for i in range(self._layers)]
        if kinds is None:
            return [_FULL] * self._layers
        if not isinstance(kinds, list) or len(kinds) < self._layers:
            raise BadConfig(f"layer_types: must name each of {self._layers} layers")
        known = {_FULL, _SLIDING, *([_LINEAR] if self._family.is_gated else [])}
        strange = next((kind for kind in kinds if kind not in known), None)
        if strange is not None:
            raise BadConfig(f"layer_types: {strange!r} is not planned for")
        return kinds[: self._layers]

    def _has_experts(self, layer: int) -> bool:
        if not self._family.has_experts:
            return False
        dense = self._text.get("mlp_only_layers") or ()
        return layer not in dense and (layer + 1) % self._number("decoder_sparse_step", 1) == 0

    def _add(self, inputs: int, outputs: int, is_biased: bool = False) -> None:
        self._found.products.append(Product(inputs, outputs, is_biased))

    def _attention(self, kv_heads: int, head_dim: int, *, has_keys: bool = True, has_values: bool = True) -> None:
        family, found, hidden = self._family, self._found, self._hidden
        queries, keys = self._heads * head_dim, kv_heads * head_dim
        is_biased = bool(self._text.get("attention_bias", family.is_biased)) or self._kind == "qwen2"
        own = (keys if has_keys else 0, keys if has_keys and has_values else 0)
        if family.is_fused:
            self._add(hidden, queries + sum(own), is_biased)
        else:
            for outputs in (queries * (2 if family.is_gated else 1), *filter(None, own)):
                self._add(hidden, outputs, is_biased)
        output_bias = self._text.get("attention_out_bias", is_biased and family.biases_output)
        self._add(queries, hidden, bool(output_bias))
        found.token_kv += 2 * keys if has_keys else 0
        if family.norms_heads:
            found.others += head_dim * (2 if has_keys else 1)
        if self._kind == _GPT_OSS:
            found.others += self._heads  # sinks

    def _unlike_attention(self, layer: int, kind: str, *, is_shared: bool) -> None:
        kv_heads, head_dim, text = self._kv_heads, self._head_dim, self._text
        is_one = bool(text.get("attention_k_eq_v")) and kind == _FULL
        own = text.get("per_layer_config")
        if isinstance(own, Mapping):  # as transformers writes it
            told = own.get(str(layer), {})
            kv_heads, head_dim = told.get("num_key_value_heads", kv_heads), told.get("head_dim", head_dim)
        elif kind == _FULL:
            head_dim = self._number("global_head_dim", 512)
            kv_heads = self._number("num_global_key_value_heads", kv_heads) if is_one else kv_heads
        self._attention(kv_heads, head_dim, has_keys=not is_shared, has_values=not is_one)

    def _delta_net(self) -> None:
        heads, of_values = self._number("linear_num_value_heads"), self._number("linear_value_head_dim")
        of_keys = self._number("linear_key_head_dim")
        keys, values = self._number("linear_num_key_heads") * of_keys, heads * of_values
        taps = self._number("linear_conv_kernel_dim", 4)
        for outputs in (2 * keys + values, values, heads, heads):
            self._add(self._hidden, outputs)
        self._add(values, self._hidden)
        self._found.others += 2 * heads + of_values + taps * (2 * keys + values)
        self._found.state += heads * of_keys * of_values + (taps - 1) * (2 * keys + values)

    def _mlp(self, width: int) -> None:
        is_biased, hidden = bool(self._text.get("mlp_bias")), self._hidden
        for outputs in (2 * width,) if self._family.is_fused else (width, width):
            self._add(hidden, outputs, is_biased)
        self._add(width, hidden, is_biased)

    def _mixture(self) -> None:
        found, hidden, is_biased = self._found, self._hidden, self._kind == _GPT_OSS
        width = self._intermediate if is_biased else self._number("moe_intermediate_size")
        found.num_experts = self._number("num_experts", self._text.get("num_local_experts"))
        found.top_k = self._number("num_experts_per_tok")
        found.experts += found.num_experts * (3 * hidden * width + (2 * width + hidden if is_biased else 0))
        found.others += found.num_experts * (hidden + (1 if is_biased else 0))
        if self._family.is_gated:
            self._mlp(self._number("shared_expert_intermediate_size"))
            self._add(hidden, 1)

    def _layer_inputs(self, width: int) -> None:
        found, hidden = self._found, self._hidden
        found.tables += self._number("vocab_size_per_layer_input") * width * self._layers
        self._add(hidden, width * self._layers)
        found.others += width + self._layers * hidden
        for _ in range(self._layers):
            self._add(hidden, width)
            self._add(width, hidden)

    def _number(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._text.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadConfig(f"{key}: must be a whole number above {least - 1}, not {value!r}")
        return value
