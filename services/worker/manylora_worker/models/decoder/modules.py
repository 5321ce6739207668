"""Linear layers and norms of a loaded model, read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manylora_worker.models.decoder.weights import Projection
from manylora_worker.models.layers.lora_linear import FusedMember, LoraLinear
from manylora_worker.models.layers.packed_linear import PackedLinear
from manylora_worker.models.quantized.linear import QuantizedLinear


def fused_projection(module: nn.Module, whole: str, members: Sequence[str]) -> Projection | None:
    """The model's or the loader's product that makes all of `members`, one after the other; None: there is none."""
    if whole and hasattr(module, whole):
        return projection_of(getattr(module, whole))
    found = [getattr(module, member, None) for member in members]
    first = found[0]
    if not all(isinstance(member, FusedMember) for member in found) or not isinstance(first, FusedMember):
        return None
    leaves = tuple(slot.path.rpartition(".")[2] for slot in first.linear.site.slots)
    return projection_of(first.linear) if leaves == tuple(members) else None


def projection_of(module: nn.Module | None) -> Projection | None:
    if not isinstance(module, LoraLinear):
        return None
    base = module.base
    if type(base) is nn.Linear:
        return Projection(module, base.weight, base.bias, None)
    if isinstance(base, PackedLinear):
        return Projection(module, None, None, None)
    return Projection(module, None, None, base) if isinstance(base, QuantizedLinear) else None


def rms_norm(module: nn.Module | None) -> Tensor | None:
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def norm_adds_one(norm: nn.Module) -> bool:
    """Gemma's norms scale by 1 + weight: seen by what a norm does to a constant input."""
    x = torch.ones(1, norm.weight.shape[0], dtype=torch.float32, device=norm.weight.device).to(norm.weight.dtype)
    with torch.inference_mode():
        scaled = norm(x)[0].float()
    weight = norm.weight.float()
    return bool((scaled - (1 + weight)).abs().sum() < (scaled - weight).abs().sum())
