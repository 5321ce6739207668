"""The engine beside the event loop: commands in, outputs out, each at token boundaries.

Owns the turning of the engine: on a thread of its own, or in a task of the simulation's loop; process_runtime.py has
it in a process of its own. EngineCore is touched by whoever turns it and by nobody else; `EngineView` and
`OutputStream` by the event loop alone.

    event loop                            turner (thread, task or process)
    submit/abort/stop/prefetch --commands-->  between two steps
    OutputStream, EngineView  <--one post a step, gathered while the loop is busy--

When the engine itself fails (a bug, or step after step), every stream ends, and the runtime takes nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.counters import EngineStats
from manylora_worker.hosting import commands as engine_commands
from manylora_worker.hosting.commands import Command
from manylora_worker.hosting.loop import Turner
from manylora_worker.hosting.output_stream import PAUSE_UNREAD_TOKENS, OutputStream
from manylora_worker.hosting.view import EnginePost, EngineView
from manylora_worker.kinds.api import AdapterBackend, EngineRequest, StepBatch
from manylora_worker.memory.tenant_shares import TenantShare

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInfo:
    """What others may know about the base model."""

    name: str
    digest: str
    device: str
    vocab_size: int
    max_context_tokens: int
    """Of prompt and output together: the model's, or what the KV blocks hold if that is less."""
    eos_token_ids: tuple[int, ...]
    kv_block_bytes: int
    """KV of one block, in all layers."""


class Runtime(ABC):
    """The engine for those on the event loop, who call all of this there. How it is turned is the subclass's matter."""

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
        """Whether the engine could ever run a request, see EngineCore.check."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def now(self) -> float:
        """Seconds, on the clock of RequestEnd's times."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None:
        """Aborts what is left and ends the engine."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Has it done between two steps."""

    def submit(self, request: EngineRequest) -> OutputStream:
        """Gives a request to the engine, from the next token boundary on.

        Raises:
            InvalidRequest, QuotaExceeded: it could never run.
            AlreadyExists, Overloaded, ServiceUnavailable: as things are now.
        """
        self._check(request)
        stream = self.view.open(request)
        self._send(engine_commands.add(request))
        return stream

    def abort(self, request_id: RequestId) -> None:
        self._send(engine_commands.abort(request_id))

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self._send(engine_commands.stop_choice(request_id, choice))

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId | None = None) -> None:
        self._send(engine_commands.prefetch(adapter_uid, tenant_id))

    def set_pins(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        """Which adapters stay on the device, from the next token boundary on; as AdapterCache.set_pins."""
        self._send(engine_commands.set_pins(pins, largest_bytes))

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        """What a tenant may have, from the next token boundary on; None: the default."""
        self._send(engine_commands.set_share(tenant_id, share))

    def set_public_prefixes(self, prefixes: Mapping[str, Sequence[int]]) -> None:
        """Which tokens, by name, are public, from the next token boundary on; as EngineCore.set_public_prefixes."""
        self._send(engine_commands.set_public_prefixes(prefixes))


@dataclass
class _Mailbox:
    """What the two threads share; every access under `condition`."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    commands: list[Command] = field(default_factory=list)
    posts: deque[EnginePost] = field(default_factory=deque)
    post_is_due: bool = False
    wakes: bool = False
    is_stopping: bool = False


class ThreadRuntime(Runtime):
    """The engine on a thread of its own, which sleeps while there is nothing to do."""

    def __init__(self, core: EngineCore, backend: AdapterBackend, model: ModelInfo, *, max_requests: int) -> None:
        super().__init__(model, core.stats(), core.check, max_requests)
        self._core = core
        self._backend = backend
        self._turner = Turner(core)
        self._mailbox = _Mailbox()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def now(self) -> float:
        return time.monotonic()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        self.view.close()
        with self._mailbox.condition:
            self._mailbox.is_stopping = True
            self._mailbox.condition.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._backend.close)
        self._deliver()

    def wake(self) -> None:
        """From any thread: the backend has news."""
        with self._mailbox.condition:
            self._mailbox.wakes = True
            self._mailbox.condition.notify()

    def _send(self, command: Command) -> None:
        with self._mailbox.condition:
            self._mailbox.commands.append(command)
            self._mailbox.condition.notify()

    # -- on the event loop

    def _deliver(self) -> None:
        while True:
            with self._mailbox.condition:
                if not self._mailbox.posts:
                    self._mailbox.post_is_due = False
                    return
                post = self._mailbox.posts.popleft()
            self.view.take(post)

    def _fail(self, message: str) -> None:
        self._deliver()
        self.view.fail(message)

    # -- on the engine's thread

    def _run(self) -> None:
        try:
            self._turner.run(self, self.now)
        except Exception as error:
            _LOG.critical("the engine has failed", exc_info=error)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")

    def take(self) -> tuple[Sequence[Command], bool]:
        """See turner.Mailbox."""
        mailbox = self._mailbox
        with mailbox.condition:
            commands, mailbox.commands = mailbox.commands, []
            mailbox.wakes = False
            return commands, mailbox.is_stopping

    def sleep(self, timeout_s: float | None) -> None:
        """See turner.Mailbox."""
        mailbox = self._mailbox
        with mailbox.condition:
            mailbox.condition.wait_for(lambda: mailbox.commands or mailbox.wakes or mailbox.is_stopping, timeout_s)

    def post(self, post: EnginePost) -> None:
        """See turner.Mailbox."""
        with self._mailbox.condition:
            self._mailbox.posts.append(post)
            is_due, self._mailbox.post_is_due = self._mailbox.post_is_due, True
        if not is_due:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver)


class LoopRuntime(Runtime):
    """The engine on the event loop, for the simulation: no thread, and a step takes the time that it is told to.

    Args:
        step_s: the virtual seconds of a step.
        pause_unread_tokens: as EngineView's; less than a worker's, where answers are short.
    """

    def __init__(
        self,
        core: EngineCore,
        backend: AdapterBackend,
        model: ModelInfo,
        *,
        max_requests: int,
        step_s: Callable[[StepBatch], float],
        pause_unread_tokens: int = PAUSE_UNREAD_TOKENS,
    ) -> None:
        super().__init__(model, core.stats(), core.check, max_requests, pause_unread_tokens)
        self._core = core
        self._backend = backend
        self._turner = Turner(core)
        self._step_s = step_s
        self._commands: list[Command] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_changes = 0
        """How often something was done to the engine: while it stands, nothing changes there."""

    def now(self) -> float:
        loop = self._loop or asyncio.get_running_loop()
        return loop.time()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="engine")

    async def stop(self) -> None:
        self.view.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.view.failure is None:
            commands, self._commands = self._commands, []
            self.num_changes += 1
            self._turner.do(commands, self.now())
            for request_id in self._core.request_ids():
                self._core.abort(request_id, self.now())
            self._core.drain(self.now())
            self._post()
        self._backend.close()

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._news.set()

    def wake(self) -> None:
        """The backend has news."""
        self._news.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._turn()
        except Exception as error:
            _LOG.critical("the engine has failed", exc_info=error)
            self.view.fail(f"{type(error).__name__}: {error}")

    async def _turn(self) -> None:
        core = self._core
        self._news.clear()
        commands, self._commands = self._commands, []
        self.num_changes += 1
        self._turner.do(commands, self.now())
        batch = core.begin_step(self.now())
        if batch is not None:
            core.submit(batch)
            try:
                await asyncio.sleep(self._step_s(batch))
            finally:
                self.num_changes += 1
                while core.num_in_flight:
                    core.end_step(core.wait(), self.now())
            self._turner.after_step()
        self._post()
        if batch is None:
            rest_s = core.rest_s()
            if rest_s is None:
                core.check_invariants()
            await self._rest(rest_s)

    async def _rest(self, longest_s: float | None) -> None:
        """Until there is news."""
        timer = None if longest_s is None else asyncio.get_running_loop().call_later(longest_s, self.wake)
        try:
            await self._news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _post(self) -> None:
        post = self._turner.take_post()
        if post is not None:
            self.view.take(post)
