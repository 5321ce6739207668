"""The model of etcd that the simulation and the unit tests run on: all in one event loop, leases by its time.

`MemoryStoreServer` owns keys, history and leases; `MemoryStore` is one client. All is a function of the calls, of the
loop's time and of `rng`. Leases do not run out while the server is down, and start anew when it is up again.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from manylora_shared.coordination.base import (
    MAX_TXN_OPERATIONS,
    Compare,
    Delete,
    EventKind,
    KeyValue,
    LeaseExpired,
    Listing,
    Put,
    Space,
    StoreUnavailable,
    TxnResult,
    WatchBatch,
    WatchEvent,
)

MIN_TTL_S = 2  # etcd gives no shorter lease
UNREACHABLE_AFTER_S = 2.0  # of a cut-off client, as EtcdStore's; a server that is down is noticed at once
_FIRST_LEASE_ID = 0x1000


@dataclass
class _Lease:
    ttl_s: int
    expires_at: float
    timer: asyncio.TimerHandle | None = None
    keys: dict[str, None] = field(default_factory=dict)


class MemoryStoreServer:
    """
    Args:
        rng: draws each call's delay.
        min_delay_s, max_delay_s: of a call, split evenly between the way there and the way back.
        watch_delay_s: how far watches lag behind, at most; drawn for each batch.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        min_delay_s: float = 0.0,
        max_delay_s: float = 0.0,
        watch_delay_s: float = 0.0,
    ) -> None:
        self._rng = rng or random.Random(0)
        self._min_delay_s = min_delay_s
        self._max_delay_s = max_delay_s
        self.watch_delay_s = watch_delay_s
        self._up = True
        self.space = Space(0, 0, False)
        self._revision = 1
        self._compacted = 0
        self._keys: dict[str, KeyValue] = {}
        self._history: list[WatchEvent] = []
        self._leases: dict[int, _Lease] = {}
        self._next_lease_id = _FIRST_LEASE_ID
        # watches that wait for a change, each with its prefix
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._context = contextvars.copy_context()  # the server's timers belong to no client

    def client(self) -> MemoryStore:
        return MemoryStore(self)

    @property
    def is_up(self) -> bool:
        return self._up

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def leases(self) -> Sequence[int]:
        return tuple(self._leases)

    @property
    def keys(self) -> Sequence[str]:
        return tuple(sorted(self._keys))

    def set_up(self, up: bool) -> None:
        """Data stay; leases start anew."""
        if up == self._up:
            return
        self._up = up
        for lease_id, lease in self._leases.items():
            if up:
                self._arm(lease_id, lease)
            elif lease.timer is not None:
                lease.timer.cancel()
        self.wake()

    def compact(self) -> None:
        """Watches that have not caught up are reset."""
        self._compacted = self._revision
        self._history.clear()
        self.wake()

    def expire_lease(self, lease_id: int) -> None:
        """As if its time had run out. The lease must exist."""
        lease = self._leases.pop(lease_id)
        if lease.timer is not None:
            lease.timer.cancel()
        self._apply([Delete(key) for key in sorted(lease.keys)])

    def wake(self) -> None:
        self._wake([""])

    async def change(self, prefix: str) -> None:
        """Waits for the next change of a key under a prefix, or for `wake`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append((prefix, waiter))
        await waiter

    def draw_half_delay_s(self) -> float:
        return self._rng.uniform(self._min_delay_s, self._max_delay_s) / 2

    def draw_watch_delay_s(self) -> float:
        return self._rng.uniform(0.0, self.watch_delay_s)

    # ---- what clients ask for; all at once, at the loop's present time

    def get(self, key: str) -> KeyValue | None:
        return self._keys.get(key)

    def list(self, prefix: str) -> Listing:
        kvs = tuple(self._keys[key] for key in sorted(self._keys) if key.startswith(prefix))
        return Listing(self._revision, kvs)

    def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """Raises LeaseExpired; then nothing has changed."""
        assert len(compares) <= MAX_TXN_OPERATIONS
        assert len(operations) <= MAX_TXN_OPERATIONS
        assert len({operation.key for operation in operations}) == len(operations), "a key is changed twice"
        for compare in compares:
            kv = self._keys.get(compare.key)
            if (kv.mod_revision if kv is not None else 0) != compare.mod_revision:
                return TxnResult(False, self._revision)
        for operation in operations:
            if isinstance(operation, Put) and operation.lease_id and operation.lease_id not in self._leases:
                raise LeaseExpired(f"lease {operation.lease_id:x}")
        self._apply(operations)
        return TxnResult(True, self._revision)

    def grant(self, ttl_s: int) -> int:
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        lease = self._leases[lease_id] = _Lease(max(ttl_s, MIN_TTL_S), 0.0)
        self._arm(lease_id, lease)
        return lease_id

    def keep_alive(self, lease_id: int) -> int:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseExpired(f"lease {lease_id:x}")
        self._arm(lease_id, lease)
        return lease.ttl_s

    def revoke(self, lease_id: int) -> None:
        if lease_id in self._leases:
            self.expire_lease(lease_id)

    def changes(self, prefix: str, start_revision: int) -> WatchBatch | None:
        """What a watch that stands at `start_revision` gets now; None where there is nothing."""
        if start_revision <= self._compacted or start_revision > self._revision + 1:
            listing = self.list(prefix)
            events = tuple(WatchEvent(EventKind.PUT, kv) for kv in listing.kvs)
            return WatchBatch(listing.revision, events, reset=True)
        first = bisect.bisect_left(self._history, start_revision, key=lambda event: event.kv.mod_revision)
        events = tuple(event for event in self._history[first:] if event.kv.key.startswith(prefix))
        return WatchBatch(events[-1].kv.mod_revision, events) if events else None

    # ---- the inside

    def _arm(self, lease_id: int, lease: _Lease) -> None:
        loop = asyncio.get_running_loop()
        if lease.timer is not None:
            lease.timer.cancel()
        lease.expires_at = loop.time() + lease.ttl_s
        lease.timer = loop.call_at(lease.expires_at, self.expire_lease, lease_id, context=self._context)

    def _apply(self, operations: Sequence[Put | Delete]) -> None:
        """One revision for all of them, if they change anything at all."""
        revision = self._revision + 1
        events: list[WatchEvent] = []
        for operation in operations:
            before = self._keys.get(operation.key)
            if before is not None and before.lease_id in self._leases:
                self._leases[before.lease_id].keys.pop(operation.key, None)
            if isinstance(operation, Put):
                kv = KeyValue(
                    operation.key,
                    operation.value,
                    create_revision=before.create_revision if before is not None else revision,
                    mod_revision=revision,
                    version=before.version + 1 if before is not None else 1,
                    lease_id=operation.lease_id,
                )
                self._keys[operation.key] = kv
                if operation.lease_id:
                    self._leases[operation.lease_id].keys[operation.key] = None
                events.append(WatchEvent(EventKind.PUT, kv))
            elif before is not None:
                del self._keys[operation.key]
                events.append(WatchEvent(EventKind.DELETE, KeyValue(operation.key, b"", 0, revision, 0)))
        if events:
            self._revision = revision
            self._history += events
            self._wake([event.kv.key for event in events])

    def _wake(self, keys: Sequence[str]) -> None:
        waiting, self._waiting = self._waiting, []
        for prefix, waiter in waiting:
            if waiter.done():
                continue
            if any(not key or key.startswith(prefix) for key in keys):
                waiter.set_result(None)
            else:
                self._waiting.append((prefix, waiter))


class MemoryStore:
    """One client of a MemoryStoreServer."""

    def __init__(self, server: MemoryStoreServer) -> None:
        self._server = server
        self._reachable = True
        self._loses_answers = False
        self._closed = False

    def set_reachable(self, reachable: bool) -> None:
        self._reachable = reachable
        self._server.wake()

    def lose_answers(self, loses: bool) -> None:
        """Changes are made but the client hears StoreUnavailable: the connection broke on the way back."""
        self._loses_answers = loses

    async def get(self, key: str) -> KeyValue | None:
        await self._there()
        found = self._server.get(key)
        await self._back()
        return found

    async def list(self, prefix: str) -> Listing:
        await self._there()
        found = self._server.list(prefix)
        await self._back()
        return found

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        return (await self.txn([], [Put(key, value, lease_id)])).revision

    async def delete(self, key: str) -> bool:
        await self._there()
        existed = self._server.get(key) is not None
        self._server.txn([], [Delete(key)])
        await self._back()
        return existed

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        await self._there()
        result = self._server.txn(compares, operations)
        await self._back()
        return result

    async def grant(self, ttl_s: int) -> int:
        await self._there()
        lease_id = self._server.grant(ttl_s)
        await self._back()
        return lease_id

    async def keep_alive(self, lease_id: int) -> int:
        await self._there()
        ttl_s = self._server.keep_alive(lease_id)
        await self._back()
        return ttl_s

    async def revoke(self, lease_id: int) -> None:
        await self._there()
        self._server.revoke(lease_id)
        await self._back()

    async def space(self) -> Space:
        await self._there()
        found = self._server.space
        await self._back()
        return found

    async def watch(self, prefix: str, *, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        assert prefix, "a prefix is not empty"
        next_revision = start_revision
        while not self._closed:
            batch = self._server.changes(prefix, next_revision) if self._is_connected() else None
            if batch is None:
                await self._server.change(prefix)
                continue
            delay_s = self._server.draw_watch_delay_s()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            next_revision = batch.revision + 1
            yield batch

    async def close(self) -> None:
        self._closed = True
        self._server.wake()

    def _is_connected(self) -> bool:
        return self._reachable and self._server.is_up

    async def _there(self) -> None:
        """Raises StoreUnavailable."""
        await asyncio.sleep(self._server.draw_half_delay_s())
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if not self._reachable:
            await asyncio.sleep(UNREACHABLE_AFTER_S)
            raise StoreUnavailable("the store did not answer")
        if not self._server.is_up:
            raise StoreUnavailable("cannot connect to the store")

    async def _back(self) -> None:
        """Raises StoreUnavailable."""
        await asyncio.sleep(self._server.draw_half_delay_s())
        if not self._reachable or self._loses_answers:
            await asyncio.sleep(UNREACHABLE_AFTER_S)
            raise StoreUnavailable("the store did not answer")
        if not self._server.is_up:
            raise StoreUnavailable("the connection to the store broke")
