"""Inputs of single layers (models/decoder) in torch's operators, for torch/decoder.py, whose products and norms it
is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from manylora_worker.models.decoder.weights import LayerInputs

_Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenInputs:
    weights: LayerInputs
    product: _Product
    norm: Callable[[Tensor], Tensor]

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids: [T]; embedded: [T, hidden] -> [T, layers, width]."""
        projected = self.product(embedded).mul_(self.weights.factor).unflatten(1, (-1, self.weights.width))
        own = self.weights.embed(token_ids).view(projected.shape)
        return self.norm(projected).add_(own).mul_(self.weights.scale)


@dataclass(frozen=True)
class InputOfLayer:
    gate: _Product
    activation: Callable[[Tensor], Tensor]
    projection: _Product
    norm: Callable[[Tensor], Tensor]

    def __call__(self, residual: Tensor, given: Tensor) -> Tensor:
        """given: [T, width] -> [T, hidden], which joins the residual."""
        return self.norm(self.projection(self.activation(self.gate(residual)).mul_(given)))
