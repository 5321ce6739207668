"""One supervised child process of a local cluster. The first start must succeed; later, what ends is started again.

Its output goes to its log. The first line of its stdout that is JSON with `"ready": true` is kept in `ready`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from manylora.local import tether
from manylora.local.log_file import LogFile

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
STEADY_AFTER_S = 10.0  # what lived this long ended for a new reason: the backoff starts over
LOG_TAIL_LINES = 15
MAX_TAIL_LINES = 200  # that are looked through for the reason
LOG_LOOK_S = 1.0
MAX_READY_LINE_BYTES = 1 << 16

_EVERY_LINE = ("time", "level", "service", "instance", "logger", "message", "exception")

Notify = Callable[[str], None]
Probe = Callable[[], Awaitable[bool]]


class ChildFailed(Exception):
    """The message has the end of its log."""


class Child:
    """
    Args:
        command: of each start, from what the last one reported as ready.
        probe: whether it serves, for a process without a ready line.
        notify: told of unexpected ends and new starts.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[Mapping[str, Any]], Sequence[str]],
        *,
        log_path: Path,
        notify: Notify,
        start_timeout_s: float,
        probe: Probe | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = LogFile(log_path)
        self.ready: Mapping[str, Any] = {}
        self.starts = 0
        self._command = command
        self._notify = notify
        self._start_timeout_s = start_timeout_s
        self._probe = probe
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._output: asyncio.Task[None] | None = None
        self._log_watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """0 before the first start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Raises ChildFailed."""
        assert self._supervisor is None
        self._log_watch = asyncio.create_task(self._bound_log(), name=f"log of {self.name}")
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        await self._end_process(grace_s)
        if self._log_watch is not None:
            self._log_watch.cancel()
            await asyncio.wait([self._log_watch])

    def kill(self) -> None:
        """The supervisor will notice."""
        self._signal(signal.SIGKILL)

    def end_at_once(self) -> None:
        """`stop` still has to run."""
        if self._supervisor is not None:
            self._supervisor.cancel()
        self.kill()

    def log_tail(self) -> str:
        """Of the last start, for a person; its last line is the reason, where one was told."""
        return "\n".join(_for_people(self.log.tail(MAX_TAIL_LINES).splitlines())[-LOG_TAIL_LINES:])

    async def _bound_log(self) -> None:
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            try:
                await asyncio.to_thread(self.log.bound)
            except OSError as error:  # a full disk
                self._notify(f"the log of {self.name} is not bounded: {error}")

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            process = self._process
            assert process is not None
            started = loop.time()
            await process.wait()
            if loop.time() - started > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            self._notify(f"{self.name} (pid {process.pid}) {_how(process.returncode)}; it is started again")
            while True:
                await asyncio.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
                try:
                    await self._spawn()
                except (ChildFailed, OSError) as error:
                    self._notify(str(error))
                else:
                    self._notify(f"{self.name} serves again (pid {self.pid})")
                    break

    async def _spawn(self) -> None:
        await self._end_output()
        with self.log.begin() as log:
            self._process = await asyncio.create_subprocess_exec(
                *_tethered(self._command(self.ready)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                limit=MAX_READY_LINE_BYTES,
                process_group=0,  # the terminal's Ctrl-C is for the parent, which stops its children in order
            )
        self.starts += 1
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._wait_ready(self._process)
        except TimeoutError:
            await self._end_process(0)
            reason = f"was not ready after {self._start_timeout_s:g} s"
            raise ChildFailed(self._describe(reason)) from None
        except BaseException:
            await asyncio.shield(self._end_process(0))
            raise

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        if self._probe is not None:
            self._output = asyncio.create_task(self._log_output(process.stdout))
            while not await self._probe():
                if process.returncode is not None:
                    raise ChildFailed(self._describe(_how(process.returncode)))
                await asyncio.sleep(0.02)
            return
        while line := await process.stdout.readline():
            ready = _ready_line(line)
            if ready is not None:
                self.ready = ready
                self._output = asyncio.create_task(self._log_output(process.stdout))
                return
            with self.log.path.open("ab") as log:
                log.write(line)
        raise ChildFailed(self._describe(_how(await process.wait())))

    async def _log_output(self, stdout: asyncio.StreamReader) -> None:
        with self.log.path.open("ab") as log:
            await _copy(stdout, log)

    def _describe(self, reason: str) -> str:
        tail = self.log_tail()
        return f"{self.name} {reason}" + (f"; the end of {self.log.path}:\n{tail}" if tail else "")

    async def _end_process(self, grace_s: float) -> None:
        if self._process is not None and self._process.returncode is None:
            self._signal(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
            try:
                async with asyncio.timeout(grace_s if grace_s > 0 else None):
                    await self._process.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._process.wait()
        await self._end_output()

    async def _end_output(self) -> None:
        if self._output is not None:
            self._output.cancel()
            await asyncio.wait([self._output])
            self._output = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _tethered(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), *command]


def _ready_line(line: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and value.get("ready") is True else None


async def _copy(stdout: asyncio.StreamReader, log: BinaryIO) -> None:
    while data := await stdout.read(1 << 16):
        log.write(data)
        log.flush()


def _for_people(lines: Sequence[str]) -> list[str]:
    """Lines of JSON as text. What is told behind the last error, as a process closes, explains nothing: left out."""
    parsed = [_log_line(line) for line in lines]
    errors = [i for i, line in enumerate(parsed) if line.get("level") in ("error", "critical")]
    shown = errors[-1] + 1 if errors else len(lines)
    return [_as_text(line) if line else raw for raw, line in zip(lines[:shown], parsed, strict=False) if raw.strip()]


def _as_text(line: Mapping[str, Any]) -> str:
    exception = str(line.get("exception", "")).strip().splitlines()
    fields = [f"{name}={value}" for name, value in line.items() if name not in _EVERY_LINE]
    words = f"{line['level']}: {line['message']} {' '.join(fields)} {exception[-1] if exception else ''}"
    return " ".join(words.split())


def _log_line(line: str) -> Mapping[str, Any]:
    """Empty: it is none of a service's log."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and {"level", "message"} <= value.keys() else {}


def _how(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
