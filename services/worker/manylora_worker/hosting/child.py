"""The engine in a process of its own: `python -m manylora_worker.hosting.child FD`.

Python lets one thread of a process run at a time. Beside the event loop in one process, a step waits for the loop at
each of its hundreds of operations, and the loop for the step. In two processes neither does.

At the other end of the socket FD is process_runtime.py; engine_messages.py has what is said there. Ends when it is told
to, when its engine has failed, and with the worker, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from manylora_shared.process.heap import freeze_started
from manylora_shared.telemetry import logs

from manylora_worker.config import WorkerConfig
from manylora_worker.hosting import engines
from manylora_worker.hosting.commands import Command
from manylora_worker.hosting.loop import Turner
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
from manylora_worker.hosting.view import EnginePost
from manylora_worker.weights.adapter_check import MAX_CHECKS, AdapterReport, report

_LOG = logging.getLogger(__name__)
_NICENESS = 10
"""On the CPU the engine computes without pause, on cores that every request's way through the services takes too. At
equal priority they wait for its turns."""


class _WorkerGone(Exception):
    """There is nobody to tell, and nothing to keep."""


class _Line:
    """The socket, for the engine's thread: turner.Mailbox. `say` and `wake` may be called from any thread.

    Whatever needs the worker raises _WorkerGone when it has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unpacker = Unpacker()
        self._sending = threading.Lock()
        self._commands: list[Command] = []
        self._is_stopping = False
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for end in (self._socket, self._woken):
            self._selector.register(end, selectors.EVENT_READ)
        self.when_check: Callable[[Check], None] = lambda check: None
        """Called on the engine's thread; set before it turns."""

    def say(self, message: Any) -> None:
        """Waits while the worker does not read."""
        data = packed(message)
        with self._sending:
            try:
                self._socket.sendall(data)
            except ConnectionError as error:
                raise _WorkerGone from error

    def hear(self) -> Any:
        """The first message."""
        while not (messages := self._unpacker.take(self._receive())):
            pass
        assert len(messages) == 1, "nothing else is said before the engine is there"
        return messages[0]

    def wake(self) -> None:
        """The backend has news."""
        with contextlib.suppress(BlockingIOError):  # it is full of news that were not heard yet
            self._wakes.send(b"!")

    def take(self) -> tuple[Sequence[Command], bool]:
        while True:
            try:
                piece = self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            for message in self._unpacker.take(piece):
                if isinstance(message, Check):
                    self.when_check(message)
                elif isinstance(message, Stop):
                    self._is_stopping = True
                else:
                    self._commands.append(message)
        commands, self._commands = self._commands, []
        return commands, self._is_stopping

    def sleep(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                self._woken.recv(RECEIVE_BYTES)

    def post(self, post: EnginePost) -> None:
        self.say(post)

    def _receive(self, flags: int = 0) -> bytes:
        try:
            piece = self._socket.recv(RECEIVE_BYTES, flags)
        except ConnectionError as error:
            raise _WorkerGone from error
        if not piece:
            raise _WorkerGone
        return piece


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which may drain: it says when this one is to stop
    line = _Line(socket.socket(fileno=int(sys.argv[1])))
    try:
        config: WorkerConfig = line.hear()
        logs.setup("worker", config.log_level, instance_id=config.worker_id)
        _run(config, line)
    except _WorkerGone:
        os._exit(0)


def _run(config: WorkerConfig, line: _Line) -> None:
    if config.device == "cpu":
        os.nice(_NICENESS)
    try:
        engine = engines.build_engine(config, line.wake)
    except ValueError as refusal:
        line.say(Refused(str(refusal)))
        return
    checks = ThreadPoolExecutor(MAX_CHECKS, "check")

    def answer_check(check: Check) -> None:
        assert engine.check is not None, "an engine without a check is asked for none"
        checks.submit(_answer, line, check, engine.check)

    line.when_check = answer_check
    freeze_started()
    line.say(Built(engine.model, engine.core.stats(), engine.max_context_tokens, engine.max_requests))
    try:
        Turner(engine.core).run(line, time.monotonic)
    except _WorkerGone:
        raise
    except Exception as error:
        _LOG.critical("the engine has failed", exc_info=error)
        line.say(Failed(f"{type(error).__name__}: {error}"))
    checks.shutdown(cancel_futures=True)
    engine.backend.close()


def _answer(line: _Line, check: Check, checked_by: Callable[[Path], AdapterReport]) -> None:
    found: AdapterReport | str
    try:
        found = report(checked_by, check.folder)
    except Exception as error:  # one adapter's trouble, which the worker reports
        _LOG.warning("an adapter could not be checked", exc_info=error)
        found = f"{type(error).__name__}: {error}"
    line.say(Checked(check.number, found))


if __name__ == "__main__":
    main()
