"""How large the buffers of a decoder's pass (decoder.py) are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from manylora_worker.models.cuda.forward.delta_pass import DeltaSizes
from manylora_worker.models.cuda.forward.expert_mlp import MixtureSizes
from manylora_worker.models.cuda.forward.layer_inputs import InputSizes
from manylora_worker.models.cuda.kernels.gemm import PARTS_ELEMENTS
from manylora_worker.models.cuda.kernels.lora import low_rank_columns, shrink_splits
from manylora_worker.models.cuda.kernels.lora_tiles import MOST_ROWS
from manylora_worker.models.decoder.weights import AttentionShape, DecoderWeights, DenseMlp, MixtureMlp


@dataclass(frozen=True)
class PassSizes:
    """[rows, columns], or flat ones of float32."""

    rows: Mapping[str, tuple[int, int]]
    low_rank: int
    parts: int
    angles: int
    scores: int  # logits of routers, where these are float32
    mixture: MixtureSizes | None
    delta: DeltaSizes | None
    inputs: InputSizes | None

    @classmethod
    def of(cls, weights: DecoderWeights, *, lora_chunks: int, max_rows: int, max_decode_rows: int) -> PassSizes:
        # of a mixer: the product that it begins with, and the one that it ends with
        mixers = [(each.qkv, each.o) for each in weights.attentions]
        mixers += [(each.inputs, each.out) for each in weights.recurrent if each.inputs is not None]
        first_outputs = max(first.out_features for first, _ in mixers)
        last_inputs = max(last.in_features for _, last in mixers)
        last_outputs = max(last.out_features for _, last in mixers)
        queries = max(each.o.in_features for each in weights.attentions)
        is_gated = any(each.shape.is_gated for each in weights.attentions)
        mixtures = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MixtureMlp)]
        shared = [mlp.shared.mlp for mlp in mixtures if mlp.shared is not None]
        branches = [mlp.branch.mlp for mlp in mixtures if mlp.branch is not None]
        dense = [*(layer.mlp for layer in weights.layers if isinstance(layer.mlp, DenseMlp)), *shared, *branches]
        gate_up = max((mlp.gate_up.out_features for mlp in dense), default=0)
        gated = max((mlp.down.in_features for mlp in dense), default=0)
        routers = [mlp.router.out_features for mlp in mixtures]
        is_exact = any(mlp.routing.is_sigmoid for mlp in mixtures)
        widths = {each.in_features for both in mixers for each in both} | {gated} - {0}
        most = max(shrink_splits(width, rows) * rows for width in widths for rows in range(1, max_rows + 1))
        rows = {} if weights.group is None else _head_rows(weights, weights.group.size, max_decode_rows)
        return cls(
            rows={
                **rows,
                "residual": (max_rows, weights.hidden_size),
                "normed": (max_rows, weights.hidden_size),
                "delta": (max_rows, weights.hidden_size),
                "mixed": (max_rows, first_outputs),
                "q": (max_rows, queries),
                "gates": (max_rows, queries if is_gated else 0),
                "attended": (max_rows, last_inputs),
                "gate_up": (max_rows, gate_up),
                "gated": (max_rows, gated),
                "routed": (max_rows, 0 if is_exact else max(routers, default=0)),
                "shared": (max_rows, weights.hidden_size if shared or branches else 0),
                "branch": (max_rows, weights.hidden_size if branches else 0),
                "shared_gates": (max_rows, min(1, len(shared))),
                "logits": (max_decode_rows, weights.vocab_size),
                "lora": (min(max_rows, MOST_ROWS), max(first_outputs, last_outputs)),
            },
            low_rank=most * low_rank_columns(lora_chunks),
            parts=PARTS_ELEMENTS,
            angles=2 * max_rows * weights.ropes[0][0].shape[1],
            scores=max_rows * max(routers) if is_exact else 0,
            mixture=MixtureSizes.of(weights, lora_chunks=lora_chunks, max_rows=max_rows),
            delta=DeltaSizes(weights.recurrent[0].net.shape, max_rows) if weights.recurrent else None,
            inputs=InputSizes.of(weights, max_rows),
        )

    def bytes(self, dtype: torch.dtype) -> int:
        by_rows = sum(rows * columns for rows, columns in self.rows.values())
        delta = 0 if self.delta is None else self.delta.bytes
        others = sum(each.bytes(dtype) for each in (self.mixture, self.inputs) if each is not None)
        return by_rows * dtype.itemsize + 4 * (self.low_rank + self.parts + self.angles + self.scores) + delta + others


def _head_rows(weights: DecoderWeights, size: int, max_decode_rows: int) -> dict[str, tuple[int, int]]:
    columns = -(-weights.vocab_size // size)
    return {"head": (max_decode_rows, columns), "heads": (size * max_decode_rows, columns)}


def buffer_bytes(
    weights: DecoderWeights, dtype: torch.dtype, *, lora_chunks: int, max_rows: int, max_decode_rows: int
) -> int:
    """What a Decoder takes on the device beside weights and arena."""
    sizes = PassSizes.of(weights, lora_chunks=lora_chunks, max_rows=max_rows, max_decode_rows=max_decode_rows)
    return sizes.bytes(dtype)


def widest(shapes: Collection[AttentionShape]) -> AttentionShape:
    return replace(
        next(iter(shapes)),
        num_heads=max(shape.num_heads for shape in shapes),
        num_kv_heads=max(shape.num_kv_heads for shape in shapes),
        head_dim=max(shape.head_dim for shape in shapes),
    )
