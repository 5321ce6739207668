"""A model's words are read from its folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLTokenizer
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.ids import TenantId
from manylora_worker.constraints.compiler import ConstraintCompiler
from manylora_worker.models.vocabulary import read_vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BASE = Path(__file__).resolve().parents[2] / "shared/manylora/demo/assets/base"


def test_the_demo_model_has_words(tmp_path: Path) -> None:
    spec: Any = SimpleNamespace(eos_token_ids=(), vocab_size=600)
    words = read_vocabulary(str(BASE), spec)
    tokenizer = LLTokenizer(words.tokenizer_json, n_vocab=words.vocab_size, eos_token=list(words.end_token_ids))
    assert (tokenizer.vocab_size, len(words.end_token_ids)) == (600, 1)
    with pytest.raises((OSError, ValueError)):
        read_vocabulary(str(tmp_path), spec)


_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def _model(kind: str) -> models.Model:
    """Of each byte, and of one that is an added token, too."""
    words = [*_BYTES, "<eos>", "[PAD]"]
    if kind == "unigram":
        return models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=False)
    return models.BPE(
        vocab={word: i for i, word in enumerate(words[: None if kind == "bpe, in both" else -1])}, merges=[]
    )


@pytest.mark.parametrize("kind", ["bpe", "bpe, in both", "unigram"])
@pytest.mark.parametrize("num_added", [0, 1, 3])
@pytest.mark.parametrize("ends_beyond", [False, True])
def test_tokens_that_are_added_beyond_the_logits_are_left_out(
    tmp_path: Path, kind: str, num_added: int, *, ends_beyond: bool
) -> None:
    """As Llama 2 with a token for padding at 32000, of 32000 logits."""
    tokenizer = Tokenizer(_model(kind))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = ["<eos>", "[PAD]", "<a>", "<b>"][: 1 + num_added]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in added])
    width = len(_BYTES) + 1
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=added[-1]).save_pretrained(tmp_path)
    ends = (width - 1, *([width] if ends_beyond else []))
    spec: Any = SimpleNamespace(eos_token_ids=ends, vocab_size=width)
    compiling = ConstraintCompiler(lambda: read_vocabulary(str(tmp_path), spec), lambda: None)
    constraint = Constraint(ConstraintKind.REGEX, "a+")
    compiled = compiling.compile(TenantId("acme"), constraint).result(30)
    assert (compiled.vocab_size, compiled.end_token_ids) == (width, [width - 1])
    compiling.close()
