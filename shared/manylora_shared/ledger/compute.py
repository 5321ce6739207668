"""Floating-point operations of a request, from the base model's shape: what serving it takes at least.

    a token through the layers       2 x their parameters
    its attention                    4 x layers x query heads x head size, for each position that it sees
    a token that is drawn            2 x hidden size x vocabulary, besides

Tokens found in the cache, computed again or not charged count nothing, and an adapter's low-rank products (well below
1 %) neither. Windows of attention are not looked at: a model with sliding windows computes less behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """0: not known."""

    layer_parameters: int = 0  # of the products in all layers
    head_parameters: int = 0
    attention: int = 0  # operations for each pair of positions, in all layers

    def prefill(self, prompt_tokens: int, cached_tokens: int) -> int:
        """With the first token's draw."""
        if prompt_tokens <= 0:
            return 0
        computed = prompt_tokens - cached_tokens
        pairs = _pairs(prompt_tokens) - _pairs(cached_tokens)
        return 2 * self.layer_parameters * computed + self.attention * pairs + 2 * self.head_parameters

    def decode(self, prompt_tokens: int, drawn: Iterable[int]) -> int:
        """drawn: tokens of each choice. The first ones are drawn by the prefill."""
        total = 0
        for tokens in drawn:
            passes = max(0, tokens - 1)
            pairs = _pairs(prompt_tokens + passes) - _pairs(prompt_tokens)
            total += 2 * (self.layer_parameters + self.head_parameters) * passes + self.attention * pairs
        return total


NO_SHAPE = ModelShape()


@dataclass(frozen=True)
class Served:
    """The base model, as far as a row tells of it."""

    model: str = ""
    shape: ModelShape = NO_SHAPE


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2
