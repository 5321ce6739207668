from __future__ import annotations

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

from tests.numerics.interpreter import DEVICES
from tests.numerics.test_experts_product import in_codes, whole

pytestmark = pytest.mark.kernels
RANKS = [0, 3, 20, 0, 1, 16]  # by adapter slot: no adapter, and of slot 3 one that leaves experts alone
MAX_RANK = 32
TILE = 64


class Site:
    """Adapters' matrices for one of a layer's products: a [slots, rank, in] and b [slots, rank, out] by slot of the
    adapter and expert, and where they lie.
    """

    def __init__(self, experts: int, slots: int, inputs: int, outputs: int, x: Tensor) -> None:
        per_group, groups = (2, 3), (-(-experts // 2), -(-experts // 3))
        self.a_groups, self.slots, self.experts = groups[0], slots, experts
        words = torch.zeros(len(RANKS), FIRST_GROUP_FIELD + sum(groups), dtype=torch.int64)
        self.a: dict[tuple[int, int], Tensor] = {}
        self.b: dict[tuple[int, int], Tensor] = {}
        placed: list[Tensor] = []
        at = 0
        for adapter, rank in enumerate(RANKS):
            words[adapter, :FIRST_GROUP_FIELD] = torch.tensor([rank, *per_group])
            field = FIRST_GROUP_FIELD
            for made, width, size, count in ((self.a, inputs, *_of(0, per_group, groups)),
                                             (self.b, outputs, *_of(1, per_group, groups))):  # fmt: skip
                for first in range(0, size * count, size):
                    words[adapter, field] = at
                    field += 1
                    for expert in range(first, min(first + size, experts) if rank else first):
                        own = (torch.randn(slots, rank, width) * width**-0.5).to(x)
                        made[adapter, expert] = own
                        placed.append(own.flatten())
                        at += own.numel()
        self.weights = torch.cat([*placed, torch.full((64,), float("nan")).to(x)])
        self.table = words.to(x.device)

    def rows(self, row_adapters: Tensor, chosen: Tensor, top_k: int, splits: int) -> ExpertRows:
        low_rank = torch.full((splits, len(chosen), self.slots * MAX_RANK), float("nan"), device=chosen.device)
        return ExpertRows(
            weights=self.weights, table=self.table, a_groups=self.a_groups, row_adapters=row_adapters, experts=chosen,
            low_rank=low_rank, max_rank=MAX_RANK, num_experts=self.experts, top_k=top_k, slots=self.slots,
        )  # fmt: skip

    def delta(self, adapter: int, expert: int, x: Tensor) -> Tensor | float:
        """[rows, slots * out]"""
        if not RANKS[adapter]:
            return 0.0
        a, b = self.a[adapter, expert], self.b[adapter, expert]
        parts = [(x.float() @ a[i].float().T).to(b.dtype).float() @ b[i].float() for i in range(self.slots)]
        return torch.cat(parts, 1)


def _of(which: int, per_group: tuple[int, int], groups: tuple[int, int]) -> tuple[int, int]:
    return per_group[which], groups[which]


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
    few, long = torch.arange(12) % len(RANKS), torch.arange(rows - 12) * len(RANKS) // (rows - 12)
    row_adapters = torch.cat([few, long]).int().to(device)
    chosen = torch.rand(rows, experts, device=device).topk(top_k).indices.flatten().int()
    chosen[-top_k:] = experts  # the last row is not there
    groups = tiles_of(chosen, experts)
    gate_up, down = weight_in(kind, experts, 2 * width, hidden, x), weight_in(kind, experts, hidden, width, x)
    first, second = Site(experts, 2, hidden, width, x), Site(experts, 1, width, hidden, x)
    gated, outputs = (x.new_full((len(chosen), columns), 7.0) for columns in (width, hidden))
    lora = first.rows(row_adapters, chosen, top_k, experts_lora.low_rank_splits(hidden, len(chosen)))
    shrink_tiles(x, lora, groups, pairs_a_row=top_k, pdl=False)
    grouped_product(x, gate_up, gated, groups, pairs_a_row=top_k, gates="silu", halves=2, lora=lora, pdl=False)
    lora = second.rows(row_adapters, chosen, top_k, experts_lora.low_rank_splits(width, len(chosen)))
    shrink_tiles(gated, lora, groups, pairs_a_row=1, pdl=False)
    grouped_product(gated, down, outputs, groups, pairs_a_row=1, lora=lora, pdl=False)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.06, "rtol": 0.03}
    by_pair = row_adapters.repeat_interleave(top_k)
    for expert in range(experts):
        weights = [
            each[expert].float() if isinstance(each, Tensor) else whole(each, expert) for each in (gate_up, down)
        ]
        for adapter in range(len(RANKS)):
            own = ((chosen == expert) & (by_pair == adapter)).nonzero()[:, 0]
            taken = x[own // top_k]
            wide = taken.float() @ weights[0].T + first.delta(adapter, expert, taken)
            gates, ups = wide.chunk(2, 1)
            torch.testing.assert_close(gated[own].float(), F.silu(gates) * ups, **tolerance)
            wanted = gated[own].float() @ weights[1].T + second.delta(adapter, expert, gated[own])
            torch.testing.assert_close(outputs[own].float(), wanted, **tolerance)
    assert (gated[-top_k:] == 7.0).all()
    assert (outputs[-top_k:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["whole", "4 bits, shifted"])
def test_what_is_no_number_stays_with_its_adapter(kind: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(40, 128, device=device, dtype=dtype)
    row_adapters = torch.tensor([1, 2, 0, 5], dtype=torch.int32, device=device).repeat(10)
    chosen = torch.zeros(40, dtype=torch.int32, device=device)
    groups, site, out = tiles_of(chosen, 1), Site(1, 1, 128, 64, x), x.new_zeros(40, 64)
    rank, start = (
        RANKS[2],
        sum(each.numel() for (adapter, _), each in (*site.a.items(), *site.b.items()) if adapter < 2),
    )
    site.weights[start : start + 2 * rank * 96] = float("nan")  # its a and b
    lora = site.rows(row_adapters, chosen, 1, 1)
    shrink_tiles(x, lora, groups, pairs_a_row=1, pdl=False)
    grouped_product(x, weight_in(kind, 1, 64, 128, x), out, groups, pairs_a_row=1, lora=lora, pdl=False)
    assert out[row_adapters != 2].isfinite().all()
    assert out[row_adapters == 2].isnan().all()
