"""How a model is cut for its ranks, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models import loader
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.quantized.fp8 import joined as fp8_joined
from manylora_worker.models.quantized.install import ShippedCodes
from manylora_worker.models.quantized.int4 import joined as int4_joined
from manylora_worker.models.ranks.cuts import check_cuts, cut_codes, is_summed, own_outputs
from manylora_worker.weights.packing import ModuleWeights, Packing, StoredMatrix
from manylora_worker.weights.sites import Site, Slot
from transformers import LlamaConfig, Olmo2Config, Qwen3_5TextConfig, Qwen3MoeConfig

from tests.numerics.families import UNLIKE, make_model

KNOWN = frozenset({"llama"})


def test_what_does_not_divide_is_named_with_its_number() -> None:
    config = LlamaConfig(num_attention_heads=12, num_key_value_heads=6, intermediate_size=1000, hidden_size=96)
    check_cuts(config, 2, KNOWN)
    with pytest.raises(ModelRefused, match=r"--tensor-parallel 4: does not divide num_key_value_heads 6$"):
        check_cuts(config, 4, KNOWN)
    with pytest.raises(ModelRefused, match=r"5: does not divide num_attention_heads 12 and num_key_value_heads 6$"):
        check_cuts(config, 5, KNOWN)
    with pytest.raises(ModelRefused, match="model_type olmo2 is not one"):
        check_cuts(Olmo2Config(), 2, KNOWN)
    delta = Qwen3_5TextConfig(linear_num_key_heads=6, linear_num_value_heads=12, num_key_value_heads=4)
    with pytest.raises(ModelRefused, match=r"4: does not divide linear_num_key_heads 6$"):
        check_cuts(delta, 4, frozenset({"qwen3_5_text"}))
    with pytest.raises(ModelRefused, match=r"2: does not divide num_key_value_heads 1$"):
        check_cuts(UNLIKE["gemma4_wide"](), 2, frozenset({"gemma4_text"}))
    with pytest.raises(ModelRefused, match=r"key_value_heads 1 and moe_intermediate_size 40 into multiples of 8$"):
        check_cuts(UNLIKE["gemma4_moe"](), 2, frozenset({"gemma4_text"}))
    mixture = Qwen3MoeConfig(num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=40)
    with pytest.raises(ModelRefused, match=r"2: does not divide moe_intermediate_size 40 into multiples of 8$"):
        check_cuts(mixture, 2, frozenset({"qwen3_moe"}))


def test_only_layers_that_write_the_residual_stream_are_summed() -> None:
    assert is_summed("model.layers.0.self_attn.o_proj")
    assert is_summed("model.layers.0.mlp.down_proj")
    assert is_summed("model.layers.0.linear_attn.out_proj")
    assert not is_summed("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("rank", [0, 1])
def test_of_fused_layers_each_part_is_cut_by_itself(rank: int) -> None:
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, intermediate_size=10)

    def own(leaf: str, outputs: int) -> list[int]:
        ranges = own_outputs(f"model.layers.0.{leaf}", outputs, config, _Ranks(rank))  # type: ignore[arg-type]
        return [output for each in ranges for output in each]

    heads = [*range(4 * rank, 4 * rank + 4), 8 + rank, 10 + rank]  # of queries, of keys, of values
    assert own("self_attn.qkv_proj", 12 * 3) == [3 * head + i for head in heads for i in range(3)]
    assert own("mlp.gate_up_proj", 20) == [*range(5 * rank, 5 * rank + 5), *range(10 + 5 * rank, 15 + 5 * rank)]
    assert own("self_attn.k_proj", 6) == list(range(3 * rank, 3 * rank + 3))
    assert own("mlp.down_proj", 7) == list(range(7))


class _Ranks:
    """What a cut asks of a group."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


def test_experts_that_would_not_be_summed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3_moe", tmp_path)
    assert len(loader._experts(model, "none", _Ranks(0))) == 2  # type: ignore[arg-type]
    monkeypatch.setattr(loader, "taken_over", lambda _, found: found[1:])
    with pytest.raises(ModelRefused, match=r"--tensor-parallel 2: model.layers.0.mlp.experts are no experts as we"):
        loader._experts(model, "none", _Ranks(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [1, 4])
def test_codes_are_cut_as_their_weights_are(groups: int) -> None:
    torch.manual_seed(0)
    inputs, size = 32, 32 // groups
    int4 = (torch.randint(256, (6, 16), dtype=torch.uint8), torch.rand(6, groups), torch.rand(6, groups))
    fp8 = (torch.randn(6, inputs).to(torch.float8_e4m3fn), torch.rand(6, groups))

    def rebuilt(path: str, shipped: ShippedCodes) -> torch.Tensor:
        parts = shipped.by_path[path]
        if len(parts) == 3:
            return int4_joined([parts], torch.device("cpu")).dequantized(torch.float32)
        return fp8_joined([parts], shipped.inputs_of_scale, torch.device("cpu")).dequantized(torch.float32)

    for parts in (int4, fp8):
        whole = ShippedCodes({"up_proj": parts, "qkv_proj": parts, "down_proj": parts}, 0 if groups == 1 else size)
        config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, intermediate_size=6)
        ranks = [cut_codes(whole, config, _Ranks(rank)) for rank in range(2)]  # type: ignore[arg-type]
        expected = rebuilt("up_proj", whole)
        assert torch.equal(torch.cat([rebuilt("up_proj", each) for each in ranks]), expected)
        by_parts = torch.stack([rebuilt("qkv_proj", each) for each in ranks], 1).flatten(0, 1)
        assert torch.equal(by_parts, expected)
        assert torch.equal(torch.cat([rebuilt("down_proj", each) for each in ranks], 1), expected)


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "at an odd byte"])
def test_an_adapter_is_cut_as_its_layers_are(offset: int) -> None:
    """B by the outputs of a column-cut layer, A by the inputs of a row-cut one; the other matrix is whole."""
    generator = torch.Generator().manual_seed(1)
    content, modules, whole = torch.zeros(offset, dtype=torch.uint8), {}, {}
    for path, inputs, outputs in (("up", 4, 6), ("gate_up", 4, 12), ("down", 6, 4)):
        a, b = torch.randn(3, inputs, generator=generator), torch.randn(outputs, 3, generator=generator)
        places = []
        for matrix in (a, b):
            places.append(StoredMatrix(torch.float32, *matrix.shape, first_byte=content.numel()))
            content = torch.cat([content, matrix.view(torch.uint8).flatten()])
        modules[path], whole[path] = ModuleWeights(places[0], places[1], 2.0), (a, b)
    for rank in range(2):
        mine, of_up = range(3 * rank, 3 * rank + 3), range(6 + 3 * rank, 9 + 3 * rank)
        sites = [
            Site(0, 4, (Slot("up", 0, 3, (mine,)),)),
            Site(1, 4, (Slot("gate_up", 0, 6, (mine, of_up)),)),
            Site(2, 3, (Slot("down", 0, 4),), first_input=3 * rank),
        ]
        packed = Packing.of({}, modules, sites, torch.float32)
        adapter = packed.pack(content, "u", lambda count, dtype: torch.empty(count, dtype=dtype))  # type: ignore[arg-type]
        up, gate_up, down = adapter.on(torch.device("cpu")).sites.values()
        assert torch.equal(up.a_t.t(), whole["up"][0])
        assert torch.equal(up.slots[0].b, 2 * whole["up"][1][mine].t())
        assert torch.equal(gate_up.a_t.t(), whole["gate_up"][0])
        assert torch.equal(gate_up.slots[0].b, 2 * whole["gate_up"][1][[*mine, *of_up]].t())
        assert torch.equal(down.a_t.t(), whole["down"][0][:, mine])
        assert torch.equal(down.slots[0].b, 2 * whole["down"][1].t())
