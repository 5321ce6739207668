"""The other ranks as rank 0 sees them: processes of their own, told of everything in order, and what they say.

Messages to a rank are pickles, its answers JSON: the worker must not unpickle what a process says that reads tenants'
files. A rank that ends, or says that it failed, is lost, and the worker with it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from manylora_shared.ids import AdapterUid
from manylora_shared.process.config import python_environment

from manylora_worker.config import WorkerConfig
from manylora_worker.kinds.api import AdapterEvent, AdapterTier, RunnerLost

_LOG = logging.getLogger(__name__)
_END_S = 10.0
_LAST_S = 20.0  # for what there is to be ended, once a rank is lost


@dataclass(frozen=True)
class Order:
    """The first message: what to build."""

    config: WorkerConfig  # with this rank's device
    rank: int
    store: Path


class Followers:
    """Args:
    orders: of ranks 1, 2, ...
    notify: called by threads when there is news.
    ends_process: whether the process must end by itself after a loss: a device waits for the lost rank for ever.
    """

    def __init__(self, orders: Sequence[Order], notify: Callable[[], None], *, ends_process: bool) -> None:
        self._notify = notify
        self._ends_process = ends_process
        self._events: queue.SimpleQueue[AdapterEvent] = queue.SimpleQueue()
        self._lost = ""
        self._lock = threading.Lock()
        self._is_closing = False
        self._ready = [threading.Event() for _ in orders]
        self._ranks = [_start() for _ in orders]
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(1, len(orders) + 1)
        ]
        for thread in self._threads:
            thread.start()
        for order, (connection, _) in zip(orders, self._ranks, strict=True):
            self._send(order.rank, connection, pickle.dumps(order))

    @property
    def lost(self) -> str:
        """Why there is nothing more to do; empty: all is well."""
        return self._lost

    def wait_ready(self) -> None:
        """Raises RunnerLost."""
        for ready in self._ready:
            ready.wait()
        self.check()

    def check(self) -> None:
        """Raises RunnerLost."""
        if self._lost:
            raise RunnerLost(self._lost)

    def lose(self, message: str) -> None:
        with self._lock:
            if self._lost or self._is_closing:
                return
            self._lost = message
        _LOG.critical("the worker ends: %s", message)
        for ready in self._ready:
            ready.set()
        if self._ends_process:
            faulthandler.dump_traceback_later(_LAST_S, exit=True)
        self._notify()

    def send(self, *message: Any) -> None:
        """To all of them. Raises RunnerLost."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for rank, (connection, _) in enumerate(self._ranks, start=1):
            self._send(rank, connection, data)
        self.check()

    def take_events(self) -> list[AdapterEvent]:
        """Each rank's, new since the last call."""
        events = []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._is_closing = True
        for connection, process in self._ranks:
            if not connection.closed:
                _close(connection, process)

    def _send(self, rank: int, connection: Connection, data: bytes) -> None:
        try:
            connection.send_bytes(data)
        except OSError:
            self.lose(f"rank {rank} takes no more orders")

    def _listen(self, rank: int) -> None:
        connection, process = self._ranks[rank - 1]
        try:
            while True:
                self._hear(rank, json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            pass  # it has ended, or we closed it
        except (ValueError, KeyError, TypeError) as error:
            self.lose(f"rank {rank} makes no sense ({error!r})")
            return
        if not self._is_closing:
            self.lose(f"rank {rank} (process {process.pid}) has ended{_how(process)}")

    def _hear(self, rank: int, said: dict[str, Any]) -> None:
        if "failed" in said:
            self.lose(f"rank {rank}: {said['failed']}")
        elif "ready" in said:
            self._ready[rank - 1].set()
        else:
            uid, tier = AdapterUid(said["uid"]), AdapterTier(said["tier"])
            self._events.put(AdapterEvent(uid, tier, said["size_bytes"], said["error"], said["is_passing"]))
            self._notify()


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    from manylora_worker.models.ranks import follower  # builds an engine, as who starts it does

    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", follower.__name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=python_environment(),
        )
    return Connection(ours.detach()), process


def _close(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return ", as far as one can hear"
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"
