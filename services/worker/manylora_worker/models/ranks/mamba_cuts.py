"""A rank's share of a Mamba layer: some heads, with their groups' B and C, which all ranks have of one group."""

# The norm goes over all heads, so ranks add up their squares.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from manylora_worker.models.layers.mamba import find_mambas
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.ranks.own_rows import cut_outputs, own_parameter


def mamba_outputs(path: str, config: PretrainedConfig, rank: int, size: int) -> tuple[range, ...]:
    """Empty: it is no such layer."""
    text = config.get_text_config()
    heads = getattr(text, "mamba_n_heads", None)
    if not heads or path.rpartition(".")[2] != "in_proj":
        return ()
    values, groups = heads * text.mamba_d_head, text.mamba_n_groups
    own, keys = _share(values, rank, size), _own_keys(groups, text.mamba_d_state, rank, size)
    into, out_of, steps = (2 * values + each * groups * text.mamba_d_state for each in range(3))
    parts = ((0, own), (values, own), (into, keys), (out_of, keys), (steps, _share(heads, rank, size)))
    return tuple(range(first + part.start, first + part.stop) for first, part in parts)


def _share(count: int, rank: int, size: int) -> range:
    return range(rank * (count // size), (rank + 1) * (count // size))


def _own_keys(groups: int, state: int, rank: int, size: int) -> range:
    return range(state) if groups == 1 else _share(groups * state, rank, size)


def cut_mambas(model: PreTrainedModel, group: RankGroup) -> None:
    """All but `out_proj`. Works on meta tensors."""
    for path, module in find_mambas(model).items():
        layer: Any = module
        own = mamba_outputs(f"{path}.in_proj", model.config, group.rank, group.size)
        values, heads = layer.intermediate_size, _share(layer.num_heads, group.rank, group.size)
        channels = tuple(range(each.start - values, each.stop - values) for each in own[1:4])
        cut_outputs(layer.in_proj, own)
        cut_outputs(layer.conv1d, channels)
        layer.conv_dim = layer.conv1d.out_channels
        for name in ("A_log", "D", "dt_bias"):
            setattr(layer, name, own_parameter(getattr(layer, name), (heads,)))
        layer.norm = SharedGatedNorm(layer.norm, own[0], group)
        layer.num_heads, layer.intermediate_size = len(heads), len(own[0])
        layer.n_groups = len(own[2]) // layer.ssm_state_size


class SharedGatedNorm(nn.Module):
    """Of a rank's part of each row."""

    def __init__(self, norm: Any, own: range, group: RankGroup) -> None:
        super().__init__()
        self.weight = own_parameter(norm.weight, (own,))
        self.variance_epsilon: float = norm.variance_epsilon
        self.width: int = norm.weight.shape[0]  # of all ranks
        self.group = group

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        gated = hidden_states.float() * F.silu(gate.float())
        squares = gated.square().sum(-1, keepdim=True)
        self.group.all_reduce(squares)
        gated *= torch.rsqrt(squares / self.width + self.variance_epsilon)
        return self.weight * gated.to(hidden_states.dtype)
