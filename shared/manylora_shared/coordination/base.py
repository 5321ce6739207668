"""The seam to the coordination store, in etcd's words: a *revision* counts the changes of the whole store. Every method
raises StoreUnavailable while the store cannot be reached.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from manylora_shared.errors import ServiceUnavailable

MAX_TXN_OPERATIONS = 128  # of comparisons, and of operations: etcd's default limit; none changes a key twice


class StoreUnavailable(ServiceUnavailable):
    label = "store_unavailable"


class LeaseExpired(Exception):
    """Its keys are gone."""


@dataclass(frozen=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    # the store's revision at the key's last change
    mod_revision: int
    version: int
    lease_id: int = 0


class EventKind(enum.Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True)
class WatchEvent:
    kind: EventKind
    kv: KeyValue  # of a DELETE only key and mod_revision mean something


@dataclass(frozen=True)
class WatchBatch:
    """`reset`: history was compacted, so `events` are all keys that exist now."""

    revision: int
    events: tuple[WatchEvent, ...]
    reset: bool = False


@dataclass(frozen=True)
class Listing:
    """Watch from revision + 1 to miss nothing."""

    revision: int
    kvs: tuple[KeyValue, ...]


@dataclass(frozen=True)
class Compare:
    """0: there is no such key."""

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


@dataclass(frozen=True)
class Space:
    used_bytes: int
    quota_bytes: int  # 0: not told
    is_full: bool  # it takes no changes


class Store(Protocol):
    async def get(self, key: str) -> KeyValue | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Returns the new revision. Raises LeaseExpired."""

    async def delete(self, key: str) -> bool:
        """Whether the key existed."""

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """All operations in one revision if all compares hold. Raises LeaseExpired."""

    async def grant(self, ttl_s: int) -> int:
        """A new lease's id."""

    async def keep_alive(self, lease_id: int) -> int:
        """Returns the seconds to live. Raises LeaseExpired."""

    async def revoke(self, lease_id: int) -> None:
        """Unknown leases are ignored."""

    def watch(self, prefix: str, *, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Every change from `start_revision` on, in order, once, through outages and compaction (`reset`). Close it
        where it is left early. `prefix` is not empty.
        """

    async def space(self) -> Space:
        """Of one member."""

    async def close(self) -> None: ...
