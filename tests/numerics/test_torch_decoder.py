"""Which models run by a decoder of our own: those whose parts are all known, and that it computes as transformers does.

What it computes is tested against the oracle with everything else of the engine (test_engine_against_peft.py).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.composition import Part, key_of
from manylora_worker.kinds.api import Sampling, StepBatch
from manylora_worker.models.decoder.read import read_decoder
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from manylora_worker.weights.source import AdapterInvalid, read_adapter
from transformers import AutoModelForCausalLM

from tests.numerics.adapters import Reference, save_adapter
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import LIMITS, Driver, Stream, make_runner, prompts, put_adapter
from tests.numerics.families import FAMILIES
from tests.numerics.test_columns import save_trained

WITHOUT_KERNELS = frozenset({"olmo2", "olmo3"})


@pytest.mark.parametrize("name", FAMILIES)
def test_which_families_are_read(family_of: FamilyOf, name: str) -> None:
    """The kernels do not norm all heads together, as OLMo does."""
    weights = trusted_weights(family_of(name).loaded)
    assert weights is not None
    assert weights.has_kernels == (name not in WITHOUT_KERNELS)


@pytest.mark.parametrize("name", ["llama", "phi3", "granite", "smollm3", "gemma4_text", "gemma4_wide"])
def test_bfloat16_is_near_enough(family_of: FamilyOf, name: str) -> None:
    assert trusted_weights(load_model(str(family_of(name).folder), dtype=torch.bfloat16)) is not None


def test_a_model_that_does_more_than_its_parts_show(family_of: FamilyOf, caplog: pytest.LogCaptureFixture) -> None:
    """A factor between the layers: found by comparing, said, and the model runs as transformers wrote it."""
    loaded = load_model(str(family_of("llama").folder))

    def halve(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 0.5

    loaded.model.get_submodule("model.layers.1").register_forward_hook(halve)
    assert read_decoder(loaded) is not None
    prompt = list(range(3, 20))
    logits = Driver(make_runner(loaded)).logits([Stream(prompt)])
    assert "its logits are off" in caplog.text
    plain = AutoModelForCausalLM.from_pretrained(family_of("llama").folder, attn_implementation="eager").eval()
    plain.get_submodule("model.layers.1").register_forward_hook(halve)
    with torch.no_grad():
        expected = plain(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", *(pytest.param(x, marks=pytest.mark.wide) for x in ("gemma2", "gemma4_text"))]
)
def test_lora_on_the_output_head(family_of: FamilyOf, tmp_path: Path, name: str) -> None:
    """Beside rows without, in a composition, and of a prompt's scored tokens. Llama's head shares the embeddings'
    weight, Gemma's logits have a soft cap behind it."""
    family = family_of(name)
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    folder = tmp_path / "head"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        save_adapter(model, folder, 3, r=5, lora_alpha=20, target_modules=["lm_head", "q_proj"])
        fresh = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32, attn_implementation="eager")
        oracle = Reference(fresh.eval(), {"head": folder, "all-linear": family.adapters["all-linear"]})
        oracle.compose("both", {"head": 0.5, "all-linear": 1.0})
    runner = make_runner(family.loaded)
    driver = Driver(runner)
    head, other = (put_adapter(runner, family.loaded, each) for each in (folder, family.adapters["all-linear"]))
    both = key_of([Part(head, 0.5), Part(other)])
    drawn = prompts(5, seed=4)
    asked = [(head, "head"), (None, None), (both, "both"), (other, "all-linear"), (head, "head")]
    streams = [(Stream(prompt, uid), adapter) for (uid, adapter), prompt in zip(asked, drawn, strict=True)]
    for row, (stream, adapter) in zip(driver.logits([each for each, _ in streams]), streams, strict=True):
        torch.testing.assert_close(row, oracle.logits(stream.tokens, adapter)[-1], atol=1e-4, rtol=0)
    stream = Stream(prompts(1, seed=9)[0], head, sampling=Sampling(seed=0, temperature=0.0, prompt_logprobs=1))
    chunk = replace(driver.chunk(stream), scored=range(len(stream.prompt) - 1))
    (answer,) = runner.execute(StepBatch([chunk]))
    wanted = torch.log_softmax(oracle.logits(stream.prompt, "head"), -1)
    expected = [float(row[token]) for row, token in zip(wanted, stream.prompt[1:], strict=False)]
    assert [each.logprob for each in answer.scored] == pytest.approx(expected, abs=1e-3)


def test_where_the_head_cannot_be_adapted_it_is_said(family_of: FamilyOf, tmp_path: Path) -> None:
    """Nor is it scaled; 'all-linear' leaves it out."""
    family = family_of("qwen2")
    base = family.loaded.adapter_base()
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    folder = save_adapter(model, tmp_path / "head", 3, r=2, target_modules=["lm_head", "q_proj"])
    read_adapter(folder, base, LIMITS)
    with pytest.raises(AdapterInvalid, match="adapts the embeddings or the output head"):
        read_adapter(folder, family.loaded.adapter_base(is_read=False), LIMITS)
    scaled = save_trained(
        family.folder, tmp_path / "dora", 1, {"target_modules": ["lm_head"], "r": 2, "use_dora": True}
    )
    with pytest.raises(AdapterInvalid, match="scales or shifts the output head"):
        read_adapter(scaled, base, LIMITS)
    plain = read_adapter(family.adapters["all-linear"], base, LIMITS)
    assert len(family.loaded.sites) not in {placed.site for placed in plain.layout}
