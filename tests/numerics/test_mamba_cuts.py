"""Ranks' shares of a Mamba layer: together they are the layer, and its norm is that of all heads."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import torch
from manylora_worker.models.layers.mamba import find_mambas
from manylora_worker.models.ranks.group import RankGroup
from manylora_worker.models.ranks.mamba_cuts import SharedGatedNorm, cut_mambas, mamba_outputs
from transformers import AutoModelForCausalLM

from tests.numerics.families import RECURRENT


class Other(RankGroup):
    """A rank to whose sums another adds what it is told."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.added: torch.Tensor | float = 0.0

    def all_reduce(self, x: torch.Tensor) -> None:
        x += self.added


@pytest.mark.parametrize("name", ["granite4_h", "granite4_h_wide"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_output_is_some_ranks_and_of_one_group_every_ranks(name: str, size: int) -> None:
    config = RECURRENT[name]()
    config.mamba_n_groups = 4 if name == "granite4_h" else 1
    values, keys = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    count = 2 * values + 2 * keys + config.mamba_n_heads
    own = [mamba_outputs("model.layers.2.mamba.in_proj", config, rank, size) for rank in range(size)]
    on = Counter(chain.from_iterable(chain.from_iterable(own)))
    assert sorted(on) == list(range(count))
    shared = set(range(2 * values, 2 * values + 2 * keys)) if config.mamba_n_groups == 1 else set()
    assert all(number == (size if output in shared else 1) for output, number in on.items())
    assert mamba_outputs("model.layers.2.mamba.out_proj", config, 0, size) == ()
    assert mamba_outputs("model.layers.0.self_attn.in_proj", RECURRENT["qwen3_5_text"](), 0, size) == ()


@pytest.mark.parametrize("name", ["granite4_h", "granite4_h_wide"])
def test_a_rank_has_its_heads(name: str) -> None:
    model = AutoModelForCausalLM.from_config(RECURRENT[name]()).eval()
    (path, whole), *_ = find_mambas(model).items()
    kept = {key: value.clone() for key, value in whole.state_dict().items()}
    heads, values, dim = whole.num_heads, whole.intermediate_size, whole.head_dim
    cut_mambas(model, Other(1, 2))
    assert find_mambas(model)[path] is whole, "it is still known as one"
    assert (whole.num_heads, whole.intermediate_size) == (heads // 2, values // 2)
    assert whole.conv_dim == whole.conv1d.weight.shape[0] == whole.in_proj.out_features - values // 2 - heads // 2
    for each in ("A_log", "D", "dt_bias"):
        assert torch.equal(getattr(whole, each), kept[each][heads // 2 :])
    gates, inputs = whole.in_proj.weight[: values // 2], whole.in_proj.weight[values // 2 : values]
    assert torch.equal(gates, kept["in_proj.weight"][values // 2 : values])
    assert torch.equal(inputs, kept["in_proj.weight"][values + dim * heads // 2 : 2 * values])
    assert torch.equal(whole.conv1d.weight[: values // 2], kept["conv1d.weight"][values // 2 : values])


def test_the_norm_is_that_of_all_heads() -> None:
    model = AutoModelForCausalLM.from_config(RECURRENT["granite4_h"]())
    norm = next(iter(find_mambas(model).values())).norm
    width = norm.weight.shape[0]
    norm.weight.data.uniform_(0.5, 2.0)
    x, gate = torch.randn(3, width), torch.randn(3, width)
    gated = x * torch.nn.functional.silu(gate)
    shares = [range(width // 2), range(width // 2, width)]
    found = []
    for rank, own in enumerate(shares):
        group, other = Other(rank, 2), shares[1 - rank]
        group.added = gated[:, other.start : other.stop].square().sum(1, keepdim=True)
        shared = SharedGatedNorm(norm, own, group)
        found.append(shared(x[:, own.start : own.stop], gate[:, own.start : own.stop]))
    torch.testing.assert_close(torch.cat(found, 1), norm(x, gate))
