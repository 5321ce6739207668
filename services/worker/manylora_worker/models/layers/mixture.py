"""A layer's experts, of which each token goes to a few, with each row's own LoRA on them.

The modules take and give what transformers' take and give, so its blocks and our decoders use them alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manylora_worker.models.layers.lora_linear import LoraLinear, LoraSwitch, Segment
from manylora_worker.models.quantized.stacks import QuantizedStack
from manylora_worker.weights.sites import Site


class ExpertLora:
    """Of a step's rows. An infinity or a NaN stays in its row, as in lora_linear.py."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._parts = [
            (segment.first_row, segment.last_row, adapter, weight)
            for segment in segments
            for adapter, weight in ((segment.adapter, segment.weight), *segment.others)
            if adapter.experts
        ]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, site: Site, expert: int, rows: Sequence[int], inputs: Tensor, outputs: Tensor) -> None:
        """rows: of the step, in order, which go to the expert. outputs: changed in place."""
        count, first_column = site.slots_an_expert, expert * site.expert_columns
        for first_row, last_row, adapter, weight in self._parts:
            first, last = bisect_left(rows, first_row), bisect_left(rows, last_row)
            weights = adapter.experts.get(site.index)
            if first == last or weights is None:
                continue
            for own in weights.slots[expert * count : (expert + 1) * count]:
                slot = site.slots[own.slot]
                low_rank = torch.mm(inputs[first:last], weights.a_t[:, own.start : own.stop])
                columns = outputs[first:last, slot.start - first_column : slot.stop - first_column]
                columns.addmm_(low_rank, own.b, alpha=weight)


CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
LEAST_SUM = 1e-20  # of a row's scores, for sigmoids may all be 0


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's."""
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * CLAMP_ALPHA)


class LoraExperts(nn.Module):
    """gate_up: [experts, 2 * width, hidden], the gate's rows first. down: [experts, hidden, width]. sites: theirs.

    biases: of both, [experts, 2 * width] and [experts, hidden]. gated: of gate and up. reduce: as LoraLinear's.
    """

    def __init__(
        self,
        gate_up: nn.Parameter | QuantizedStack,
        down: nn.Parameter | QuantizedStack,
        gated: Callable[[Tensor, Tensor], Tensor],
        sites: tuple[Site, Site],
        switch: LoraSwitch,
        biases: tuple[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        super().__init__()
        self.gate_up: nn.Parameter | QuantizedStack = gate_up
        self.down: nn.Parameter | QuantizedStack = down
        self.gate_up_bias: nn.Parameter | None
        self.down_bias: nn.Parameter | None
        self.gate_up_bias, self.down_bias = biases or (None, None)
        self.gated = gated
        self.sites = sites
        self.switch = switch
        self.reduce: Callable[[Tensor], None] | None = None

    @property
    def is_clamped(self) -> bool:
        return self.gated is clamped_swiglu

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        gate_up, down = self.gate_up_bias, self.down_bias
        return None if gate_up is None or down is None else (gate_up, down)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x: [rows, hidden]; experts, weights: [rows, experts of a row], each at most once."""
        result = torch.zeros_like(x)
        chosen = experts.flatten()
        order = torch.argsort(chosen, stable=True)
        shares = weights.flatten()[order, None]
        rows = order // experts.shape[1]
        counts: list[int] = torch.bincount(chosen, minlength=len(self.gate_up)).tolist()
        lora: ExpertLora | None = self.switch.experts
        gate_up_site, down_site = self.sites
        gate_up_bias, down_bias = self.biases or (None, None)
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            own = rows[start : start + count]
            inputs, told = x[own], own.tolist() if lora is not None else ()
            both = F.linear(inputs, self.gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            if lora is not None:
                lora.add(gate_up_site, expert, told, inputs, both)
            gate, up = both.chunk(2, 1)
            gated = self.gated(gate, up)
            outputs = F.linear(gated, self.down[expert], None if down_bias is None else down_bias[expert])
            if lora is not None:
                lora.add(down_site, expert, told, gated, outputs)
            result.index_add_(0, own, (outputs * shares[start : start + count]).to(result.dtype))
            start += count
        if self.reduce is not None:
            self.reduce(result)
        return result


@dataclass(frozen=True)
class Routing:
    """Of a router's logits, in float32. An expert's score is its part of a softmax over all, or its logit's sigmoid.

    normalizes: a row's shares add up to 1. choice_bias: [experts], of the scores, where experts are chosen.
    scales: [experts], of shares at last, which stay float32 then.
    """

    top_k: int
    normalizes: bool
    is_sigmoid: bool = False
    choice_bias: Tensor | None = None
    scales: Tensor | None = None


class LoraRouter(nn.Module):
    """Which experts a row goes to, and their shares."""

    def __init__(self, linear: LoraLinear, routing: Routing, *, experts_first: bool = False) -> None:
        super().__init__()
        self.linear = linear
        self.routing = routing
        self.experts_first = experts_first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [rows, hidden] -> logits [rows, experts], shares and experts [rows, top_k]; experts_first: in reverse."""
        rows = x.view(-1, x.shape[-1])
        logits = exact_logits(self.linear, rows) if self.routing.is_sigmoid else self.linear(rows)
        shares, experts = chosen_experts(logits, self.routing)
        return (experts, shares, logits) if self.experts_first else (logits, shares, experts)


def exact_logits(linear: LoraLinear, x: Tensor) -> Tensor:
    """x: [rows, hidden]. In float32, as transformers has those of sigmoids: which expert is chosen hangs on it."""
    logits = F.linear(x.float(), linear.base.weight.float())
    if linear.switch.batch is not None:
        change = x.new_zeros(logits.shape)
        linear.switch.batch.add(linear.site, x, change)
        logits += change
    return logits


def chosen_experts(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Their shares, and which they are, [rows, top_k] each."""
    scores = logits.sigmoid() if routing.is_sigmoid else logits.softmax(-1, dtype=torch.float32)
    ranked = scores if routing.choice_bias is None else scores + routing.choice_bias
    experts = torch.topk(ranked, routing.top_k, dim=-1).indices
    shares = scores.gather(-1, experts)
    if routing.normalizes:
        shares = shares / (shares.sum(-1, keepdim=True) + LEAST_SUM)
    if routing.scales is not None:
        return shares * routing.scales[experts], experts
    return shares.to(logits.dtype), experts
