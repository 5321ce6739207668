"""A linear layer with its weight laid out once for the CPU's vector units (oneDNN): half the time of torch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTH_PACKING = 1 << 19  # elements; for a smaller weight a call of the BLAS costs less
_LAYOUT_ROWS = 16  # the layout is chosen for so many; any other number works, about as fast


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def padded_rows(num_rows: int) -> int:
    # oneDNN keeps a third of a MiB of code a shape: rounding leaves some fifty shapes a matrix
    step = 1 if num_rows <= 32 else 16 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


class PackedLinear(nn.Module):
    """x: [..., in] -> [..., out]. weight: [out, in], copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes
        self.packed = self.pack(weight.detach())
        self.bias = None if bias is None else bias.detach()
        self._product = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _LAYOUT_ROWS)
        return packed

    def unpacked(self) -> Tensor:
        """A copy of the weight, [out, in], bit for bit."""
        return self.packed.to_dense()

    def replace(self, packed: Tensor) -> None:
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.shape[-2]
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        output: Tensor = self._product(x, self.packed, self.bias, "none", [], "")
        return output[..., :num_rows, :] if padding else output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
