"""The seam to the coordination store: an ordered key space with revisions, leases, transactions and watches.

Two implementations, one contract suite (tests/shared/test_store_contract.py): `etcd` (a real etcd over its v3 gRPC API)
and `memory` (the model that the simulation runs on). Keys are strings, values bytes. The names and their meaning are
etcd's: a *revision* counts the changes of the whole store, `mod_revision` is the one of a key's last change.

Every method raises StoreUnavailable while the store cannot be reached; callers decide whether to wait.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from manylora_shared.errors import ServiceUnavailable

MAX_TXN_OPERATIONS = 128
"""Most comparisons, and most operations, in one transaction (etcd's default limit). None changes a key twice."""


class StoreUnavailable(ServiceUnavailable):
    label = "store_unavailable"


class LeaseExpired(Exception):
    """The lease is not known (any more); keys bound to it are gone."""


@dataclass(frozen=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int = 0


class EventKind(enum.Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True)
class WatchEvent:
    kind: EventKind
    kv: KeyValue
    """For DELETE only key and mod_revision are meaningful."""


@dataclass(frozen=True)
class WatchBatch:
    """Changes in order. `reset`: history was compacted away, so `events` are PUTs of all keys that exist now, and the
    reader must forget every other key."""

    revision: int
    events: tuple[WatchEvent, ...]
    reset: bool = False


@dataclass(frozen=True)
class Listing:
    """Keys in order, as of `revision`; watch from revision + 1 to miss nothing."""

    revision: int
    kvs: tuple[KeyValue, ...]


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction: the key's mod_revision is exactly this one (0: the key does not exist)."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class TxnResult:
    succeeded: bool
    revision: int


class Store(Protocol):
    async def get(self, key: str) -> KeyValue | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Returns the new revision. Raises LeaseExpired."""

    async def delete(self, key: str) -> bool:
        """Whether the key existed."""

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """Applies all operations in one revision if all compares hold, else none. Raises LeaseExpired."""

    async def grant(self, ttl_s: int) -> int:
        """A new lease's id; it expires `ttl_s` seconds after its last keep-alive."""

    async def keep_alive(self, lease_id: int) -> int:
        """Renews once. Returns the seconds to live. Raises LeaseExpired."""

    async def revoke(self, lease_id: int) -> None:
        """Deletes the lease and its keys; unknown leases are ignored."""

    def watch(self, prefix: str, *, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Every change of a key under `prefix` from `start_revision` on, in order, once, for ever: it outlives broken
        connections and restarts of the store (resuming behind the last revision seen) and compaction (`reset`).
        An async generator: close it (contextlib.aclosing) where it is left early. `prefix` is not empty."""

    async def close(self) -> None: ...
