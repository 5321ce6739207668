"""A model's words are read from its folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLTokenizer
from manylora_worker.models.vocabulary import read_vocabulary

BASE = Path(__file__).resolve().parents[2] / "shared/manylora/demo/assets/base"


def test_the_demo_model_has_words(tmp_path: Path) -> None:
    spec: Any = SimpleNamespace(eos_token_ids=(), vocab_size=600)
    words = read_vocabulary(str(BASE), spec)
    tokenizer = LLTokenizer(words.tokenizer_json, n_vocab=words.vocab_size, eos_token=list(words.end_token_ids))
    assert (tokenizer.vocab_size, len(words.end_token_ids)) == (600, 1)
    with pytest.raises((OSError, ValueError)):
        read_vocabulary(str(tmp_path), spec)
