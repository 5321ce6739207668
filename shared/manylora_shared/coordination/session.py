"""What services do with a store all their life: hold keys under a lease, stand for election, mirror a prefix. Each
class owns one background task and the state that the task alone writes.
"""

# While the store is away they keep their last knowledge. Any error but StoreUnavailable and LeaseExpired is a bug:
# `close` raises it. A mirror goes on with the next record, for others depend on it.

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from manylora_shared.coordination.base import (
    Compare,
    EventKind,
    KeyValue,
    LeaseExpired,
    Listing,
    Put,
    Store,
    StoreUnavailable,
    WatchEvent,
)

_LOG = logging.getLogger(__name__)

RETRY_S = 0.25

T = TypeVar("T")


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _stop(task: asyncio.Task[None] | None) -> None:
    if task is None:
        return
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def first_of(*waits: Awaitable[Any]) -> None:
    """Returns when one of them does; raises what it raised. The others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Ended(NamedTuple):
    why: str
    is_unreached: bool = False  # else the store has said it


class _Lease:
    # Validity is counted from before a renewal was sent, so a lease that we hold valid is one that the store has
    # not expired.

    def __init__(self, store: Store, ttl_s: int) -> None:
        self.lease_id = 0
        self._store = store
        self._ttl_s = ttl_s
        self._valid_until = 0.0
        self._renew_at = 0.0

    def is_valid(self, now: float) -> bool:
        return self.lease_id != 0 and now < self._valid_until

    async def renew(self) -> None:
        """Also grants one where there is none. Raises StoreUnavailable, LeaseExpired."""
        sent_at = _now()
        if self.lease_id:
            await self._store.keep_alive(self.lease_id)
        else:
            self.lease_id = await self._store.grant(self._ttl_s)
        self._valid_until = sent_at + self._ttl_s
        # An answer that took long leaves less than a third: then it is renewed when it is not certain any more.
        self._renew_at = min(_now() + self._ttl_s / 3, self._valid_until)

    async def hold(self, use: Callable[[float], Awaitable[bool]], *, margin_s: float = 0.0) -> _Ended:
        """Renews the lease every third of its time to live. Returns why it ended: lost, or not needed.

        Args:
            margin_s: a store that does not answer is given up so long before the lease ends.
            use: called while the lease is valid, with the seconds that it may take; False: the lease is not needed any
                more. May raise StoreUnavailable, which is tried again, and LeaseExpired.
        """
        while True:
            try:
                if not self.lease_id or _now() >= min(self._renew_at, self._valid_until - margin_s):
                    await self._renew_in_time(margin_s)
                if not await use(max(0.0, min(self._renew_at, self._valid_until - margin_s) - _now())):
                    return _Ended("it is not needed any more")
            except LeaseExpired:
                return _Ended("the store no longer knows it")
            except (StoreUnavailable, TimeoutError) as e:
                left_s = self._valid_until - margin_s - _now() if self.lease_id else RETRY_S
                if left_s <= 0:
                    return _Ended(f"it could not be renewed: {e}", is_unreached=True)
                self._renew_at = 0.0
                await asyncio.sleep(min(RETRY_S, left_s))

    def forget(self) -> int:
        lease_id, self.lease_id = self.lease_id, 0
        return lease_id

    async def revoke(self) -> None:
        # Where the store cannot be reached, the lease expires by itself.
        lease_id = self.forget()
        if lease_id:
            with contextlib.suppress(StoreUnavailable):
                await self._store.revoke(lease_id)

    async def _renew_in_time(self, margin_s: float) -> None:
        """Raises TimeoutError when a held lease's time to live has passed but for the margin."""
        async with asyncio.timeout_at(self._valid_until - margin_s if self.lease_id else None):
            await self.renew()


class LeaseSession:
    """Keys that stand as long as this process lives. After a loss it puts every key again under a new lease. The task
    calls `on_lost` once a loss.
    """

    def __init__(self, store: Store, *, ttl_s: int, on_lost: Callable[[], None] | None = None) -> None:
        self._store = store
        self._lease = _Lease(store, ttl_s)
        self._on_lost = on_lost
        self._wanted: dict[str, bytes] = {}
        self._standing: dict[str, bytes] = {}
        self._unwanted: dict[str, None] = {}
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def lease_id(self) -> int:
        return self._lease.lease_id

    def is_live(self, now: float) -> bool:
        return self._lease.is_valid(now)

    def start(self) -> None:
        assert self._task is None, "start is called once"
        self._task = asyncio.create_task(self._run(), name="lease-session")

    def set(self, key: str, value: bytes) -> None:
        self._wanted[key] = value
        self._unwanted.pop(key, None)
        self._work.set()

    def unset(self, key: str) -> None:
        if self._wanted.pop(key, None) is not None:
            self._unwanted[key] = None
            self._work.set()

    async def register(self, key: str, value: bytes) -> None:
        """Waits until the key stands in the store, through any outage."""
        self.set(key, value)
        while self._standing.get(key) != value and self._wanted.get(key) == value:
            await self._wait_progress()

    async def unregister(self, key: str) -> None:
        self.unset(key)
        while key in self._unwanted:
            await self._wait_progress()

    async def close(self) -> None:
        try:
            await _stop(self._task)
        finally:
            self._standing.clear()
            await self._lease.revoke()

    async def _wait_progress(self) -> None:
        assert self._task is not None, "start comes first"
        progress = asyncio.ensure_future(self._progress.wait())
        try:
            await asyncio.wait([progress, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            progress.cancel()
        if self._task.done():
            await _stop(self._task)
            raise RuntimeError("the lease session is closed")

    def _progressed(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def _run(self) -> None:
        while True:
            self._lose((await self._lease.hold(self._use)).why)

    async def _use(self, pause_s: float) -> bool:
        self._work.clear()
        await self._reconcile()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._work.wait()
        return True

    async def _reconcile(self) -> None:
        for key in list(self._unwanted):
            await self._store.delete(key)
            self._unwanted.pop(key, None)
            self._standing.pop(key, None)
            self._progressed()
        for key, value in list(self._wanted.items()):
            if self._standing.get(key) != value and self._wanted.get(key) == value:
                await self._store.put(key, value, lease_id=self._lease.lease_id)
                self._standing[key] = value
                self._progressed()

    def _lose(self, why: str) -> None:
        # After a loss by time the old lease is left to expire: its keys may stand until the new ones are put.
        _LOG.warning("lease %x is lost: %s", self._lease.forget(), why)
        self._standing.clear()
        if self._on_lost is not None:
            self._on_lost()


class Election:
    """One candidate for a key. The key's create_revision is the *epoch*: every later leader has a greater one.

    `is_leader`: nobody else can be. A leader to whom the store does not answer any more leads on after its lease
    (`leads`), as nobody can be elected where the store is gone. Where it is cut off alone another may be: then whoever
    obeys the greater epoch says so, and the leader must call `outranked`::

        election.start()
        while True:
            epoch = await election.elected()
            ...                       # lead; check leads(now) before every decision
            await election.lost(epoch)
    """

    def __init__(self, store: Store, *, key: str, value: bytes, ttl_s: int) -> None:
        self._store = store
        self._key = key
        self._value = value
        self._lease = _Lease(store, ttl_s)
        self._margin_s = ttl_s / 4  # so that leading goes on without a gap
        self._former_lease_id = 0
        self._epoch = 0
        self._is_held_over = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        """0 while not leading."""
        return self._epoch

    def is_leader(self, now: float) -> bool:
        """Whether nobody else can be leader at `now`."""
        return self._epoch != 0 and self._lease.is_valid(now)

    def leads(self, now: float) -> bool:
        return self.is_leader(now) or (self._epoch != 0 and self._is_held_over)

    def outranked(self) -> None:
        """Another one's epoch is obeyed. Without the lease this one's term is over at once."""
        if self._epoch and not self.is_leader(_now()):
            _LOG.warning("term %d on %s is over: another leads", self._epoch, self._key)
            self._set_epoch(0)

    def start(self) -> None:
        assert self._task is None, "start is called once"
        self._task = asyncio.create_task(self._run(), name="election")

    async def elected(self) -> int:
        while not self.is_leader(_now()):
            await self._wait_changed()
        return self._epoch

    async def lost(self, epoch: int) -> None:
        while self._epoch == epoch:
            await self._wait_changed()

    async def resign(self) -> None:
        try:
            await _stop(self._task)
        finally:
            self._set_epoch(0)
            await self._lease.revoke()

    async def _wait_changed(self) -> None:
        assert self._task is not None, "start comes first"
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([changed, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if self._task.done():
            await _stop(self._task)
            raise RuntimeError("the election is closed")

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        while True:
            try:
                epoch = await self._campaign()
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            except LeaseExpired:
                self._lease.forget()
                continue
            _LOG.info("elected on %s, epoch %d", self._key, epoch)
            self._set_epoch(epoch)
            try:
                await self._lead()
            finally:
                self._set_epoch(0)
            _LOG.warning("the term that began at %d on %s has ended", epoch, self._key)

    async def _campaign(self) -> int:
        # The lease is kept over failed attempts: a transaction that was cut off may have been applied.
        while True:
            kv = await self._store.get(self._key)
            if kv is None:
                await self._lease.renew()
                put = Put(self._key, self._value, lease_id=self._lease.lease_id)
                result = await self._store.txn([Compare(self._key, 0)], [put])
                if result.succeeded:
                    return result.revision
            elif kv.lease_id and kv.lease_id == self._lease.lease_id:
                await self._lease.renew()
                return kv.create_revision
            elif kv.lease_id and kv.lease_id == self._former_lease_id:
                await self._store.revoke(kv.lease_id)  # left over from a term that ended while the store was away
            else:
                await self._wait_free(kv.create_revision, kv.mod_revision)

    async def _wait_free(self, create_revision: int, after_revision: int) -> None:
        """Returns when the key that was created at `create_revision`, seen at `after_revision`, is gone."""
        watch = self._store.watch(self._key, start_revision=after_revision + 1)
        async with contextlib.aclosing(watch) as batches:
            async for batch in batches:
                events = [e for e in batch.events if e.kv.key == self._key]
                if any(e.kind is EventKind.DELETE for e in events):
                    return
                if batch.reset and not any(e.kv.create_revision == create_revision for e in events):
                    return

    async def _lead(self) -> None:
        # The lease is given up at the end: the next term has a new epoch.
        watcher = asyncio.create_task(self._wait_free(self._epoch, self._epoch), name="election-watch")

        async def is_ours(pause_s: float) -> bool:
            await asyncio.wait([watcher], timeout=pause_s)
            return not watcher.done()  # else somebody deleted the key: the term is over though the lease stands

        try:
            ended = await self._lease.hold(is_ours, margin_s=self._margin_s)
            while ended.is_unreached and await self._hold_over(watcher):
                self._tell()  # who waits to be elected: this one is leader again, in the same term
                ended = await self._lease.hold(is_ours, margin_s=self._margin_s)
            if watcher.done():
                watcher.result()
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])
        self._set_epoch(0)
        self._former_lease_id = self._lease.lease_id
        await self._lease.revoke()

    async def _hold_over(self, watcher: asyncio.Task[None]) -> bool:
        """Leads on while the store does not answer. Whether the lease holds again."""
        if not self._lease.is_valid(_now()):
            return False  # this process stood still meanwhile: others may have been elected, and not be known here
        _LOG.warning("the store does not answer: term %d on %s goes on without it", self._epoch, self._key)
        self._is_held_over = True
        try:
            while self._epoch and not watcher.done():
                try:
                    await self._lease.renew()
                except LeaseExpired:
                    return False
                except StoreUnavailable:
                    await asyncio.wait([watcher], timeout=RETRY_S)
                else:
                    return self._epoch != 0
        finally:
            self._is_held_over = False
        return False


class Mirror(Generic[T]):
    """The keys under a prefix, without it, as a dict that follows the store.

    Args:
        parse: what raises is logged, and the key counts as absent.
        on_change: called from the task after the change: the key, and its value or None. A value that it fails on is
            logged and taken away again.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        parse: Callable[[KeyValue], T],
        on_change: Callable[[str, T | None], None] | None = None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._parse = parse
        self._on_change = on_change
        self._values: dict[str, T] = {}
        self._view = MappingProxyType(self._values)
        self._revision = 0
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # the first of on_change

    @property
    def values(self) -> Mapping[str, T]:
        return self._view

    @property
    def revision(self) -> int:
        """0 before the first listing."""
        return self._revision

    def start(self) -> None:
        assert self._task is None, "start is called once"
        self._task = asyncio.create_task(self._run(), name=f"mirror {self._prefix}")

    async def ready(self) -> None:
        assert self._task is not None, "start comes first"
        waiting = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            await _stop(self._task)
            raise RuntimeError("the mirror is closed")

    async def failed(self) -> None:
        """Waits until the mirror ends by itself, which only a bug makes it do, and raises why."""
        assert self._task is not None, "start comes first"
        await asyncio.wait([self._task])
        if self._task.cancelled():
            await asyncio.get_running_loop().create_future()  # it was closed
        self._task.result()
        raise RuntimeError(f"the mirror of {self._prefix} has ended")

    async def close(self) -> None:
        await _stop(self._task)
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        while True:
            try:
                listing = await self._listed()
                break
            except StoreUnavailable as e:
                _LOG.warning("waiting for the store to list %s: %s", self._prefix, e)
                await asyncio.sleep(RETRY_S)
        self._replace(listing.kvs)
        self._revision = listing.revision
        self._ready.set()
        watch = self._store.watch(self._prefix, start_revision=listing.revision + 1)
        async with contextlib.aclosing(watch) as batches:
            async for batch in batches:
                if batch.reset:
                    self._replace([event.kv for event in batch.events])
                else:
                    for event in batch.events:
                        self._apply(event)
                self._revision = batch.revision

    async def _listed(self) -> Listing:
        return await self._store.list(self._prefix)

    def _replace(self, kvs: Any) -> None:
        found = {kv.key: kv for kv in kvs}
        for name in [n for n in self._values if self._prefix + n not in found]:
            self._set(name, None)
        for kv in found.values():
            self._set(kv.key.removeprefix(self._prefix), kv)

    def _apply(self, event: WatchEvent) -> None:
        name = event.kv.key.removeprefix(self._prefix)
        self._set(name, event.kv if event.kind is EventKind.PUT else None)

    def _set(self, name: str, kv: KeyValue | None) -> None:
        value: T | None = None
        if kv is not None:
            try:
                value = self._parse(kv)
            except Exception as e:  # a stored record's, whatever it is
                _LOG.error("the record at %s is unreadable and is ignored: %s", kv.key, e)
        before = self._values.get(name)
        if not self._put(name, value, before) and value is not None:
            self._put(name, None, value)

    def _put(self, name: str, value: T | None, before: T | None) -> bool:
        if value is None:
            self._values.pop(name, None)
        else:
            self._values[name] = value
        if self._on_change is not None and value != before:
            try:
                self._on_change(name, value)
            except Exception as e:  # a bug; `close` raises it
                _LOG.exception("the record at %s%s could not be taken and is ignored", self._prefix, name)
                self._error = self._error or e
                return False
        return True
