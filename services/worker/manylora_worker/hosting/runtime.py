"""The engine beside the event loop. Commands go in between two steps; one post a step comes out.

Only the engine's thread touches EngineCore; only the event loop touches `EngineView` and `OutputStream`. When the
engine fails, or is given up because it stands still, every stream ends, and the runtime takes nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.counters import EngineStats
from manylora_worker.hosting.loop import EngineLoop
from manylora_worker.hosting.output_stream import PAUSE_UNREAD_TOKENS, OutputStream
from manylora_worker.hosting.stall import Progress
from manylora_worker.hosting.view import Command, EnginePost, EngineView
from manylora_worker.kinds.api import AdapterBackend, EngineRequest
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.parts import ModelInfo

_LOG = logging.getLogger(__name__)
_JOIN_S = 10.0  # for the step under way; then the thread is left behind
_FAILED_JOIN_S = 0.5
_LOOK_AGAIN_S = 5e-4  # a step may end before it was expected to


class Runtime(ABC):
    """Called on the event loop. The subclass drives the engine's loop."""

    def __init__(
        self,
        model: ModelInfo,
        stats: EngineStats,
        check: Callable[[EngineRequest], None],
        max_requests: int,
        pause_unread_tokens: int = PAUSE_UNREAD_TOKENS,
    ) -> None:
        self.model = model
        self.view = EngineView(stats, max_requests, self._send, pause_unread_tokens)
        self._check = check
        self.admits: Callable[[EngineRequest], None] = lambda request: None  # raises ServiceUnavailable
        self.merge_problem = ""  # why it merges no adapter; empty: it does

    @abstractmethod
    def now(self) -> float:
        """Seconds, on the clock of RequestEnd's times."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None:
        """Aborts what is left."""

    @abstractmethod
    def progress(self) -> Progress: ...

    def give_up(self, reason: str) -> None:
        """The engine stands still: it has failed."""
        _LOG.critical("the engine has failed: %s", reason)
        self.view.fail(reason)

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def submit(self, request: EngineRequest) -> OutputStream:
        """
        Raises:
            InvalidRequest, QuotaExceeded: it could never run.
            AlreadyExists, Overloaded, ServiceUnavailable: as things are now, here or of what this worker takes.
        """
        self._check(request)
        self.admits(request)
        stream = self.view.open(request)
        self._send(lambda core, now: core.add(request, now))
        return stream

    def abort(self, request_id: RequestId) -> None:
        self._send(lambda core, now: core.abort(request_id, now))

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self._send(lambda core, now: core.stop_choice(request_id, choice, now))

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId | None = None) -> None:
        self._send(lambda core, now: core.prefetch(adapter_uid, tenant_id))

    def set_pins(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        self._send(lambda core, now: core.set_pins(pins, largest_bytes))

    def set_merged(self, uid: AdapterUid | None, tenant_id: TenantId) -> Future[str]:
        """Nothing runs here, or comes until it is over: then with what went wrong, which leaves the base model."""
        told: Future[str] = Future()
        self._send(lambda core, now: core.set_merged(uid, tenant_id, told.set_result, now))
        return told

    def drop_caches(self, *, adapters: bool, prefixes: bool) -> Future[tuple[int, int]]:
        """How many adapters, and blocks of prefixes."""
        done: Future[tuple[int, int]] = Future()

        def drop(core: EngineCore, now: float) -> None:
            done.set_result((core.drop_adapters() if adapters else 0, core.drop_prefixes() if prefixes else 0))

        self._send(drop)
        return done

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        """None: the default."""
        self._send(lambda core, now: core.set_share(tenant_id, share))


class Mailbox:
    """Any thread may call any of it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: list[Command] = []
        self._posts: list[EnginePost] = []
        self._has_news = False
        self._is_stopping = False
        self._turns = 0
        self._is_asleep = False

    def wake(self) -> None:
        """The adapters' backend has news."""
        with self._condition:
            self._has_news = True
            self._condition.notify()

    def send(self, command: Command) -> None:
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._is_stopping = True
            self._condition.notify()

    def take(self) -> tuple[Sequence[Command], bool]:
        """New commands, and whether to stop."""
        with self._condition:
            commands, self._commands = self._commands, []
            self._has_news = False
            self._turns += 1
            return commands, self._is_stopping

    def sleep(self, timeout_s: float | None) -> None:
        with self._condition:
            self._is_asleep = True
            self._condition.wait_for(self._has_anything, timeout_s)
            self._is_asleep = False

    def rest(self, left_s: Callable[[], float]) -> None:
        """Until nothing is left, which may be sooner than it was said, or until the end; whatever else comes waits."""
        with self._condition:
            while not self._is_stopping and (rest_s := left_s()) > 0:
                self._condition.wait(min(rest_s, _LOOK_AGAIN_S))

    def progress(self) -> Progress:
        with self._condition:
            return Progress(self._turns, self._is_asleep and not self._has_anything())

    def _has_anything(self) -> bool:
        return bool(self._commands) or self._has_news or self._is_stopping

    def post(self, post: EnginePost) -> bool:
        """Whether it is the first since `take_posts`."""
        with self._condition:
            self._posts.append(post)
            return len(self._posts) == 1

    def take_posts(self) -> Sequence[EnginePost]:
        with self._condition:
            posts, self._posts = self._posts, []
            return posts


class ThreadRuntime(Runtime):
    def __init__(
        self, core: EngineCore, backend: AdapterBackend, model: ModelInfo, mailbox: Mailbox, *, max_requests: int
    ) -> None:
        super().__init__(model, core.stats(), core.check, max_requests)
        self.merge_problem = core.merge_problem
        self._core = core
        self._backend = backend
        self._mailbox = mailbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def now(self) -> float:
        return time.monotonic()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        self.view.close()
        self._mailbox.stop()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_S if self.view.failure is None else _FAILED_JOIN_S)
        if self._thread.is_alive():
            _LOG.error("the engine's thread does not end, and is left behind: %s", self._where())
            return
        await asyncio.to_thread(self._backend.close)
        self._deliver()

    def progress(self) -> Progress:
        return self._mailbox.progress()

    def give_up(self, reason: str) -> None:
        super().give_up(f"{reason}, {self._where()}")

    def _send(self, command: Command) -> None:
        self._mailbox.send(command)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "its thread is gone"
        frames = traceback.extract_stack(frame)
        return "in " + " > ".join(f"{each.name} ({each.filename}:{each.lineno})" for each in frames[-4:])

    # -- on the event loop

    def _deliver(self) -> None:
        while posts := self._mailbox.take_posts():
            for post in posts:
                self.view.take(post)

    def _fail(self, message: str) -> None:
        self._deliver()
        self.view.fail(message)

    # -- on the engine's thread

    def _run(self) -> None:
        try:
            self._turn_until_stopped(EngineLoop(self._core, self.now, self._post))
        except BaseException as error:  # a thread that ended would be waited for
            _LOG.critical("the engine has failed", exc_info=error)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")

    def _turn_until_stopped(self, engine: EngineLoop) -> None:
        core, mailbox = self._core, self._mailbox
        while True:
            mailbox.rest(engine.rest_s)
            commands, is_stopping = mailbox.take()
            if is_stopping:
                engine.stop(commands)
                return
            batch = engine.begin(commands)
            if core.must_wait or (batch is None and core.num_in_flight):
                engine.end()
                engine.tell()
                continue
            engine.tell()
            if batch is None:
                mailbox.sleep(core.rest_s())

    def _post(self, post: EnginePost) -> None:
        if self._mailbox.post(post):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver)
