"""A linear layer whose weight stays in the 4 bits that were shipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora_worker.models.quantized.linear import QuantizedLinear

if TYPE_CHECKING:
    from manylora_worker.models.cuda.kernels.int4_product import Int4Kernels

# The CPU rebuilds the weight for each product. On a GPU cuda/kernels/int4_product.py multiplies with the codes.
MIDDLE = 8  # the code that stands for `shifts`


@dataclass(frozen=True)
class Int4Weight:
    """(code - MIDDLE) * scale + shift."""

    codes: Tensor  # uint8 [out, in / 2], inputs of even index in high bits
    scales: Tensor  # float32 [out, groups]
    shifts: Tensor | None  # as scales, of which they are whole multiples; None: all are 0
    group_size: int  # in inputs

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.shifts is None else self.shifts.nbytes)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[out, in]. In float32, rounded once."""
        codes = torch.stack([self.codes >> 4, self.codes & 15], dim=-1).flatten(1).float() - MIDDLE
        groups = codes.unflatten(1, (-1, self.group_size)) * self.scales[..., None]
        return (groups if self.shifts is None else groups + self.shifts[..., None]).flatten(1).to(dtype)


def joined(parts: Sequence[Sequence[Tensor]], device: torch.device) -> Int4Weight:
    """Of layers that read the same input, as a checkpoint ships them (Scheme.words)."""
    codes, scales, shifts = (torch.cat(each).to(device) for each in zip(*parts, strict=True))
    return Int4Weight(codes, scales, shifts if shifts.any() else None, codes.shape[1] * 2 // scales.shape[1])


class Int4Linear(QuantizedLinear):
    # kernels: of the weight's GPU
    def __init__(self, weight: Int4Weight, bias: Tensor | None, kernels: Int4Kernels | None) -> None:
        product = None if kernels is None else kernels.product_with(weight, None if bias is None else bias.detach())
        num_bytes = weight.num_bytes if product is None else product.num_bytes
        super().__init__(weight.codes.shape[0], weight.codes.shape[1] * 2, bias, num_bytes)
        self.weight = weight
        self._product = product

    def dequantized(self, rows: slice, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        shifts = None if weight.shifts is None else weight.shifts[rows]
        return Int4Weight(weight.codes[rows], weight.scales[rows], shifts, weight.group_size).dequantized(dtype)

    def parts(self, x: Tensor, *, pdl: bool) -> Tensor:
        if self._product is None or x.dtype != torch.bfloat16:
            return F.linear(x, self.weight.dequantized(x.dtype), self.bias)[None]
        return self._product(x.contiguous(), pdl=pdl)
