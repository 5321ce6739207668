"""Rows of the embeddings and of the output head that adapters bring for some tokens, in a step of mixed adapters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manylora_worker.models.layers.lora_linear import Segment


class StepTokens:
    def __init__(self, segments: Sequence[Segment]) -> None:
        parts = [(s.first_row, s.last_row, each) for s in segments for each in s.adapter.tokens]
        self._embedded = [part for part in parts if part[2].embeds]
        self._heads = [part for part in parts if part[2].heads]

    def __bool__(self) -> bool:
        return bool(self._embedded or self._heads)

    def embed(self, token_ids: Tensor, residual: Tensor, scale: float) -> None:
        """residual: [T, hidden], what the base model's embeddings gave, changed in place."""
        for first, last, tokens in self._embedded:
            rows, places = (token_ids[first:last, None] == tokens.ids).nonzero().unbind(1)
            residual[first + rows] = tokens.rows[places] * scale

    def add(self, rows: Tensor, normed: Tensor, logits: Tensor) -> None:
        """rows: of the step, whose logits these are, changed in place."""
        for first, last, tokens in self._heads:
            own = ((rows >= first) & (rows < last)).nonzero()
            if len(own):
                logits[own, tokens.ids] = normed[own[:, 0]] @ tokens.rows.T
