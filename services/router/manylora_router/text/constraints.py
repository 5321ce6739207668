"""Whether constraints can be kept, asked of processes that can be ended. Owns these: as many as places, each started
where none is idle. Remembers of each tenant's last ones that they can.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import Pipe

from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import FieldViolation, ServiceUnavailable
from manylora_shared.process.config import python_environment

from manylora_router.text import constraint_process
from manylora_router.text.constraint_process import MAX_MEMORY_BYTES

_LOG = logging.getLogger(__name__)
NUM_PLACES = 2
MAX_SECONDS = 2.0  # of a core
_MAX_WALL_S = 6.0  # a busy machine gives less than a core
MAX_WAIT_S = 5.0  # for a place
_MARGIN_S = 1.0  # after which a process whose router is gone ends by itself
_START_S = 30.0
_MAX_MESSAGE_BYTES = 1 << 20
_STARTS = 2
_KNOWN_TENANTS = 1024
_KNOWN_OF_A_TENANT = 256


class ConstraintCheck:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_PLACES, thread_name_prefix="constraints")
        self._known: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()
        self._lock = threading.Lock()
        self._all: set[_Checker] = set()
        self._idle: list[_Checker] = []
        self._is_closed = False

    def is_known(self, tenant: str, constraint: Constraint) -> bool:
        return constraint.digest in self._known.get(tenant, ())

    async def violation(self, tenant: str, constraint: Constraint) -> FieldViolation | None:
        """What is wrong; what takes long is, too. Raises ServiceUnavailable."""
        # its caller holds a place until nothing of it runs any more
        checking = asyncio.get_running_loop().run_in_executor(self._executor, self._check, constraint)
        try:
            found = await asyncio.shield(checking)
        except asyncio.CancelledError:
            await asyncio.wait([checking])  # no longer than a schema may take
            if not checking.cancelled():
                checking.exception()  # nobody waits for it any more
            raise
        if found is None:
            self._remember(tenant, constraint.digest)
        return found

    def close(self) -> None:
        """Ends what is running, too."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
            running = self._all.difference(idle)
        for checker in running:
            checker.end()
        for checker in idle:
            self._drop(checker)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _check(self, constraint: Constraint) -> FieldViolation | None:
        for _ in range(_STARTS):  # one that dies may have been ended by somebody else
            checker = self._take()
            try:
                found = checker.ask(constraint)
            except TimeoutError:
                self._drop(checker)
                raise ServiceUnavailable("nothing had the time to look at the constraint", retry_after_s=1.0) from None
            except (EOFError, OSError):
                self._drop(checker)
                if checker.has_used_its_time:
                    return FieldViolation(constraint.field, f"takes longer than {MAX_SECONDS:g} s to compile")
                continue
            except BaseException:
                self._drop(checker)
                raise
            self._put_back(checker)
            return found
        _LOG.warning("a constraint of %d bytes ended the processes that looked at it", constraint.size_bytes)
        return FieldViolation(constraint.field, f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile")

    def _take(self) -> _Checker:
        """Raises ServiceUnavailable."""
        while (idle := self._idle_one()) is not None:
            if idle.is_alive:
                return idle
            self._drop(idle)  # somebody has ended it since: no fault of this constraint
        try:
            checker = _Checker()
        except OSError as error:
            raise ServiceUnavailable(f"no process reads the constraint: {error.strerror}", retry_after_s=1.0) from error
        with self._lock:
            self._all.add(checker)
            is_closed = self._is_closed
        if is_closed or not checker.has_started():
            self._drop(checker)
            raise ServiceUnavailable("the process that reads the constraint does not start", retry_after_s=1.0)
        return checker

    def _idle_one(self) -> _Checker | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put_back(self, checker: _Checker) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(checker)
                return
        self._drop(checker)

    def _drop(self, checker: _Checker) -> None:
        checker.end()
        checker.forget()
        with self._lock:
            self._all.discard(checker)

    def _remember(self, tenant: str, digest: bytes) -> None:
        known = self._known.pop(tenant, OrderedDict())
        self._known[tenant] = known
        known[digest] = None
        if len(known) > _KNOWN_OF_A_TENANT:
            known.popitem(last=False)
        if len(self._known) > _KNOWN_TENANTS:
            self._known.popitem(last=False)


class _Checker:
    """One process, asked by one thread at a time; any may end it."""

    def __init__(self) -> None:
        limits = MAX_SECONDS, _MAX_WALL_S + _MARGIN_S
        self._connection, theirs = Pipe()
        with ExitStack() as failed, theirs:
            failed.push(self._connection)
            self._process = subprocess.Popen(
                [sys.executable, "-m", constraint_process.__name__, str(theirs.fileno()), *map(str, limits)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic may quote a schema
                pass_fds=(theirs.fileno(),),
                env=python_environment(),
            )
            failed.pop_all()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def has_used_its_time(self) -> bool:
        """Of one that has ended."""
        return self._process.returncode == -signal.SIGPROF

    def has_started(self) -> bool:
        try:
            self._answer(_START_S)
        except (TimeoutError, EOFError, OSError) as error:
            self.end()
            told = "a process that looks at constraints did not start: %r, exit status %d"
            _LOG.warning(told, error, self._process.returncode)
            return False
        return True

    def ask(self, constraint: Constraint) -> FieldViolation | None:
        """Raises TimeoutError, or EOFError or OSError where it has died."""
        assert constraint.kind is not None
        self._connection.send_bytes(json.dumps([constraint.kind.value, constraint.source]).encode())
        found = self._answer(_MAX_WALL_S)
        return FieldViolation(*found) if found is not None else None

    def end(self) -> None:
        """Returns when it has ended. Idempotent."""
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Of one that has ended, and that nobody asks."""
        self._connection.close()

    def _answer(self, within_s: float) -> list[str] | None:
        if not self._connection.poll(within_s):
            raise TimeoutError
        found: list[str] | None = json.loads(self._connection.recv_bytes(_MAX_MESSAGE_BYTES))
        return found
