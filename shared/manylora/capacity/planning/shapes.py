"""Models and GPUs as a planner sees them: bytes, multiplications, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manylora.capacity.planning.kept import check_ranks, kept_of
from manylora.capacity.planning.parts import BadConfig, Cut, Parts, parts_of
from manylora.capacity.planning.ranks import share_of

BYTES = 2  # of an element: bfloat16
STATE_BYTES = 4
BLOCK_TOKENS = 16  # of KV
GIB = 1 << 30
RANKS_AT_ONCE = 16  # as manylora_shared.composition has it


class CannotPlan(ValueError):
    """The message says what is wrong, and where."""


@dataclass(frozen=True)
class Shape:
    """Two that differ by name only are equal: a folder of a known model has another one. All is of one GPU.

    weight_bytes: on the device. step_bytes: of them, what each step reads; not `expert_bytes`, of all experts.
    row_elements: that a row is multiplied with. rank_bytes: of an adapter on all linear layers, experts not among them,
    for each of its rank. state_bytes: of a sequence, in recurrent layers. ranks: GPUs of a worker. load_bytes: of
    weights while it starts. sums: over ranks, by a step, each of sum_row_bytes a row. widest: inputs or outputs of a
    layer.
    """

    name: str = dataclasses.field(compare=False)
    layers: int
    weight_bytes: int
    step_bytes: int
    row_elements: int
    kv_token_elements: int
    rank_bytes: int
    expert_bytes: int = 0
    experts: int = 0  # of a layer
    top_k: int = 0
    state_bytes: int = 0
    kv_element_bytes: int = BYTES
    quantization: str = "none"
    ranks: int = 1
    load_bytes: int = dataclasses.field(default=0, compare=False)
    sum_row_bytes: int = dataclasses.field(default=0, compare=False)
    sums: int = dataclasses.field(default=0, compare=False)
    widest: int = dataclasses.field(default=0, compare=False)

    @property
    def kv_token_bytes(self) -> int:
        return self.kv_token_elements * self.kv_element_bytes

    @property
    def state_tokens(self) -> int:
        """What a sequence's state takes of the KV: whole blocks."""
        return -(-self.state_bytes // (self.kv_token_bytes * BLOCK_TOKENS)) * BLOCK_TOKENS

    def block_tokens(self, max_rank: int) -> int:
        """The least that a worker takes: a block of KV in FP8 has a whole part of an adapter."""
        part_bytes = min(RANKS_AT_ONCE, max_rank) * self.widest * BYTES
        if self.kv_element_bytes == BYTES or part_bytes <= BLOCK_TOKENS * self.kv_token_bytes:
            return BLOCK_TOKENS
        return 1 << (-(-part_bytes // self.kv_token_bytes) - 1).bit_length()

    @property
    def kind(self) -> tuple[bool, bool]:
        return self.experts > 0, self.state_bytes > 0

    def read_bytes(self, rows: int) -> float:
        """Of weights and states by a step. Rows go to experts at random."""
        return self.step_bytes + self.reached_bytes(rows) + 2 * rows * self.state_bytes

    def reached_bytes(self, rows: int) -> float:
        """Of experts."""
        return self.expert_bytes * (1 - self.idle_share(rows))

    def idle_share(self, rows: float) -> float:
        return idle_share(self.experts, self.top_k, rows) if self.experts else 0.0


def idle_share(experts: int, top_k: int, rows: float) -> float:
    """Of a layer's experts that none of the rows goes to."""
    return float((1 - top_k / experts) ** rows)


def shape_of(config: Mapping[str, Any], name: str, quantization: str = "none", ranks: int = 1) -> Shape:
    """Of a Hugging Face config.json, as workers with that `--quantization` have it; of one of `ranks` what it has.
    Raises CannotPlan.
    """
    try:
        whole = parts_of(config)
        kept = kept_of(config, whole, quantization)
        parts = whole
        if ranks > 1:
            parts = share_of(whole, ranks)
            check_ranks(kept, whole, ranks)
    except BadConfig as error:
        raise CannotPlan(f"{name}: {error}") from None
    sizes = [(each.inputs, each.outputs) for each in parts.products]
    head = parts.hidden * parts.vocab
    plain = (parts.others + parts.cut_others + head) * BYTES
    multiplied = sum(inputs * outputs for inputs, outputs in sizes) + head
    if parts.num_experts:
        multiplied += parts.expert_elements * parts.top_k // parts.num_experts
    unread = _unread_bytes(whole, parts, ranks)
    return Shape(
        name,
        layers=parts.layers,
        weight_bytes=sum(map(kept.num_bytes, parts.products + parts.experts)) + plain + unread,
        step_bytes=sum(map(kept.read_bytes, parts.products)) + plain,
        row_elements=multiplied,
        kv_token_elements=parts.token_kv,
        rank_bytes=sum(inputs + outputs for inputs, outputs in sizes) * BYTES,
        expert_bytes=sum(map(kept.read_bytes, parts.experts)),
        experts=parts.num_experts,
        top_k=parts.top_k,
        state_bytes=parts.state * STATE_BYTES,
        quantization=quantization,
        ranks=ranks,
        load_bytes=sum(map(kept.load_bytes, parts.products + parts.experts)) + plain + unread,
        sum_row_bytes=parts.hidden * BYTES,
        sums=parts.sums,
        widest=max(parts.num_experts, *(size for both in sizes for size in both)),
    )


def _unread_bytes(whole: Parts, parts: Parts, ranks: int) -> int:
    """Of tables, which a step reads by row, beside the head that a rank reads: less where that is a part of one."""
    head, embeddings = parts.hidden * parts.vocab, whole.hidden * whole.vocab
    if not whole.is_tied:
        return BYTES * (parts.tables + embeddings)
    # The last of several ranks makes its head anew where tokens do not divide; it has no biases of what is summed.
    biases = sum(each.outputs for each in parts.products if each.is_biased and each.cut is Cut.INPUTS)
    anew = head if whole.vocab % ranks else 0
    return BYTES * (parts.tables + embeddings - head + max(0, anew - biases))


def _dense(layers: int, hidden: int, intermediate: int, heads: int, vocab: int, **more: Any) -> Mapping[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocab,
        **more,
    }


_MIXTURE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_HYBRID = {
    "model_type": "qwen3_5_text",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_NEXT = {
    **_HYBRID,
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _dense(32, 4096, 14336, 32, 128256),
    "qwen3-8b": _dense(36, 4096, 12288, 32, 151936, model_type="qwen3"),
    "llama-70b": _dense(80, 8192, 28672, 64, 128256),
    "30b-a3b": _dense(48, 2048, 6144, 32, 151936, **_MIXTURE),
    "qwen3.5-9b": _dense(32, 4096, 12288, 16, 248320, **_HYBRID),
    "80b-a3b": _dense(48, 2048, 5120, 16, 151936, **_NEXT),
}
SHAPES = {name: shape_of(config, name) for name, config in CONFIGS.items()}


@dataclass(frozen=True)
class Gpu:
    """read_tb_s, matrix_tflops (bf16): measured where `is_measured`, else 91 and 80 % of the data sheet's."""

    name: str
    memory_gib: float
    read_tb_s: float
    matrix_tflops: float
    is_measured: bool = False
    has_fp8: bool = True
    is_hopper: bool = False


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 79.2, 3.12, 786.0, is_measured=True, is_hopper=True),
        Gpu("H200", 139.8, 4.57, 786.0, is_measured=True, is_hopper=True),
        Gpu("A100", 79.2, 1.86, 250.0, has_fp8=False),
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
