"""The worker's end of an engine in a process of its own.

Owns the process and the socket to it (engine_messages.py says what goes over it), and a mirror of the tenants' bounds,
by which requests are refused before they are sent. Where the process ends unasked, the engine has failed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from manylora_shared.ids import TenantId
from manylora_shared.process.config import environment

from manylora_worker.config import WorkerConfig
from manylora_worker.engine.request_bounds import RequestBounds
from manylora_worker.hosting import child as engine_process
from manylora_worker.hosting.commands import Command
from manylora_worker.hosting.messages import (
    RECEIVE_BYTES,
    Built,
    Check,
    Checked,
    Failed,
    Refused,
    Stop,
    Unpacker,
    packed,
)
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.hosting.view import EnginePost
from manylora_worker.memory.tenant_shares import TenantShare, TenantShares
from manylora_worker.weights.adapter_check import AdapterReport

_END_S = 10.0
"""For the process to end once it was told to; then it is killed."""


class ProcessRuntime(Runtime):
    """See `start_engine`."""

    def __init__(
        self, config: WorkerConfig, process: subprocess.Popen[bytes], line: socket.socket, built: Built
    ) -> None:
        stats = built.stats
        self._shares = TenantShares(stats.blocks_total)
        bounds = RequestBounds(
            built.max_context_tokens, config.sequence_slots, stats.blocks_total, stats.block_size, self._shares
        )
        super().__init__(built.model, stats, bounds.check, built.max_requests)
        self._process = process
        self._socket = line
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self._is_stopping = False
        self._ended: asyncio.Future[None] | None = None
        """Done when the engine's end of the socket is closed."""
        self._checks: dict[int, Future[AdapterReport]] = {}
        """That are under way."""
        self._num_checks = 0

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def now(self) -> float:
        return time.monotonic()  # one clock for all processes of a machine

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)

    async def stop(self) -> None:
        self.view.close()
        self._is_stopping = True
        if self._ended is not None:
            self._say(Stop())
            await asyncio.wait([self._ended], timeout=_END_S)
            self._end_line()
        self._socket.close()
        await asyncio.to_thread(_end, self._process)

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        self._shares.set(tenant_id, share)
        super().set_share(tenant_id, share)

    def check_adapter(self, folder: Path) -> AdapterReport:
        """What the adapter in the folder is. Called on a thread, which waits.

        Raises:
            RuntimeError: it could not be checked.
        """
        assert self._loop is not None, "start comes first"
        answer: Future[AdapterReport] = Future()
        self._loop.call_soon_threadsafe(self._ask, folder, answer)
        return answer.result()

    def _ask(self, folder: Path, answer: Future[AdapterReport]) -> None:
        if self.view.failure is not None or self._is_stopping:
            answer.set_exception(RuntimeError("the engine is no more"))
            return
        self._num_checks += 1
        self._checks[self._num_checks] = answer
        self._say(Check(self._num_checks, folder))

    def _send(self, command: Command) -> None:
        self._say(command)

    def _say(self, message: Any) -> None:
        """Never waits: what the socket does not take goes when it does. To an engine that is no more, nothing goes."""
        assert self._ended is not None, "start comes first"
        if self._ended.done():
            return
        had_unsent = bool(self._unsent)
        self._unsent += packed(message)
        if not had_unsent:
            self._transmit()

    def _transmit(self) -> None:
        assert self._loop is not None
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()  # the reader sees the end as well
        if self._unsent:
            self._loop.add_writer(self._socket, self._transmit)
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            piece = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            piece = b""
        if not piece:
            self._lost()
            return
        for message in self._unpacker.take(piece):
            if isinstance(message, EnginePost):
                self.view.take(message)
            elif isinstance(message, Checked):
                self._checked(message)
            else:
                assert isinstance(message, Failed), message
                self.view.fail(message.message)

    def _checked(self, message: Checked) -> None:
        answer = self._checks.pop(message.number)
        if isinstance(message.found, AdapterReport):
            answer.set_result(message.found)
        else:
            answer.set_exception(RuntimeError(message.found))

    def _lost(self) -> None:
        """The other end is closed."""
        self._end_line()
        if not self._is_stopping and self.view.failure is None:
            self.view.fail(f"its process (pid {self.pid}) {_how(self._process)}")

    def _end_line(self) -> None:
        assert self._loop is not None
        assert self._ended is not None
        if not self._ended.done():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._ended.set_result(None)
        for answer in self._checks.values():  # whose threads would wait for ever
            answer.set_exception(RuntimeError("the engine is no more"))
        self._checks.clear()


def start_engine(config: WorkerConfig) -> ProcessRuntime:
    """Starts the process and waits for its engine, as long as a model takes to load.

    Raises:
        ValueError: the model cannot be served with this configuration; the message says why.
        OSError: the process could not be started, or has ended.
    """
    line, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", engine_process.__name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        line.sendall(packed(config))
        unpacker = Unpacker()
        while not (messages := unpacker.take(_receive_first(line, process))):
            pass
    except BaseException:
        line.close()
        process.kill()
        process.wait()
        raise
    if isinstance(messages[0], Refused):
        line.close()
        _end(process)
        raise ValueError(messages[0].message)
    return ProcessRuntime(config, process, line, messages[0])


def _receive_first(line: socket.socket, process: subprocess.Popen[bytes]) -> bytes:
    piece = line.recv(RECEIVE_BYTES)
    if not piece:
        raise OSError(f"the engine's process (pid {process.pid}) {_how(process)} while it loaded the model")
    return piece


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for its end, and kills it where it does not come."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(process: subprocess.Popen[bytes]) -> str:
    """How it ended. Its end of the socket is closed, so this is a moment's matter."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "has closed its line"
    return f"was killed by signal {-code}" if code < 0 else f"has ended with {code}"
