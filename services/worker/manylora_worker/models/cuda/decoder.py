"""One forward pass of a decoder, as a fixed sequence of kernels over preallocated buffers.

No decision of the host depends on the batch's content: rows, blocks and adapters stand in device tensors (DeviceStep),
so a CUDA graph replays the pass for other batches of the same shape (rows, LoRA or none, how a context is split).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from manylora_worker.models.cuda.expert_mlp import ExpertMlp, MixtureSizes
from manylora_worker.models.cuda.expert_tables import ExpertAdapters
from manylora_worker.models.cuda.kernels.add_norm import add_norm
from manylora_worker.models.cuda.kernels.attention import (
    DecodeScratch,
    PagedLayout,
    attend_decode,
    attend_prefill,
    prefill_block_m,
)
from manylora_worker.models.cuda.kernels.attention_decode import DecodeAttention
from manylora_worker.models.cuda.kernels.combine import combine
from manylora_worker.models.cuda.kernels.gate import gate
from manylora_worker.models.cuda.kernels.gemm import MOST_SPLIT_ROWS, MOST_SPLITS, linear
from manylora_worker.models.cuda.kernels.lora import LoraRows, low_rank_columns, shrink, shrink_splits
from manylora_worker.models.cuda.kernels.lora_tiles import FEWEST_ROWS, MOST_ROWS, LoraTiles
from manylora_worker.models.cuda.kernels.rotate import rotate_store, row_angles
from manylora_worker.models.cuda.layer_inputs import InputPass, InputSizes
from manylora_worker.models.decoder_weights import AttentionShape, DecoderWeights, DenseMlp, MixtureMlp, Projection
from manylora_worker.models.ranks.cuts import SharedHead

MAX_SPLITS = 32


@dataclass(frozen=True)
class LoraStep:
    """Formats: kernels/lora.py."""

    tiles: Tensor
    num_tiles: int  # 0: by row
    row_adapters: Tensor
    columns: bool = False  # whether an adapter of the rows may have gains and shifts


@dataclass(frozen=True)
class DeviceStep:
    """Device tensors of at least `rows` entries. Rows [0, decode_rows) decode; the rest are chunks of prompts, cut in
    `prefill_tiles`.
    """

    rows: int
    num_rows: Tensor  # int32 scalar: rows that are there; those behind are padding
    token_ids: Tensor
    positions: Tensor  # int32
    tables: Tensor  # int32 [sequences, blocks]
    table_rows: Tensor  # int32: each row's sequence in `tables`
    decode_rows: int
    splits: int
    prefill_tiles: Tensor | None = None
    num_prefill_tiles: int = 0
    lora: LoraStep | None = None
    logit_rows: Tensor | None = None  # int64: rows whose logits are wanted; None: all, in order


@dataclass(frozen=True)
class _Sizes:
    """Of the pass's buffers: [rows, columns], or flat ones of float32."""

    rows: Mapping[str, tuple[int, int]]
    low_rank: int
    parts: int
    angles: int
    mixture: MixtureSizes | None
    inputs: InputSizes | None

    @classmethod
    def of(cls, weights: DecoderWeights, *, lora_chunks: int, max_rows: int, max_decode_rows: int) -> _Sizes:
        layers = weights.layers
        qkv, heads = (max(each) for each in zip(*((x.qkv.out_features, x.o.in_features) for x in layers), strict=True))
        dense = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, DenseMlp)]
        gate_up = max((mlp.gate_up.out_features for mlp in dense), default=0)
        gated = max((mlp.down.in_features for mlp in dense), default=0)
        out_features = [qkv, weights.hidden_size, gate_up]
        routers = [layer.mlp.router.out_features for layer in weights.layers if isinstance(layer.mlp, MixtureMlp)]
        widths = {weights.hidden_size, heads, gated} - {0}
        most = max(shrink_splits(width, rows) * rows for width in widths for rows in range(1, max_rows + 1))
        rows = {} if weights.group is None else _head_rows(weights, weights.group.size, max_decode_rows)
        if weights.group is not None:
            out_features.append(rows["head"][1])
        inputs = InputSizes.of(weights, max_rows)
        if inputs is not None:
            out_features.append(inputs.columns)
        return cls(
            rows={
                **rows,
                "residual": (max_rows, weights.hidden_size),
                "normed": (max_rows, weights.hidden_size),
                "delta": (max_rows, weights.hidden_size),
                "qkv": (max_rows, qkv),
                "q": (max_rows, heads),
                "attended": (max_rows, heads),
                "gate_up": (max_rows, gate_up),
                "gated": (max_rows, gated),
                "routed": (max_rows, max(routers, default=0)),
                "logits": (max_decode_rows, weights.vocab_size),
                "lora": (min(max_rows, MOST_ROWS), max(qkv, weights.hidden_size)),
            },
            low_rank=most * low_rank_columns(lora_chunks),
            parts=MOST_SPLITS * MOST_SPLIT_ROWS * max(out_features),
            angles=2 * max_rows * weights.ropes[0][0].shape[1],
            mixture=MixtureSizes.of(weights, lora_chunks=lora_chunks, max_rows=max_rows),
            inputs=inputs,
        )

    def bytes(self, dtype: torch.dtype) -> int:
        by_rows = sum(rows * columns for rows, columns in self.rows.values())
        others = sum(each.bytes(dtype) for each in (self.mixture, self.inputs) if each is not None)
        return by_rows * dtype.itemsize + 4 * (self.low_rank + self.parts + self.angles) + others


def _head_rows(weights: DecoderWeights, size: int, max_decode_rows: int) -> dict[str, tuple[int, int]]:
    columns = -(-weights.vocab_size // size)
    return {"head": (max_decode_rows, columns), "heads": (size * max_decode_rows, columns)}


def buffer_bytes(
    weights: DecoderWeights, dtype: torch.dtype, *, lora_chunks: int, max_rows: int, max_decode_rows: int
) -> int:
    """What a Decoder takes on the device beside weights and arena."""
    sizes = _Sizes.of(weights, lora_chunks=lora_chunks, max_rows=max_rows, max_decode_rows=max_decode_rows)
    return sizes.bytes(dtype)


def _widest(weights: DecoderWeights) -> AttentionShape:
    shapes = [layer.attention for layer in weights.layers]
    return replace(
        shapes[0],
        num_heads=max(shape.num_heads for shape in shapes),
        num_kv_heads=max(shape.num_kv_heads for shape in shapes),
        head_dim=max(shape.head_dim for shape in shapes),
    )


def _first(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, columns], contiguous: layers may be of different widths."""
    return buffer.view(-1)[: rows * columns].view(rows, columns)


# Per layer: norm | qkv product | rotate and store | attention | o product | add and norm | gate-up product | gate |
# down product | add and norm (the next layer's); where a layer has an input of its own, gate product | gate | product |
# add and norm behind that. LoRA's shrink runs beside a product, or, with the expand, before it in steps that
# kernels/lora_tiles.py serves.
class Decoder:
    """Args:
    arena: every block of KV and adapters, flat.
    layouts: by layer.
    layer_offsets: where each layer's keys begin inside a block, in elements.
    sites: int64 [sites, adapter slots, fields]; see kernels/lora.py.
    ropes: float32 [adapter slots, rotated / 2 + 1]; see rotate.row_angles.
    pdl: see the kernels package.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        arena: Tensor,
        layouts: Sequence[PagedLayout],
        layer_offsets: Sequence[int],
        sites: Tensor,
        ropes: Tensor,
        lora_chunks: int,
        max_rows: int,
        max_decode_rows: int,
        pdl: bool,
        experts: ExpertAdapters | None = None,
    ) -> None:
        self.weights = weights
        self._arena = arena
        self._layouts = layouts
        self._layer_caches = [arena[offset:] for offset in layer_offsets]
        self._sites = sites
        self._ropes = ropes
        self._lora_chunks = lora_chunks
        device, dtype = arena.device, arena.dtype
        sizes = _Sizes.of(weights, lora_chunks=lora_chunks, max_rows=max_rows, max_decode_rows=max_decode_rows)

        def buffer(name: str) -> Tensor:
            return torch.zeros(sizes.rows[name], dtype=dtype, device=device)

        self._residual = buffer("residual")
        self._normed = buffer("normed")
        group = weights.group
        self._delta = buffer("delta") if group is None else group.summed_buffer(*sizes.rows["delta"], dtype)
        if group is not None:
            self._head, self._heads = buffer("head"), buffer("heads")
        self._qkv = buffer("qkv")
        self._q = buffer("q")
        self._attended = buffer("attended")
        self._gate_up = buffer("gate_up")
        self._gated = buffer("gated")
        self._routed = buffer("routed")
        self._experts = None
        if sizes.mixture is not None:
            assert experts is not None
            self._experts = ExpertMlp(sizes.mixture, experts, lora_chunks=lora_chunks, pdl=pdl)
        self._inputs = None
        if sizes.inputs is not None:
            self._inputs = InputPass(weights, sizes.inputs, dtype, device, pdl=pdl)
        self._logits = buffer("logits")
        self._lora = buffer("lora")
        self._lora_tiles = LoraTiles.where_it_runs(lora_chunks, dtype, device)
        self._low_rank = torch.zeros(sizes.low_rank, device=device)
        self._parts = torch.empty(sizes.parts, device=device)
        self._angles = torch.zeros(sizes.angles, device=device)
        self._counters = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._pdl = pdl
        self.prefill_rows = max(prefill_block_m(layer.attention) for layer in weights.layers)  # of a tile, at most
        self._scratch = DecodeScratch(max_decode_rows, _widest(weights), MAX_SPLITS, device)
        self._decode_attention = {
            shape: DecodeAttention.where_it_runs(shape, layouts[0].block_size, dtype, device)
            for shape in {layer.attention for layer in weights.layers}
        }
        self._sinks = [None if layer.sinks is None else layer.sinks.float() for layer in weights.layers]
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def logits_buffer(self) -> Tensor:
        """[max decode rows, vocab]: of the last pass without `logit_rows`."""
        return self._logits

    def forward(self, step: DeviceStep) -> Tensor:
        """[wanted rows, vocab], in a buffer that the next pass overwrites."""
        self.run_layers(step)
        return self.head(step)

    def run_layers(self, step: DeviceStep) -> None:
        weights = self.weights
        rows = step.rows
        residual, normed, delta = self._residual[:rows], self._normed[:rows], self._delta[:rows]
        token_ids = step.token_ids[:rows]
        if weights.read_as is not None:
            token_ids = weights.read_as[token_ids]
        residual.copy_(weights.embed(token_ids))
        product_of = partial(self._product, step=step, expands=False)
        inputs = None
        if self._inputs is not None:
            inputs = self._inputs.of_tokens(token_ids, residual, product_of, num_rows=step.num_rows)
        ropes = self._step_ropes(step)
        self._norm(None, residual, normed, None, weights.layers[0].input_norm, step, None)
        for i, layer in enumerate(weights.layers):
            q, attended = (_first(each, rows, layer.o.in_features) for each in (self._q, self._attended))
            qkv, lora = self._product(layer.qkv, normed, _first(self._qkv, rows, layer.qkv.out_features), step)
            self._rotate(i, qkv, q, step, lora, *ropes[layer.rope])
            self._attend(i, q, attended, step)
            product, lora = self._summed(layer.o, attended, delta, step)
            self._norm(product, residual, normed, layer.attention_post_norm, layer.ffn_norm, step, lora)
            product, lora = self._mlp(layer.mlp, normed, delta, step)
            is_last = i + 1 == len(weights.layers)
            next_norm = weights.final_norm if is_last else weights.layers[i + 1].input_norm
            post_norm, own = layer.ffn_post_norm, layer.input
            if own is not None and self._inputs is not None and inputs is not None:
                self._norm(product, residual, normed, post_norm, None, step, lora)
                gated = self._inputs.of_layer(own, i, normed, inputs, product_of, num_rows=step.num_rows)
                product, lora = self._product(own.projection, gated, delta, step)
                post_norm = own.norm
            self._norm(product, residual, normed, post_norm, next_norm, step, lora, factor=layer.scale)

    def _mlp(
        self, mlp: DenseMlp | MixtureMlp, normed: Tensor, delta: Tensor, step: DeviceStep
    ) -> tuple[Tensor, LoraRows | None]:
        if isinstance(mlp, MixtureMlp):
            self._mixture(mlp, normed, delta, step)
            return delta[None], None
        gated = _first(self._gated, step.rows, mlp.down.in_features)
        both = _first(self._gate_up, step.rows, mlp.gate_up.out_features)
        gate_up, lora = self._product(mlp.gate_up, normed, both, step, expands=False)
        self._gate(mlp.gate_up, gate_up, gated, step, lora)
        return self._summed(mlp.down, gated, delta, step)

    def _mixture(self, mlp: MixtureMlp, normed: Tensor, delta: Tensor, step: DeviceStep) -> None:
        routed = _first(self._routed, step.rows, mlp.router.out_features)
        product, lora = self._product(mlp.router, normed, routed, step, expands=False)
        assert self._experts is not None
        self._experts.run(
            mlp,
            normed,
            product,
            lora,
            delta,
            num_rows=step.num_rows,
            row_adapters=None if step.lora is None else step.lora.row_adapters,
            beside=self._beside,
            end_beside=self._end_beside,
        )

    def head(self, step: DeviceStep) -> Tensor:
        """As `forward`, of the step whose layers ran last."""
        normed = self._normed[: step.rows]
        if step.logit_rows is not None:
            normed = normed.index_select(0, step.logit_rows)
        logits = self._logits[: normed.shape[0]]
        if not len(logits):  # ranks gather nothing then
            return logits
        head, group = self.weights.head, self.weights.group
        if isinstance(head, SharedHead) and group is not None:
            rows = normed.shape[0]
            own = self._matrix(normed, head.part.weight, self._head[:rows])
            group.gather_columns(own, self._heads[: group.size * rows].view(group.size, rows, -1), logits)
        else:
            self._matrix(normed, head.weight, logits)
        softcap = self.weights.logit_softcap
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits

    def _matrix(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        product = linear(x, weight, None, out, self._parts, pdl=self._pdl)
        return out if product.data_ptr() == out.data_ptr() else torch.sum(product, 0, out=out)

    def _summed(
        self, projection: Projection, x: Tensor, out: Tensor, step: DeviceStep
    ) -> tuple[Tensor, LoraRows | None]:
        """As `_product`; with a group, over all ranks, LoRA among it."""
        product, lora = self._product(projection, x, out, step)
        group = self.weights.group
        if group is None:
            return product, lora
        combine(product, out, num_rows=step.num_rows, lora=lora, pdl=self._pdl)
        group.all_reduce(out)
        return out[None], None

    def _product(
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
        tiles = self._tiles_for(lora, x)
        if tiles is None:
            with self._beside():
                shrink(x, lora, num_slots=len(slots), num_rows=step.num_rows, pdl=self._pdl)
            product = self._linear(projection, x, out)
            self._end_beside()
            return product, lora
        # So many rows' product leaves no room beside it: what starts there only waits in its way.
        tiles.shrink(x, lora, num_slots=len(slots), pdl=self._pdl)
        if expands:
            outputs = _first(self._lora, x.shape[0], projection.out_features)
            tiles.expand(lora, outputs, widths=[slot.stop - slot.start for slot in slots], pdl=self._pdl)
            lora = replace(lora, outputs=outputs)
        return self._linear(projection, x, out), lora

    def _linear(self, projection: Projection, x: Tensor, out: Tensor) -> Tensor:
        if projection.quantized is not None:
            return projection.quantized.parts(x, pdl=self._pdl)
        return linear(x, projection.weight, projection.bias, out, self._parts, pdl=self._pdl)

    def _tiles_for(self, lora: LoraRows, x: Tensor) -> LoraTiles | None:
        if lora.columns:  # which those kernels know nothing of
            return None
        return self._lora_tiles if lora.num_tiles and FEWEST_ROWS <= x.shape[0] <= MOST_ROWS else None

    def _gate(
        self, projection: Projection, gate_up: Tensor, gated: Tensor, step: DeviceStep, lora: LoraRows | None
    ) -> None:
        num_slots, activation = len(projection.site.slots), self.weights.activation
        tiled = lora is not None and gate_up.shape[0] == 1 and activation != "gelu"
        tiles = self._tiles_for(lora, gated) if lora is not None and tiled else None
        if tiles is not None and lora is not None:
            tiles.gate(gate_up, gated, activation=activation, lora=lora, num_slots=num_slots, pdl=self._pdl)
            return
        gate(
            gate_up,
            gated,
            activation=activation,
            num_rows=step.num_rows,
            lora=lora,
            num_slots=num_slots,
            pdl=self._pdl,
        )

    def _low_rank_of(self, x: Tensor) -> Tensor:
        """[splits, rows, columns]"""
        splits = shrink_splits(x.shape[1], x.shape[0])
        columns = low_rank_columns(self._lora_chunks)
        return self._low_rank[: splits * x.shape[0] * columns].view(splits, x.shape[0], columns)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Work in it runs beside the main stream's next work, until that waits for `_side`."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _end_beside(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _norm(
        self,
        delta: Tensor | None,
        residual: Tensor,
        normed: Tensor,
        post: Tensor | None,
        pre: Tensor | None,
        step: DeviceStep,
        lora: LoraRows | None,
        *,
        factor: float = 1.0,
    ) -> None:
        add_norm(
            delta,
            residual,
            normed,
            post_weight=post,
            pre_weight=pre,
            eps=self.weights.eps,
            weight_plus_one=self.weights.norm_weight_plus_one,
            num_rows=step.num_rows,
            counters=self._counters,
            lora=lora,
            factor=factor,
            pdl=self._pdl,
        )

    def _step_ropes(self, step: DeviceStep) -> Sequence[tuple[Tensor, Tensor]]:
        """By row where adapters may rotate in their own way, or else by position."""
        ropes = self.weights.ropes
        if step.lora is None or len(ropes) > 1:
            return ropes
        cos, sin = self._angles.view(2, -1, ropes[0][0].shape[1])[:, : step.rows].unbind(0)
        row_angles(
            cos,
            sin,
            positions=step.positions,
            row_adapters=step.lora.row_adapters,
            ropes=self._ropes,
            cos=ropes[0][0],
            sin=ropes[0][1],
            num_rows=step.num_rows,
        )
        return [(cos, sin)]

    def _rotate(
        self, index: int, qkv: Tensor, q: Tensor, step: DeviceStep, lora: LoraRows | None, cos: Tensor, sin: Tensor
    ) -> None:
        layer = self.weights.layers[index]
        rotate_store(
            qkv,
            q,
            self._layer_caches[index],
            tables=step.tables,
            table_rows=step.table_rows,
            positions=step.positions,
            cos=cos,
            sin=sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.weights.eps,
            weight_plus_one=self.weights.norm_weight_plus_one,
            num_heads=layer.attention.num_heads,
            num_kv_heads=layer.attention.num_kv_heads,
            head_dim=layer.attention.head_dim,
            layout=self._layouts[index],
            num_rows=step.num_rows,
            lora=lora,
            num_slots=len(layer.qkv.site.slots),
            kv_products=layer.kv_products,
            norms_values=layer.norms_values,
            angles_by_row=step.lora is not None and len(self.weights.ropes) == 1,
            pdl=self._pdl,
        )

    def _attend(self, index: int, q: Tensor, attended: Tensor, step: DeviceStep) -> None:
        shape = self.weights.layers[index].attention
        cache = self._layer_caches[index]
        if step.decode_rows:
            compiled = self._decode_attention[shape]
            attend = compiled.attend if compiled is not None else partial(attend_decode, shape=shape)
            attend(
                q,
                cache,
                attended,
                tables=step.tables,
                table_rows=step.table_rows[: step.decode_rows],
                positions=step.positions,
                num_rows=step.num_rows,
                layout=self._layouts[index],
                scratch=self._scratch,
                splits=step.splits,
                pdl=self._pdl,
                sinks=self._sinks[index],
            )
        if step.prefill_tiles is not None:
            attend_prefill(
                q,
                cache,
                attended,
                tables=step.tables,
                tiles=step.prefill_tiles,
                num_tiles=step.num_prefill_tiles,
                tile_rows=self.prefill_rows,
                shape=shape,
                layout=self._layouts[index],
                sinks=self._sinks[index],
            )
