from __future__ import annotations

import pytest
import torch
from manylora_worker.models.quantized.loading import to_device_but_linears
from torch import nn
from transformers import AutoModelForCausalLM

from tests.numerics.families import FAMILIES, MIXTURES, RECURRENT


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_moe_text"])
def test_what_comes_to_a_device_before_it_is_quantized(family: str) -> None:
    """The meta device stands for it. A mixture's blocks go whole, the shared expert with them."""
    config = (FAMILIES | MIXTURES | RECURRENT)[family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    to_device_but_linears(model, torch.device("meta"))
    blocks = tuple(path for path, each in model.named_modules() if hasattr(each, "experts"))
    assert bool(blocks) == (family != "llama")
    for path, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        stays = isinstance(module, nn.Linear) and path != "lm_head" and not path.startswith(blocks or ("none",))
        devices = {each.device.type for each in own if each is not None}
        assert devices <= {"cpu" if stays else "meta"}, path
    layer = model.model.layers[1 if family == "qwen3_5_moe_text" else 0]
    assert layer.self_attn.q_proj.weight.device.type == "cpu"
