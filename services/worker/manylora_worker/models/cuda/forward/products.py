"""Products of a pass: a layer's linear projections with LoRA beside or before them, and sums over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from manylora_worker.models.cuda.forward.device_step import DeviceStep
from manylora_worker.models.cuda.forward.pass_sizes import PassSizes
from manylora_worker.models.cuda.kernels.combine import combine
from manylora_worker.models.cuda.kernels.gemm import linear
from manylora_worker.models.cuda.kernels.lora import LoraRows, low_rank_columns, shrink, shrink_splits
from manylora_worker.models.cuda.kernels.lora_tiles import FEWEST_ROWS, MOST_ROWS, LoraTiles
from manylora_worker.models.decoder.weights import Projection
from manylora_worker.models.ranks.group import RankGroup


class Products:
    """Args:
    arena: every block of KV and adapters, flat.
    sites: int64 [sites, adapter slots, fields]; see kernels/lora.py.
    group: ranks that share the model.
    pdl: see the kernels package.
    """

    def __init__(
        self,
        sizes: PassSizes,
        *,
        arena: Tensor,
        sites: Tensor,
        group: RankGroup | None,
        lora_chunks: int,
        pdl: bool,
    ) -> None:
        device, dtype = arena.device, arena.dtype
        self._arena, self._sites, self._group = arena, sites, group
        self._lora_chunks, self._pdl = lora_chunks, pdl
        self._lora = torch.zeros(sizes.rows["lora"], dtype=dtype, device=device)
        self._lora_tiles = LoraTiles.where_it_runs(lora_chunks, dtype, device)
        self._low_rank = torch.zeros(sizes.low_rank, device=device)
        self._parts = torch.empty(sizes.parts, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def matrix(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        product = linear(x, weight, None, out, self._parts, pdl=self._pdl)
        return out if product.data_ptr() == out.data_ptr() else torch.sum(product, 0, out=out)

    def summed(
        self, projection: Projection, x: Tensor, out: Tensor, step: DeviceStep
    ) -> tuple[Tensor, LoraRows | None]:
        """As `of`; with a group, over all ranks, LoRA among it."""
        product, lora = self.of(projection, x, out, step)
        group = self._group
        if group is None:
            return product, lora
        combine(product, out, num_rows=step.num_rows, lora=lora, pdl=self._pdl)
        group.all_reduce(out)
        return out[None], None

    def of(
        self, projection: Projection, x: Tensor, out: Tensor, step: DeviceStep, *, expands: bool = True
    ) -> tuple[Tensor, LoraRows | None]:
        """The base product [parts, rows, out] (see gemm.linear), and the low-rank values of rows with adapters.
        expands: whether LoRA's outputs may be computed beside the product, not by its reader.
        """
        if step.lora is None:
            return self._linear(projection, x, out), None
        lora = LoraRows(
            weights=self._arena,
            sites=self._sites[projection.site.index],
            tiles=step.lora.tiles,
            num_tiles=step.lora.num_tiles,
            row_adapters=step.lora.row_adapters,
            low_rank=self._low_rank_of(x),
            chunks=self._lora_chunks,
            columns=step.lora.columns,
        )
        slots = projection.site.slots
        tiles = self.tiles_for(lora, x)
        if tiles is None:
            with self.beside():
                shrink(x, lora, num_slots=len(slots), num_rows=step.num_rows, pdl=self._pdl)
            product = self._linear(projection, x, out)
            self.end_beside()
            return product, lora
        # So many rows' product leaves no room beside it: what starts there only waits in its way.
        tiles.shrink(x, lora, num_slots=len(slots), pdl=self._pdl)
        if expands:
            outputs = rows_of(self._lora, x.shape[0], projection.out_features)
            tiles.expand(lora, outputs, widths=[slot.stop - slot.start for slot in slots], pdl=self._pdl)
            lora = replace(lora, outputs=outputs)
        return self._linear(projection, x, out), lora

    def _linear(self, projection: Projection, x: Tensor, out: Tensor) -> Tensor:
        if projection.quantized is not None:
            return projection.quantized.parts(x, pdl=self._pdl)
        return linear(x, projection.weight, projection.bias, out, self._parts, pdl=self._pdl)

    def tiles_for(self, lora: LoraRows, x: Tensor) -> LoraTiles | None:
        if lora.columns:  # which those kernels know nothing of
            return None
        return self._lora_tiles if lora.num_tiles and FEWEST_ROWS <= x.shape[0] <= MOST_ROWS else None

    def _low_rank_of(self, x: Tensor) -> Tensor:
        """[splits, rows, columns]"""
        splits = shrink_splits(x.shape[1], x.shape[0])
        columns = low_rank_columns(self._lora_chunks)
        return self._low_rank[: splits * x.shape[0] * columns].view(splits, x.shape[0], columns)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Work in it runs beside the main stream's next work, up to `end_beside`."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def end_beside(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def rows_of(buffer: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width], of a buffer that may be wider."""
    return buffer.view(-1)[: rows * width].view(rows, width) if buffer.numel() else buffer
