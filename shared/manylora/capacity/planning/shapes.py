"""Models and GPUs as a planner sees them: bytes, multiplications, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTES = 2  # of an element: bfloat16
GIB = 1 << 30


class CannotPlan(ValueError):
    """The message says what is wrong, and where."""


@dataclass(frozen=True)
class Shape:
    """Two that differ by name only are equal: a folder of a known model has another one."""

    name: str = dataclasses.field(compare=False)
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = False
    kv_element_bytes: int = BYTES

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_element_bytes

    @property
    def _layer_elements(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def step_elements(self) -> int:
        """That a step multiplies with: all but the table of embeddings."""
        return self.layers * self._layer_elements + self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        return (self.step_elements + (0 if self.is_tied else self.hidden * self.vocab)) * BYTES

    @property
    def rank_bytes(self) -> int:
        """Of an adapter on all projections, for each of its rank."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.intermediate)
        return self.layers * sides * BYTES


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        Shape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
        Shape("llama-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    )
}
_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}


# fields of a text part whose layers have other weights or another KV than those of a dense model
_UNPLANNED = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "linear_num_value_heads": "gated delta nets",
    "global_head_dim": "heads that differ from layer to layer",
    "per_layer_config": "layers that differ",
}


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """Of a Hugging Face config.json. Raises CannotPlan."""
    text = config.get("text_config") or config
    reason = next((reason for key, reason in _UNPLANNED.items() if text.get(key)), "")
    if reason:
        raise CannotPlan(f"{name}: {text.get('model_type')}: {reason}: not planned for")
    found: dict[str, int] = {}
    for field, key in _NAMES.items():
        value = text.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CannotPlan(f"{name}: {key}: must be a whole number above 0, not {value!r}")
        found[field] = value
    kv_heads = text.get("num_key_value_heads") or found["heads"]
    head_dim = text.get("head_dim") or found["hidden"] // found["heads"]
    return Shape(name, **found, kv_heads=kv_heads, head_dim=head_dim, is_tied=bool(text.get("tie_word_embeddings")))


@dataclass(frozen=True)
class Gpu:
    """read_tb_s, matrix_tflops (bf16): measured where `is_measured`, else 91 and 80 % of the data sheet's."""

    name: str
    memory_gib: float
    read_tb_s: float
    matrix_tflops: float
    is_measured: bool = False


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 79.2, 3.12, 786.0, is_measured=True),
        Gpu("H200", 139.8, 4.57, 786.0, is_measured=True),
        Gpu("A100", 79.2, 1.86, 250.0),
        Gpu("L40S", 44.5, 0.79, 290.0),
        Gpu("L4", 22.5, 0.27, 97.0),
    )
}


def gpu_of(name: str) -> Gpu:
    """Raises CannotPlan."""
    for gpu in GPUS.values():
        if gpu.name.lower() == name.lower():
            return gpu
    raise CannotPlan(f"--gpu: {name!r} is none of {', '.join(GPUS)}")
