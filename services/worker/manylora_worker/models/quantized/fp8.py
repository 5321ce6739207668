"""A linear layer whose weight stays in FP8 (e4m3): half of bf16's bytes. Activations are what they are.

The CPU rebuilds the weight for each product. On a GPU cuda/kernels/fp8_product.py multiplies with the codes themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.quantized.schemes import FP8
from manylora_worker.models.ranks.group import RankGroup

_LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True)
class Fp8Weight:
    """codes: [out, in]. scales: float32 [out, groups], of equally many inputs each but for the last."""

    codes: Tensor
    scales: Tensor
    group_size: int

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[out, in]. Code times scale in float32, rounded once."""
        scales = self.scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]
        return (self.codes.float() * scales).to(dtype)


def quantize(weight: Tensor, group: RankGroup | None = None) -> Fp8Weight:
    """By output: its largest value becomes FP8's largest. group: of ranks that have the outputs' other inputs."""
    largest = weight.float().abs().amax(1, keepdim=True)
    if group is not None:
        group.largest(largest)
    scales = scales_of(largest)
    return Fp8Weight(codes_of(weight, scales), scales, weight.shape[1])


def scales_of(largest: Tensor) -> Tensor:
    # By a tensor: a GPU multiplies with a number's reciprocal, which is another scale in its last bit, and other codes.
    return largest.clamp_min(1e-30) / torch.full_like(largest, _LARGEST)


def codes_of(weight: Tensor, scales: Tensor) -> Tensor:
    return (weight.float() / scales).clamp(-_LARGEST, _LARGEST).to(FP8)


def joined(parts: Sequence[tuple[Tensor, Tensor]], group_size: int, device: torch.device) -> Fp8Weight:
    """Of layers that read the same input, as a checkpoint ships them (Scheme.codes)."""
    codes = torch.cat([codes for codes, _ in parts]).to(device)
    scales = torch.cat([scales for _, scales in parts]).to(device)
    return Fp8Weight(codes, scales, group_size if scales.shape[1] > 1 else codes.shape[1])


class Fp8Linear(QuantizedLinear):
    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        out_features, in_features = weight.codes.shape
        super().__init__(out_features, in_features, bias, weight.num_bytes)
        self.weight = weight

    def dequantized(self, rows: slice, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        return Fp8Weight(weight.codes[rows], weight.scales[rows], weight.group_size).dequantized(dtype)

    def parts(self, x: Tensor, *, pdl: bool) -> Tensor:
        if not x.is_cuda:
            return F.linear(x, self.weight.dequantized(x.dtype), self.bias)[None]
        from manylora_worker.models.cuda.kernels import fp8_product  # Triton, which a worker on the CPU has not

        return fp8_product.product(x.contiguous(), self.weight, self.bias, pdl=pdl)
