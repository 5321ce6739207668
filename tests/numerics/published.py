"""config.json of families as they are published: their facts and fields, with sizes and windows made tiny."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
}
_LLAMA: dict[str, Any] = {
    **_SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    **_SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "sliding_window": 9, "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
_MISTRAL: dict[str, Any] = {
    **_SIZES, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
_PHI3: dict[str, Any] = {
    **_SIZES, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
    },
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 2, "hidden_act": "silu", "num_key_value_heads": 4,
    "original_max_position_embeddings": 256, "pad_token_id": 2, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 9, "tie_word_embeddings": False,
}  # fmt: skip


def _longrope(factors: int) -> dict[str, Any]:
    scaling = {"type": "longrope", "short_factor": [1.25] * factors, "long_factor": [3.0] * factors}
    return {**_PHI3, "original_max_position_embeddings": 128, "rope_scaling": scaling, "sliding_window": 200}


_GEMMA3_TEXT: dict[str, Any] = {
    **{k: v for k, v in _SIZES.items() if k not in ("torch_dtype", "transformers_version")},
    "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 20, "rope_scaling": {
        "factor": 8.0, "rope_type": "linear"
    }, "sliding_window": 9, "sliding_window_pattern": 2,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "glm-4.5-air": {
        **_SIZES, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": [126, 127, 128], "first_k_dense_replace": 1, "head_dim": 16,
        "hidden_act": "silu", "moe_intermediate_size": 48, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 3, "num_nextn_predict_layers": 1, "pad_token_id": 125,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
    },
    "llama-2": {**_LLAMA, "num_key_value_heads": 4, "pad_token_id": 0, "rope_scaling": None},
    "llama-3": {**_LLAMA, "rope_scaling": None, "rope_theta": 500000.0},
    "llama-3.2": {
        **_LLAMA, "eos_token_id": [2, 3, 4], "head_dim": 16, "mlp_bias": False, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
    },
    "mistral-v0.1": {**_MISTRAL, "sliding_window": 9},
    "mistral-v0.3": {**_MISTRAL, "sliding_window": None, "head_dim": 24, "rope_theta": 1e6},
    "qwen2": {**_QWEN2, "tie_word_embeddings": False},
    "qwen2.5": _QWEN2,
    "qwen2.5-yarn": {
        **_QWEN2, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}
    },
    "qwen3": {
        **_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 24,
        "sliding_window": None,
    },
    "gemma-2": {
        **_SIZES, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 2.0,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 5.0,
        "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0,
        "query_pre_attn_scalar": 20, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 9,
    },
    "gemma-3-1b": {
        **_GEMMA3_TEXT, "architectures": ["Gemma3ForCausalLM"], "bos_token_id": 2, "eos_token_id": [1, 106],
        "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "torch_dtype": "bfloat16",
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 120,
        "eoi_token_index": 121, "image_token_index": 122, "eos_token_id": [1, 106], "initializer_range": 0.25,
        "mm_tokens_per_image": 4, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": _GEMMA3_TEXT,
        "vision_config": {
            "hidden_size": 32, "image_size": 28, "intermediate_size": 48, "model_type": "siglip_vision_model",
            "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 14, "vision_use_head": False,
        },
    },
    "phi-3-mini-4k": _PHI3,
    "phi-3-mini-128k": _longrope(8),
    "phi-3.5-mini": _longrope(8),
    "phi-4-mini": {
        **_longrope(6), "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    },
    "phi-4": {
        **_PHI3, "auto_map": {}, "num_key_value_heads": 2, "rope_theta": 250000, "sliding_window": None,
    },
    "mistral-small-3": {**_MISTRAL, "head_dim": 24, "rope_theta": 100000000.0, "sliding_window": None},
    "gemma-2b": {
        **_SIZES, "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "attention_bias": False,
        "bos_token_id": 2, "eos_token_id": 1, "head_dim": 24, "hidden_act": "gelu", "hidden_activation": None,
        "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
    },
    "granite-3.3-2b": {
        **_LLAMA, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.0625,
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False, "residual_multiplier": 0.22,
        "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
    },
    "smollm3-3b": {
        **_SIZES, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "mlp_bias": False, "max_window_layers": 28,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 0], "pad_token_id": 3, "pretraining_tp": 2,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False, "layer_types": ["full_attention"] * 3,
    },
    "exaone-4-32b": {
        **_SIZES, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "bos_token_id": 1,
        "eos_token_id": 3, "head_dim": 16, "hidden_act": "silu", "pad_token_id": 0, "rms_norm_eps": 1e-5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000, "sliding_window": 9, "sliding_window_pattern": "LLG", "tie_word_embeddings": False,
    },
    "olmo-2-7b": {
        **_LLAMA, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000, "pad_token_id": 1,
    },
    "olmo-3-7b": {
        **_LLAMA, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_key_value_heads": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 32, "rope_type": "yarn",
        },
        "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 9, "pad_token_id": 1,
    },
}  # fmt: skip

_QWEN35_TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "attn_output_gate": True, "full_attention_interval": 4, "hidden_act": "silu",
    "initializer_range": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 8, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 256, "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6, "eos_token_id": 2,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip


def _qwen35(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, "image_token_id": 120, "video_token_id": 121,
        "vision_start_token_id": 122, "vision_end_token_id": 123, "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0", "text_config": {
            "model_type": f"{model_type}_text", **_QWEN35_TEXT, **sizes
        },
        "vision_config": {
            "deepstack_visual_indexes": [], "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "model_type": model_type, "num_position_embeddings": 16, "out_hidden_size": 64, "patch_size": 8,
        },
    }  # fmt: skip


def _mistral3(model_type: str, **text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_feature_layer": -1, "tie_word_embeddings": False, "text_config": {
            **_SIZES, "model_type": model_type, "attention_dropout": 0.0, "head_dim": 24, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "sliding_window": None, **text,
        },
        "vision_config": {
            "model_type": "pixtral", "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "gelu", "hidden_size": 32,
            "image_size": 56, "intermediate_size": 48, "num_attention_heads": 2, "num_channels": 3,
            "num_hidden_layers": 1, "patch_size": 14, "rope_theta": 10000.0,
        },
    }  # fmt: skip


_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123,
}  # fmt: skip


def _qwen3_vl(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, **_QWEN_TOKENS, "tie_word_embeddings": False,
        "text_config": {
            **_SIZES, "model_type": f"{model_type}_text", "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
            "rope_theta": 5000000, **sizes,
        },
        "vision_config": {
            "model_type": model_type, "deepstack_visual_indexes": [0], "depth": 1, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32, "in_channels": 3, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 16,
            "out_hidden_size": 64, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    }  # fmt: skip


def _granite4_h(**experts: int) -> dict[str, Any]:
    return {
        **_SIZES, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
        "attention_bias": False, "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 1,
        "embedding_multiplier": 12, "eos_token_id": 2, "hidden_act": "silu", "init_method": "mup",
        "layer_types": ["mamba", "mamba", "attention"], "logits_scaling": 6, "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False, "normalization_function": "rmsnorm",
        "output_router_logits": False, "pad_token_id": 0, "position_embedding_type": "nope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000,
        "router_aux_loss_coef": 0.01, "shared_intermediate_size": 112, "tie_word_embeddings": True, **experts,
    }  # fmt: skip


# a model of text and images, whose text part alone is served; and hybrids
PUBLISHED_HYBRIDS: dict[str, dict[str, Any]] = {
    "granite-4.0-h-micro": _granite4_h(num_local_experts=0, num_experts_per_tok=0),
    "granite-4.0-h-tiny": _granite4_h(num_local_experts=8, num_experts_per_tok=3, intermediate_size=48),
    "mistral-small-3.2": _mistral3("mistral", rope_theta=1e9),
    "ministral-3-8b": _mistral3(
        "ministral3", rope_parameters={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "rope_theta": 1e6, "rope_type": "yarn",
            "type": "yarn",
        },
    ),
    "qwen2.5-vl-7b": {
        **_SIZES, **_QWEN_TOKENS, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "vision_token_id": 124, "hidden_act": "silu",
        "max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 9,
        "tie_word_embeddings": False, "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_config": {
            "depth": 1, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "in_chans": 3, "out_hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [0], "tokens_per_second": 2, "temporal_patch_size": 2,
        },
    },
    "qwen3-vl-8b": _qwen3_vl("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "qwen3-vl-30b-a3b": _qwen3_vl(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", decoder_sparse_step=1, mlp_only_layers=[],
        moe_intermediate_size=48, norm_topk_prob=True, num_experts=8, num_experts_per_tok=3,
    ),
    "qwen3.5": _qwen35("qwen3_5", "Qwen3_5ForConditionalGeneration", intermediate_size=96),
    "qwen3.5-moe": _qwen35(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", moe_intermediate_size=40, num_experts=8,
        num_experts_per_tok=3, router_aux_loss_coef=0.001, shared_expert_intermediate_size=56,
    ),
    "gemma-4-e2b": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "audio_token_id": 120,
        "boa_token_id": 121, "boi_token_id": 122, "eoa_token_index": 123, "eoi_token_id": 124, "eos_token_id": [1, 106],
        "image_token_id": 125, "video_token_id": 126, "tie_word_embeddings": True, "initializer_range": 0.25,
        "text_config": {
            "model_type": "gemma4_text", "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
            "global_head_dim": 32, "num_global_key_value_heads": None, "num_kv_shared_layers": 3,
            "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 8, "initializer_range": 0.25,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "max_position_embeddings": 256, "sliding_window": 9, "use_bidirectional_attention": None,
            "use_double_wide_mlp": True, "vocab_size_per_layer_input": 131, "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
            "pooling_kernel_size": 2, "position_embedding_size": 16,
        },
        "audio_config": {
            "model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "output_proj_dims": 32, "subsampling_conv_channels": [8, 4],
        },
    },
}  # fmt: skip
