"""What cannot be quantized is refused by its path."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_worker.models.checkpoint import ModelRefused
from manylora_worker.models.loader import load_model
from transformers import GPT2Config, GPT2LMHeadModel


def test_layers_of_another_kind(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    load_model(str(tmp_path / "gpt2"))
    with pytest.raises(ModelRefused, match=r"transformer\.h\.0\.attn\.c_attn: Conv1D"):
        load_model(str(tmp_path / "gpt2"), quantization="fp8")
