"""A recurrent layer's part of the decoder's pass, between its two products, over buffers that all such layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manylora_worker.models.cuda.kernels.combine import combine
from manylora_worker.models.cuda.kernels.delta_net import (
    StateLayout,
    convolve,
    delta_rule,
    gate_rows,
    gated_norm,
    norm_by_squares,
)
from manylora_worker.models.cuda.kernels.lora import LoraRows
from manylora_worker.models.decoder.weights import RecurrentMixer
from manylora_worker.models.layers.recurrent import RecurrentShape
from manylora_worker.models.ranks.mamba_cuts import SharedGatedNorm


@dataclass(frozen=True)
class StateStep:
    """Device tensors; see kernels/delta_net.py. tables: with the states' blocks, which come before the tokens'."""

    tables: Tensor
    offsets: Tensor
    sequences: Tensor
    num_sequences: int


@dataclass(frozen=True)
class DeltaSizes:
    """Of the buffers, in float32."""

    shape: RecurrentShape
    max_rows: int

    @property
    def bytes(self) -> int:
        columns = self.shape.channels + self.shape.values + 2 * self.shape.value_heads
        return 4 * self.max_rows * columns


class DeltaPass:
    def __init__(self, sizes: DeltaSizes, states: StateLayout, *, pdl: bool) -> None:
        shape, rows, device = sizes.shape, sizes.max_rows, states.blocks.device
        self._shape, self._states, self._pdl = shape, states, pdl
        self._convolved = torch.zeros(rows, shape.channels, device=device)
        self._gates = torch.zeros(rows, shape.value_heads, 2, device=device)
        self._ruled = torch.zeros(rows, shape.values, device=device)

    def run(
        self,
        delta: RecurrentMixer,
        product: Tensor,
        lora: LoraRows | None,
        whole: Tensor,
        out: Tensor,
        *,
        states: StateStep,
        table_rows: Tensor,
        positions: Tensor,
        num_rows: Tensor,
    ) -> None:
        """product, lora: of the layer's inputs, which become `whole`. out: [rows, values], written."""
        assert delta.inputs is not None
        layer, shape, pdl, rows = delta.net.layer, self._shape, self._pdl, whole.shape[0]
        convolved, gates, ruled = self._convolved[:rows], self._gates[:rows], self._ruled[:rows]
        widths = [slot.stop - slot.start for slot in delta.inputs.site.slots]
        combine(product, whole, num_rows=num_rows, lora=lora, widths=widths, pdl=pdl)
        convolve(
            whole,
            convolved,
            gates,
            weight=layer.conv1d.weight,
            bias=layer.conv1d.bias,
            decay=layer.A_log,
            decay_bias=layer.dt_bias,
            shape=shape,
            states=self._states,
            layer=delta.net.index,
            tables=states.tables,
            table_rows=table_rows,
            positions=positions,
            offsets=states.offsets,
            num_rows=num_rows,
            pdl=pdl,
        )
        delta_rule(
            convolved,
            gates,
            whole,
            ruled,
            shape=shape,
            states=self._states,
            layer=delta.net.index,
            tables=states.tables,
            sequences=states.sequences,
            num_sequences=states.num_sequences,
            skip=layer.D if shape.is_mamba else None,
            pdl=pdl,
        )
        self._norm(layer.norm, ruled, whole, out, num_rows)

    def _norm(self, norm: Any, x: Tensor, product: Tensor, out: Tensor, num_rows: Tensor) -> None:
        weight, eps, pdl = norm.weight, norm.variance_epsilon, self._pdl
        if isinstance(norm, SharedGatedNorm):
            squares = self._gates.view(-1)[: x.shape[0]]  # which are used up
            gate_rows(x, product, squares, num_rows=num_rows, pdl=pdl)
            norm.group.all_reduce(squares)
            norm_by_squares(x, squares, out, weight=weight, eps=eps, width=norm.width, num_rows=num_rows, pdl=pdl)
        else:
            gated_norm(x, product, out, weight=weight, eps=eps, shape=self._shape, num_rows=num_rows, pdl=pdl)
