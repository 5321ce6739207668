from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import experts_lora
from manylora_worker.models.cuda.kernels.experts_lora import FIRST_GROUP_FIELD, ExpertRows
from manylora_worker.models.cuda.kernels.experts_lora_tiles import shrink_tiles
from manylora_worker.models.cuda.kernels.experts_product import grouped_product
from manylora_worker.models.cuda.kernels.experts_route import TILE_FIELDS, Groups, group, most_tiles
from manylora_worker.models.quantized.stacks import QuantizedStack, nf4_stack
from manylora_worker.weights.sites import ExpertShape

from tests.numerics.interpreter import DEVICES
from tests.numerics.test_expert_tables import filled, made, sites_of
from tests.numerics.test_experts_product import in_codes, whole

pytestmark = pytest.mark.kernels
RANKS = (3, 20, 0, 1, 16)  # of adapters; 0: it leaves experts alone
MAX_RANK = 32
TILE = 64


class Adapters:
    """Of a layer's experts, in an arena whose blocks hold some of them, and what a row's adapter adds to a product."""

    def __init__(self, shape: ExpertShape, x: Tensor) -> None:
        device, sites = str(x.device), sites_of(shape)
        self._shape, self._sites = shape, sites[1:]
        own = [
            made(dict.fromkeys((slot.path for site in self._sites for slot in site.slots), rank) if rank else {"q": 3},
                 seed, device, sites)
            for seed, rank in enumerate(RANKS)
        ]  # fmt: skip
        own = [replace(each, buffer=(each.buffer * (3 / 16)).to(x.dtype)) for each in own]
        largest = 2 * MAX_RANK * max(shape.hidden, shape.width)
        self._arena, self.flat, self._fields = filled(own, device, sites, 2 * largest, 8 * shape.experts * len(RANKS))
        self.slots = [0, *(self._arena.slot_of(each.uid) for each in own)]
        placed = [each.on(x.device).experts for each in own]
        self._placed = {slot: each for slot, each in zip(self.slots[1:], placed, strict=True)}

    def rows(self, which: int, row_adapters: Tensor, chosen: Tensor, splits: int) -> ExpertRows:
        assert self._arena.experts is not None
        slots = self._sites[which].slots_an_expert
        low_rank = torch.full((splits, len(chosen), slots * MAX_RANK), float("nan"), device=chosen.device)
        return ExpertRows(
            weights=self.flat, table=self._arena.experts[which], a_groups=self._fields.a_groups,
            row_adapters=row_adapters, experts=chosen, low_rank=low_rank, max_rank=MAX_RANK,
            num_experts=self._shape.experts, top_k=self._shape.top_k, slots=slots,
        )  # fmt: skip

    def delta(self, which: int, slot: int, expert: int, x: Tensor) -> Tensor | float:
        """[rows, slots * out], float32."""
        site = self._sites[which]
        weights = self._placed.get(slot, {}).get(site.index)
        if weights is None:
            return 0.0
        count = site.slots_an_expert
        own = weights.slots[expert * count : (expert + 1) * count]
        low = [(x.float() @ weights.a_t[:, each.start : each.stop].float()).to(x.dtype) for each in own]
        return torch.cat([s.float() @ each.b.float() for s, each in zip(low, own, strict=True)], 1)


def weight_in(kind: str, experts: int, outputs: int, inputs: int, x: Tensor) -> Tensor | QuantizedStack:
    weight = (torch.randn(experts, outputs, inputs, device=x.device) * inputs**-0.5).to(x.dtype)
    if kind == "nf4":
        return nf4_stack(weight, x.device, x.device)
    return weight if kind == "whole" else in_codes(weight, kind, 64)


def tiles_of(chosen: Tensor, experts: int) -> Groups:
    tiles = torch.zeros(most_tiles(len(chosen), experts, TILE), TILE_FIELDS, dtype=torch.int32, device=chosen.device)
    groups = Groups(torch.zeros_like(chosen), tiles, torch.zeros(1, dtype=torch.int32, device=chosen.device), TILE)
    group(chosen, groups, num_experts=experts, pdl=False)
    assert groups.is_wide
    return groups


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["whole", "fp8", "4 bits, shifted", "nf4"])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "hidden", "width"),
    [(90, 3, 2, 128, 64), (1500, 16, 4, 2048, 768), (90, 5, 2, 320, 64)],
)
def test_tiles_of_several_adapters(
    rows: int, experts: int, top_k: int, hidden: int, width: int, kind: str, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Some rows of all adapters, and prompts: each pair has its own adapter's and expert's matrices."""
    if device == "cpu" and hidden > 200:
        pytest.skip("a real shape takes minutes in the interpreter")
    monkeypatch.setattr(experts_lora, "_K_OF_SPLIT", 80 if hidden < 200 else 1024)  # so that a shrink has parts
    torch.manual_seed(rows)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    adapters = Adapters(ExpertShape(experts, hidden, width, top_k), x)
    count = len(adapters.slots)
    few, long = torch.arange(12) % count, torch.arange(rows - 12) * count // (rows - 12)
    row_adapters = torch.tensor(adapters.slots)[torch.cat([few, long])].int().to(device)
    chosen = torch.rand(rows, experts, device=device).topk(top_k).indices.flatten().int()
    chosen[-top_k:] = experts  # the last row is not there
    groups = tiles_of(chosen, experts)
    gate_up, down = weight_in(kind, experts, 2 * width, hidden, x), weight_in(kind, experts, hidden, width, x)
    gated, outputs = (x.new_full((len(chosen), columns), 7.0) for columns in (width, hidden))
    lora = adapters.rows(0, row_adapters, chosen, experts_lora.low_rank_splits(hidden, len(chosen)))
    shrink_tiles(x, lora, groups, pairs_a_row=top_k, pdl=False)
    grouped_product(x, gate_up, gated, groups, pairs_a_row=top_k, gates="silu", halves=2, lora=lora, pdl=False)
    lora = adapters.rows(1, row_adapters, chosen, experts_lora.low_rank_splits(width, len(chosen)))
    shrink_tiles(gated, lora, groups, pairs_a_row=1, pdl=False)
    grouped_product(gated, down, outputs, groups, pairs_a_row=1, lora=lora, pdl=False)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.06, "rtol": 0.03}
    by_pair = row_adapters.repeat_interleave(top_k)
    for expert in range(experts):
        weights = [
            each[expert].float() if isinstance(each, Tensor) else whole(each, expert) for each in (gate_up, down)
        ]
        for slot in adapters.slots:
            own = ((chosen == expert) & (by_pair == slot)).nonzero()[:, 0]
            taken = x[own // top_k]
            wide = taken.float() @ weights[0].T + adapters.delta(0, slot, expert, taken)
            gates, ups = wide.chunk(2, 1)
            torch.testing.assert_close(gated[own].float(), F.silu(gates) * ups, **tolerance)
            wanted = gated[own].float() @ weights[1].T + adapters.delta(1, slot, expert, gated[own])
            torch.testing.assert_close(outputs[own].float(), wanted, **tolerance)
    assert (gated[-top_k:] == 7.0).all()
    assert (outputs[-top_k:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["whole", "4 bits, shifted"])
def test_what_is_no_number_stays_with_its_adapter(kind: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(40, 64, device=device, dtype=dtype)
    adapters = Adapters(ExpertShape(1, 128, 64, 1), x)
    _, one, bad, _, _, other = adapters.slots
    row_adapters = torch.tensor([one, bad, 0, other], dtype=torch.int32, device=device).repeat(10)
    chosen = torch.zeros(40, dtype=torch.int32, device=device)
    groups, out = tiles_of(chosen, 1), x.new_zeros(40, 128)
    lora = adapters.rows(1, row_adapters, chosen, 1)
    for start, size in ((FIRST_GROUP_FIELD, 64), (FIRST_GROUP_FIELD + lora.a_groups, 128)):  # its a, and its b
        at = int(lora.table[bad, start])
        adapters.flat[at : at + RANKS[1] * size] = float("nan")
    shrink_tiles(x, lora, groups, pairs_a_row=1, pdl=False)
    grouped_product(x, weight_in(kind, 1, 128, 64, x), out, groups, pairs_a_row=1, lora=lora, pdl=False)
    assert out[row_adapters != bad].isfinite().all()
    assert out[row_adapters == bad].isnan().all()
