from __future__ import annotations

import pytest
import torch
from manylora_worker.models.layers.mixture import Routing, chosen_experts

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels.experts_route import TILE_FIELDS, Groups, group, most_tiles, route

from tests.numerics.interpreter import DEVICES

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize(("rows", "there", "count", "top_k"), [(1, 1, 8, 3), (11, 9, 6, 2), (600, 577, 128, 8)])
def test_pairs_stand_by_expert_and_in_order(
    rows: int, there: int, count: int, top_k: int, is_sigmoid: bool, device: str
) -> None:
    if rows > 100 and device == "cpu":
        rows, there = 30, 27
    torch.manual_seed(rows)
    parts, scales = torch.randn(2, rows, count), torch.rand(count, device=device) if rows == 11 or is_sigmoid else None
    bias = torch.randn(count, device=device) if is_sigmoid else None
    routing = Routing(top_k, count != 128, is_sigmoid, bias, scales)
    pairs, block_m = rows * top_k, 16

    def buffer(length: int) -> torch.Tensor:
        return torch.full((length,), -1, dtype=torch.int32, device=device)

    tiles = buffer(most_tiles(pairs, count, block_m) * TILE_FIELDS).view(-1, TILE_FIELDS)
    groups = Groups(buffer(pairs), tiles, buffer(1), block_m)
    chosen, shares = buffer(pairs), torch.zeros(pairs, device=device)
    route(
        parts.to(device), chosen, shares, groups, routing, num_experts=count,
        num_rows=torch.tensor([there], dtype=torch.int32, device=device), lora=None, dtype=torch.float32, pdl=False,
    )  # fmt: skip
    wanted, experts = (each.cpu() for each in chosen_experts(parts.to(device).sum(0)[:there], routing))
    assert torch.equal(chosen.cpu().view(rows, top_k)[:there].long(), experts)
    assert (chosen.cpu().view(rows, top_k)[there:] == count).all()
    torch.testing.assert_close(shares.cpu().view(rows, top_k)[:there], wanted)
    if rows == 1:  # grouped already, in the order of its shares
        assert groups.tiles[:top_k, :3].tolist() == [[i, 1, expert] for i, expert in enumerate(experts[0].tolist())]
        assert groups.order.tolist() == list(range(top_k))
        assert int(groups.count) == top_k
    group(chosen, groups, num_experts=count, pdl=False)
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    assert torch.equal(groups.order[: there * top_k].cpu().long(), order)
    seen = []
    for first, pairs_there, expert, _ in groups.tiles[: int(groups.count)].tolist():
        assert 0 < pairs_there <= block_m
        assert (flat[order[first : first + pairs_there]] == expert).all()
        seen += range(first, first + pairs_there)
    assert seen == list(range(there * top_k))
