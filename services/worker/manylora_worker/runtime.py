"""The engine beside the event loop: commands in, outputs out, each at token boundaries.

Owns the turning of the engine (a thread of its own, or a task of the simulation's loop) and, on the event loop's side,
what is known of the engine there: the open output streams, the last counters. EngineCore is touched by whoever turns it
and by nobody else; `EngineView` and `OutputStream` by the event loop alone.

    event loop                            turner (thread or task)
    submit/abort/stop/prefetch --commands-->  between two steps
    OutputStream, EngineView  <--one post a step, gathered while the loop is busy--

A request is in `EngineView.running` from `submit` until the engine has let go of all that it held. A request of which
PAUSE_UNREAD_TOKENS wait for their reader is paused: it gives its slot up at its unit's end, until the reader reads.
One that is not read for MAX_PAUSE_S is aborted, and its stream ends with SLOW_READER. When the engine itself fails (a
bug, or step after step), every stream ends, and the runtime takes nothing more.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from manylora_shared.errors import AlreadyExists, Overloaded, ServiceUnavailable
from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.cache import TenantAdapters
from manylora_worker.adapters.pins import Pin
from manylora_worker.engine.api import (
    AdapterBackend,
    AdapterTier,
    EngineRequest,
    FinishReason,
    StepBatch,
    TokenOutput,
)
from manylora_worker.engine.core import EngineCore, EngineStats, FlowTokens, RequestEnd
from manylora_worker.engine.step_planner import FlowSlots
from manylora_worker.engine.tenant_shares import FlowKey, TenantShare

_LOG = logging.getLogger(__name__)

PAUSE_UNREAD_TOKENS = 1024
"""Of one request, over its choices. A unit of each choice and what is on its way from the engine come on top."""
MAX_PAUSE_S = 15.0
"""Longer than a router waits for a stream's token lease (10 s), during which it does not read either."""
MAX_FAILED_STEPS = 3
"""Steps that may fail one after the other before the engine counts as broken."""


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


class EndKind(enum.Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"
    ADAPTER_FAILED = "adapter_failed"
    ERROR = "error"
    SLOW_READER = "slow_reader"


_END_KINDS = {
    FinishReason.STOP: EndKind.COMPLETED,
    FinishReason.LENGTH: EndKind.COMPLETED,
    FinishReason.ABORTED: EndKind.ABORTED,
    FinishReason.ADAPTER_FAILED: EndKind.ADAPTER_FAILED,
    FinishReason.ERROR: EndKind.ERROR,
}


@dataclass(frozen=True)
class StreamEnd:
    kind: EndKind
    message: str = ""
    request_end: RequestEnd | None = None
    """None where the engine failed and could not tell."""


class OutputBatch(NamedTuple):
    outputs: Sequence[TokenOutput]
    """In order; several of one choice may follow one another."""
    end: StreamEnd | None = None
    """Set on the last batch."""


class OutputStream:
    """The outputs of one request, for one reader.

    Args:
        when_read: called after each read that found something, while the stream is paused.
    """

    def __init__(self, request: EngineRequest, when_read: Callable[[OutputStream], None] = lambda stream: None) -> None:
        self.request = request
        self.unfinished_choices = request.n
        self.is_paused = False
        self.is_too_slow = False
        self._when_read = when_read
        self._pending: list[TokenOutput] = []
        self._pending_tokens = 0
        self._end: StreamEnd | None = None
        self._flush_at = float("-inf")
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the engine has let go of the request; unread outputs may be left."""
        return self._end is not None

    async def read(self, *, interval_s: float = 0.0) -> OutputBatch:
        """All outputs since the last read, at least one of them or the end.

        Args:
            interval_s: outputs are gathered until so long after the last read, and up to a third longer; the end is not
                waited with.
        """
        loop = asyncio.get_running_loop()
        while not self._pending and self._end is None:
            await self._wait(loop, None)
        while self._end is None and loop.time() < self._flush_at:
            await self._wait(loop, self._flush_at)
        self._flush_at = _flush_time(loop.time(), interval_s)
        batch = OutputBatch(self._pending, self._end)
        self._pending = []
        self._pending_tokens = 0
        if self.is_paused:
            self._when_read(self)
        return batch

    @property
    def is_full(self) -> bool:
        """Whether so much is unread that the request is to be paused."""
        return self._pending_tokens >= PAUSE_UNREAD_TOKENS

    def put(self, output: TokenOutput) -> None:
        """From EngineView."""
        if output.finish_reason is not None:
            self.unfinished_choices -= 1
        if not self._pending:
            self._wake()
        self._pending.append(output)
        self._pending_tokens += len(output.token_ids)

    def end(self, end: StreamEnd) -> None:
        """From EngineView."""
        assert self._end is None
        self._end = end
        self._wake()

    async def _wait(self, loop: asyncio.AbstractEventLoop, until: float | None) -> None:
        assert self._waiter is None, "one reader at most"
        self._waiter = loop.create_future()
        timer = None if until is None else loop.call_at(until, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _flush_time(now: float, interval_s: float) -> float:
    """When a stream that was read at `now` is read again: on a grid, so that the frames of many streams leave together.

    Their reader then wakes once for all of them. The grid is the power of two that is a sixth to a third of the
    interval, so that it stays the same while streams come and go.
    """
    if interval_s <= 0.0:
        return now
    grid_s = 2.0 ** math.floor(math.log2(interval_s / 3))
    return math.ceil((now + interval_s) / grid_s) * grid_s


class EngineListener(Protocol):
    """Told by EngineView, on the event loop. Must not block or raise."""

    def request_started(self, request: EngineRequest) -> None: ...

    def request_ended(self, request_id: RequestId) -> None: ...

    def engine_changed(self) -> None:
        """Counters, blocks or adapters."""


class _Post(NamedTuple):
    """What one turn of the engine has to tell."""

    outputs: Sequence[TokenOutput]
    ends: Sequence[RequestEnd]
    stats: EngineStats
    flows: Mapping[FlowKey, FlowTokens]
    kv_blocks: Mapping[TenantId, int]
    adapters: Mapping[AdapterUid, AdapterTier] | None
    """None: unchanged."""
    tenant_adapters: Mapping[TenantId, TenantAdapters] | None
    """None: unchanged."""
    slots: Mapping[FlowKey, FlowSlots] | None
    """None: unchanged."""


class FlowLoad(NamedTuple):
    """A flow's unfinished sequences, as in worker.proto's FlowCounter."""

    slotted: int = 0
    ready: int = 0
    held: int = 0


class EngineView:
    """The engine as the event loop knows it: one post behind at most.

    Args:
        send: takes commands for the engine.
    """

    def __init__(self, stats: EngineStats, max_requests: int, send: Callable[[Command], None]) -> None:
        self.stats = stats
        self.slots: Mapping[FlowKey, FlowSlots] = {}
        """Never changed in place."""
        self._send = send
        self._unfinished: dict[FlowKey, int] = {}
        """Sequences of each flow, waiting ones included."""
        self._paused: dict[RequestId, asyncio.TimerHandle] = {}
        """Requests that their readers keep from going on, and what ends them."""
        self.adapters: Mapping[AdapterUid, AdapterTier] = {}
        self.tenant_adapters: Mapping[TenantId, TenantAdapters] = {}
        """Never changed in place."""
        self.flows: dict[FlowKey, FlowTokens] = {}
        self.kv_blocks: Mapping[TenantId, int] = {}
        """That tenants' sequences hold; those that hold none are absent."""
        self.running: dict[RequestId, OutputStream] = {}
        self.failure: str | None = None
        """Why the engine is no more; None while it lives."""
        self._is_closed = False
        self._max_requests = max_requests
        self._listeners: list[EngineListener] = []
        self._failure_callbacks: list[Callable[[str], None]] = []

    @property
    def unfinished_sequences(self) -> int:
        """Waiting ones included."""
        return sum(self._unfinished.values())

    def loads(self) -> dict[FlowKey, FlowLoad]:
        """Of all flows with unfinished sequences."""
        paused: dict[FlowKey, int] = {}
        for request_id in self._paused:
            stream = self.running[request_id]
            flow = _flow(stream.request)
            paused[flow] = paused.get(flow, 0) + stream.unfinished_choices
        loads: dict[FlowKey, FlowLoad] = {}
        for flow, unfinished in self._unfinished.items():
            slots = self.slots.get(flow, _NO_SLOTS)
            # A paused sequence may have its slot for some steps yet.
            slotted = min(unfinished, slots.num_slots)
            without = unfinished - slotted
            held = without if slots.is_capped else min(without, paused.get(flow, 0) + slots.num_loading)
            loads[flow] = FlowLoad(slotted, without - held, held)
        return loads

    def subscribe(self, listener: EngineListener) -> None:
        self._listeners.append(listener)

    def when_failed(self, callback: Callable[[str], None]) -> None:
        """Calls back with the reason once the engine has failed, after its streams have ended."""
        self._failure_callbacks.append(callback)

    def close(self) -> None:
        """Opens no further stream."""
        self._is_closed = True

    def open(self, request: EngineRequest) -> OutputStream:
        """A stream for a request that is about to be given to the engine."""
        if self.failure is not None:
            raise ServiceUnavailable(f"the engine has failed: {self.failure}")
        if self._is_closed:
            raise ServiceUnavailable("the engine has stopped")
        if request.request_id in self.running:
            raise AlreadyExists(f"request_id: {request.request_id} is being executed")
        if len(self.running) >= self._max_requests:
            raise Overloaded(f"the worker has {len(self.running)} requests")
        stream = self.running[request.request_id] = OutputStream(request, self._resume)
        self._count(request, request.n)
        for listener in self._listeners:
            listener.request_started(request)
        return stream

    def take(self, post: _Post) -> None:
        """Hands out a post, and pauses the requests that are not read."""
        for output in post.outputs:
            stream = self.running.get(output.request_id)
            if stream is not None:
                if output.finish_reason is not None:
                    self._count(stream.request, -1)
                stream.put(output)
                if stream.is_full and not stream.is_paused:
                    self._pause(stream)
        self.stats = post.stats
        self.flows.update(post.flows)
        self.kv_blocks = post.kv_blocks
        if post.adapters is not None:
            self.adapters = post.adapters
        if post.tenant_adapters is not None:
            self.tenant_adapters = post.tenant_adapters
        if post.slots is not None:
            self.slots = post.slots
        for end in post.ends:
            self._end(end.request_id, StreamEnd(_END_KINDS[end.reason], end.message, end))
        for listener in self._listeners:
            listener.engine_changed()

    def fail(self, message: str) -> None:
        """The engine is no more: every stream ends."""
        self.failure = message
        for request_id in list(self.running):
            self._end(request_id, StreamEnd(EndKind.ERROR, f"the engine has failed: {message}"))
        for callback in self._failure_callbacks:
            callback(message)

    def _end(self, request_id: RequestId, end: StreamEnd) -> None:
        stream = self.running.pop(request_id, None)
        if stream is None:
            return
        if (timer := self._paused.pop(request_id, None)) is not None:
            timer.cancel()
        self._count(stream.request, -stream.unfinished_choices)
        if stream.is_too_slow:
            message = f"{PAUSE_UNREAD_TOKENS} tokens and more were not read for {MAX_PAUSE_S:g} s"
            end = StreamEnd(EndKind.SLOW_READER, message, end.request_end)
        stream.end(end)
        for listener in self._listeners:
            listener.request_ended(request_id)

    def _pause(self, stream: OutputStream) -> None:
        request_id = stream.request.request_id
        stream.is_paused = True
        self._send(lambda core, now: core.pause(request_id))
        self._paused[request_id] = asyncio.get_running_loop().call_later(MAX_PAUSE_S, self._give_up, stream)

    def _resume(self, stream: OutputStream) -> None:
        """Its reader reads again."""
        stream.is_paused = False
        timer = self._paused.pop(stream.request.request_id, None)
        if timer is not None:
            timer.cancel()
            self._send(lambda core, now: core.resume(stream.request.request_id))

    def _give_up(self, stream: OutputStream) -> None:
        stream.is_too_slow = True
        self._send(_abort(stream.request.request_id))

    def _count(self, request: EngineRequest, sequences: int) -> None:
        flow = _flow(request)
        left = self._unfinished.get(flow, 0) + sequences
        if left:
            self._unfinished[flow] = left
        else:
            self._unfinished.pop(flow, None)


_NO_SLOTS = FlowSlots()


def _flow(request: EngineRequest) -> FlowKey:
    return (request.tenant_id, request.qos_class)


class Runtime(Protocol):
    """All of it is called on the event loop."""

    model: ModelInfo
    view: EngineView

    def now(self) -> float:
        """Seconds, on the clock of RequestEnd's times."""

    def start(self) -> None: ...

    async def stop(self) -> None:
        """Aborts what is left and ends the engine."""

    def submit(self, request: EngineRequest) -> OutputStream:
        """Gives a request to the engine, from the next token boundary on.

        Raises:
            InvalidRequest, QuotaExceeded: it could never run.
            AlreadyExists, Overloaded, ServiceUnavailable: as things are now.
        """

    def abort(self, request_id: RequestId) -> None: ...

    def stop_choice(self, request_id: RequestId, choice: int) -> None: ...

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId | None = None) -> None: ...

    def set_pins(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        """Which adapters stay on the device, from the next token boundary on; as AdapterCache.set_pins."""

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        """What a tenant may have, from the next token boundary on; None: the default."""


Command = Callable[[EngineCore, float], None]
"""Done between two steps, with the time."""


class _Turner:
    """One turn of an engine after another; shared by both runtimes, used by whoever turns."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._failed_in_a_row = 0
        self._last_stats: EngineStats | None = None

    def do(self, commands: Sequence[Command], now: float) -> None:
        for command in commands:
            command(self.core, now)

    def after_step(self) -> None:
        """Raises RuntimeError where the model fails in every step."""
        error = self.core.step_error
        if error is None:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        _LOG.error("a step failed", exc_info=error)
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps failed one after the other") from error

    def take_post(self) -> _Post | None:
        """What is new since the last one; None where nothing is."""
        stats, last = self.core.stats(), self._last_stats
        outputs, ends = self.core.take_outputs(), self.core.take_ended()
        if stats == last and not outputs and not ends:
            return None
        self._last_stats = stats
        adapters_changed = last is None or last.adapter_version != stats.adapter_version
        tenants_changed = last is None or last.tenant_adapters_version != stats.tenant_adapters_version
        slots_changed = last is None or last.slots_version != stats.slots_version
        return _Post(
            outputs=outputs,
            ends=ends,
            stats=stats,
            flows=self.core.take_changed_flows(),
            kv_blocks=self.core.blocks_held(),
            adapters=self.core.adapter_tiers() if adapters_changed else None,
            tenant_adapters=self.core.tenant_adapters() if tenants_changed else None,
            slots=self.core.flow_slots() if slots_changed else None,
        )


def _add(request: EngineRequest) -> Command:
    return lambda core, now: core.add(request, now)


def _abort(request_id: RequestId) -> Command:
    return lambda core, now: core.abort(request_id, now)


def _stop_choice(request_id: RequestId, choice: int) -> Command:
    return lambda core, now: core.stop_choice(request_id, choice, now)


def _prefetch(adapter_uid: AdapterUid, tenant_id: TenantId | None) -> Command:
    return lambda core, now: core.prefetch(adapter_uid, tenant_id)


def _set_pins(pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> Command:
    return lambda core, now: core.set_pins(pins, largest_bytes)


def _set_share(tenant_id: TenantId, share: TenantShare | None) -> Command:
    return lambda core, now: core.set_share(tenant_id, share)


@dataclass
class _Mailbox:
    """What the two threads share; every access under `condition`."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    commands: list[Command] = field(default_factory=list)
    posts: deque[_Post] = field(default_factory=deque)
    post_is_due: bool = False
    wakes: bool = False
    is_stopping: bool = False


class ThreadRuntime:
    """The engine on a thread of its own, which sleeps while there is nothing to do."""

    def __init__(self, core: EngineCore, backend: AdapterBackend, model: ModelInfo, *, max_requests: int) -> None:
        self.model = model
        self.view = EngineView(core.stats(), max_requests, self._send)
        self._core = core
        self._turner = _Turner(core)
        self._backend = backend
        self._mailbox = _Mailbox()
        self._loop: asyncio.AbstractEventLoop | None = None
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

    def submit(self, request: EngineRequest) -> OutputStream:
        self._core.check(request)
        stream = self.view.open(request)
        self._send(_add(request))
        return stream

    def abort(self, request_id: RequestId) -> None:
        self._send(_abort(request_id))

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self._send(_stop_choice(request_id, choice))

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId | None = None) -> None:
        self._send(_prefetch(adapter_uid, tenant_id))

    def set_pins(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        self._send(_set_pins(pins, largest_bytes))

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        self._send(_set_share(tenant_id, share))

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
            while self._turn():
                pass
        except Exception as error:
            _LOG.critical("the engine has failed", exc_info=error)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")

    def _turn(self) -> bool:
        """One turn; False: it was the last."""
        core, turner, mailbox = self._core, self._turner, self._mailbox
        with mailbox.condition:
            commands, mailbox.commands = mailbox.commands, []
            mailbox.wakes = False
            is_stopping = mailbox.is_stopping
        turner.do(commands, self.now())
        if is_stopping:
            for request_id in core.request_ids():
                core.abort(request_id, self.now())
            core.drain(self.now())
            self._post()
            return False
        batch = core.begin_step(self.now())
        if batch is not None:
            core.submit(batch)
        if core.must_wait or (batch is None and core.num_in_flight):
            core.end_step(core.wait(), self.now())
            turner.after_step()
            self._post()
            return True
        self._post()
        if batch is None:
            self._sleep(core.rest_s())
        return True

    def _sleep(self, timeout_s: float | None) -> None:
        mailbox = self._mailbox
        with mailbox.condition:
            mailbox.condition.wait_for(lambda: mailbox.commands or mailbox.wakes or mailbox.is_stopping, timeout_s)

    def _post(self) -> None:
        post = self._turner.take_post()
        if post is None:
            return
        with self._mailbox.condition:
            self._mailbox.posts.append(post)
            is_due, self._mailbox.post_is_due = self._mailbox.post_is_due, True
        if not is_due:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver)


class LoopRuntime:
    """The engine on the event loop, for the simulation: no thread, and a step takes the time that it is told to.

    Args:
        step_s: the virtual seconds of a step.
    """

    def __init__(
        self,
        core: EngineCore,
        backend: AdapterBackend,
        model: ModelInfo,
        *,
        max_requests: int,
        step_s: Callable[[StepBatch], float],
    ) -> None:
        self.model = model
        self.view = EngineView(core.stats(), max_requests, self._send)
        self._core = core
        self._turner = _Turner(core)
        self._backend = backend
        self._step_s = step_s
        self._commands: list[Command] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
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

    def submit(self, request: EngineRequest) -> OutputStream:
        self._core.check(request)
        stream = self.view.open(request)
        self._send(_add(request))
        return stream

    def abort(self, request_id: RequestId) -> None:
        self._send(_abort(request_id))

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self._send(_stop_choice(request_id, choice))

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId | None = None) -> None:
        self._send(_prefetch(adapter_uid, tenant_id))

    def set_pins(self, pins: Mapping[TenantId, Sequence[Pin]], largest_bytes: int) -> None:
        self._send(_set_pins(pins, largest_bytes))

    def set_share(self, tenant_id: TenantId, share: TenantShare | None) -> None:
        self._send(_set_share(tenant_id, share))

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
