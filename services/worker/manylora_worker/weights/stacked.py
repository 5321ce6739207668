"""LoRA on the stacked weights of a layer's experts, as peft writes it for `target_parameters`.

Both matrices of a stack are of all experts: A [experts * rank, in], expert by expert; B [out, rank * experts], in
whose columns the experts stand side by side for each rank. peft wraps the module once a parameter, so of two wrapped
parameters `gate_up_proj`, the first one, is under `base_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from manylora_worker.weights.packing import ModuleWeights, StoredMatrix
from manylora_worker.weights.sites import ExpertShape

GATE_UP = "gate_up_proj"
DOWN = "down_proj"
INNER = "base_layer"


@dataclass(frozen=True)
class Stack:
    """One stacked weight. key: the path that its matrices have in an adapter's file."""

    path: str  # of the experts
    parameter: str
    key: str
    shape: ExpertShape

    @property
    def name(self) -> str:
        return f"{self.path}.{self.parameter}"

    @property
    def features(self) -> tuple[int, int]:
        """Inputs and outputs of one expert's."""
        width, hidden = self.shape.width, self.shape.hidden
        return (hidden, 2 * width) if self.parameter == GATE_UP else (width, hidden)

    def matrix_shape(self, matrix: str, rank: int) -> tuple[int, int]:
        in_features, out_features = self.features
        ranks = self.shape.experts * rank
        return (ranks, in_features) if matrix == "A" else (out_features, ranks)

    def modules(self, a: StoredMatrix, b: StoredMatrix, rank: int, scale: float) -> Iterator[tuple[str, ModuleWeights]]:
        """Of each expert's linear layers. Gate and up have the same A."""
        leaves = ("gate_proj", "up_proj") if self.parameter == GATE_UP else ("down_proj",)
        in_features, out_features = self.features
        own_rows = out_features // len(leaves)
        for expert in range(self.shape.experts):
            first = a.first_byte + expert * rank * in_features * a.dtype.itemsize
            own_a = StoredMatrix(a.dtype, rank, in_features, first)
            stride, first_row = (len(leaves), 1) if self.shape.in_turn else (1, own_rows)
            for i, leaf in enumerate(leaves):
                element = i * first_row * b.columns + expert
                first_byte = b.first_byte + element * b.dtype.itemsize
                own_b = StoredMatrix(b.dtype, own_rows, rank, first_byte, stride * b.columns, self.shape.experts)
                yield f"{self.path}.{expert}.{leaf}", ModuleWeights(own_a, own_b, scale)


def is_stack_key(path: str, experts: Mapping[str, ExpertShape]) -> bool:
    return path.removesuffix(f".{INNER}") in experts


def stacks_of(path: str, shape: ExpertShape, parameters: Sequence[str]) -> list[Stack]:
    """parameters: which of the stack at `path` an adapter changes, in the order of GATE_UP, DOWN."""
    if len(parameters) == 2:
        return [Stack(path, GATE_UP, f"{path}.{INNER}", shape), Stack(path, DOWN, path, shape)]
    return [Stack(path, parameter, path, shape) for parameter in parameters]


def without_weights(targeted: Sequence[str], found: Set[str], is_of_expert: Callable[[str], bool]) -> list[str]:
    """Of the paths that an adapter targets, those that it should have matrices for and has not.

    peft sees stacks where we see a layer an expert: a name that a shared expert bears targets that one alone, unless
    the adapter is of a model whose experts were layers, and has their matrices.
    """
    others = {path.rpartition(".")[2] for path in found if not is_of_expert(path)}
    if any(is_of_expert(path) for path in found):
        others = set()
    bare = [path for path in targeted if path not in found]
    return [path for path in bare if path.rpartition(".")[2] not in others or not is_of_expert(path)]
