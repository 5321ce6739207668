"""MXFP4, in which gpt-oss ships its experts: two 4-bit floats a byte, and a power of two for each 32 inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manylora_worker.models.quantized.schemes import SchemeRefused
from manylora_worker.weights.stacked import DOWN, GATE_UP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK_BYTES = 16
_BIAS = 127  # of a scale's exponent
PARTS = tuple(f"{stack}_{part}" for stack in (GATE_UP, DOWN) for part in ("blocks", "scales"))


def rebuilt_stacks(path: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """parts: those of PARTS. -> [experts, in, out] by name, as transformers has them. Raises SchemeRefused."""
    absent = [name for name in PARTS if name not in parts]
    if absent:
        raise SchemeRefused(f"{path}: has no {' and no '.join(absent)}")
    return {
        stack: _rebuilt(f"{path}.{stack}", parts[f"{stack}_blocks"], parts[f"{stack}_scales"], dtype)
        for stack in (GATE_UP, DOWN)
    }


def _rebuilt(name: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks: [experts, out, groups, 16]; scales: [experts, out, groups]."""
    is_bytes = blocks.dtype is torch.uint8 and scales.dtype is torch.uint8
    if not is_bytes or blocks.shape != (*scales.shape, _BLOCK_BYTES) or scales.dim() != 3:
        raise SchemeRefused(
            f"{name}: blocks {list(blocks.shape)} and scales {list(scales.shape)} are not bytes of {_BLOCK_BYTES} a "
            "scale"
        )
    experts, outputs, groups = scales.shape
    both = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    codes = torch.arange(256)
    pairs = torch.stack((both[codes & 15], both[codes >> 4]), dim=1)  # the low bits are the first
    whole = torch.empty(experts, 2 * _BLOCK_BYTES * groups, outputs, dtype=dtype)
    for expert in range(experts):  # one at a time: 32-bit floats of all would take twice the result's memory
        values = pairs[blocks[expert].int()].view(outputs, groups, -1)
        values *= torch.exp2(scales[expert].float() - _BIAS)[..., None]
        whole[expert] = values.view(outputs, -1).T
    return whole
