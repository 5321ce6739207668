"""A rank's outputs, taken out of a whole layer. Works on meta tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def own_rows(tensor: Tensor, own: Sequence[range], dim: int = 0) -> Tensor:
    return torch.cat([tensor.narrow(dim, each.start, len(each)) for each in own], dim)


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def own_parameter(whole: nn.Parameter, own: Sequence[range]) -> nn.Parameter:
    return frozen(own_rows(whole.data, own))


def cut_outputs(layer: nn.Linear | nn.Conv1d, own: Sequence[range]) -> None:
    layer.weight = own_parameter(layer.weight, own)
    layer.bias = None if layer.bias is None else own_parameter(layer.bias, own)
    count = layer.weight.shape[0]
    if isinstance(layer, nn.Conv1d):  # each channel by itself
        layer.in_channels = layer.out_channels = layer.groups = count
    else:
        layer.out_features = count
