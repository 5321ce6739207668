"""Reads adapters in processes of their own, so that the engine's thread never waits for the interpreter.

ReaderProcesses owns the readers (reader_process.py), their fork server, and the host tier's memory. A reader serves one
call at a time; a call that finds none idle forks one.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from manylora_shared.encryption.sealing import MAX_HEADER_BYTES, Header, NoKeys, OpeningKeys, SealBroken
from manylora_shared.errors import FieldViolation
from manylora_shared.ids import AdapterUid
from manylora_shared.process.config import python_environment
from manylora_shared.stores.adapter_files import FILE_NAMES, WEIGHTS_NAME
from torch import Tensor

from manylora_worker.weights import reader_process
from manylora_worker.weights.host_memory import HostMemory
from manylora_worker.weights.layout import Extras, HostAdapter, Layout, elements_with, heard_extras, lay_out
from manylora_worker.weights.source import AdapterBase, AdapterInvalid, AdapterLimits

_LOG = logging.getLogger(__name__)
# libraries then start no threads of their own
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START_S = 120.0  # for the fork server to import torch, from a slow disk too
_STARTS = 2
_PATIENCE_S = 30.0
_SLOWEST_BYTES_PER_S = 10e6  # a read may take _PATIENCE_S, and longer for a large file on slow storage
_MESSAGE_S = 5.0  # from a message's first byte to its last
_PROBE_S = 0.05
_END_S = 5.0
_MAX_MESSAGE_BYTES = 16 << 20
_LAYOUTS = 64  # kept: most adapters of a model have one of a few


class ReaderFailed(RuntimeError): ...


class ReaderProcesses:
    """Its processes end with `close`, and with this process. patience_s: for reading a small adapter."""

    # A reader that dies, is late or makes no sense is killed and fails only its call. Its memory is given out again
    # once it has ended; if it hangs in the kernel, that memory is lost and the log says so.
    def __init__(
        self,
        base: AdapterBase,
        limits: AdapterLimits,
        memory: HostMemory,
        *,
        patience_s: float = _PATIENCE_S,
        keys: OpeningKeys | None = None,
    ) -> None:
        self._base = base
        self._limits = limits
        self._memory = memory
        self._patience_s = patience_s
        self._keys = keys or NoKeys()
        self._paths = [slot.path for site in base.sites for slot in site.slots]
        self._layouts: OrderedDict[tuple[int, ...], Layout] = OrderedDict()
        self._lock = threading.Lock()
        self._idle: list[_Reader] = []  # the last one used is taken first
        self._is_closed = False
        self._fork_lock = threading.Lock()
        self._fork_server = _ForkServer(base, limits, memory.fd)

    def read(self, folder: Path, uid: AdapterUid) -> HostAdapter:
        (layout, extras), buffer = self._call(folder, uid)
        assert buffer is not None
        return HostAdapter(uid, buffer, layout, extras)

    def check(self, folder: Path) -> tuple[Layout, Extras]:
        found, _ = self._call(folder, None)
        return found

    def free(self, adapter: HostAdapter) -> None:
        self._memory.free(adapter.buffer)

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for reader in idle:
            reader.connection.close()
        self._fork_server.close()
        self._memory.close()

    def _call(self, folder: Path, uid: AdapterUid | None) -> tuple[tuple[Layout, Extras], Tensor | None]:
        key = _key_of(folder, self._keys)
        reader = self._take()
        buffer: Tensor | None = None
        try:
            deadline = time.monotonic() + self._patience_s + _weights_bytes(folder) / _SLOWEST_BYTES_PER_S
            reader.say({"folder": str(folder), "uid": uid, "keeps": uid is not None, "key": key})
            answer = reader.hear(deadline)
            if uid is not None and "elements" in answer:
                buffer = self._memory.allocate(answer["elements"], self._base.dtype)
                self._tell_where(reader, buffer)
                answer = reader.hear(deadline)
            outcome = self._outcome(answer)
            if isinstance(outcome, tuple) and uid is not None and _elements(buffer) != elements_with(*outcome):
                raise ValueError("ranks that do not fit the memory asked for")
        except BaseException as error:
            self._give_up(reader, buffer)
            failure = _failure_of(error)
            if failure is None:
                raise
            raise failure from error
        self._put_back(reader)
        if isinstance(outcome, Exception):
            if buffer is not None:
                self._memory.free(buffer)
            raise outcome
        return outcome, buffer

    def _outcome(self, answer: Mapping[str, Any]) -> tuple[Layout, Extras] | Exception:
        if "ranks" in answer:
            layout = self._layout(tuple(answer["ranks"]))
            return layout, heard_extras(answer["extras"], layout, self._base.sites)
        if "violations" in answer:
            return AdapterInvalid.of_all([FieldViolation(name, text) for name, text in answer["violations"]])
        return RuntimeError(answer["error"])

    def _layout(self, ranks: tuple[int, ...]) -> Layout:
        with self._lock:
            layout = self._layouts.pop(ranks, None)
            if layout is None:
                by_path = {path: rank for path, rank in zip(self._paths, ranks, strict=True) if rank}
                layout = lay_out(self._base.sites, by_path)
                if len(self._layouts) == _LAYOUTS:
                    self._layouts.popitem(last=False)
            self._layouts[ranks] = layout
        return layout

    def _tell_where(self, reader: _Reader, buffer: Tensor) -> None:
        offset = self._memory.offset_of(buffer)
        reader.say({"offset": offset})
        if offset < 0:
            send_handle(reader.connection, self._memory.fd_apart(buffer), reader.pid)

    def _take(self) -> _Reader:
        while True:
            with self._lock:
                if not self._idle:
                    break
                reader = self._idle.pop()
            if not reader.connection.poll(0):
                return reader
            reader.connection.close()  # it has died since its last call
        return self._fork()

    def _fork(self) -> _Reader:
        with self._fork_lock:
            for _ in range(_STARTS):
                if self._is_closed:
                    break
                try:
                    return self._fork_server.fork()
                except (EOFError, OSError) as error:
                    _LOG.warning("the fork server of the adapters' readers is started anew: %r", error)
                    self._fork_server.close()
                    self._fork_server = _ForkServer(self._base, self._limits, self._memory.fd)
        raise ReaderFailed("no process could be started to read the adapter")

    def _put_back(self, reader: _Reader) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(reader)
                return
        reader.connection.close()

    def _give_up(self, reader: _Reader, buffer: Tensor | None) -> None:
        has_ended = reader.kill()
        if buffer is not None:
            if has_ended:
                self._memory.free(buffer)
            else:
                _LOG.error("process %d does not end: %d bytes of the host tier are lost", reader.pid, buffer.nbytes)


def _failure_of(error: BaseException) -> ReaderFailed | None:
    """None: the call fails with the error itself."""
    if isinstance(error, EOFError | ConnectionError):
        return ReaderFailed("the process that read the adapter died")
    if isinstance(error, TimeoutError | BlockingIOError):
        return ReaderFailed("the process that read the adapter took too long and was ended")
    if isinstance(error, ValueError | LookupError | TypeError | AssertionError):
        return ReaderFailed("the process that read the adapter made no sense and was ended")
    return None


def _elements(buffer: Tensor | None) -> int:
    return -1 if buffer is None else buffer.numel()


def _key_of(folder: Path, keys: OpeningKeys) -> list[str] | None:
    """What a reader opens the files with; None: they are not sealed, or it will say what is wrong with them.

    Raises Sealed, ServiceUnavailable.
    """
    for name in FILE_NAMES:  # one key sealed both
        try:
            with (folder / name).open("rb") as file:
                header = Header.of(file.read(MAX_HEADER_BYTES))
        except (OSError, SealBroken):
            continue
        if header is not None:
            key = keys.opening(header.owner, header.key_id)
            return [key.owner, key.key_id, key.secret.hex()]
    return None


def _weights_bytes(folder: Path) -> int:
    try:
        return (folder / WEIGHTS_NAME).lstat().st_size
    except OSError:
        return 0  # the reader will say what is wrong with it


class _Reader:
    def __init__(self, end: socket.socket) -> None:
        seconds, rest = divmod(_MESSAGE_S, 1.0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        self.connection = Connection(end.detach())
        self.pid = 0  # 0: not known yet

    def say(self, message: Mapping[str, Any]) -> None:
        self.connection.send_bytes(json.dumps(message).encode())

    def hear(self, deadline: float) -> Mapping[str, Any]:
        """Raises TimeoutError or BlockingIOError after `deadline` (time.monotonic), EOFError or ConnectionError where
        it has died, ValueError or TypeError where it makes no sense.
        """
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            data = self.connection.recv_bytes(_MAX_MESSAGE_BYTES)
        except (BlockingIOError, ConnectionError):
            raise
        except OSError as error:
            raise ValueError("a message of a length that none has") from error
        message = json.loads(data)
        if not isinstance(message, dict):
            raise TypeError("a message that is no object")
        return message

    def kill(self) -> bool:
        """Whether it has ended, and so writes nowhere any more."""
        with self.connection:
            if self._has_ended(_PROBE_S):
                return True
            os.kill(self.pid, signal.SIGKILL)  # it has its end still, so the id is its own
            return self._has_ended(_END_S)

    def _has_ended(self, within_s: float) -> bool:
        """Drops whatever it still says."""
        deadline = time.monotonic() + within_s
        try:
            while (left_s := deadline - time.monotonic()) > 0 and wait([self.connection.fileno()], left_s):
                if not os.read(self.connection.fileno(), 1 << 16):
                    return True
        except ConnectionError:
            return True
        return False


class _ForkServer:
    """A new program that inherits only three descriptors."""

    def __init__(self, base: AdapterBase, limits: AdapterLimits, memory_fd: int) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, open(os.memfd_create("manylora-base"), "wb") as description:
            pickle.dump((base, limits), description)
            description.flush()
            descriptors = (theirs.fileno(), description.fileno(), memory_fd)
            self._process = subprocess.Popen(
                [sys.executable, "-m", reader_process.__name__, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**python_environment(), **dict.fromkeys(_ONE_THREAD, "1")},
            )

    def fork(self) -> _Reader:
        """Raises EOFError or OSError where the server has died or does not answer."""
        ours, theirs = socket.socketpair()
        reader = _Reader(ours)
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            reader.pid = reader.hear(time.monotonic() + _START_S)["pid"]
        except BaseException:
            reader.connection.close()
            raise
        return reader

    def close(self) -> None:
        """Ends every reader that is left, too. Idempotent."""
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
