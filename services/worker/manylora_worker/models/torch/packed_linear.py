"""A linear layer whose weight is laid out once for the CPU's vector units.

PackedLinear owns its weight and is immutable. torch's own linear goes through a BLAS that reads the plain matrix; for
the few rows of a decode step oneDNN over a pre-arranged one takes half the time (and 10 % less in prefill). The
operators are those that torch.compile uses for frozen weights. Packing copies, so the plain weight should be dropped.

oneDNN generates code for every shape and keeps it, about a third of a MiB each: the batches of a busy worker, of any
number of rows up to the step's budget, would come to a GiB and more. So rows are rounded up (`padded_rows`), which
leaves some fifty shapes a matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTH_PACKING = 1 << 19
"""Elements of the smallest weight for which it pays: a call of oneDNN costs more than one of the BLAS."""
_LAYOUT_ROWS = 16
"""The number of rows that the layout is chosen for; any other number works, about as fast."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch on this machine has the operators for the type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def padded_rows(num_rows: int) -> int:
    """The next number of rows that has code of its own: any up to 32, then multiples of 16, from 128 on of 32."""
    step = 1 if num_rows <= 32 else 16 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


class PackedLinear(nn.Module):
    """x: [..., in] -> [..., out].

    Args:
        weight: [out, in]; copied.
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _LAYOUT_ROWS)
        self.bias = None if bias is None else bias.detach()
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.shape[-2]
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        output: Tensor = self._product(x, self._packed, self.bias, "none", [], "")
        return output[..., :num_rows, :] if padding else output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
