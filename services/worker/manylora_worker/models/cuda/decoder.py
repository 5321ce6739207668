"""One forward pass of a decoder, as a fixed sequence of kernels over preallocated buffers.

No decision of the host depends on the batch's content: rows, blocks and adapters stand in device tensors (DeviceStep),
so a CUDA graph replays the pass for other batches of the same shape (rows, LoRA or none, how a context is split).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from manylora_worker.models.cuda.delta_pass import DeltaPass, StateStep
from manylora_worker.models.cuda.expert_mlp import ExpertMlp
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
from manylora_worker.models.cuda.kernels.delta_net import StateLayout
from manylora_worker.models.cuda.kernels.gate import gate, gate_attended
from manylora_worker.models.cuda.kernels.gemm import linear
from manylora_worker.models.cuda.kernels.lora import LoraRows, low_rank_columns, shrink, shrink_splits
from manylora_worker.models.cuda.kernels.lora_tiles import FEWEST_ROWS, MOST_ROWS, LoraTiles
from manylora_worker.models.cuda.kernels.rotate import rotate_store, row_angles
from manylora_worker.models.cuda.layer_inputs import InputPass
from manylora_worker.models.cuda.pass_sizes import PassSizes, widest
from manylora_worker.models.decoder.weights import (
    DecoderWeights,
    DenseBranch,
    DenseMlp,
    MixtureMlp,
    Projection,
    RecurrentMixer,
    SelfAttention,
    SharedExpert,
)
from manylora_worker.models.ranks.cuts import SharedHead

MAX_SPLITS = 32
_ROWS_A_TILE = 4  # of LoRA, in the mean: from there on experts' adapters take turns in a tile, too


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
    tables: Tensor  # int32 [sequences, blocks], of tokens alone
    table_rows: Tensor  # int32: each row's sequence in `tables`
    decode_rows: int
    splits: int
    prefill_tiles: Tensor | None = None
    num_prefill_tiles: int = 0
    lora: LoraStep | None = None
    states: StateStep | None = None  # of a model with recurrent layers
    logit_rows: Tensor | None = None  # int64: rows whose logits are wanted; None: all, in order


# Per layer: norm | qkv product | rotate and store | attention | o product | add and norm | gate-up product | gate |
# down product | add and norm (the next layer's); where a layer has an input of its own, gate product | gate | product |
# add and norm behind that. In place of attention: delta_pass.py between two products. LoRA's shrink runs beside a
# product, or, with the expand, before it in steps that kernels/lora_tiles.py serves.
class Decoder:
    """Args:
    arena: every block of KV and adapters, flat; kv: the same, as elements of keys and values.
    layouts, layer_offsets: by attention; the latter: where its keys begin inside a block, in elements of `kv`.
    scales: by attention, of keys and values in FP8; cuts: see rotate_store.
    sites: int64 [sites, adapter slots, fields]; see kernels/lora.py.
    ropes: float32 [adapter slots, rotated / 2 + 1]; see rotate.row_angles.
    pdl: see the kernels package.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        arena: Tensor,
        kv: Tensor,
        layouts: Sequence[PagedLayout],
        layer_offsets: Sequence[int],
        scales: Sequence[tuple[float, float]],
        cuts: Tensor | None,
        sites: Tensor,
        ropes: Tensor,
        lora_chunks: int,
        max_rows: int,
        max_decode_rows: int,
        pdl: bool,
        experts: ExpertAdapters | None = None,
        states: StateLayout | None = None,
    ) -> None:
        self.weights = weights
        self._arena = arena
        self._layouts = layouts
        self._layer_caches = [kv[offset:] for offset in layer_offsets]
        self._scales, self._cuts = scales or [(1.0, 1.0)] * len(layer_offsets), cuts
        self._sites = sites
        self._ropes = ropes
        self._lora_chunks = lora_chunks
        device, dtype = arena.device, arena.dtype
        sizes = PassSizes.of(weights, lora_chunks=lora_chunks, max_rows=max_rows, max_decode_rows=max_decode_rows)

        def buffer(name: str) -> Tensor:
            return torch.zeros(sizes.rows[name], dtype=dtype, device=device)

        self._residual, self._normed = buffer("residual"), buffer("normed")
        group = weights.group
        self._delta = buffer("delta") if group is None else group.summed_buffer(*sizes.rows["delta"], dtype)
        if group is not None:
            self._head, self._heads = buffer("head"), buffer("heads")
        self._mixed, self._lora = buffer("mixed"), buffer("lora")
        self._routed = torch.zeros(sizes.scores, device=device) if sizes.scores else buffer("routed")
        self._q, self._gates, self._attended = buffer("q"), buffer("gates"), buffer("attended")
        self._gate_up, self._gated = buffer("gate_up"), buffer("gated")
        self._shared, self._shared_gates, self._branch = buffer("shared"), buffer("shared_gates"), buffer("branch")
        self._experts = None
        if sizes.mixture is not None:
            assert experts is not None
            self._experts = ExpertMlp(sizes.mixture, experts, lora_chunks=lora_chunks, pdl=pdl)
        self._delta_pass = None
        if sizes.delta is not None:
            assert states is not None
            self._delta_pass = DeltaPass(sizes.delta, states, pdl=pdl)
        self._inputs = None
        if sizes.inputs is not None:
            self._inputs = InputPass(weights, sizes.inputs, dtype, device, pdl=pdl)
        self._logits = buffer("logits")
        self._lora_tiles = LoraTiles.where_it_runs(lora_chunks, dtype, device)
        self._low_rank = torch.zeros(sizes.low_rank, device=device)
        self._parts = torch.empty(sizes.parts, device=device)
        self._angles = torch.zeros(sizes.angles, device=device)
        self._counters = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._pdl = pdl
        shapes = {each.shape for each in weights.attentions}
        self.prefill_rows = max(map(prefill_block_m, shapes))  # of a tile, at most
        self._scratch = DecodeScratch(max_decode_rows, widest(shapes), MAX_SPLITS, device)
        block_size, is_fp8 = layouts[0].block_size, kv.dtype.itemsize == 1
        self._decode_attention = {
            shape: DecodeAttention.where_it_runs(shape, block_size, dtype, device, is_fp8=is_fp8) for shape in shapes
        }
        self._sinks = [None if each.sinks is None else each.sinks.float() for each in weights.attentions]
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
            if isinstance(layer.mixer, RecurrentMixer):
                product, lora = self._recur(layer.mixer, normed, delta, step)
            else:
                product, lora = self._attention(layer.mixer, normed, delta, step, ropes)
            self._norm(product, residual, normed, layer.mixer_post_norm, layer.ffn_norm, step, lora)
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

    def _attention(
        self,
        mixer: SelfAttention,
        normed: Tensor,
        delta: Tensor,
        step: DeviceStep,
        ropes: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, LoraRows | None]:
        rows, width = step.rows, mixer.o.in_features
        q, gates, attended = (_rows_of(each, rows, width) for each in (self._q, self._gates, self._attended))
        qkv, lora = self._product(mixer.qkv, normed, _rows_of(self._mixed, rows, mixer.qkv.out_features), step)
        is_gated = mixer.shape.is_gated
        self._rotate(mixer, qkv, q, gates if is_gated else None, step, lora, *ropes[mixer.rope])
        self._attend(mixer, q, attended, step)
        if is_gated:
            gate_attended(attended, gates, num_rows=step.num_rows, pdl=self._pdl)
        return self._summed(mixer.o, attended, delta, step)

    def _recur(
        self, mixer: RecurrentMixer, normed: Tensor, delta: Tensor, step: DeviceStep
    ) -> tuple[Tensor, LoraRows | None]:
        assert mixer.inputs is not None
        assert self._delta_pass is not None
        assert step.states is not None
        whole = _rows_of(self._mixed, step.rows, mixer.inputs.out_features)
        out = _rows_of(self._attended, step.rows, mixer.out.in_features)
        product, lora = self._product(mixer.inputs, normed, whole, step)
        self._delta_pass.run(
            mixer,
            product,
            lora,
            whole,
            out,
            states=step.states,
            table_rows=step.table_rows,
            positions=step.positions,
            num_rows=step.num_rows,
        )
        return self._summed(mixer.out, out, delta, step)

    def _mlp(
        self, mlp: DenseMlp | MixtureMlp, normed: Tensor, delta: Tensor, step: DeviceStep
    ) -> tuple[Tensor, LoraRows | None]:
        if isinstance(mlp, MixtureMlp):
            if mlp.branch is not None:
                return self._branched(mlp, mlp.branch, normed, delta, step)[None], None
            self._mixture(mlp, normed, self._routed_to(mlp, normed, step), delta, step)
            if mlp.shared is not None:
                self._add_shared(mlp.shared, normed, delta, step)
            if self.weights.group is not None:
                self.weights.group.all_reduce(delta)
            return delta[None], None
        return self._summed(mlp.down, self._gated_rows(mlp, normed, step), delta, step)

    def _gated_rows(self, mlp: DenseMlp, normed: Tensor, step: DeviceStep) -> Tensor:
        gated = _rows_of(self._gated, step.rows, mlp.down.in_features)
        both = _rows_of(self._gate_up, step.rows, mlp.gate_up.out_features)
        gate_up, lora = self._product(mlp.gate_up, normed, both, step, expands=False)
        self._gate(mlp.gate_up, gate_up, gated, step, lora)
        return gated

    def _add_shared(self, shared: SharedExpert, normed: Tensor, delta: Tensor, step: DeviceStep) -> None:
        gates = None
        if shared.gate is not None:
            gates = self._shared_gates[: step.rows]
            product, lora = self._product(shared.gate, normed, gates, step, expands=False)
            combine(product, gates, num_rows=step.num_rows, lora=lora, pdl=self._pdl)
        gated = self._gated_rows(shared.mlp, normed, step)
        product, lora = self._product(shared.mlp.down, gated, self._shared[: step.rows], step)
        combine(product, delta, num_rows=step.num_rows, lora=lora, adds=True, gates=gates, pdl=self._pdl)

    def _branched(
        self, mlp: MixtureMlp, branch: DenseBranch, residual: Tensor, delta: Tensor, step: DeviceStep
    ) -> Tensor:
        """residual: the layer's as it is, which stays. [rows, hidden]: what joins it, before the norm of both."""
        x, total = self._branch[: step.rows], self._shared[: step.rows].zero_()
        self._norm(None, residual, x, None, branch.norm, step, None)
        product, lora = self._summed(branch.mlp.down, self._gated_rows(branch.mlp, x, step), delta, step)
        self._norm(product, total, x, branch.post_norm, None, step, lora)
        self._norm(None, residual, x, None, branch.router_norm, step, None)
        routed = self._routed_to(mlp, x, step)
        self._norm(None, residual, x, None, branch.experts_norm, step, None)
        self._mixture(mlp, x, routed, delta, step)
        if self.weights.group is not None:
            self.weights.group.all_reduce(delta)
        self._norm(delta[None], total, x, branch.experts_post_norm, None, step, None)
        return total

    def _routed_to(self, mlp: MixtureMlp, x: Tensor, step: DeviceStep) -> tuple[Tensor, LoraRows | None]:
        routed = _rows_of(self._routed, step.rows, mlp.router.out_features)
        return self._product(mlp.router, x, routed, step, expands=False)

    def _mixture(
        self, mlp: MixtureMlp, x: Tensor, routed: tuple[Tensor, LoraRows | None], delta: Tensor, step: DeviceStep
    ) -> None:
        assert self._experts is not None
        self._experts.run(
            mlp,
            x,
            *routed,
            delta,
            num_rows=step.num_rows,
            row_adapters=None if step.lora is None else step.lora.row_adapters,
            by_tile=step.lora is not None and 0 < _ROWS_A_TILE * step.lora.num_tiles <= step.rows,
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
            outputs = _rows_of(self._lora, x.shape[0], projection.out_features)
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
        is_whole = gate_up.shape[0] == 1 and gate_up.dtype == gated.dtype
        tiled = lora is not None and is_whole and activation != "gelu"
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
        self,
        mixer: SelfAttention,
        qkv: Tensor,
        q: Tensor,
        gates: Tensor | None,
        step: DeviceStep,
        lora: LoraRows | None,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        rotate_store(
            qkv,
            q,
            self._layer_caches[mixer.index],
            tables=step.tables,
            table_rows=step.table_rows,
            positions=step.positions,
            cos=cos,
            sin=sin,
            q_norm=mixer.q_norm,
            k_norm=mixer.k_norm,
            eps=self.weights.eps,
            weight_plus_one=self.weights.norm_weight_plus_one,
            num_heads=mixer.shape.num_heads,
            num_kv_heads=mixer.shape.num_kv_heads,
            head_dim=mixer.shape.head_dim,
            layout=self._layouts[mixer.index],
            num_rows=step.num_rows,
            lora=lora,
            num_slots=len(mixer.qkv.site.slots),
            kv_products=mixer.kv_products,
            norms_values=mixer.norms_values,
            gates=gates,
            angles_by_row=step.lora is not None and len(self.weights.ropes) == 1,
            scales=self._scales[mixer.index],
            cuts=self._cuts,
            query_scales=self.weights.query_scales,
            pdl=self._pdl,
        )

    def _attend(self, mixer: SelfAttention, q: Tensor, attended: Tensor, step: DeviceStep) -> None:
        shape, cache, sinks = mixer.shape, self._layer_caches[mixer.index], self._sinks[mixer.index]
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
                layout=self._layouts[mixer.index],
                scratch=self._scratch,
                splits=step.splits,
                pdl=self._pdl,
                sinks=sinks,
                scales=self._scales[mixer.index],
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
                layout=self._layouts[mixer.index],
                sinks=sinks,
                scales=self._scales[mixer.index],
            )


def _rows_of(buffer: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width], of a buffer that may be wider."""
    return buffer.view(-1)[: rows * width].view(rows, width) if buffer.numel() else buffer
