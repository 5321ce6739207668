"""Inputs of single layers as kernels between products, which products.py makes. Owns their buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.layer_inputs import gate_input, token_inputs
from manylora_worker.models.cuda.kernels.lora import LoraRows
from manylora_worker.models.decoder.weights import DecoderWeights, LayerInput, LayerInputs, Projection


class Product(Protocol):
    def __call__(self, projection: Projection, x: Tensor, out: Tensor) -> tuple[Tensor, LoraRows | None]:
        """[parts, rows, out], and LoRA's low-rank values, which the reader adds."""


@dataclass(frozen=True)
class InputSizes:
    rows: int
    columns: int  # of all layers
    width: int

    @classmethod
    def of(cls, weights: DecoderWeights, max_rows: int) -> InputSizes | None:
        inputs = weights.inputs
        return None if inputs is None else cls(max_rows, inputs.projection.out_features, inputs.width)

    def bytes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize * self.rows * (2 * self.columns + 2 * self.width)  # what is looked up is one of them


class InputPass:
    def __init__(
        self, weights: DecoderWeights, sizes: InputSizes, dtype: torch.dtype, device: torch.device, *, pdl: bool
    ) -> None:
        assert weights.inputs is not None
        self._inputs: LayerInputs = weights.inputs
        self._weights, self._width, self._pdl = weights, sizes.width, pdl
        self._projected = torch.zeros(sizes.rows, sizes.columns, dtype=dtype, device=device)
        self._gate = torch.zeros(sizes.rows, sizes.width, dtype=dtype, device=device)
        self._gated = torch.zeros(sizes.rows, sizes.width, dtype=dtype, device=device)

    def of_tokens(self, token_ids: Tensor, embedded: Tensor, product: Product, *, num_rows: Tensor) -> Tensor:
        """embedded: [rows, hidden] -> [rows, layers * width]."""
        inputs, weights = self._inputs, self._weights
        found = inputs.embed(token_ids)
        projected, lora = product(inputs.projection, embedded, self._projected[: len(embedded)])
        token_inputs(
            projected,
            found,
            norm=inputs.norm,
            eps=weights.eps,
            weight_plus_one=weights.norm_weight_plus_one,
            factor=inputs.factor,
            scale=inputs.scale,
            num_rows=num_rows,
            lora=lora,
            pdl=self._pdl,
        )
        return found

    def of_layer(
        self, own: LayerInput, index: int, residual: Tensor, given: Tensor, product: Product, *, num_rows: Tensor
    ) -> Tensor:
        """given: of the tokens, of all layers -> [rows, width], for `own.projection`."""
        rows, first = len(residual), index * self._width
        gated = self._gated[:rows]
        gate, lora = product(own.gate, residual, self._gate[:rows])
        gate_input(
            gate,
            given[:, first : first + self._width],
            gated,
            activation=self._weights.activation,
            num_rows=num_rows,
            lora=lora,
            pdl=self._pdl,
        )
        return gated
