"""What follows a mixer, layer by layer beside transformers' own: an MLP, experts, shared ones among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models import loader
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.cuda.forward.device_step import DeviceStep
from manylora_worker.models.decoder.read import read_decoder

from tests.numerics.conftest import FamilyOf
from tests.numerics.interpreter import needs_interpreter
from tests.numerics.mixtures import OWN_PATTERNS, make_mixture
from tests.numerics.test_cuda_runner import make_device_runner

pytestmark = [pytest.mark.kernels, needs_interpreter, OWN_PATTERNS]
ROWS, THERE = 6, 5


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "qwen3_5_moe_text", "glm4_moe"])
def test_each_layer(family_of: FamilyOf, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family: Any = family_of(name) if name in ("llama", "gemma2") else make_mixture(tmp_path, name)
    loaded, runner = make_device_runner(family, family.folder, "cpu")
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    weights = read_decoder(loaded)
    assert weights is not None
    unread = torch.empty(0)
    step = DeviceStep(ROWS, torch.tensor([THERE], dtype=torch.int32), unread, unread, unread, unread, ROWS, 1)
    torch.manual_seed(1)
    for layer, theirs in zip(weights.layers, model.get_decoder().layers, strict=True):
        x = torch.randn(ROWS, weights.hidden_size)
        with torch.no_grad():
            expected = theirs.mlp(x[None])
        expected = expected[0] if isinstance(expected, torch.Tensor) else expected[0][0]
        product, lora = runner._decoder._mlp.run(layer.mlp, x, torch.zeros_like(x), step)
        assert lora is None
        torch.testing.assert_close(product.sum(0)[:THERE], expected[:THERE], atol=1e-4, rtol=1e-4)
