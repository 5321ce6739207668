"""Products of bf16 rows with an Int4Weight, by NF4's kernels with other values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora_worker.models.cuda.kernels.nf4 import FUSED_ROWS, TileWorkspace, dequantize, product_by_tiles
from manylora_worker.models.cuda.kernels.nf4_format import BLOCK_SIZE, Nf4Weight
from manylora_worker.models.cuda.kernels.nf4_hopper import HopperProducts
from manylora_worker.models.cuda.kernels.nf4_lookup import bf16_bits
from manylora_worker.models.quantized.int4 import MIDDLE, Int4Weight

# Exact in bf16. A scale is one of NF4's for each 64 inputs. What a group's zero is from MIDDLE does not depend on the
# code: it is added as one product more, of the groups' sums of x. AWQ has such zeros, most of GPTQ has not.
VALUES = tuple(float(code - MIDDLE) for code in range(16))
VALUE_BITS = tuple(bf16_bits(value) for value in VALUES)


class Int4Kernels:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises CudaUnavailable."""
        self.hopper = HopperProducts(VALUE_BITS, device)
        self.workspace = TileWorkspace(device, VALUES)

    def product_with(self, weight: Int4Weight, bias: Tensor | None) -> Int4Product:
        return Int4Product(self, weight, bias)


class Int4Product:
    def __init__(self, kernels: Int4Kernels, weight: Int4Weight, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._bias = bias
        self._group_size = weight.group_size
        repeats = weight.group_size // BLOCK_SIZE
        self._weight = Nf4Weight(weight.codes, weight.scales.repeat_interleave(repeats, dim=1).contiguous())
        self._shifts = None if weight.shifts is None else weight.shifts.T.contiguous()

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes + (0 if self._shifts is None else self._shifts.nbytes)

    def __call__(self, x: Tensor, *, pdl: bool) -> Tensor:
        weight, kernels, rows = self._weight, self._kernels, x.shape[0]
        has_kernel = kernels.hopper.takes(rows, weight.in_features, weight.out_features)
        if not has_kernel and rows > FUSED_ROWS:
            return F.linear(x, self.rebuilt(), self._bias)[None]
        sums = None if self._shifts is None else group_sums(x, self._group_size)
        if has_kernel:
            parts = kernels.hopper.product(
                x, weight.codes, weight.absmax, self._bias, unrounded=sums is not None, pdl=pdl and sums is None
            )
        else:
            dtype = x.dtype if sums is None else sums.dtype
            out = torch.empty(rows, weight.out_features, dtype=dtype, device=x.device)
            parts = product_by_tiles(x, weight, kernels.workspace, self._bias, out)[None]
        if self._shifts is not None and sums is not None:
            parts[0].addmm_(sums, self._shifts)
        return parts

    def rebuilt(self) -> Tensor:
        """[out, in] bf16"""
        whole = dequantize(self._weight, self._kernels.workspace.codebook)
        if self._shifts is not None:
            whole.unflatten(1, (-1, self._group_size)).add_(self._shifts.T[..., None])
        return whole


def group_sums(x: Tensor, group_size: int) -> Tensor:
    """[rows, in] to float32 [rows, groups]"""
    return x.unflatten(1, (-1, group_size)).sum(-1, dtype=torch.float32)
