from __future__ import annotations

import torch
import torch.nn.functional as F
from manylora_shared.ids import AdapterUid
from manylora_worker.models.experts import _down_site, _gate_up_site
from manylora_worker.models.layers.lora_linear import LoraSwitch, Segment
from manylora_worker.models.layers.mixture import ExpertLora, LoraExperts, Routing, chosen_experts
from manylora_worker.weights.layout import HostAdapter, elements_of, lay_out
from manylora_worker.weights.sites import ExpertShape
from torch import Tensor, nn

SHAPE = ExpertShape(experts=5, hidden=16, width=8, top_k=2)
SITES = (_gate_up_site(0, "e", SHAPE), _down_site(1, "e", SHAPE))
ROWS = 9


def made(ranks: dict[str, int], seed: int) -> HostAdapter:
    layout = lay_out(SITES, ranks)
    torch.manual_seed(seed)
    return HostAdapter(AdapterUid(f"a{seed}"), torch.randn(elements_of(layout)) * 0.3, layout)


def expected(experts: LoraExperts, x: Tensor, chosen: Tensor, shares: Tensor, parts: list[tuple[HostAdapter, float]]):  # type: ignore[no-untyped-def]
    """One row, by whole weights."""
    total = torch.zeros_like(x)
    for expert, share in zip(chosen.tolist(), shares, strict=True):
        gate_up, down = experts.gate_up[expert].clone(), experts.down[expert].clone()
        for adapter, weight in parts:
            placed = adapter.on(torch.device("cpu")).experts
            for weights, site, target in ((placed.get(0), SITES[0], gate_up), (placed.get(1), SITES[1], down)):
                for own in weights.slots if weights is not None else ():
                    slot, first = site.slots[own.slot], expert * site.expert_columns
                    if slot.path.startswith(f"e.{expert}."):
                        delta = (weights.a_t[:, own.start : own.stop] @ own.b).T
                        target[slot.start - first : slot.stop - first] += weight * delta
        gate, up = F.linear(x, gate_up).chunk(2)
        total += share * F.linear(F.silu(gate) * up, down)
    return total


def test_rows_of_mixed_adapters_and_compositions_at_the_same_experts() -> None:
    torch.manual_seed(0)
    switch = LoraSwitch()
    weights = torch.randn(5, 16, 16), torch.randn(5, 16, 8)
    experts = LoraExperts(
        *(nn.Parameter(each, requires_grad=False) for each in weights),
        lambda gate, up: F.silu(gate) * up,
        SITES,
        switch,
    )
    x = torch.randn(ROWS, 16)
    shares, chosen = chosen_experts(torch.randn(ROWS, 5), Routing(2, normalizes=True))
    torch.testing.assert_close(shares.sum(1), torch.ones(ROWS))
    one = made({slot.path: 3 for site in SITES for slot in site.slots}, 1)
    two = made({"e.0.gate_proj": 2, "e.3.gate_proj": 4, "e.1.up_proj": 4}, 2)  # the others are padding
    device = torch.device("cpu")
    segments = [
        Segment(0, 3, one.on(device)),
        Segment(4, 6, two.on(device)),
        Segment(6, 8, one.on(device), 0.5, [(two.on(device), -1.5)]),
    ]
    switch.experts = ExpertLora(segments)
    by_row = [[(one, 1.0)]] * 3 + [[]] + [[(two, 1.0)]] * 2 + [[(one, 0.5), (two, -1.5)]] * 2 + [[]]
    wanted = torch.stack([expected(experts, x[i], chosen[i], shares[i], parts) for i, parts in enumerate(by_row)])
    torch.testing.assert_close(experts(x, chosen, shares), wanted, atol=1e-4, rtol=1e-4)
    x[4] = float("nan")
    found = experts(x, chosen, shares)
    assert found.isnan().any(1).tolist() == [i == 4 for i in range(ROWS)]
