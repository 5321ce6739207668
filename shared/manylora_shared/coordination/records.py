"""The values behind the keys: frozen records with their JSON form. Unknown fields are ignored on reading, for services
of neighbouring versions.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

from manylora_shared.address import parse_address


@dataclass(frozen=True)
class _JsonRecord:
    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises ValueError."""
        loaded: Any = json.loads(data)
        if not isinstance(loaded, dict):
            raise ValueError(f"{cls.__name__}: a JSON object is expected")
        known = {f.name for f in dataclasses.fields(cls)}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in loaded.items() if k in known}
        try:
            return cls(**values)
        except TypeError as e:
            raise ValueError(f"{cls.__name__}: {e}") from e


@dataclass(frozen=True)
class WorkerRecord(_JsonRecord):
    worker_id: str
    address: str
    device: str
    model_name: str
    model_digest: str  # sha256 over the base model's configuration and its weight files' sizes and headers
    vocab_size: int
    max_context_tokens: int
    sequence_slots: int
    max_lora_rank: int
    eos_token_ids: tuple[int, ...] = ()
    device_adapter_bytes: int = 0  # 0: a worker of an earlier version

    def __post_init__(self) -> None:
        parse_address(self.address)


@dataclass(frozen=True)
class RouterRecord(_JsonRecord):
    router_id: str
    address: str

    def __post_init__(self) -> None:
        parse_address(self.address)


@dataclass(frozen=True)
class SchedulerRecord(_JsonRecord):
    scheduler_id: str
    address: str

    def __post_init__(self) -> None:
        parse_address(self.address)


@dataclass(frozen=True)
class AdapterRecord(_JsonRecord):
    """Its files stand in the adapter store under `objects/<uid>/`."""

    tenant_id: str
    name: str
    uid: str
    max_lora_rank: int
    size_bytes: int
    target_modules: tuple[str, ...]
    created_unix_s: float


@dataclass(frozen=True)
class ClockIndexRecord(_JsonRecord):
    """Parts 0 to `parts` - 1 of a bank, together `size_bytes` long. The banks take turns: the last whole clock can be
    read until the next one is whole.
    """

    bank: int
    parts: int
    size_bytes: int


@dataclass(frozen=True)
class KeyRecord(_JsonRecord):
    key_id: str
    secret_hash: str  # identity.hash_of(key_id, secret), hex
    tenant_id: str  # empty: bound to no tenant
    scopes: tuple[str, ...]
    name: str  # for people alone
    created_unix_s: float
    revoked_unix_s: float = 0.0  # 0: in force; a revoked key's record stays, so that nothing can bring the key back
