"""Moves adapters between the store, host memory and the device, beside the engine loop.

TorchAdapterBackend owns the host tier (uid -> HostAdapter); the device tier is the runner's, an AdapterTarget; which
adapters should be where is adapters/cache.py's decision. Loads from the store have threads of their own, one where the
model runs on the CPU too and a few beside a GPU; copies to the device have one, so that none waits for a file. Each
works in the order asked. They share with the engine thread only queues and single dict operations; the engine thread
never waits for them, and computes nothing for them. What a loader thread does itself, or only waits for, is the
AdapterReader's choice.

A loader thread uses one compute thread, so that a load takes its time and not the step's cores. It has the priority
of any other thread: with a lower one it could be put aside while it holds the interpreter's lock, and the engine too.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from manylora_shared.errors import ManyloraError
from manylora_shared.ids import AdapterUid

from manylora_worker.kinds.api import AdapterEvent, AdapterTier
from manylora_worker.weights.layout import HostAdapter
from manylora_worker.weights.reader import AdapterReader

_LOG = logging.getLogger(__name__)


class AdapterTarget(Protocol):
    """Where adapters go on the device. Room is given on the engine's thread, weights are copied on the copying one."""

    def adapter_bytes(self, adapter: HostAdapter) -> int:
        """What it takes on the device. A loader's thread."""

    def reserve_adapter(self, adapter: HostAdapter) -> None:
        """Takes room for it. Raises RuntimeError or ValueError where there is none, or it can have none."""

    def fill_adapter(self, adapter: HostAdapter) -> None:
        """Copies its weights into the room reserved, and returns when a step may use them. The copying thread."""

    def drop_adapter(self, uid: AdapterUid) -> None:
        """Gives the room back. Unknown ids are ignored."""


@dataclass(frozen=True)
class _Job:
    uid: AdapterUid
    tier: AdapterTier
    adapter: HostAdapter | None = None


class TorchAdapterBackend:
    """See api.AdapterBackend. All methods are called by the engine thread.

    Args:
        objects: the folder that holds one folder an adapter, named by uid.
        reader: reads them, and is closed with the backend.
        host_threads: adapters that are read from the store at the same time.
        notify: called by the threads after each event is queued, to wake the engine; must not block.
    """

    def __init__(
        self,
        objects: Path,
        reader: AdapterReader,
        target: AdapterTarget,
        *,
        host_threads: int = 1,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._objects = objects
        self._reader = reader
        self._target = target
        self._notify = notify
        self._host: dict[AdapterUid, HostAdapter] = {}
        self._jobs: dict[AdapterTier, queue.SimpleQueue[_Job | None]] = {
            AdapterTier.HOST: queue.SimpleQueue(),
            AdapterTier.DEVICE: queue.SimpleQueue(),
        }
        self._events: queue.SimpleQueue[AdapterEvent] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        tiers = [AdapterTier.DEVICE, *(AdapterTier.HOST for _ in range(host_threads))]
        self._threads = [
            (
                tier,
                threading.Thread(target=self._run, args=(tier,), name=f"to-{tier.name.lower()}", daemon=True),
            )
            for tier in tiers
        ]
        for _, thread in self._threads:
            thread.start()

    def start_host_load(self, uid: AdapterUid) -> None:
        self._jobs[AdapterTier.HOST].put(_Job(uid, AdapterTier.HOST))

    def start_device_load(self, uid: AdapterUid) -> None:
        adapter = self._host.get(uid)
        try:
            if adapter is None:
                raise RuntimeError("the adapter is no longer in host memory")
            self._target.reserve_adapter(adapter)
        except (RuntimeError, ValueError) as error:
            self._events.put(AdapterEvent(uid, AdapterTier.DEVICE, error=str(error)))
            self._notify()
            return
        self._jobs[AdapterTier.DEVICE].put(_Job(uid, AdapterTier.DEVICE, adapter))

    def poll(self) -> Sequence[AdapterEvent]:
        """See api.AdapterBackend.poll. Raises what ended the loader thread, if anything unforeseen did."""
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
            for tier, _ in self._threads:
                self._jobs[tier].put(None)
            for _, thread in self._threads:
                thread.join()
            self._reader.close()

    def _run(self, tier: AdapterTier) -> None:
        try:
            self._serve(self._jobs[tier])
        except BaseException as error:
            self._failure = error
            self._notify()
            raise

    def _serve(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        torch.set_num_threads(1)
        while (job := jobs.get()) is not None and not self._closing.is_set():
            self._events.put(self._load(job))
            self._notify()

    def _load(self, job: _Job) -> AdapterEvent:
        try:
            if job.tier is AdapterTier.HOST:
                adapter = self._reader.read(self._objects / job.uid, job.uid)
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
        except (ManyloraError, OSError, RuntimeError, ValueError, MemoryError) as error:
            _LOG.warning("adapter %s did not load: %s", job.uid, error)
            return AdapterEvent(job.uid, job.tier, error=str(error))
