"""Products with codes of 4 bits by the kernels of CUDA C++: which of them takes how many rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.cuda_module import HOPPER, CudaUnavailable
from manylora_worker.models.cuda.kernels.nf4_rows import Nf4Rows
from manylora_worker.models.cuda.kernels.nf4_tiles import Nf4Tiles

_LOG = logging.getLogger(__name__)


class HopperProducts:
    def __init__(self, values: Sequence[int], device: torch.device) -> None:
        """values: the 16 values as bf16 bits. Raises CudaUnavailable."""
        self._rows = Nf4Rows(values, device)
        has_tiles = torch.cuda.get_device_capability(device)[0] == HOPPER
        self._tiles = Nf4Tiles(values, device) if has_tiles else None

    @classmethod
    def where_they_run(cls, values: Sequence[int], device: torch.device) -> HopperProducts | None:
        """None, with a line in the log, where the Triton kernels have to do."""
        if device.type != "cuda":
            return None
        try:
            return cls(values, device)
        except CudaUnavailable as error:
            _LOG.warning("4-bit products fall back to Triton kernels, at half the speed or less: %s", error)
            return None

    def takes(self, rows: int, in_features: int, out_features: int) -> bool:
        in_tiles = self._tiles is not None and self._tiles.takes(rows, in_features)
        return in_tiles or self._rows.takes(rows, in_features, out_features)

    def product(
        self, x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, *, unrounded: bool = False, pdl: bool
    ) -> Tensor:
        """x [rows, in] @ weight^T + bias of bf16 as [parts, rows, out], as gemm.linear: parts are float32.

        Args:
            unrounded: one part is float32 too.
        """
        if self._rows.takes(x.shape[0], x.shape[1], absmax.shape[0]):
            return self._rows.product(x, codes, absmax, bias, pdl=pdl)
        assert self._tiles is not None
        return self._tiles.product(x, codes, absmax, bias, unrounded=unrounded, pdl=pdl)
