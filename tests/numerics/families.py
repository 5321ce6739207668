"""Tiny random models of every family that is served.

Weights are drawn wide, so that attention scores are large: a soft cap, a window or a scale that is ignored shows. All
windows are shorter than the prompts of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CwmConfig,
    Dots1Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

VOCAB_SIZE = 131
WINDOW = 9
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.5] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 128,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 8,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=24),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **_SHAPE, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: Phi3Config(
        **_SHAPE, sliding_window=WINDOW, rope_parameters=_LONGROPE, original_max_position_embeddings=128
    ),
    "olmo2": lambda: Olmo2Config(**_SHAPE),
    "granite": lambda: GraniteConfig(
        **_SHAPE, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=3.0, attention_multiplier=0.2
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **_SHAPE, layer_types=["attention"] * 3, num_local_experts=0, shared_intermediate_size=112,
        position_embedding_type="rope", embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=3.0,
        attention_multiplier=0.2,
    ),
    "gemma": lambda: GemmaConfig(**_SHAPE, head_dim=24, hidden_act="gelu"),
    "ministral": lambda: MinistralConfig(
        **_SHAPE, head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral3": lambda: Ministral3Config(**_SHAPE, head_dim=16, rope_parameters=_MINISTRAL3_ROPE),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0, 1]),
    "exaone4": lambda: Exaone4Config(
        **_SHAPE, head_dim=16, sliding_window=WINDOW, sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo3": lambda: Olmo3Config(
        **_SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "cwm": lambda: CwmConfig(
        **_SHAPE, head_dim=24, sliding_window=WINDOW, rope_parameters=_LLAMA3_ROPE,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "seed_oss": lambda: SeedOssConfig(**_SHAPE, head_dim=24, attention_bias=True, attention_out_bias=True),
}  # fmt: skip


MIXTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SHAPE, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt_oss": lambda: GptOssConfig(
        **(_SHAPE | {"intermediate_size": 40}), head_dim=16, num_local_experts=8, num_experts_per_tok=3,
        sliding_window=WINDOW, rope_parameters=_GPT_OSS_ROPE,
    ),
    # of whose codes the kernels take groups
    "qwen3_moe_wide": lambda: Qwen3MoeConfig(
        **(_SHAPE | {"intermediate_size": 128, "num_hidden_layers": 2}), head_dim=16, num_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=True,
    ),
    "mixtral": lambda: MixtralConfig(
        **(_SHAPE | {"intermediate_size": 40}), num_local_experts=8, num_experts_per_tok=3, sliding_window=WINDOW,
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_SHAPE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=56,
        norm_topk_prob=False, mlp_only_layers=[1],
    ),
    # whose experts two ranks share
    "mixtral_wide": lambda: MixtralConfig(
        **(_SHAPE | {"intermediate_size": 48}), num_local_experts=8, num_experts_per_tok=3, sliding_window=WINDOW,
    ),
    "qwen2_moe_wide": lambda: Qwen2MoeConfig(
        **_SHAPE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=64,
        norm_topk_prob=False, mlp_only_layers=[1],
    ),
    "olmoe": lambda: OlmoeConfig(**(_SHAPE | {"intermediate_size": 40}), num_experts=8, num_experts_per_tok=3),
    # of whose experts' inputs NF4 takes whole blocks
    "gpt_oss_blocks": lambda: GptOssConfig(
        **(_SHAPE | {"intermediate_size": 64}), head_dim=16, num_local_experts=8, num_experts_per_tok=3,
        sliding_window=WINDOW, rope_parameters=_GPT_OSS_ROPE,
    ),
    # a router of sigmoids, and a shared expert without a gate
    "glm4_moe": lambda: Glm4MoeConfig(
        **_SHAPE, head_dim=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, attention_bias=True, routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "dots1": lambda: Dots1Config(
        **_SHAPE, head_dim=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, n_shared_experts=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=False,
    ),
    # whose router leaves out groups of experts: it is not ours
    "dots1_in_groups": lambda: Dots1Config(
        **_SHAPE, head_dim=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, n_shared_experts=1,
        first_k_dense_replace=1, n_group=4, topk_group=2,
    ),
}  # fmt: skip

_GRANITE4_H = {
    **_SHAPE, "num_hidden_layers": 4, "layer_types": ["attention", "attention", "mamba", "mamba"],
    "num_local_experts": 0, "shared_intermediate_size": 112, "position_embedding_type": "nope",
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 3.0, "attention_multiplier": 0.2,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_DELTA_NETS = {
    "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}  # fmt: skip
_QWEN35 = {
    **_DELTA_NETS,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_FEW_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

_BLOCKS = {
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 32, "linear_value_head_dim": 8,
}  # fmt: skip
_ROPE_OF_BLOCKS = {"rope_parameters": {**_QWEN35["rope_parameters"], "mrope_section": [4, 2, 2]}}
_WIDE = {"linear_num_value_heads": 16, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64}
_QWEN35_DENSE = {
    **_SHAPE, **_QWEN35, "num_hidden_layers": 5,
    "layer_types": [*["full_attention"] * 2, "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

_GRANITE4_H_WIDE = _GRANITE4_H | {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 1}

# layers that keep a state beside one that attends: a sequence's state takes two blocks of four tokens and more
RECURRENT: dict[str, Callable[[], PretrainedConfig]] = {
    "granite4_h": lambda: GraniteMoeHybridConfig(**_GRANITE4_H),
    "granite4_h_moe": lambda: GraniteMoeHybridConfig(
        **_GRANITE4_H | {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**_QWEN35_DENSE),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(**_SHAPE, **_QWEN35, **_FEW_EXPERTS),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_SHAPE, **_DELTA_NETS, **_FEW_EXPERTS, norm_topk_prob=True, mlp_only_layers=[2], partial_rotary_factor=0.5,
    ),
    # of whose heads and experts kernels compute two ranks' shares
    "granite4_h_wide": lambda: GraniteMoeHybridConfig(**_GRANITE4_H_WIDE),
    "granite4_h_moe_wide": lambda: GraniteMoeHybridConfig(
        **_GRANITE4_H_WIDE
        | {"mamba_n_groups": 2, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "qwen3_5_wide": lambda: Qwen3_5TextConfig(**{**_QWEN35_DENSE, "linear_num_value_heads": 16}),
    "qwen3_5_moe_wide": lambda: Qwen3_5MoeTextConfig(**{**_SHAPE, **_QWEN35, **_FEW_EXPERTS, **_WIDE}),
    "qwen3_5_moe_blocks": lambda: Qwen3_5MoeTextConfig(
        **{**_SHAPE, **_QWEN35, **_FEW_EXPERTS, **_BLOCKS, **_ROPE_OF_BLOCKS}
    ),
    "qwen3_next_blocks": lambda: Qwen3NextConfig(
        **{**_SHAPE, **_DELTA_NETS, **_FEW_EXPERTS, **_BLOCKS}, mlp_only_layers=[2], partial_rotary_factor=0.5
    ),
    "qwen3_next_wide": lambda: Qwen3NextConfig(
        **{**_SHAPE, **_DELTA_NETS, **_FEW_EXPERTS, **_WIDE}, mlp_only_layers=[2], partial_rotary_factor=0.5
    ),
}  # fmt: skip

# What differs from one of these by numbers, or runs as transformers wrote it, takes fewer tests and no cluster.
MORE_FAMILIES = ("olmo2", "gemma", "ministral", "ministral3", "smollm3", "seed_oss", "granitemoehybrid")
EACH_FAMILY = [
    pytest.param(name, marks=() if name == "llama" else pytest.mark.wide)
    for name in FAMILIES
    if name not in MORE_FAMILIES
]


_GEMMA4 = {
    **_SHAPE, "head_dim": 16, "global_head_dim": 24, "sliding_window": WINDOW, "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 5.0,
}  # fmt: skip

# layers that differ in their heads, and read one another's keys and values
UNLIKE: dict[str, Callable[[], PretrainedConfig]] = {
    # as E2B: embeddings a layer, the last layers' KV shared
    "gemma4_text": lambda: Gemma4TextConfig(
        **{**_GEMMA4, "num_hidden_layers": 6}, hidden_size_per_layer_input=16, num_kv_shared_layers=3,
        use_double_wide_mlp=True, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    # as 31B: other heads and one weight for keys and values where a layer sees all
    "gemma4_wide": lambda: Gemma4TextConfig(
        **_GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "gemma4_shared": lambda: Gemma4TextConfig(
        **{**_GEMMA4, "num_key_value_heads": 4}, hidden_size_per_layer_input=0, attention_k_eq_v=True,
        num_global_key_value_heads=2, layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    # as 26B-A4B
    "gemma4_moe": lambda: Gemma4TextConfig(
        **_GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"], enable_moe_block=True, num_experts=8,
        top_k_experts=3, moe_intermediate_size=40,
    ),
    "gemma4_moe_wide": lambda: Gemma4TextConfig(
        **{**_GEMMA4, "num_key_value_heads": 4}, hidden_size_per_layer_input=0, attention_k_eq_v=True,
        num_global_key_value_heads=2, layer_types=["sliding_attention", "full_attention", "full_attention"],
        enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=48,
    ),
    "gemma4_moe_blocks": lambda: Gemma4TextConfig(
        **_GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"], enable_moe_block=True, num_experts=8,
        top_k_experts=3, moe_intermediate_size=64,
    ),
}  # fmt: skip


def make_model(family: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A random model of the family, saved into `folder`."""
    torch.manual_seed(seed)
    config = (FAMILIES | MIXTURES | RECURRENT | UNLIKE)[family]()
    config.initializer_range = 0.25
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif name.endswith("sinks"):
                parameter.normal_(std=2.0)
            elif name.endswith("mamba.A_log"):
                parameter.uniform_(-4.0, 0.0)  # so that a state is felt for long
            elif name.endswith("mamba.D"):
                parameter.normal_()
            elif "norm" in name or name.endswith("scale"):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return model
