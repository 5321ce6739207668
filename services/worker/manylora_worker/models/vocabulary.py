"""A model's words, for constraints on its text."""

from __future__ import annotations

import json

from manylora_shared.stores.model_files import model_folder
from transformers import AutoTokenizer

from manylora_worker.constraints.compiler import Vocabulary
from manylora_worker.models.loader import ModelSpec


def read_vocabulary(model: str, spec: ModelSpec) -> Vocabulary:
    """Takes a second for a large one. Raises OSError or ValueError."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder(model)), local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it has no tokenizer that tokenizers can read")
    ends = spec.eos_token_ids or (() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    own = tuple(token for token in ends if token < spec.vocab_size)
    words = backend.to_str()
    if max(backend.get_vocab().values(), default=0) >= spec.vocab_size:
        words = _without_words_from(spec.vocab_size, words)
    return Vocabulary(words, spec.vocab_size, own)


def _without_words_from(vocab_size: int, tokenizer_json: str) -> str:
    """Trainers add a token for padding and leave the model's logits as they are: it can never be chosen."""
    parts = json.loads(tokenizer_json)
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < vocab_size]
    words = parts["model"].get("vocab")
    if isinstance(words, dict):
        parts["model"]["vocab"] = {word: token for word, token in words.items() if token < vocab_size}
    elif isinstance(words, list):  # Unigram's: their places are the ids
        parts["model"]["vocab"] = words[:vocab_size]
    return json.dumps(parts, ensure_ascii=False)
