"""What linear layers of quantized weights have in common, for those that serve and count them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class QuantizedLinear(nn.Module, ABC):
    """x: [..., in] -> [..., out] in x's type. Immutable, so a captured graph that holds it stays right."""

    def __init__(self, out_features: int, in_features: int, bias: Tensor | None, weight_bytes: int) -> None:
        super().__init__()
        self.out_features, self.in_features, self.weight_bytes = out_features, in_features, weight_bytes
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        parts = self.parts(rows, pdl=False)
        y = parts[0] if parts.dtype == x.dtype else parts.sum(0).to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    @abstractmethod
    def parts(self, x: Tensor, *, pdl: bool) -> Tensor:
        """[rows, in], rows > 0, to [parts, rows, out], as gemm.linear."""

    @abstractmethod
    def dequantized(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """[rows, in]"""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
