"""A model's words, for constraints on its text."""

from __future__ import annotations

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
    return Vocabulary(backend.to_str(), spec.vocab_size, ends)
