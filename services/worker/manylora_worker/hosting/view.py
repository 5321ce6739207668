"""The engine as the event loop knows it: one post behind at most.

Owns the open output streams, the last counters, and which requests are paused until their reader reads; one that is not
read for MAX_PAUSE_S is aborted. Touched on the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from manylora_shared.errors import AlreadyExists, Overloaded, ServiceUnavailable
from manylora_shared.ids import AdapterUid, RequestId, TenantId

from manylora_worker.adapters.cache import TenantAdapters
from manylora_worker.engine.core import EngineCore
from manylora_worker.engine.counters import EngineStats, FlowTokens, Setbacks, StepSeconds
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.hosting.output_stream import PAUSE_UNREAD_TOKENS, EndKind, OutputStream, StreamEnd
from manylora_worker.kinds.api import AdapterTier, EngineRequest, FinishReason, TokenOutput
from manylora_worker.kinds.flow import FlowKey
from manylora_worker.planning.step_planner import FlowSlots

Command = Callable[[EngineCore, float], None]
"""Done to the engine between two steps, with the time."""

MAX_ENDS = 4096  # of the requests that ended last: a router that gave a stream up asks at once
MAX_PAUSE_S = 15.0  # a router waits for a stream's token lease for 10 s, and does not read meanwhile

_END_KINDS = {
    FinishReason.STOP: EndKind.COMPLETED,
    FinishReason.LENGTH: EndKind.COMPLETED,
    FinishReason.ABORTED: EndKind.ABORTED,
    FinishReason.ADAPTER_FAILED: EndKind.ADAPTER_FAILED,
    FinishReason.ADAPTER_UNAVAILABLE: EndKind.ADAPTER_UNAVAILABLE,
    FinishReason.ERROR: EndKind.ERROR,
}


class EngineListener(Protocol):
    """Must not block or raise."""

    def request_started(self, request: EngineRequest) -> None: ...

    def request_ended(self, request_id: RequestId) -> None: ...

    def engine_changed(self) -> None:
        """Counters, blocks or adapters."""


class EnginePost(NamedTuple):
    """What one turn of the engine has to tell. None: unchanged."""

    outputs: Sequence[TokenOutput]
    ends: Sequence[RequestEnd]
    stats: EngineStats
    flows: Mapping[FlowKey, FlowTokens]
    setbacks: Mapping[TenantId, Setbacks]
    kv_blocks: Mapping[TenantId, int]
    adapters: Mapping[AdapterUid, AdapterTier] | None
    tenant_adapters: Mapping[TenantId, TenantAdapters] | None
    slots: Mapping[FlowKey, FlowSlots] | None
    step_times: Sequence[StepSeconds] = ()


class FlowLoad(NamedTuple):
    """Unfinished sequences, as in worker.proto's FlowCounter."""

    slotted: int = 0
    ready: int = 0
    held: int = 0


class EngineView:
    """`slots`, `adapters` and `tenant_adapters` are never changed in place."""

    def __init__(
        self,
        stats: EngineStats,
        max_requests: int,
        send: Callable[[Command], None],
        pause_unread_tokens: int = PAUSE_UNREAD_TOKENS,
    ) -> None:
        self.stats = stats
        self.slots: Mapping[FlowKey, FlowSlots] = {}
        self._send = send
        self._unfinished: dict[FlowKey, int] = {}  # sequences, waiting ones included
        self._paused: dict[RequestId, asyncio.TimerHandle] = {}  # and what ends them
        self.adapters: Mapping[AdapterUid, AdapterTier] = {}
        self.tenant_adapters: Mapping[TenantId, TenantAdapters] = {}
        self.flows: dict[FlowKey, FlowTokens] = {}
        self.step_times: Sequence[StepSeconds] = ()  # of the last post
        self.setbacks: dict[TenantId, Setbacks] = {}  # whose counts grew last stands last
        self.kv_blocks: Mapping[TenantId, int] = {}
        self.running: dict[RequestId, OutputStream] = {}  # until the engine has let go of all that they held
        self._ends: dict[RequestId, StreamEnd] = {}
        self._asked: dict[RequestId, list[asyncio.Future[StreamEnd]]] = {}
        self.failure: str | None = None  # why the engine is no more
        self._is_closed = False
        self._max_requests = max_requests
        self._pause_unread_tokens = pause_unread_tokens
        self._listeners: list[EngineListener] = []
        self._failure_callbacks: list[Callable[[str], None]] = []

    @property
    def unfinished_sequences(self) -> int:
        """Waiting ones included."""
        return sum(self._unfinished.values())

    def loads(self) -> dict[FlowKey, FlowLoad]:
        paused: dict[FlowKey, int] = {}
        for request_id in self._paused:
            stream = self.running[request_id]
            flow = _flow(stream.request)
            paused[flow] = paused.get(flow, 0) + stream.unfinished_choices
        loads: dict[FlowKey, FlowLoad] = {}
        for flow, unfinished in self._unfinished.items():
            num_slots, is_capped, num_loading = self.slots.get(flow, _NO_SLOTS)
            # A paused sequence may have its slot for some steps yet.
            slotted = num_slots if num_slots < unfinished else unfinished
            held = without = unfinished - slotted
            if without and not is_capped:
                held = min(without, paused.get(flow, 0) + num_loading)
            loads[flow] = tuple.__new__(FlowLoad, (slotted, without - held, held))  # without a Python call
        return loads

    def subscribe(self, listener: EngineListener) -> None:
        self._listeners.append(listener)

    def when_failed(self, callback: Callable[[str], None]) -> None:
        """Called with the reason, after the streams have ended."""
        self._failure_callbacks.append(callback)

    def close(self) -> None:
        """Opens no further stream."""
        self._is_closed = True

    def open(self, request: EngineRequest) -> OutputStream:
        """Raises AlreadyExists, Overloaded, ServiceUnavailable."""
        if self.failure is not None:
            raise ServiceUnavailable(f"the engine has failed: {self.failure}")
        if self._is_closed:
            raise ServiceUnavailable("the engine has stopped")
        if request.request_id in self.running:
            raise AlreadyExists(f"request_id: {request.request_id} is being executed")
        if len(self.running) >= self._max_requests:
            raise Overloaded(f"the worker has {len(self.running)} requests")
        stream = self.running[request.request_id] = OutputStream(request, self._resume, self._pause_unread_tokens)
        self._count(request, request.num_open)
        for listener in self._listeners:
            listener.request_started(request)
        return stream

    async def end_of(self, request_id: RequestId) -> StreamEnd:
        """Waits for it, also where the request has not come yet."""
        found = self._ends.get(request_id) if request_id not in self.running else None
        if found is not None:
            return found
        asked: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        all_asked = self._asked.setdefault(request_id, [])
        all_asked.append(asked)
        try:
            return await asked
        finally:
            all_asked.remove(asked)
            if not all_asked and self._asked.get(request_id) is all_asked:
                del self._asked[request_id]

    def take(self, post: EnginePost) -> None:
        for output in post.outputs:
            stream = self.running.get(output.request_id)
            if stream is not None:
                if output.finish_reason is not None:
                    self._count(stream.request, -1)
                stream.put(output)
                if stream.is_full and not stream.is_paused:
                    self._pause(stream)
        self.stats = post.stats
        self.step_times = post.step_times
        self.flows.update(post.flows)
        for tenant_id, setbacks in post.setbacks.items():
            self.setbacks.pop(tenant_id, None)
            self.setbacks[tenant_id] = setbacks
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
        self.failure = message
        for request_id in list(self.running):
            self._end(request_id, StreamEnd(EndKind.ENGINE_FAILED, f"the engine has failed: {message}"))
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
            message = f"{self._pause_unread_tokens} tokens and more were not read for {MAX_PAUSE_S:g} s"
            end = StreamEnd(EndKind.SLOW_READER, message, end.request_end)
        stream.end(end)
        self._ends[request_id] = end
        if len(self._ends) > MAX_ENDS:
            del self._ends[next(iter(self._ends))]
        for asked in self._asked.pop(request_id, ()):
            if not asked.done():
                asked.set_result(end)
        for listener in self._listeners:
            listener.request_ended(request_id)

    def _pause(self, stream: OutputStream) -> None:
        request_id = stream.request.request_id
        stream.is_paused = True
        self._send(lambda core, now: core.pause(request_id))
        self._paused[request_id] = asyncio.get_running_loop().call_later(MAX_PAUSE_S, self._give_up, stream)

    def _resume(self, stream: OutputStream) -> None:
        stream.is_paused = False
        request_id = stream.request.request_id
        timer = self._paused.pop(request_id, None)
        if timer is not None:
            timer.cancel()
            self._send(lambda core, now: core.resume(request_id))

    def _give_up(self, stream: OutputStream) -> None:
        stream.is_too_slow = True
        self._send(lambda core, now: core.abort(stream.request.request_id, now))

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
