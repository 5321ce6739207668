"""How the inputs of gated delta nets are put in order and cut for ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from manylora_worker.models.merging import merge
from manylora_worker.models.quantized.linear import QuantizedLinear
from manylora_worker.models.ranks.delta_cuts import delta_outputs, reordered
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3NextConfig

from tests.numerics.adapters import Reference, save_adapter
from tests.numerics.driver import Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.families import RECURRENT
from tests.numerics.quantizing import check_with_adapter, ship
from tests.numerics.test_columns import assert_differs, save_trained
from tests.numerics.test_merged_weights import merge as merge_all
from tests.numerics.test_merged_weights import restore

TOLERANCE = 1e-4
INPUTS = ["in_proj_qkvz", "in_proj_ba"]
HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 2, "linear_value_head_dim": 3,
}  # fmt: skip


def outputs(ranges: tuple[range, ...]) -> list[int]:
    return [output for each in ranges for output in each]


def test_ranks_have_their_heads_of_each_part() -> None:
    config = Qwen3_5TextConfig(**HEADS)
    assert outputs(delta_outputs("a.in_proj_qkv", config, 0, 2)) == [0, 1, 4, 5, 8, 9, 10, 11, 12, 13]
    assert outputs(delta_outputs("a.in_proj_qkv", config, 1, 2)) == [2, 3, 6, 7, 14, 15, 16, 17, 18, 19]
    assert outputs(delta_outputs("a.in_proj_z", config, 1, 2)) == list(range(6, 12))
    assert outputs(delta_outputs("a.in_proj_b", config, 1, 2)) == [2, 3]
    assert outputs(delta_outputs("a.in_proj_qkv", config)) == list(range(20))
    assert reordered("a.in_proj_qkv", config) == delta_outputs("a.out_proj", config) == ()
    assert delta_outputs("a.in_proj_qkvz", LlamaConfig()) == ()


def test_what_stands_by_heads_is_put_in_order() -> None:
    """A head has 2 of its query, 2 of its key, 6 of its values and as many gates; 2 of beta and 2 of decay."""
    config = Qwen3NextConfig(**HEADS)
    query, key, values, gates = [0, 1], [2, 3], list(range(4, 10)), list(range(10, 16))
    whole = [16 * head + i for part in (query, key, values, gates) for head in (0, 1) for i in part]
    assert outputs(reordered("a.in_proj_qkvz", config)) == whole
    assert outputs(reordered("a.in_proj_ba", config)) == [0, 1, 4, 5, 2, 3, 6, 7]
    second = [16 + i for part in (query, key, values, gates) for i in part]
    assert outputs(delta_outputs("a.in_proj_qkvz", config, 1, 2)) == second
    assert outputs(delta_outputs("a.in_proj_ba", config, 1, 2)) == [4, 5, 6, 7]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Next of dense layers."""
    folder = tmp_path_factory.mktemp("next") / "model"
    config = RECURRENT["qwen3_next"]()
    config.mlp_only_layers, config.initializer_range = [0, 1, 2], 0.25
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def eager(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("recipe", [{"use_dora": True}, {"lora_bias": True}], ids=["dora", "biases"])
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.filterwarnings(r"ignore:Adapter 'default'. \d+ LoRA tensor")
def test_gains_and_shifts_follow(plain: Path, recipe: dict[str, bool], tmp_path: Path) -> None:
    folder = save_trained(plain, tmp_path / "own", 1, {"r": 4, "lora_alpha": 8, "target_modules": INPUTS, **recipe})
    oracle = Reference(eager(plain), {"own": folder})
    runner = make_runner(loaded := load_model(str(plain)))
    stream = Stream(prompts(1, seed=2)[0], put_adapter(runner, loaded, folder))
    assert_differs(oracle, stream.prompt, *recipe)
    found = Driver(runner).logits([stream])[0]
    torch.testing.assert_close(found, oracle.logits(stream.prompt, "own")[-1], atol=TOLERANCE, rtol=0)


def test_merges_are_pefts(plain: Path, tmp_path: Path) -> None:
    """In a worker's weights and out again bit for bit; and in a folder, which has the checkpoint's own order."""
    model = eager(plain)
    folder = save_adapter(model, tmp_path / "own", 1, r=4, lora_alpha=8, target_modules=[*INPUTS, "out_proj", "q_proj"])
    runner = make_runner(loaded := load_model(str(plain)))
    uid, stream = put_adapter(runner, loaded, folder), Stream(prompts(1, seed=2)[0])
    before = Driver(runner).logits([stream])[0]
    merge_all(runner, uid)
    found = Driver(runner).logits([Stream(stream.prompt)])[0]
    restore(runner)
    assert torch.equal(Driver(runner).logits([Stream(stream.prompt)])[0], before)
    expected = PeftModel.from_pretrained(model, folder).merge_and_unload()
    with torch.no_grad():
        wanted = expected(torch.tensor([stream.prompt])).logits[0, -1]
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    merge(str(plain), folder, tmp_path / "merged")
    written, weights = eager(tmp_path / "merged").state_dict(), expected.state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(written[name], weight, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("name", "quantization"), [("fp8-16", "fp8"), ("awq-16", "int4")])
def test_codes_that_are_shipped_are_put_in_order(plain: Path, name: str, quantization: str, tmp_path: Path) -> None:
    stands_for = ship(plain, tmp_path / plain.name, name, leaves=("_proj", *INPUTS))
    reference = eager(plain)
    reference.load_state_dict(stands_for, strict=False)
    adapter = save_adapter(reference, tmp_path / "own", 1, r=4, lora_alpha=8, target_modules=INPUTS)
    loaded = load_model(str(tmp_path / plain.name), quantization=quantization)  # type: ignore[arg-type]
    kept = [path for path, module in loaded.model.named_modules() if isinstance(module, QuantizedLinear)]
    assert sum("in_proj_qkvz" in path for path in kept) == 2
    check_with_adapter(loaded, reference, adapter, atol=1e-3)


def test_what_bitsandbytes_has_made_is_refused(plain: Path) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ModelRefused, match=r"layers\.0\.linear_attn\.in_proj_qkvz: .*--quantization nf4 on the CPU"):
        load_model(str(plain), quantization="nf4")
