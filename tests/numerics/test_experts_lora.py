from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import experts_lora
from manylora_worker.models.cuda.kernels.experts_lora import ExpertRows, expand, gate, join, shrink

from tests.numerics.interpreter import DEVICES
from tests.numerics.test_expert_tables import EXPERTS_ALONE, SHAPE, SITES, filled, made

pytestmark = pytest.mark.kernels
ROWS, TOP_K = 4, 2


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_of_mixed_adapters(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_lora, "_K_OF_SPLIT", 8)  # so that a shrink has parts
    adapters = [made(dict.fromkeys(EXPERTS_ALONE, 20), 1, device), made({"q": 3, "e.2.down_proj": 5}, 2, device)]
    arena, flat, fields = filled(adapters, device)
    assert arena.experts is not None
    slots = [arena.slot_of(adapter.uid) for adapter in adapters]
    by_row = [slots[0], 0, slots[1], slots[0]]
    chosen = torch.tensor([4, 0, 1, 2, 2, 3, SHAPE.experts, SHAPE.experts], dtype=torch.int32, device=device)
    x = torch.randn(ROWS, 16, device=device)
    both, gated = torch.randn(8, 16, device=device), torch.full((8, 8), 7.0, device=device)

    def rows(which: int, in_features: int) -> ExpertRows:
        splits = experts_lora.low_rank_splits(in_features, 8)
        return ExpertRows(
            weights=flat, table=arena.experts[which], a_groups=fields.a_groups,
            row_adapters=torch.tensor(by_row, dtype=torch.int32, device=device), experts=chosen,
            low_rank=torch.full((splits, 8, (2 - which) * 32), float("nan"), device=device), max_rank=32,
            num_experts=SHAPE.experts, top_k=TOP_K, slots=2 - which,
        )  # fmt: skip

    outputs = torch.randn(8, 16, device=device)
    before = outputs.clone()
    first, second = rows(0, 16), rows(1, 8)
    assert first.low_rank.shape[0] == 2
    shrink(x, first, pairs_a_row=TOP_K, pdl=False)
    gate(both, gated, first, activation="silu", pdl=False)
    shrink(gated, second, pairs_a_row=1, pdl=False)
    expand(outputs, second, pdl=False)
    placed = {slot: adapter.on(torch.device(device)).experts for slot, adapter in zip(slots, adapters, strict=True)}

    def delta(pair: int, site: int, inputs: torch.Tensor) -> torch.Tensor:
        weights = placed.get(by_row[pair // TOP_K], {}).get(site)
        count, expert = SITES[site].slots_an_expert, int(chosen[pair])
        if weights is None:
            return torch.zeros(16, device=device)
        own = weights.slots[expert * count : (expert + 1) * count]
        return torch.cat([inputs @ weights.a_t[:, each.start : each.stop] @ each.b for each in own])

    for pair in range(6):
        wide = both[pair] + delta(pair, 1, x[pair // TOP_K])
        torch.testing.assert_close(gated[pair], F.silu(wide[:8]) * wide[8:], atol=1e-4, rtol=1e-4)
        wanted = before[pair] + delta(pair, 2, gated[pair])
        torch.testing.assert_close(outputs[pair], wanted, atol=1e-4, rtol=1e-4)
    assert (gated[6:] == 7.0).all()
    assert torch.equal(outputs[6:], before[6:])
    joined = torch.full((ROWS, 16), 7.0, device=device)
    shares = torch.rand(8, device=device)
    there = torch.tensor([3], dtype=torch.int32, device=device)
    join(outputs, shares, joined, num_rows=there, top_k=TOP_K, pdl=False)
    wanted = (outputs * shares[:, None]).view(ROWS, TOP_K, -1).sum(1)
    torch.testing.assert_close(joined[:3], wanted[:3])
    assert (joined[3] == 7.0).all()
