"""What follows a layer's mixer: an MLP, a mixture of experts, or one with an MLP beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora_worker.models.cuda.expert_tables import ExpertAdapters
from manylora_worker.models.cuda.forward.device_step import DeviceStep
from manylora_worker.models.cuda.forward.expert_mlp import ExpertMlp
from manylora_worker.models.cuda.forward.pass_sizes import PassSizes
from manylora_worker.models.cuda.forward.products import Products, rows_of
from manylora_worker.models.cuda.kernels.add_norm import Norms
from manylora_worker.models.cuda.kernels.combine import combine
from manylora_worker.models.cuda.kernels.gate import gate
from manylora_worker.models.cuda.kernels.lora import LoraRows
from manylora_worker.models.decoder.weights import (
    DecoderWeights,
    DenseBranch,
    DenseMlp,
    MixtureMlp,
    Projection,
    SharedExpert,
)

_ROWS_A_TILE = 4  # of LoRA, in the mean: from there on experts' adapters take turns in a tile, too


class MlpPass:
    def __init__(
        self,
        weights: DecoderWeights,
        sizes: PassSizes,
        products: Products,
        norms: Norms,
        experts: ExpertAdapters | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        lora_chunks: int,
        pdl: bool,
    ) -> None:
        def buffer(name: str) -> Tensor:
            return torch.zeros(sizes.rows[name], dtype=dtype, device=device)

        self._weights, self._products, self._norms, self._pdl = weights, products, norms, pdl
        self._routed = torch.zeros(sizes.scores, device=device) if sizes.scores else buffer("routed")
        self._gate_up, self._gated = buffer("gate_up"), buffer("gated")
        self._shared, self._shared_gates, self._branch = buffer("shared"), buffer("shared_gates"), buffer("branch")
        self._experts = None
        if sizes.mixture is not None:
            assert experts is not None
            self._experts = ExpertMlp(sizes.mixture, experts, lora_chunks=lora_chunks, pdl=pdl)

    def run(
        self, mlp: DenseMlp | MixtureMlp, normed: Tensor, delta: Tensor, step: DeviceStep
    ) -> tuple[Tensor, LoraRows | None]:
        if isinstance(mlp, MixtureMlp):
            if mlp.branch is not None:
                return self._branched(mlp, mlp.branch, normed, delta, step)[None], None
            self._mixture(mlp, normed, self._routed_to(mlp, normed, step), delta, step)
            if mlp.shared is not None:
                self._add_shared(mlp.shared, normed, delta, step)
            if self._weights.group is not None:
                self._weights.group.all_reduce(delta)
            return delta[None], None
        return self._products.summed(mlp.down, self._gated_rows(mlp, normed, step), delta, step)

    def _gated_rows(self, mlp: DenseMlp, normed: Tensor, step: DeviceStep) -> Tensor:
        gated = rows_of(self._gated, step.rows, mlp.down.in_features)
        both = rows_of(self._gate_up, step.rows, mlp.gate_up.out_features)
        gate_up, lora = self._products.of(mlp.gate_up, normed, both, step, expands=False)
        self._gate(mlp.gate_up, gate_up, gated, step, lora)
        return gated

    def _add_shared(self, shared: SharedExpert, normed: Tensor, delta: Tensor, step: DeviceStep) -> None:
        gates = None
        if shared.gate is not None:
            gates = self._shared_gates[: step.rows]
            product, lora = self._products.of(shared.gate, normed, gates, step, expands=False)
            combine(product, gates, num_rows=step.num_rows, lora=lora, pdl=self._pdl)
        gated = self._gated_rows(shared.mlp, normed, step)
        product, lora = self._products.of(shared.mlp.down, gated, self._shared[: step.rows], step)
        combine(product, delta, num_rows=step.num_rows, lora=lora, adds=True, gates=gates, pdl=self._pdl)

    def _branched(
        self, mlp: MixtureMlp, branch: DenseBranch, residual: Tensor, delta: Tensor, step: DeviceStep
    ) -> Tensor:
        """residual: the layer's as it is, which stays. [rows, hidden]: what joins it, before the norm of both."""
        x, total = self._branch[: step.rows], self._shared[: step.rows].zero_()
        self._norms.add(None, residual, x, None, branch.norm, step.num_rows, None)
        product, lora = self._products.summed(branch.mlp.down, self._gated_rows(branch.mlp, x, step), delta, step)
        self._norms.add(product, total, x, branch.post_norm, None, step.num_rows, lora)
        self._norms.add(None, residual, x, None, branch.router_norm, step.num_rows, None)
        routed = self._routed_to(mlp, x, step)
        self._norms.add(None, residual, x, None, branch.experts_norm, step.num_rows, None)
        self._mixture(mlp, x, routed, delta, step)
        if self._weights.group is not None:
            self._weights.group.all_reduce(delta)
        self._norms.add(delta[None], total, x, branch.experts_post_norm, None, step.num_rows, None)
        return total

    def _routed_to(self, mlp: MixtureMlp, x: Tensor, step: DeviceStep) -> tuple[Tensor, LoraRows | None]:
        routed = rows_of(self._routed, step.rows, mlp.router.out_features)
        return self._products.of(mlp.router, x, routed, step, expands=False)

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
            beside=self._products.beside,
            end_beside=self._products.end_beside,
        )

    def _gate(
        self, projection: Projection, gate_up: Tensor, gated: Tensor, step: DeviceStep, lora: LoraRows | None
    ) -> None:
        num_slots, activation = len(projection.site.slots), self._weights.activation
        is_whole = gate_up.shape[0] == 1 and gate_up.dtype == gated.dtype
        tiled = lora is not None and is_whole and activation != "gelu"
        tiles = self._products.tiles_for(lora, gated) if lora is not None and tiled else None
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
