"""One forward pass of a decoder, as a fixed sequence of kernels over preallocated buffers.

No decision of the host depends on the batch's content: rows, blocks and adapters stand in device tensors (DeviceStep),
so a CUDA graph replays the pass for other batches of the same shape (rows, LoRA or none, how a context is split).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from manylora_worker.models.cuda.expert_tables import ExpertAdapters
from manylora_worker.models.cuda.forward.delta_pass import DeltaPass
from manylora_worker.models.cuda.forward.device_step import DeviceStep
from manylora_worker.models.cuda.forward.layer_inputs import InputPass
from manylora_worker.models.cuda.forward.mlp import MlpPass
from manylora_worker.models.cuda.forward.pass_sizes import PassSizes, widest
from manylora_worker.models.cuda.forward.products import Products, rows_of
from manylora_worker.models.cuda.kernels.add_norm import Norms
from manylora_worker.models.cuda.kernels.attention import (
    DecodeScratch,
    PagedLayout,
    attend_decode,
    attend_prefill,
    prefill_block_m,
)
from manylora_worker.models.cuda.kernels.attention_decode import DecodeAttention
from manylora_worker.models.cuda.kernels.delta_net import StateLayout
from manylora_worker.models.cuda.kernels.gate import gate_attended
from manylora_worker.models.cuda.kernels.lora import LoraRows
from manylora_worker.models.cuda.kernels.rotate import rotate_store, row_angles
from manylora_worker.models.decoder.weights import (
    DecoderWeights,
    RecurrentMixer,
    SelfAttention,
)
from manylora_worker.models.ranks.cuts import SharedHead

MAX_SPLITS = 32


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
        self._layouts = layouts
        self._layer_caches = [kv[offset:] for offset in layer_offsets]
        self._scales, self._cuts = scales or [(1.0, 1.0)] * len(layer_offsets), cuts
        self._ropes = ropes
        device, dtype = arena.device, arena.dtype
        sizes = PassSizes.of(weights, lora_chunks=lora_chunks, max_rows=max_rows, max_decode_rows=max_decode_rows)

        def buffer(name: str) -> Tensor:
            return torch.zeros(sizes.rows[name], dtype=dtype, device=device)

        self._residual, self._normed = buffer("residual"), buffer("normed")
        group = weights.group
        self._delta = buffer("delta") if group is None else group.summed_buffer(*sizes.rows["delta"], dtype)
        if group is not None:
            self._head, self._heads = buffer("head"), buffer("heads")
        self._mixed = buffer("mixed")
        self._q, self._gates, self._attended = buffer("q"), buffer("gates"), buffer("attended")
        self._norms = Norms(weights, max_rows, device, pdl=pdl)
        self._products = Products(sizes, arena=arena, sites=sites, group=group, lora_chunks=lora_chunks, pdl=pdl)
        self._mlp = MlpPass(
            weights, sizes, self._products, self._norms, experts, dtype=dtype, device=device, lora_chunks=lora_chunks,
            pdl=pdl,
        )  # fmt: skip
        self._delta_pass = None
        if sizes.delta is not None:
            assert states is not None
            self._delta_pass = DeltaPass(sizes.delta, states, pdl=pdl)
        self._inputs = None
        if sizes.inputs is not None:
            self._inputs = InputPass(weights, sizes.inputs, dtype, device, pdl=pdl)
        self._logits = buffer("logits")
        self._angles = torch.zeros(sizes.angles, device=device)
        self._pdl = pdl
        shapes = {each.shape for each in weights.attentions}
        self.prefill_rows = max(map(prefill_block_m, shapes))  # of a tile, at most
        self._scratch = DecodeScratch(max_decode_rows, widest(shapes), MAX_SPLITS, device)
        block_size, is_fp8 = layouts[0].block_size, kv.dtype.itemsize == 1
        self._decode_attention = {
            shape: DecodeAttention.where_it_runs(shape, block_size, dtype, device, is_fp8=is_fp8) for shape in shapes
        }
        self._sinks = [None if each.sinks is None else each.sinks.float() for each in weights.attentions]

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
        product_of = partial(self._products.of, step=step, expands=False)
        inputs = None
        if self._inputs is not None:
            inputs = self._inputs.of_tokens(token_ids, residual, product_of, num_rows=step.num_rows)
        ropes = self._step_ropes(step)
        self._norms.add(None, residual, normed, None, weights.layers[0].input_norm, step.num_rows, None)
        for i, layer in enumerate(weights.layers):
            if isinstance(layer.mixer, RecurrentMixer):
                product, lora = self._recur(layer.mixer, normed, delta, step)
            else:
                product, lora = self._attention(layer.mixer, normed, delta, step, ropes)
            self._norms.add(product, residual, normed, layer.mixer_post_norm, layer.ffn_norm, step.num_rows, lora)
            product, lora = self._mlp.run(layer.mlp, normed, delta, step)
            is_last = i + 1 == len(weights.layers)
            next_norm = weights.final_norm if is_last else weights.layers[i + 1].input_norm
            post_norm, own = layer.ffn_post_norm, layer.input
            if own is not None and self._inputs is not None and inputs is not None:
                self._norms.add(product, residual, normed, post_norm, None, step.num_rows, lora)
                gated = self._inputs.of_layer(own, i, normed, inputs, product_of, num_rows=step.num_rows)
                product, lora = self._products.of(own.projection, gated, delta, step)
                post_norm = own.norm
            self._norms.add(product, residual, normed, post_norm, next_norm, step.num_rows, lora, factor=layer.scale)

    def _attention(
        self,
        mixer: SelfAttention,
        normed: Tensor,
        delta: Tensor,
        step: DeviceStep,
        ropes: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, LoraRows | None]:
        rows, width = step.rows, mixer.o.in_features
        q, gates, attended = (rows_of(each, rows, width) for each in (self._q, self._gates, self._attended))
        qkv, lora = self._products.of(mixer.qkv, normed, rows_of(self._mixed, rows, mixer.qkv.out_features), step)
        is_gated = mixer.shape.is_gated
        self._rotate(mixer, qkv, q, gates if is_gated else None, step, lora, *ropes[mixer.rope])
        self._attend(mixer, q, attended, step)
        if is_gated:
            gate_attended(attended, gates, num_rows=step.num_rows, pdl=self._pdl)
        return self._products.summed(mixer.o, attended, delta, step)

    def _recur(
        self, mixer: RecurrentMixer, normed: Tensor, delta: Tensor, step: DeviceStep
    ) -> tuple[Tensor, LoraRows | None]:
        assert mixer.inputs is not None
        assert self._delta_pass is not None
        assert step.states is not None
        whole = rows_of(self._mixed, step.rows, mixer.inputs.out_features)
        out = rows_of(self._attended, step.rows, mixer.out.in_features)
        product, lora = self._products.of(mixer.inputs, normed, whole, step)
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
        return self._products.summed(mixer.out, out, delta, step)

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
            own = self._products.matrix(normed, head.part.weight, self._head[:rows])
            group.gather_columns(own, self._heads[: group.size * rows].view(group.size, rows, -1), logits)
        else:
            self._products.matrix(normed, head.weight, logits)
        softcap = self.weights.logit_softcap
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits

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
