"""What a model has by its Hugging Face config.json, of each family that a GPU runs by our kernels."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class BadConfig(ValueError):
    """The message says which field is wrong, or what is not planned for."""


class Cut(enum.Enum):
    """What of a layer is divided among the ranks of a worker."""

    NONE = enum.auto()
    OUTPUTS = enum.auto()
    INPUTS = enum.auto()  # their outputs are summed


@dataclass(frozen=True)
class Product:
    """A linear layer: adapters stand on it, and `--quantization` changes it. Those of one site read the same, and are
    one product at a worker. Of experts: as many as `count` have one such stack of `members`, at the path of all.
    """

    inputs: int
    outputs: int
    is_biased: bool = False
    path: str = ""
    site: str = ""
    cut: Cut = Cut.NONE
    on_each: int = 0  # outputs that every rank has
    count: int = 1
    members: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return self.count * self.inputs * self.outputs


@dataclass
class Parts:
    # Of elements: `others` are read whole by each step (norms, routers), `cut_others`, too, but ranks have a share of
    # each (convolutions); `tables` are read by row, `experts` by those that rows go to. `state` is of a sequence, in
    # 32-bit floats. `counts` are what N ranks have to divide, `widths` into multiples of 8.

    kind: str
    layers: int
    hidden: int
    vocab: int
    is_tied: bool
    products: list[Product] = field(default_factory=list)
    others: int = 0
    cut_others: int = 0
    tables: int = 0
    token_kv: int = 0
    state: int = 0
    whole_state: int = 0  # of `state`, what every rank has
    experts: list[Product] = field(default_factory=list)  # of a layer one for gates and ups, and one behind it
    num_experts: int = 0  # of a layer
    top_k: int = 0
    sums: int = 0  # over ranks, by a step
    counts: dict[tuple[str, int], None] = field(default_factory=dict)
    widths: dict[tuple[str, int], None] = field(default_factory=dict)

    @property
    def expert_elements(self) -> int:
        return sum(each.elements for each in self.experts)


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
    has_shared_expert: bool = False


_PLAIN = _Family()
_GEMMA = _Family(is_tied=True, head_dim=256)
_QWEN35 = _Family(norms_heads=True, head_dim=256, is_gated=True)
_QWEN35_MOE = _Family(norms_heads=True, head_dim=256, is_gated=True, has_experts=True, has_shared_expert=True)
_QWEN2 = _Family(is_biased=True, biases_output=False)
_QWEN3 = _Family(norms_heads=True, head_dim=128)
_QWEN3_MOE = _Family(norms_heads=True, has_experts=True)
_GEMMA4 = "gemma4_text"
GPT_OSS = "gpt_oss"
_QWEN3_NEXT = "qwen3_next"
_MIXTRAL = "mixtral"
_GRANITE4 = "granitemoehybrid"
_GLM4_MOE, _DOTS1 = _BY_SIGMOIDS = ("glm4_moe", "dots1")
_BIASED = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")  # queries, keys, values
_FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "granite", "cwm", _GRANITE4), _PLAIN),
    **dict.fromkeys(_BIASED, _QWEN2),
    "qwen2_moe": _Family(is_biased=True, biases_output=False, has_experts=True, has_shared_expert=True),
    "seed_oss": _Family(is_biased=True, biases_output=False, head_dim=128),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), _QWEN3),
    "ministral3": _Family(head_dim=128),
    "smollm3": _Family(is_tied=True),
    "exaone4": _Family(norms_heads=True),
    "phi3": _Family(is_fused=True),
    "gemma": _GEMMA,
    "gemma2": _Family(norms=4, is_tied=True, head_dim=256),
    "gemma3_text": _Family(norms=4, norms_heads=True, is_tied=True, head_dim=256),
    _GEMMA4: _Family(norms=4, norms_heads=True, is_tied=True, head_dim=256),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), _QWEN3_MOE),
    _MIXTRAL: _Family(has_experts=True),
    GPT_OSS: _Family(is_biased=True, head_dim=64, has_experts=True),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": _QWEN35_MOE,
    _QWEN3_NEXT: _QWEN35_MOE,
    _GLM4_MOE: _Family(has_experts=True, biases_output=False),
    _DOTS1: _Family(has_experts=True, norms_heads=True),
}
# of a family that is not among them: what its layers have that a dense model's have not
_UNLIKE = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "linear_num_value_heads": "gated delta nets",
    "global_head_dim": "heads that differ from layer to layer",
    "per_layer_config": "layers that differ",
}
_LINEAR, _FULL = "linear_attention", "full_attention"
_MAMBA = "mamba"  # as Granite 4's are published; transformers writes _LINEAR
_SLIDING = "sliding_attention"
_ATTENTION = "attention"  # Granite 4's
_KERNELS_OUTPUTS = 8  # of a delta net's layer, at whose multiples each begins
_DELTA_NET = "linear_attn"


def parts_of(config: Mapping[str, Any]) -> Parts:
    """Raises BadConfig."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise BadConfig(f"text_config: must be an object, not {text!r}")
    kind = text.get("model_type", "llama")
    if not isinstance(kind, str):
        raise BadConfig(f"model_type: must be text, not {kind!r}")
    family = _FAMILIES.get(kind)
    if family is None:
        reason = next((reason for key, reason in _UNLIKE.items() if text.get(key)), "runs without our kernels on a GPU")
        raise BadConfig(f"{kind}: {reason}: not planned for")
    root = "model" if text is config else "model.language_model"
    return _Reader(text, kind, family, _is_tied(config, text, family), root).parts()


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any], family: _Family) -> bool:
    """The text part's word, else the whole model's."""
    told = [each["tie_word_embeddings"] for each in (text, config) if "tie_word_embeddings" in each]
    return bool(told[0]) if told else family.is_tied


def check_kernels(parts: Parts) -> None:
    """Raises BadConfig where a GPU runs it by torch's operators."""
    nets = (
        each
        for each in parts.products
        if (f".{_DELTA_NET}." in each.path and each.cut is Cut.OUTPUTS) or each.path.endswith(f".{_MAMBA}.in_proj")
    )
    odd = next((each for each in nets if each.outputs % _KERNELS_OUTPUTS), None)
    if odd is not None:
        raise BadConfig(
            f"{odd.path}: {odd.outputs} outputs on a GPU are no multiple of {_KERNELS_OUTPUTS}: it runs without our "
            "kernels there, which is not planned for"
        )


class _Reader:
    def __init__(self, text: Mapping[str, Any], kind: str, family: _Family, is_tied: bool, root: str) -> None:
        self._text, self._kind, self._family = text, kind, family
        self._layers = self._number("num_hidden_layers")
        self._hidden = self._number("hidden_size")
        self._heads = self._number("num_attention_heads")
        self._kv_heads = self._number("num_key_value_heads", self._heads)
        self._head_dim = self._number("head_dim", family.head_dim or self._hidden // self._heads)
        self._root, self._block = root, ""
        self._found = Parts(kind, self._layers, self._hidden, self._number("vocab_size"), is_tied)

    def parts(self) -> Parts:
        found = self._found
        found.others += self._hidden  # the last norm
        kinds = self._kinds()
        shared_from = self._layers - self._number("num_kv_shared_layers", 0, least=0)
        self._count("num_attention_heads", self._heads)
        if self._text.get("intermediate_size"):
            self._count("intermediate_size", self._number("intermediate_size"))
        for layer, kind in enumerate(kinds):
            self._block = f"{self._root}.layers.{layer}"
            found.others += self._family.norms * self._hidden
            found.sums += 2
            if kind == _MAMBA or (kind == _LINEAR and self._kind == _GRANITE4):
                self._mamba()
            elif kind == _LINEAR:
                self._delta_net()
            elif self._kind == _GEMMA4:
                self._unlike_attention(layer, kind, is_shared=layer >= shared_from)
            else:
                self._attention(self._kv_heads, self._head_dim)
            if self._kind == _GRANITE4:
                self._granite_mlp()
            elif self._has_experts(layer):
                self._mixture()
            else:  # also beside Gemma 4's experts
                doubles = self._text.get("use_double_wide_mlp") and layer >= shared_from > 0
                self._mlp("mlp", self._number("intermediate_size") * (2 if doubles else 1))
            if self._kind == _GEMMA4 and self._text.get("enable_moe_block"):
                self._mixture_beside()
        width = self._number("hidden_size_per_layer_input", 0 if self._kind != _GEMMA4 else 256, least=0)
        if width:
            self._layer_inputs(width)
        if not found.token_kv:  # a worker's memory is counted by what a token has there
            raise BadConfig(f"num_hidden_layers: none of {self._layers} layers has keys and values: not planned for")
        check_kernels(found)
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
        known = {
            _FULL,
            _SLIDING,
            _ATTENTION,
            *([_LINEAR] if self._family.is_gated else []),
            *([_MAMBA, _LINEAR] if self._kind == _GRANITE4 else []),
        }
        strange = [kind for kind in kinds if not isinstance(kind, str) or kind not in known]
        if strange:
            raise BadConfig(f"layer_types: {strange[0]!r} is not planned for")
        return kinds[: self._layers]

    def _has_experts(self, layer: int) -> bool:
        if not self._family.has_experts:
            return False
        if self._kind in _BY_SIGMOIDS:
            return layer >= self._number("first_k_dense_replace", 1 if self._kind == _GLM4_MOE else 0, least=0)
        dense = self._text.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise BadConfig(f"mlp_only_layers: must be a list, not {dense!r}")
        return layer not in dense and (layer + 1) % self._number("decoder_sparse_step", 1) == 0

    def _count(self, name: str, count: int) -> None:
        self._found.counts[name, count] = None

    def _add(
        self, path: str, inputs: int, outputs: int, cut: Cut = Cut.NONE, *, on_each: int = 0, is_biased: bool = False
    ) -> None:
        whole = f"{self._block}.{path}"
        self._found.products.append(Product(inputs, outputs, is_biased, whole, whole, cut, on_each))

    def _read(self, module: str, outputs: Mapping[str, int], *, is_biased: bool = False) -> None:
        # layers of one input, cut by outputs: one product
        site = f"{self._block}.{module}"
        for name, count in outputs.items():
            path = f"{site}.{name}"
            self._found.products.append(Product(self._hidden, count, is_biased, path, site, Cut.OUTPUTS))

    def _attention(self, kv_heads: int, head_dim: int, *, has_keys: bool = True, has_values: bool = True) -> None:
        family, found, hidden = self._family, self._found, self._hidden
        queries, keys = self._heads * head_dim, kv_heads * head_dim
        is_biased = bool(self._text.get("attention_bias", family.is_biased)) or self._kind in _BIASED
        own = {"k_proj": keys if has_keys else 0, "v_proj": keys if has_keys and has_values else 0}
        if family.is_fused:
            self._read("self_attn", {"qkv_proj": queries + sum(own.values())}, is_biased=is_biased)
        else:
            first = {"q_proj": queries * (2 if family.is_gated else 1)}
            there = {name: outputs for name, outputs in own.items() if outputs}
            self._read("self_attn", first | there, is_biased=is_biased)
        output_bias = self._text.get("attention_out_bias", is_biased and family.biases_output)
        self._add("self_attn.o_proj", queries, hidden, Cut.INPUTS, is_biased=bool(output_bias))
        found.token_kv += 2 * keys if has_keys else 0
        self._count("num_key_value_heads", kv_heads)
        if family.norms_heads or (self._kind == _GLM4_MOE and self._text.get("use_qk_norm")):
            found.others += head_dim * (2 if has_keys else 1)
        if self._kind == GPT_OSS:
            found.cut_others += self._heads  # sinks

    def _unlike_attention(self, layer: int, kind: str, *, is_shared: bool) -> None:
        kv_heads, head_dim, text = self._kv_heads, self._head_dim, self._text
        is_one = bool(text.get("attention_k_eq_v")) and kind == _FULL
        own = text.get("per_layer_config")
        if isinstance(own, Mapping):  # as transformers writes it
            kv_heads, head_dim = (
                self._of_layer(own, layer, name, default)
                for name, default in (("num_key_value_heads", kv_heads), ("head_dim", head_dim))
            )
        elif kind == _FULL:
            head_dim = self._number("global_head_dim", 512)
            kv_heads = self._number("num_global_key_value_heads", kv_heads) if is_one else kv_heads
        self._attention(kv_heads, head_dim, has_keys=not is_shared, has_values=not is_one)

    def _delta_net(self) -> None:
        heads, of_values = self._number("linear_num_value_heads"), self._number("linear_value_head_dim")
        key_heads, of_keys = self._number("linear_num_key_heads"), self._number("linear_key_head_dim")
        keys, values = key_heads * of_keys, heads * of_values
        taps = self._number("linear_conv_kernel_dim", 4)
        inputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        if self._kind == _QWEN3_NEXT:
            inputs = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
        self._read(_DELTA_NET, inputs)
        self._add(f"{_DELTA_NET}.out_proj", values, self._hidden, Cut.INPUTS)
        self._found.others += of_values
        self._found.cut_others += 2 * heads + taps * (2 * keys + values)
        self._found.state += heads * of_keys * of_values + (taps - 1) * (2 * keys + values)
        self._count("linear_num_key_heads", key_heads)
        self._count("linear_num_value_heads", heads)

    def _mamba(self) -> None:
        heads, size, groups = (
            self._number("mamba_n_heads"),
            self._number("mamba_d_state"),
            self._number("mamba_n_groups", 1),
        )
        values, taps = self._number("mamba_expand", 2) * self._hidden, self._number("mamba_d_conv", 4)
        keys, is_biased = 2 * groups * size, bool(self._text.get("mamba_proj_bias"))
        on_each = keys if groups == 1 else 0
        outputs = 2 * values + keys + heads
        self._add(f"{_MAMBA}.in_proj", self._hidden, outputs, Cut.OUTPUTS, on_each=on_each, is_biased=is_biased)
        self._add(f"{_MAMBA}.out_proj", values, self._hidden, Cut.INPUTS, is_biased=is_biased)
        of_channel = taps + bool(self._text.get("mamba_conv_bias", True))
        self._found.others += on_each * of_channel
        self._found.cut_others += values + 3 * heads + (values + keys - on_each) * of_channel
        self._found.state += values * size + (taps - 1) * (values + keys)
        self._found.whole_state += (taps - 1) * on_each
        self._found.sums += 1  # of the norm's squares
        self._count("mamba_n_heads", heads)
        if groups > 1:
            self._count("mamba_n_groups", groups)

    def _granite_mlp(self) -> None:
        if self._text.get("num_local_experts"):
            self._experts("block_sparse_moe.experts", "intermediate_size")
            self._found.top_k = self._number("num_experts_per_tok")
            self._found.others += self._found.num_experts * self._hidden
        width, hidden = self._number("shared_intermediate_size"), self._hidden
        self._read("shared_mlp", {"input_linear": 2 * width})
        self._add("shared_mlp.output_linear", width, hidden, Cut.INPUTS)
        self._count("shared_intermediate_size", width)

    def _mlp(self, module: str, width: int) -> None:
        is_biased, hidden = bool(self._text.get("mlp_bias")), self._hidden
        outputs = {"gate_up_proj": 2 * width} if self._family.is_fused else {"gate_proj": width, "up_proj": width}
        self._read(module, outputs, is_biased=is_biased)
        self._add(f"{module}.down_proj", width, hidden, Cut.INPUTS, is_biased=is_biased)

    def _experts(self, module: str, named: str, *, is_biased: bool = False) -> None:
        found, hidden, width = self._found, self._hidden, self._number(named)
        told = ["n_routed_experts"] if self._kind in _BY_SIGMOIDS else ["num_experts", "num_local_experts"]
        name = next((each for each in told if self._text.get(each)), told[0])
        count = found.num_experts = self._number(name)
        path = f"{self._block}.{module}"
        found.experts += [
            Product(hidden, 2 * width, is_biased, path, path, Cut.OUTPUTS, 0, count, ("gate_proj", "up_proj")),
            Product(width, hidden, is_biased, path, path, Cut.INPUTS, 0, count, ("down_proj",)),
        ]
        found.widths[named, width] = None

    def _mixture_beside(self) -> None:
        found, hidden = self._found, self._hidden
        self._experts("experts", "moe_intermediate_size")
        found.top_k = self._number("top_k_experts")
        self._add("router.proj", hidden, found.num_experts)
        found.others += found.num_experts + 4 * hidden  # the router's scales, and three norms
        found.sums += 1

    def _mixture(self) -> None:
        found, hidden, is_biased = self._found, self._hidden, self._kind == GPT_OSS
        width = "intermediate_size" if self._kind in (GPT_OSS, _MIXTRAL) else "moe_intermediate_size"
        self._experts("mlp.experts", width, is_biased=is_biased)
        found.top_k = self._number("num_experts_per_tok")
        found.others += found.num_experts * (hidden + (1 if is_biased else 0))
        if self._family.has_shared_expert:
            shared = self._number("shared_expert_intermediate_size")
            found.widths["shared_expert_intermediate_size", shared] = None
            self._mlp("mlp.shared_expert", shared)
            self._add("mlp.shared_expert_gate", hidden, 1)
        if self._kind in _BY_SIGMOIDS:
            self._check_groups()
            self._mlp("mlp.shared_experts", self._number("n_shared_experts", 1) * self._number(width))

    def _check_groups(self) -> None:
        groups, taken = (self._number(name, 1) for name in ("n_group", "topk_group"))
        if groups != taken:
            raise BadConfig(f"topk_group: a router that takes {taken} of {groups} groups: not planned for")

    def _layer_inputs(self, width: int) -> None:
        found, hidden = self._found, self._hidden
        found.tables += self._number("vocab_size_per_layer_input") * width * self._layers
        self._block = self._root
        self._add("per_layer_model_projection", hidden, width * self._layers)
        found.others += width + self._layers * hidden
        for layer in range(self._layers):
            self._block = f"{self._root}.layers.{layer}"
            self._add("per_layer_input_gate", hidden, width)
            self._add("per_layer_projection", width, hidden)

    @staticmethod
    def _of_layer(own: Mapping[str, Any], layer: int, name: str, default: int) -> int:
        told = own.get(str(layer), {})
        value = told.get(name, default) if isinstance(told, Mapping) else None
        if type(value) is not int or value < 1:
            raise BadConfig(f"per_layer_config.{layer}.{name}: must be a whole number above 0, not {value!r}")
        return value

    def _number(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._text.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadConfig(f"{key}: must be a whole number above {least - 1}, not {value!r}")
        return value
