"""What an engine is made of: what a builder (models/build.py, a test's fake) hands to the hosting. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from manylora_worker.kinds.api import AdapterBackend, ModelRunner
from manylora_worker.weights.adapter_check import AdapterValidator


@dataclass(frozen=True)
class ModelInfo:
    """What others may know about the base model."""

    name: str
    digest: str
    device: str
    vocab_size: int
    max_context_tokens: int
    """Of prompt and output together: the model's, or what the KV blocks hold if that is less."""
    eos_token_ids: tuple[int, ...]
    kv_block_bytes: int
    """KV of one block, in all layers."""


@dataclass(frozen=True)
class EngineParts:
    """The backend is its holder's to close."""

    runner: ModelRunner
    backend: AdapterBackend
    model: ModelInfo
    validator: AdapterValidator
