"""What cannot be quantized is refused by its path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused, Quantization
from manylora_worker.models.layers.lora_linear import LoraLinear
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.install import check_device
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.numerics.families import make_model


def test_layers_of_another_kind(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    load_model(str(tmp_path / "gpt2"))
    with pytest.raises(ModelRefused, match=r"transformer\.h\.0\.attn\.c_attn: Conv1D"):
        load_model(str(tmp_path / "gpt2"), quantization="fp8")


@pytest.mark.parametrize("quantization", ["fp8", "nf4"])
def test_routers_stay_as_they_are(quantization: Quantization, tmp_path: Path) -> None:
    """Of Gemma 4's mixture, whose router is not ours, and of one that is; all else is in codes."""
    for family, router in (("gemma4_moe_blocks", "router.proj"), ("qwen3_moe_wide", "mlp.gate.linear")):
        make_model(family, tmp_path / family)
        model = load_model(str(tmp_path / family), quantization=quantization).model
        bases = {path: module.base for path, module in model.named_modules() if isinstance(module, LoraLinear)}
        plain = {path for path, base in bases.items() if type(base) is nn.Linear}
        assert plain == {f"model.layers.{layer}.{router}" for layer in range(model.config.num_hidden_layers)}
        assert len(bases) > len(plain)


def test_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    options = ("--quantization fp8", "--quantization none or nf4")
    check_device(torch.device("cuda"), *options)
    check_device(torch.device("cpu"), *options)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ModelRefused, match=r"--quantization fp8: A100 has no FP8.*8\.9 .*none or nf4"):
        check_device(torch.device("cuda"), *options)
