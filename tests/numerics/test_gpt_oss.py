"""gpt-oss: attention sinks, windows in every other layer, experts with biases whose gates and ups stand in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from manylora_worker.models.build import _planner
from manylora_worker.models.experts import _down_site, _experts, _gate_up_site, _shape_in_turn
from manylora_worker.models.layers.lora_linear import LoraSwitch
from manylora_worker.models.merging import merge
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.models.torch.eager_check import check_against_eager
from manylora_worker.weights.source import AdapterInvalid, AdapterLimits, read_adapter
from manylora_worker.weights.stacked import DOWN
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.numerics.adapters import ATTENTION, Reference, save_adapter
from tests.numerics.driver import Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.mixtures import OWN_PATTERNS, TOLERANCE, Mixture, check_mixed_batch, make_mixture

pytestmark = OWN_PATTERNS
ROUTED = {"r": 5, "lora_alpha": 9, "target_modules": ["v_proj"], "target_parameters": ["router.weight", DOWN]}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return make_mixture(tmp_path_factory.mktemp("mixture"), "gpt_oss")


@pytest.fixture
def fresh(mixture: Mixture) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(mixture.folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_a_mixed_batch_has_the_logits_and_greedy_tokens_of_each_alone(mixture: Mixture) -> None:
    check_against_eager(mixture.loaded, _planner(mixture.loaded))
    weights = trusted_weights(mixture.loaded)
    assert weights is not None
    assert [each.shape.window for each in weights.attentions] == [9, None, 9]
    assert all(each.sinks is not None and each.sinks.abs().max() > 1 for each in weights.attentions)
    check_mixed_batch(mixture)


def test_an_adapted_router_chooses_otherwise(mixture: Mixture, fresh: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(fresh, tmp_path / "routed", 5, **ROUTED)
    driver = Driver(make_runner(mixture.loaded))
    uid = put_adapter(driver.runner, mixture.loaded, folder)
    prompt = prompts(1, seed=6)[0]
    expected = Reference(fresh, {"routed": folder}).logits(prompt, "routed")[-1]
    torch.testing.assert_close(driver.logits([Stream(prompt, uid)])[0], expected, atol=TOLERANCE, rtol=0)


def test_experts_compute_what_transformers_do_beyond_the_clamp(fresh: PreTrainedModel) -> None:
    block = fresh.model.layers[1].mlp
    shape = _shape_in_turn(block.experts, top_k=3)
    assert shape is not None
    sites = (_gate_up_site(0, "", shape), _down_site(1, "", shape))
    ours = _experts(block.experts, shape, sites, LoraSwitch())
    torch.manual_seed(0)
    x = torch.randn(9, shape.hidden) * 8
    shares, experts = torch.topk(torch.randn(9, shape.experts).softmax(-1), 3)
    gate_up = torch.einsum("ri,eio->reo", x, block.experts.gate_up_proj)
    assert (gate_up.abs() > 7).float().mean() > 0.2
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, experts, shares), block.experts(x, experts, shares), atol=1e-4, rtol=1e-4)


def test_merged_weights_are_those_of_pefts_merge(mixture: Mixture, fresh: PreTrainedModel, tmp_path: Path) -> None:
    adapter = mixture.adapters["stacks"]
    assert merge(str(mixture.folder), adapter, tmp_path / "merged") > 0
    expected = PeftModel.from_pretrained(fresh, adapter).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for (name, one), (_, other) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=name)


def refusals(mixture: Mixture, folder: Path) -> Iterator[str]:
    with pytest.raises(AdapterInvalid) as caught:
        read_adapter(folder, mixture.loaded.adapter_base(), AdapterLimits(max_rank=64))
    yield from (f"{each.field}: {each.description}" for each in caught.value.violations)


def test_an_expert_has_no_layer_of_its_own(mixture: Mixture, fresh: PreTrainedModel, tmp_path: Path) -> None:
    """As which of the stacked columns another trainer's would be is not known."""
    folder = save_adapter(fresh, tmp_path / "single", 5, r=2, target_modules=ATTENTION)
    tensors = load_file(folder / "adapter_model.safetensors")
    stack = "base_model.model.model.layers.0.mlp.experts"
    tensors[f"{stack}.3.gate_proj.lora_A.weight"] = torch.zeros(2, 64)
    tensors[f"{stack}.3.gate_proj.lora_B.weight"] = torch.zeros(40, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    (told, *_) = refusals(mixture, folder)
    assert "the base model has no linear layer model.layers.0.mlp.experts.3.gate_proj" in told
