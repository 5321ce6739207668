"""Gated delta nets (Qwen3.5, Qwen3-Next): layers that keep a matrix a head from token to token, in place of keys and
values.

The rule over several tokens is transformers' own; that over one token of many sequences is here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manylora_worker.models.layers.recurrence import LayerStates, StepStates
from manylora_worker.models.layers.recurrent import RecurrentLayer, RecurrentShape

_COMMON = frozenset({"conv1d", "norm", "out_proj"})
# of queries, keys, values, gates, beta and decay; the latter Qwen3-Next's, whose rows ranks/delta_cuts.py puts in order
DELTA_INPUTS = (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba"))
_CHUNK_RULE = "torch_chunk_gated_delta_rule"
_CHUNK_TOKENS = 64  # that the rule takes at once
NORM_EPS = 1e-6  # of queries and keys


def find_delta_nets(model: nn.Module) -> dict[str, nn.Module]:
    """By path, those whose parts are known."""
    return {
        path: module
        for path, module in model.named_modules()
        if {name for name, _ in module.named_children()} - _COMMON in map(set, DELTA_INPUTS)
        and hasattr(sys.modules[type(module).__module__], _CHUNK_RULE)
    }


class DeltaNet(RecurrentLayer):
    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__(layer, index)
        self._chunk_rule = getattr(sys.modules[type(layer).__module__], _CHUNK_RULE)

    @property
    def shape(self) -> RecurrentShape:
        layer = self.layer
        window = layer.conv_kernel_size - 1
        return RecurrentShape(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, window)

    def rows(self, hidden_states: Tensor, states: StepStates) -> Tensor:
        """[T, hidden] -> the same."""
        layer = self.layer
        mixed, z, b, a = _projected(layer, hidden_states)
        held = states.read(self.index)
        key_width = layer.num_k_heads * layer.head_k_dim
        convolved = self._convolved(mixed, states, held)
        query, key, value = convolved.split_with_sizes((key_width, key_width, convolved.shape[1] - 2 * key_width), 1)
        repeats = layer.num_v_heads // layer.num_k_heads
        query, key = (x.unflatten(1, (-1, layer.head_k_dim)).repeat_interleave(repeats, 1) for x in (query, key))
        value = value.unflatten(1, (-1, layer.head_v_dim))
        decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
        mixed = self._ruled((query, key, value, decay, b.sigmoid()), states, held)
        states.write(held)
        normed = layer.norm(mixed.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
        outputs: Tensor = layer.out_proj(normed.view(hidden_states.shape[0], -1))
        return outputs

    def _ruled(self, inputs: tuple[Tensor, ...], states: StepStates, held: LayerStates) -> Tensor:
        """query, key, value [T, heads, dim], decay (its logarithm), beta [T, heads] -> as values; matrices move on."""
        value = inputs[2]
        outputs = torch.empty_like(value)
        singles, count = states.single_rows, states.num_singles
        if count:
            outputs[singles] = _one_token(held.matrices[:count], *(x[singles].float() for x in inputs)).to(value.dtype)
        for matrix, run in zip(held.matrices[count:], states.runs, strict=True):
            query, key, values, decay, beta = (x[None, run.first_row : run.last_row] for x in inputs)
            found, last = self._chunk_rule(
                query,
                key,
                values,
                g=decay,
                beta=beta,
                chunk_size=min(_CHUNK_TOKENS, run.num_rows),
                initial_state=matrix[None],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            outputs[run.first_row : run.last_row] = found[0]
            matrix.copy_(last[0])
        return outputs


def _projected(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, ...]: queries, keys and values, all heads of each side by side; what gates outputs; beta's and decay's."""
    if not hasattr(layer, "in_proj_qkvz"):
        mixed, z = layer.in_proj_qkv(hidden_states), layer.in_proj_z(hidden_states)
        return mixed, z, layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)
    mixed, z = layer.in_proj_qkvz(hidden_states).split((layer.conv_dim, layer.value_dim), 1)
    b, a = layer.in_proj_ba(hidden_states).chunk(2, 1)
    return mixed, z, b, a


def _one_token(matrices: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """matrices: [n, heads, of keys, of values], changed in place; the rest: [n, heads, ...] -> as values.

    Of all a head's matrix holds, the key's part is moved towards the value by beta.
    """
    query, key = _normed(query) * query.shape[-1] ** -0.5, _normed(key)
    matrices.mul_(decay.exp()[..., None, None])
    remembered = (key.unsqueeze(-2) @ matrices).squeeze(-2)
    change = (value - remembered) * beta.unsqueeze(-1)
    matrices.add_(key.unsqueeze(-1) * change.unsqueeze(-2))
    return (query.unsqueeze(-2) @ matrices).squeeze(-2)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
