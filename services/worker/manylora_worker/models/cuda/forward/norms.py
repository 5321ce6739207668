"""Norms of a pass, with the sums before them."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora_worker.models.cuda.forward.device_step import DeviceStep
from manylora_worker.models.cuda.kernels.add_norm import add_norm
from manylora_worker.models.cuda.kernels.lora import LoraRows
from manylora_worker.models.decoder.weights import DecoderWeights


class Norms:
    def __init__(self, weights: DecoderWeights, max_rows: int, device: torch.device, *, pdl: bool) -> None:
        self._eps, self._weight_plus_one, self._pdl = weights.eps, weights.norm_weight_plus_one, pdl
        self._counters = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def add(
        self,
        delta: Tensor | None,
        residual: Tensor,
        normed: Tensor,
        post: Tensor | None,
        pre: Tensor | None,
        step: DeviceStep,
        lora: LoraRows | None,
        *,
        factor: float = 1.0,
    ) -> None:
        """See add_norm. lora: of `delta`, a product."""
        add_norm(
            delta,
            residual,
            normed,
            post_weight=post,
            pre_weight=pre,
            eps=self._eps,
            weight_plus_one=self._weight_plus_one,
            num_rows=step.num_rows,
            counters=self._counters,
            lora=lora,
            factor=factor,
            pdl=self._pdl,
        )
