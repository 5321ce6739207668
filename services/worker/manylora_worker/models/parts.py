"""What a builder, models/build.py or a test's, hands to the hosting. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manylora_shared.encryption.keyring import Keyring
from manylora_shared.ledger.compute import NO_SHAPE, ModelShape

from manylora_worker.constraints.compiler import ConstraintCompiler
from manylora_worker.kinds.api import AdapterBackend, ModelRunner
from manylora_worker.weights.adapter_check import AdapterValidator


@dataclass(frozen=True)
class ModelInfo:
    name: str
    digest: str
    device: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    kv_block_bytes: int  # in all layers
    dtype: str = ""  # of its computation, and of its KV where that is another
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    longest_context_tokens: int = 0  # with an adapter that stretches it; 0: as without
    shape: ModelShape = NO_SHAPE
    rotation: str = ""  # see ModelSpec

    @property
    def longest(self) -> int:
        return max(self.max_context_tokens, self.longest_context_tokens)


@dataclass(frozen=True)
class EngineParts:
    runner: ModelRunner
    backend: AdapterBackend
    model: ModelInfo
    validator: AdapterValidator
    constraints: ConstraintCompiler | None = None  # None: the model has no tokenizer
    keyring: Keyring | None = None  # None: nothing sealed is opened; else it waits for its start
