"""Moves adapters between the store, host memory and the device, beside the engine loop.

TorchAdapterBackend owns the host tier (uid -> HostAdapter); the runner owns the device tier (AdapterTarget). Its
threads share only queues and single dict operations with the engine thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from manylora_shared.errors import DataLost, InvalidRequest, ManyloraError, Overloaded, ServiceUnavailable
from manylora_shared.ids import AdapterUid
from manylora_shared.telemetry.logs import fields

from manylora_worker.kinds.api import AdapterEvent, AdapterTier
from manylora_worker.weights.layout import HostAdapter
from manylora_worker.weights.reader import AdapterReader
from manylora_worker.weights.store import AdapterStore

_LOG = logging.getLogger(__name__)
# The store does not answer, the disk is full or fails: none of it is the adapter's.
_PASSING = (ServiceUnavailable, Overloaded, OSError, MemoryError)


class AdapterTarget(Protocol):
    """The engine's thread reserves and drops, the copying thread fills."""

    def adapter_bytes(self, adapter: HostAdapter) -> int:
        """Called by a loader's thread."""

    def reserve_adapter(self, adapter: HostAdapter) -> None:
        """Raises RuntimeError or ValueError where there is no room for it."""

    def fill_adapter(self, adapter: HostAdapter) -> None:
        """Returns when a step may use the weights."""

    def drop_adapter(self, uid: AdapterUid) -> None:
        """Ignores unknown ids."""

    def close(self) -> None:
        """No step follows."""


@dataclass(frozen=True)
class _Job:
    uid: AdapterUid
    tier: AdapterTier
    adapter: HostAdapter | None = None
    lent: str | None = None


_Work = tuple[queue.SimpleQueue[_Job | None], Callable[[_Job], AdapterEvent], str]


class TorchAdapterBackend:
    """See api.AdapterBackend. Called by the engine thread.

    Args:
        notify: called by the threads after each event; must not block.
    """

    def __init__(
        self,
        store: AdapterStore,
        reader: AdapterReader,
        target: AdapterTarget,
        *,
        host_threads: int = 1,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._reader = reader
        self._target = target
        self._notify = notify
        self._lent: dict[AdapterUid, tuple[str, ...]] = {}
        self._lending = threading.Lock()
        self._host: dict[AdapterUid, HostAdapter] = {}
        self._jobs: dict[AdapterTier, queue.SimpleQueue[_Job | None]] = {
            AdapterTier.HOST: queue.SimpleQueue(),
            AdapterTier.DEVICE: queue.SimpleQueue(),
        }
        self._events: queue.SimpleQueue[AdapterEvent] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        # copies have a thread of their own: none waits for a file
        tiers = [AdapterTier.DEVICE, *(AdapterTier.HOST for _ in range(host_threads))]
        work: list[_Work] = [(self._jobs[tier], self._load, f"to-{tier.name.lower()}") for tier in tiers]
        self._threads = [
            (jobs, threading.Thread(target=self._run, args=(jobs, do), name=name, daemon=True))
            for jobs, do, name in work
        ]
        for _, thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def lends(self, uid: AdapterUid, path: str) -> Iterator[None]:
        """From any thread. Meanwhile loads find the adapter at `path` of the store."""
        with self._lending:
            self._lent[uid] = (*self._lent.get(uid, ()), path)
        try:
            yield
        finally:
            with self._lending:
                left = list(self._lent.pop(uid))
                left.remove(path)
                if left:
                    self._lent[uid] = tuple(left)

    def lent(self, uid: AdapterUid) -> str | None:
        lent = self._lent.get(uid)
        return lent[0] if lent else None

    def is_near(self, uid: AdapterUid) -> bool:
        return self._store.has(uid)

    def start_fetch(self, uid: AdapterUid) -> None:
        # A thread of its own, for it may hang; nobody waits for it at the end, and it leaves the disk in order then.
        threading.Thread(target=self._fetch, args=(_Job(uid, AdapterTier.DISK),), name="to-disk", daemon=True).start()

    def start_host_load(self, uid: AdapterUid, lent: str | None = None) -> None:
        """lent: to another rank, as if to this one."""
        self._jobs[AdapterTier.HOST].put(_Job(uid, AdapterTier.HOST, lent=lent))

    def start_device_load(self, uid: AdapterUid) -> None:
        adapter = self._host.get(uid)
        try:
            if adapter is None:
                raise RuntimeError("the adapter is no longer in host memory")
            self._target.reserve_adapter(adapter)
        except Exception as error:  # whatever it is, it is this adapter's, and on the engine's thread everybody's
            _LOG.warning("an adapter does not come to the device", extra=fields(adapter=uid), exc_info=True)
            self._events.put(AdapterEvent(uid, AdapterTier.DEVICE, error=str(error) or type(error).__name__))
            self._notify()
            return
        self._jobs[AdapterTier.DEVICE].put(_Job(uid, AdapterTier.DEVICE, adapter))

    def poll(self) -> Sequence[AdapterEvent]:
        """Raises RuntimeError if a loader thread has died."""
        if self._failure is not None:
            raise RuntimeError("the adapter loader has died") from self._failure
        events: list[AdapterEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        for event in events:
            if event.tier is AdapterTier.DEVICE and event.error is not None:
                self._target.drop_adapter(event.uid)
        return events

    def drop_device(self, uid: AdapterUid) -> None:
        self._target.drop_adapter(uid)

    def drop_host(self, uid: AdapterUid) -> None:
        adapter = self._host.pop(uid, None)
        if adapter is not None:
            self._reader.free(adapter)

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            for jobs, _ in self._threads:
                jobs.put(None)
            for _, thread in self._threads:
                thread.join()
            self._reader.close()
            self._target.close()

    def _run(self, jobs: queue.SimpleQueue[_Job | None], do: Callable[[_Job], AdapterEvent]) -> None:
        with self._told_where_it_ends():
            self._serve(jobs, do)

    @contextlib.contextmanager
    def _told_where_it_ends(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._notify()
            raise

    def _serve(self, jobs: queue.SimpleQueue[_Job | None], do: Callable[[_Job], AdapterEvent]) -> None:
        # A load takes its time and leaves the step its cores. No lower priority: a thread put aside while it holds the
        # interpreter's lock stops the engine.
        torch.set_num_threads(1)
        while (job := jobs.get()) is not None and not self._closing.is_set():
            self._tell(job, do)

    def _tell(self, job: _Job, do: Callable[[_Job], AdapterEvent]) -> None:
        try:
            event = do(job)
        except (ManyloraError, OSError, RuntimeError, ValueError, MemoryError) as error:
            _LOG.warning("adapter %s did not load: %s", job.uid, error)
            event = AdapterEvent(job.uid, job.tier, error=str(error), is_passing=isinstance(error, _PASSING))
        self._events.put(event)
        self._notify()

    def _fetch(self, job: _Job) -> None:
        with self._told_where_it_ends():
            self._tell(job, self._bring)

    def _bring(self, job: _Job) -> AdapterEvent:
        self._store.fetch(job.uid, self.lent(job.uid))
        return AdapterEvent(job.uid, AdapterTier.DISK)

    def _load(self, job: _Job) -> AdapterEvent:
        if job.tier is AdapterTier.HOST:
            adapter = self._read(job)
            # The greater of what it takes here and there: one number counts against both budgets.
            try:
                size_bytes = max(adapter.size_bytes, self._target.adapter_bytes(adapter))
            except ValueError:
                self._reader.free(adapter)
                raise
            self._host[job.uid] = adapter
            return AdapterEvent(job.uid, AdapterTier.HOST, size_bytes)
        assert job.adapter is not None
        self._target.fill_adapter(job.adapter)
        return AdapterEvent(job.uid, AdapterTier.DEVICE)

    def _read(self, job: _Job) -> HostAdapter:
        try:
            with self._store.held(job.uid, job.lent or self.lent(job.uid)) as folder:
                return self._reader.read(folder, job.uid)
        except (InvalidRequest, DataLost):
            self._store.drop(job.uid)
            raise
