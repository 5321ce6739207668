"""The least that a step of bench/engine.py can do: bytes that a decode step reads once, operations of a prefill."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from manylora.capacity.planning.shapes import idle_share
from manylora_worker.models.loader import LoadedModel
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.quantized.stacks import QuantizedStack, stacks_in
from manylora_worker.weights.layout import HostAdapter
from manylora_worker.weights.sites import ExpertShape


class Floor:
    """ranks: GPUs that share the model."""

    def __init__(self, loaded: LoadedModel, ranks: int) -> None:
        self._loaded = loaded
        self._ranks = ranks
        model, self._experts = loaded.model, loaded.spec.experts
        self._weight_bytes = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
        quantized = (QuantizedLinear, QuantizedStack)
        self._weight_bytes += sum(m.weight_bytes for m in model.modules() if isinstance(m, quantized))
        self._expert_bytes = {
            path: sum(
                each.weight_bytes if isinstance(each, QuantizedStack) else each.nbytes
                for each in stacks_in(model.get_submodule(path)).values()
            )
            for path in self._experts
        }
        self._weight_elements = sum(
            p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name
        )
        self._weight_elements += sum(3 * e.hidden * e.width * e.top_k for e in self._experts.values())
        self.token_bytes = loaded.spec.kv.token_bytes(torch.bfloat16)

    def step_bytes(
        self, rows: int, context: int, adapters: Iterable[tuple[HostAdapter, int]], rows_of_each: float
    ) -> float:
        """Weights, KV, states and distinct adapters with their sizes; of experts those that rows reach which go to
        them at random.
        """
        total: float = self._weight_bytes + rows * context * self.token_bytes
        state = self._loaded.spec.kv.state
        total += 0 if state is None else 2 * rows * state.size_bytes  # read and written
        total -= sum(self._expert_bytes[path] * _idle(e, rows) for path, e in self._experts.items())
        return total + sum(size - self._idle_bytes(each, rows_of_each) for each, size in adapters)

    def prefill_flops(self, prompts: int, tokens: int) -> int:
        rows, config = prompts * tokens, self._loaded.model.config
        head = config.vocab_size * config.hidden_size // self._ranks
        flops = 2 * (self._weight_elements - head) * rows + 2 * head * prompts
        kv = self._loaded.spec.kv
        attention = config.num_attention_heads * kv.head_dim * kv.num_layers
        return int(flops + 2 * rows * tokens * attention // self._ranks)

    def _idle_bytes(self, adapter: HostAdapter, rows: float) -> float:
        shape = next(iter(self._experts.values()), None)
        if shape is None:
            return 0.0
        placed = [each for each in adapter.layout if each.experts]
        held = sum(each.a.rows * each.a.columns + sum(b.rows * b.columns for *_, b in each.slots) for each in placed)
        return 2 * held * _idle(shape, rows)


def _idle(shape: ExpertShape, rows: float) -> float:
    return idle_share(shape.experts, shape.top_k, rows)
