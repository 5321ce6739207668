"""A layer of experts as a fixed sequence of kernels: route | group | gate and up | down | join, with LoRA by pair."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora_worker.models.cuda.expert_tables import ExpertAdapters
from manylora_worker.models.cuda.kernels.experts_lora import (
    ExpertRows,
    expand,
    gate,
    join,
    low_rank_splits,
    shrink,
)
from manylora_worker.models.cuda.kernels.experts_lora_tiles import shrink_tiles
from manylora_worker.models.cuda.kernels.experts_product import grouped_product, tile_pairs
from manylora_worker.models.cuda.kernels.experts_route import TILE_FIELDS, Groups, group, most_tiles, route
from manylora_worker.models.cuda.kernels.lora import CHUNK_RANKS, LoraRows
from manylora_worker.models.decoder.weights import DecoderWeights, MixtureMlp


@dataclass(frozen=True)
class MixtureSizes:
    """The largest of all layers', in elements."""

    pairs: int
    tiles: int
    both: int  # gate and up, and then outputs: of the model's dtype
    gated: int
    low_rank: int  # float32

    @classmethod
    def of(cls, weights: DecoderWeights, *, lora_chunks: int, max_rows: int) -> MixtureSizes | None:
        mixtures = {
            (layer.mlp.experts.down.shape, layer.mlp.routing.top_k)
            for layer in weights.layers
            if isinstance(layer.mlp, MixtureMlp)
        }
        if not mixtures:
            return None
        pairs = tiles = both = gated = low_rank = 0
        for (count, hidden, width), top_k in mixtures:
            own = max_rows * top_k
            pairs, gated = max(pairs, own), max(gated, own * width)
            both = max(both, own * max(2 * width, hidden))
            each = (rows * top_k for rows in range(1, max_rows + 1))
            most = max(n * max(2 * low_rank_splits(hidden, n), low_rank_splits(width, n)) for n in each)
            low_rank = max(low_rank, most * lora_chunks * CHUNK_RANKS)
            tiles = max(tiles, *(most_tiles(own, count, block_m) for block_m in (16, 32, 64)))
        return cls(pairs, tiles, both, gated, low_rank)

    def bytes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize * (self.both + self.gated) + 4 * (
            3 * self.pairs + TILE_FIELDS * self.tiles + 1 + self.low_rank
        )


class ExpertMlp:
    """Of every layer of experts; its buffers serve one after the other."""

    def __init__(self, sizes: MixtureSizes, adapters: ExpertAdapters, *, lora_chunks: int, pdl: bool) -> None:
        device, dtype = adapters.arena.device, adapters.arena.dtype
        self._adapters = adapters
        self._max_rank = lora_chunks * CHUNK_RANKS
        self._pdl = pdl
        self._chosen = torch.zeros(sizes.pairs, dtype=torch.int32, device=device)
        self._shares = torch.zeros(sizes.pairs, device=device)
        self._order = torch.zeros(sizes.pairs, dtype=torch.int32, device=device)
        self._tiles = torch.zeros(sizes.tiles * TILE_FIELDS, dtype=torch.int32, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._both = torch.zeros(sizes.both, dtype=dtype, device=device)
        self._gated = torch.zeros(sizes.gated, dtype=dtype, device=device)
        self._low_rank = torch.zeros(sizes.low_rank, device=device)

    def run(
        self,
        mlp: MixtureMlp,
        x: Tensor,
        routed: Tensor,
        router_lora: LoraRows | None,
        out: Tensor,
        *,
        num_rows: Tensor,
        row_adapters: Tensor | None,
        by_tile: bool,
        beside: Callable[[], AbstractContextManager[None]],
        end_beside: Callable[[], None],
    ) -> None:
        """
        Args:
            routed: [parts, rows, experts], the router's product.
            out: [rows, hidden], written.
            row_adapters: int32 [rows]; None: no row has one.
            by_tile: whether many rows in turn have the same one.
            beside, end_beside: for work that the next product does not wait for, and its end.
        """
        count, hidden, width = mlp.experts.down.shape
        top_k = mlp.routing.top_k
        pairs = x.shape[0] * top_k
        chosen, shares = self._chosen[:pairs], self._shares[:pairs]
        block_m = tile_pairs(pairs, count)
        tiles = self._tiles[: most_tiles(pairs, count, block_m) * TILE_FIELDS].view(-1, TILE_FIELDS)
        groups = Groups(self._order[:pairs], tiles, self._count, block_m)
        route(
            routed, chosen, shares, groups, mlp.routing, num_experts=count, num_rows=num_rows, lora=router_lora,
            dtype=routed.dtype if mlp.routing.is_sigmoid else x.dtype, pdl=self._pdl,
        )  # fmt: skip
        if x.shape[0] > 1:
            group(chosen, groups, num_experts=count, pdl=self._pdl)
        gated = self._gated[: pairs * width].view(pairs, width)
        both = self._both[: pairs * 2 * width].view(pairs, 2 * width)
        outputs = self._both[: pairs * hidden].view(pairs, hidden)
        gate_up_weight, down_weight = mlp.experts.gate_up, mlp.experts.down
        gate_up_bias, down_bias = mlp.experts.biases or (None, None)
        if row_adapters is None or (by_tile and groups.is_wide):
            lora = self._shrunk(mlp, 0, row_adapters, chosen, x, groups, top_k)
            grouped_product(
                x, gate_up_weight, gated, groups, bias=gate_up_bias, pairs_a_row=top_k, gates=mlp.activation, halves=2,
                lora=lora, pdl=self._pdl,
            )  # fmt: skip
            lora = self._shrunk(mlp, 1, row_adapters, chosen, gated, groups, 1)
            grouped_product(
                gated, down_weight, outputs, groups, bias=down_bias, pairs_a_row=1, lora=lora, pdl=self._pdl
            )
        else:
            rows = self._rows(mlp, 0, row_adapters, chosen, hidden)
            with beside():
                shrink(x, rows, pairs_a_row=top_k, pdl=self._pdl)
            grouped_product(
                x, gate_up_weight, both, groups, bias=gate_up_bias, pairs_a_row=top_k, halves=2, pdl=self._pdl
            )
            end_beside()
            gate(both, gated, rows, activation=mlp.activation, pdl=self._pdl)
            rows = self._rows(mlp, 1, row_adapters, chosen, width)
            with beside():
                shrink(gated, rows, pairs_a_row=1, pdl=self._pdl)
            grouped_product(gated, down_weight, outputs, groups, bias=down_bias, pairs_a_row=1, pdl=self._pdl)
            end_beside()
            expand(outputs, rows, pdl=self._pdl)
        join(outputs, shares, out, num_rows=num_rows, top_k=top_k, pdl=self._pdl)

    def _shrunk(
        self, mlp: MixtureMlp, which: int, row_adapters: Tensor | None, chosen: Tensor, x: Tensor, groups: Groups,
        pairs_a_row: int,
    ) -> ExpertRows | None:  # fmt: skip
        if row_adapters is None:
            return None
        rows = self._rows(mlp, which, row_adapters, chosen, x.shape[1])
        shrink_tiles(x, rows, groups, pairs_a_row=pairs_a_row, pdl=self._pdl)
        return rows

    def _rows(self, mlp: MixtureMlp, which: int, row_adapters: Tensor, chosen: Tensor, in_features: int) -> ExpertRows:
        site = mlp.experts.sites[which]
        pairs, slots = len(chosen), site.slots_an_expert
        splits = low_rank_splits(in_features, pairs)
        low_rank = self._low_rank[: splits * pairs * slots * self._max_rank].view(splits, pairs, -1)
        fields = self._adapters.fields
        return ExpertRows(
            weights=self._adapters.arena,
            table=self._adapters.table[site.index - fields.first_site],
            a_groups=fields.a_groups,
            row_adapters=row_adapters,
            experts=chosen,
            low_rank=low_rank,
            max_rank=self._max_rank,
            num_experts=site.experts,
            top_k=mlp.routing.top_k,
            slots=slots,
        )
