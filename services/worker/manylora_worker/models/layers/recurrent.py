"""What all kinds of layers have that keep a state from token to token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manylora_worker.models.layers.attention import STEP_KEYWORD
from manylora_worker.models.layers.recurrence import LayerStates, StepStates


@dataclass(frozen=True)
class RecurrentShape:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int  # tokens that the convolution sees beside a row's own
    is_mamba: bool = False  # whose queries are C and keys B; its product has other places

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values


class RecurrentLayer(ABC):
    """Stands in for the forward of transformers' module. Without a step's states the layer computes as it did. index:
    among the model's.
    """

    def __init__(self, layer: nn.Module, index: int) -> None:
        self.layer: Any = layer
        self.index = index
        self._eager: Callable[..., Tensor] = layer.forward
        layer.forward = self

    def __call__(self, hidden_states: Tensor, **others: Any) -> Tensor:
        step = others.get(STEP_KEYWORD)
        if step is None:
            return self._eager(hidden_states, **others)
        outputs: Tensor = step.recur(self, hidden_states)
        return outputs

    @property
    @abstractmethod
    def shape(self) -> RecurrentShape: ...

    @property
    def has_kernels(self) -> bool:
        return True

    @abstractmethod
    def rows(self, hidden_states: Tensor, states: StepStates) -> Tensor:
        """[T, hidden] -> the same."""

    def _convolved(self, mixed: Tensor, states: StepStates, held: LayerStates) -> Tensor:
        """[T, channels] -> the same; windows move on."""
        layer = self.layer
        outputs = torch.empty_like(mixed)
        weight, bias = layer.conv1d.weight, layer.conv1d.bias
        singles, count = states.single_rows, states.num_singles
        if count:
            seen = torch.cat((held.windows[:count], mixed[singles].float().unsqueeze(2)), 2)
            summed = (seen * weight.float().squeeze(1)).sum(2)
            outputs[singles] = F.silu(summed if bias is None else summed + bias.float()).to(mixed.dtype)
            held.windows[:count] = seen[:, :, 1:]
        for window, run in zip(held.windows[count:], states.runs, strict=True):
            seen = torch.cat((window.to(mixed.dtype), mixed[run.first_row : run.last_row].T), 1)
            summed = F.conv1d(seen.unsqueeze(0), weight, bias, groups=weight.shape[0])
            outputs[run.first_row : run.last_row] = F.silu(summed)[0].T
            window.copy_(seen[:, -window.shape[1] :])
        return outputs
