"""One request's events, over as many attempts and routers as it takes."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from manylora_shared.errors import Code, RpcError
from manylora_shared.metadata import HEDGE_KEY
from manylora_shared.transport.base import Stream, methods_of

from manylora.client.answers import Collector, Event, Result, Started
from manylora.client.caller import Caller, deadline_of, left_s_of
from manylora.client.messages import events_from
from manylora.client.streams.hedging import Hedging
from manylora.client.streams.progress import Progress, is_lost
from manylora.v1 import inference_pb2

ELSEWHERE = "answered_elsewhere"
GENERATE = methods_of(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])["Generate"]


# idle -> (connecting, maybe several attempts) -> running -> ended. Attempts are repeated only before the first frame;
# then an answer whose router is lost goes on at another one.
class GenerateStream:
    """The events of one request, in order: one Started, Deltas, one Finished. One reader.

    Use it as an async context manager where it may be left early: leaving cancels the request at the next token. One
    that is dropped is cancelled, too, when Python collects it.
    """

    def __init__(
        self,
        caller: Caller,
        request: inference_pb2.GenerateRequest,
        metadata: Mapping[str, str],
        timeout_s: float | None,
        hedging: Hedging | None = None,
    ) -> None:
        self._caller = caller
        self._request = request
        self._metadata = {**metadata, **({HEDGE_KEY: "1"} if hedging is not None else {})}
        self._hedging = hedging
        self._deadline = deadline_of(timeout_s)
        self._stream: Stream | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._progress = Progress(request)
        self._lost_at: float | None = None
        self._num_lost = 0  # attempts in a row
        self._hops = 0  # to the router that has its idempotency key
        self._collector = Collector()
        self._told: collections.deque[Event] = collections.deque()  # what was not given out yet
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._ended and not self._told:
            message = await self._read()
            if message is None:
                self._ended = True
            else:
                self._take(message)
        if not self._told:
            raise StopAsyncIteration
        event = self._told.popleft()
        self._collector.add(event)
        return event

    async def collect(self) -> Result:
        async for _ in self:
            pass
        return self.result()

    def result(self) -> Result:
        """Before the end: of the events so far."""
        return self._collector.result()

    def cancel(self) -> None:
        """Safe to call again, and after the end."""
        self._ended = True
        self._told.clear()
        if self._stream is not None:
            self._stream.cancel()

    def __del__(self) -> None:
        loop, stream = self._loop, self._stream
        if stream is not None and loop is not None and not self._ended and not loop.is_closed():
            loop.call_soon_threadsafe(stream.cancel)  # it may be collected by any thread

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _take(self, message: inference_pb2.GenerateResponse) -> None:
        events = events_from(message)
        if self._progress.can_go_on and events and isinstance(events[0], Started):
            self._collector.add(events.pop(0))  # of the router that goes on, whose id the request has now
        self._progress.take(message)
        self._told.extend(events)

    async def _read(self) -> inference_pb2.GenerateResponse | None:
        try:
            while True:
                try:
                    message = await (self._stream.read() if self._stream is not None else self._open())
                    break
                except RpcError as error:
                    if self._ended or not await self._wait_to_go_on(error):
                        raise
                    self._stream = None
        except RpcError as error:
            self._ended = True
            raise self._caller.failed(error, None if self._collector.is_empty else self.result()) from None
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._lost_at, self._num_lost = None, 0
        assert message is None or isinstance(message, inference_pb2.GenerateResponse)
        return message

    async def _open(self) -> Any:
        if not self._progress.can_go_on:
            return await self._first()
        self._stream = self._send(self._progress.request())
        return await self._stream.read()

    def _send(self, request: inference_pb2.GenerateRequest, hops: int = 0) -> Stream:
        left_s = left_s_of(self._deadline)
        self._loop = asyncio.get_running_loop()
        return self._caller.stream(GENERATE, request, timeout_s=left_s, metadata=self._metadata, hops=hops)

    async def _first(self) -> Any:
        self._caller.check_open()
        self._caller.budget.on_call()
        attempt, search = 1, self._caller.search(self._deadline, hops=self._caller.num_servers - 1)
        while True:
            self._stream = self._send(self._request, self._hops)
            try:
                if self._hedging is None or attempt > 1:
                    return await self._stream.read()
                self._stream, message = await self._hedging.first(
                    self._stream, lambda: self._send(self._request, hops=1)
                )
                return message
            except RpcError as error:
                if self._ended:
                    raise
                if await search.goes_on(error) or await self._follow(error):
                    continue
                if not await self._caller.wait_to_repeat(error, attempt, self._deadline):
                    raise
            attempt += 1

    async def _follow(self, error: RpcError) -> bool:
        """To the router that has the idempotency key; false (at once) where that is not what is wrong."""
        retry, servers = self._caller.retry, self._caller.num_servers
        if error.label != ELSEWHERE or retry is None or servers == 1:
            return False
        self._hops += 1
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        delay_s = 0.0 if self._hops % servers else error.retry_after_s or 1.0  # it ends, or its router's lease does
        until = self._lost_at + retry.resume_s
        if now + delay_s >= (until if self._deadline is None else min(until, self._deadline)):
            return False
        await asyncio.sleep(delay_s)
        return not self._ended

    async def _wait_to_go_on(self, error: RpcError) -> bool:
        """False (at once) where the answer is not gone on with."""
        retry = self._caller.retry
        if retry is None or not self._progress.can_go_on:
            return False
        hint_s = error.retry_after_s if self._num_lost and error.code is not Code.UNAVAILABLE else None
        if not is_lost(error) and (hint_s is None or hint_s > retry.max_delay_s):
            return False
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        delay_s = max(hint_s or 0.0, retry.going_on_s(self._num_lost, self._caller.rng))
        until = self._lost_at + retry.resume_s
        if now + delay_s >= (until if self._deadline is None else min(until, self._deadline)):
            return False
        self._num_lost += 1
        await asyncio.sleep(delay_s)
        return not self._ended
