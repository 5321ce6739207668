"""What cannot be quantized is refused by its path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from manylora_worker.models.quantized.install import check_device
from transformers import GPT2Config, GPT2LMHeadModel


def test_layers_of_another_kind(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    load_model(str(tmp_path / "gpt2"))
    with pytest.raises(ModelRefused, match=r"transformer\.h\.0\.attn\.c_attn: Conv1D"):
        load_model(str(tmp_path / "gpt2"), quantization="fp8")


def test_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    options = ("--quantization fp8", "--quantization none or nf4")
    check_device(torch.device("cuda"), *options)
    check_device(torch.device("cpu"), *options)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ModelRefused, match=r"--quantization fp8: A100 has no FP8.*8\.9 .*none or nf4"):
        check_device(torch.device("cuda"), *options)
