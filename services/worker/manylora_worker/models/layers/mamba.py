"""Mamba 2 (Dao and Gu 2024): a head keeps a matrix S <- exp(dt A) S + dt x B^T, and a token's output is S C + D x."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manylora_worker.models.layers.recurrence import LayerStates, StepStates
from manylora_worker.models.layers.recurrent import RecurrentLayer, RecurrentShape

_PARTS = frozenset({"in_proj", "conv1d", "norm", "out_proj"})
_OWN = frozenset({"A_log", "D", "dt_bias"})
_SIZES = ("num_heads", "head_dim", "ssm_state_size", "n_groups", "intermediate_size", "conv_dim", "conv_kernel_size")
_CHUNK_TOKENS = 64


def find_mambas(model: nn.Module) -> dict[str, nn.Module]:
    return {
        path: module
        for path, module in model.named_modules()
        if {name for name, _ in module.named_children()} - {"act"} == _PARTS
        and {name for name, _ in module.named_parameters(recurse=False)} == _OWN
        and all(isinstance(getattr(module, name, None), int) for name in _SIZES)
        and getattr(module, "activation", "") == "silu"
    }


class Mamba(RecurrentLayer):
    @property
    def shape(self) -> RecurrentShape:
        layer = self.layer
        return RecurrentShape(
            key_heads=layer.n_groups,
            value_heads=layer.num_heads,
            key_dim=layer.ssm_state_size,
            value_dim=layer.head_dim,
            window=layer.conv_kernel_size - 1,
            is_mamba=True,
        )

    @property
    def has_kernels(self) -> bool:
        return tuple(self.layer.time_step_limit) == (0.0, math.inf)

    def rows(self, hidden_states: Tensor, states: StepStates) -> Tensor:
        layer = self.layer
        width, groups = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
        gate, mixed, dt = layer.in_proj(hidden_states).split_with_sizes((width, layer.conv_dim, layer.num_heads), 1)
        held = states.read(self.index)
        convolved = self._convolved(mixed, states, held).float()
        x, into, out_of = convolved.split_with_sizes((width, groups, groups), 1)
        x = x.unflatten(1, (layer.num_heads, -1))
        into, out_of = (each.unflatten(1, (layer.n_groups, -1)) for each in (into, out_of))
        dt = F.softplus(dt.float() + layer.dt_bias.float()).clamp(*layer.time_step_limit)
        summed = self._summed((x, dt, into, out_of), states, held) + layer.D.float()[:, None] * x
        states.write(held)
        outputs: Tensor = layer.out_proj(layer.norm(summed.flatten(1).to(hidden_states.dtype), gate))
        return outputs

    def _summed(self, inputs: tuple[Tensor, ...], states: StepStates, held: LayerStates) -> Tensor:
        """x [T, heads, dim], dt [T, heads], B and C [T, groups, size], float32 -> S C, as x; matrices move on."""
        outputs = torch.empty_like(inputs[0])
        rates = -self.layer.A_log.float().exp()
        singles, count = states.single_rows, states.num_singles
        if count:
            outputs[singles] = _one_token(held.matrices[:count], rates, *(each[singles] for each in inputs))
        for matrix, run in zip(held.matrices[count:], states.runs, strict=True):
            for first in range(run.first_row, run.last_row, _CHUNK_TOKENS):
                rows = slice(first, min(first + _CHUNK_TOKENS, run.last_row))
                outputs[rows] = _one_chunk(matrix, rates, *(each[rows] for each in inputs))
        return outputs


def _one_token(matrices: Tensor, rates: Tensor, x: Tensor, dt: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    """matrices: [n, heads, size, dim], changed in place. -> as x."""
    into, out_of = (each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (into, out_of))
    matrices.mul_((dt * rates).exp()[..., None, None])
    matrices.add_(into[..., None] * (x * dt[..., None])[:, :, None])
    return (out_of[:, :, None] @ matrices)[:, :, 0]


def _one_chunk(matrix: Tensor, rates: Tensor, x: Tensor, dt: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    """matrix: [heads, size, dim], changed in place. Of one sequence, by products of matrices."""
    repeats = x.shape[1] // into.shape[1]
    x, dt, into, out_of = x.transpose(0, 1), dt.T, into.transpose(0, 1), out_of.transpose(0, 1)  # heads ahead
    decays = (dt * rates[:, None]).cumsum(1)  # [heads, T], their logarithms
    scores = (out_of @ into.mT).repeat_interleave(repeats, 0)
    between = (decays[:, :, None] - decays[:, None]).masked_fill_(
        torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).triu_(1), float("-inf")
    )
    taken = x * dt[..., None]
    into, out_of = into.repeat_interleave(repeats, 0), out_of.repeat_interleave(repeats, 0)
    outputs = (scores * between.exp_()) @ taken + decays.exp()[..., None] * (out_of @ matrix)
    matrix.mul_(decays[:, -1].exp()[:, None, None])
    matrix.add_(into.mT @ (taken * (decays[:, -1:] - decays).exp()[..., None]))
    return outputs.transpose(0, 1)
