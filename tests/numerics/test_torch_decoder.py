"""Which models run by a decoder of our own: those whose parts are all known, and that it computes as transformers does.

What it computes is tested against the oracle with everything else of the engine (test_engine_against_peft.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from manylora_worker.models.decoder_weights import read_decoder
from manylora_worker.models.loader import load_model
from manylora_worker.models.torch.decoder import trusted_weights
from transformers import AutoModelForCausalLM

from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import Driver, Stream, make_runner
from tests.numerics.families import FAMILIES

READ = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"})


@pytest.mark.parametrize("name", FAMILIES)
def test_which_families_are_read(family_of: FamilyOf, name: str) -> None:
    """granite has llama's parts, but not its arithmetic, and no fused products; olmo2 norms all heads at once."""
    assert (trusted_weights(family_of(name).loaded) is not None) == (name in READ)


@pytest.mark.parametrize("name", ["llama", "phi3"])
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
