"""The values behind the keys: frozen records with their JSON form. Unknown fields are ignored on reading, so that
services of neighbouring versions can share a cluster."""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class _JsonRecord:
    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises ValueError on anything that is not this record."""
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
    model_digest: str
    """sha256 over the base model's configuration and its weight files' sizes and headers; equal in all of a pool."""
    vocab_size: int
    max_context_tokens: int
    sequence_slots: int
    max_lora_rank: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RouterRecord(_JsonRecord):
    router_id: str
    address: str


@dataclass(frozen=True)
class SchedulerRecord(_JsonRecord):
    scheduler_id: str
    address: str


@dataclass(frozen=True)
class AdapterRecord(_JsonRecord):
    """A registered adapter. Its files stand in the adapter store under `objects/<uid>/`."""

    tenant_id: str
    name: str
    uid: str
    max_lora_rank: int
    size_bytes: int
    target_modules: tuple[str, ...]
    created_unix_s: float


@dataclass(frozen=True)
class ClockIndexRecord(_JsonRecord):
    """Where the scheduler's clock stands: parts 0 to `parts` - 1 of a bank, together `size_bytes` of ClockRecord. The
    banks take turns, so that the last whole clock can be read until the next one is whole."""

    bank: int
    parts: int
    size_bytes: int


@dataclass(frozen=True)
class ClockRecord:
    """The fair queue's clock, for the next leader. Flows are named once, in `flows`, and by their index elsewhere."""

    clock: int
    flows: tuple[tuple[str, str, int, int, bool], ...]
    """(tenant, class, weight, settled tag, whether it had queued requests); weight 0: only its counters are known."""
    reserved: tuple[tuple[str, int, int], ...]
    """(request id, flow, what is left of its reservation)."""
    counted: dict[str, dict[int, int]]
    """By worker: the cost counted for each flow."""

    def to_bytes(self) -> bytes:
        """Compressed JSON."""
        values = [self.clock, self.flows, self.reserved, {w: [*c.items()] for w, c in self.counted.items()}]
        return zlib.compress(json.dumps(values, separators=(",", ":")).encode(), level=1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ValueError on anything that is not this record."""
        try:
            clock, flows, reserved, counted = json.loads(zlib.decompress(data))
            record = cls(
                clock=int(clock),
                flows=tuple((str(t), str(c), int(w), int(s), bool(q)) for t, c, w, s, q in flows),
                reserved=tuple((str(r), int(f), int(left)) for r, f, left in reserved),
                counted={str(w): {int(f): int(total) for f, total in totals} for w, totals in counted.items()},
            )
        except (zlib.error, TypeError, AttributeError) as e:
            raise ValueError(f"{cls.__name__}: {e}") from e
        named = [f for _, f, _ in record.reserved] + [f for totals in record.counted.values() for f in totals]
        if any(not 0 <= f < len(record.flows) for f in named):
            raise ValueError(f"{cls.__name__}: a flow is not named")
        return record
