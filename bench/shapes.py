"""Models of real shapes with random weights: nothing is downloaded, and what a step costs does not depend on values.

    python -m bench.shapes [--shape llama-3.1-8b] [--rank 16] [--device cuda] FOLDER

writes FOLDER/model, with the demo model's tokenizer (its ids are the first 259 of the shape), and FOLDER/adapter, of
that rank on all projections: what `bench/isolation.py --model FOLDER` serves.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from manylora.demo import BASE_FOLDER
from manylora_worker.models.experts import find_experts
from manylora_worker.models.linears import linear_modules
from manylora_worker.models.quantized.install import ShippedCodes
from manylora_worker.models.quantized.stacks import QuantizedStack, put_stack, stacks_in
from manylora_worker.models.ranks.cuts import cut_linears
from manylora_worker.models.ranks.group import RankGroup
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

# What Granite 4's hybrids have alike.
_GRANITE4_H: dict[str, Any] = {
    "vocab_size": 100352, "num_hidden_layers": 40, "max_position_embeddings": 16384, "position_embedding_type": "nope",
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "tie_word_embeddings": True, "layer_types": [
        "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
    ],
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "llama-3.1-8b": lambda: LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=16384, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "qwen3-8b": lambda: Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=16384, tie_word_embeddings=False,
    ),
    "llama-70b-20-layers": lambda: LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=20, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=16384, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "llama-70b": lambda: LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=16384, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "30b-a3b": lambda: Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=16384, tie_word_embeddings=False,
    ),
    "qwen3.5-9b": lambda: Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=16384, tie_word_embeddings=False,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 8,
    ),
    "granite-4.0-h-tiny": lambda: GraniteMoeHybridConfig(
        **_GRANITE4_H, hidden_size=1536, intermediate_size=512, shared_intermediate_size=1024, num_attention_heads=12,
        num_key_value_heads=4, num_local_experts=64, num_experts_per_tok=6, mamba_n_heads=48,
    ),
    "granite-4.0-h-small": lambda: GraniteMoeHybridConfig(
        **_GRANITE4_H, hidden_size=4096, intermediate_size=768, shared_intermediate_size=1536, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=72, num_experts_per_tok=10, mamba_n_heads=128,
    ),
    "llama-tiny": lambda: LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
}  # fmt: skip
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("in_proj", "input_linear", "output_linear"),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def random_model(shape: str, device: str, **settings: Any) -> PreTrainedModel:
    """In bfloat16, the same for the same shape and device. `settings` are for `from_config`."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=torch.bfloat16, **settings)


def shipped_codes(model: PreTrainedModel) -> ShippedCodes:
    """As GPTQ ships them, of groups of 128 inputs; those of experts are put into the model."""
    for found in find_experts(model):
        experts = model.get_submodule(found.stack)
        for name, stack in stacks_in(experts).items():
            put_stack(experts, name, QuantizedStack(_random_codes(tuple(stack.shape), stack.device), 128, stack.dtype))
    linears = linear_modules(model).items()
    return ShippedCodes({path: _random_codes(sizes[::-1], model.device) for path, sizes in linears}, 0)


def _random_codes(shape: Sequence[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Codes, scales and shifts of a weight whose mean is 0: else all rows' experts would be the same few."""
    *outer, inputs = shape
    high, low = torch.randint(1, 16, (2, *outer, inputs // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(*outer, inputs // 128, device=device).mul_(0.004)
    return high << 4 | low, scales, torch.zeros_like(scales)


def random_share(
    shape: str, group: RankGroup, **settings: Any
) -> tuple[PreTrainedModel, Mapping[str, tuple[int, int]]]:
    """A rank's share, made on its device alone, and what prepare_model wants to know of the whole."""
    model = random_model(shape, "meta", **settings)
    modules = linear_modules(model)
    cut_linears(model, group)
    model.to_empty(device=group.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    body = model.get_decoder()
    if body.rotary_emb is not None:
        body.rotary_emb = type(body.rotary_emb)(model.config).to(group.device)
    return model, modules


def write_adapter(model: PreTrainedModel, folder: Path, rank: int) -> None:
    """An adapter as PEFT saves one, on every projection of the model."""
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if path.rsplit(".", 1)[-1] in PROJECTIONS and isinstance(module, torch.nn.Linear):
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                weight = torch.randn(shape, dtype=torch.bfloat16, device=model.device).mul_(0.02)
                tensors[f"base_model.model.{path}.lora_{part}.weight"] = weight.cpu()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    LoraConfig(r=rank, lora_alpha=rank, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM").save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    model = random_model(arguments.shape, arguments.device)
    model.save_pretrained(arguments.folder / "model")
    for name in TOKENIZER_FILES:
        shutil.copy(BASE_FOLDER / name, arguments.folder / "model")
    write_adapter(model, arguments.folder / "adapter", arguments.rank)


if __name__ == "__main__":
    main()
