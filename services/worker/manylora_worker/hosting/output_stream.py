"""The unread outputs of one request, for its one reader. EngineView pauses the request of a full stream."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.hosting.waiter import Waiter
from manylora_worker.kinds.api import EngineRequest, TokenOutput

# over its choices, and of its prompt where they are told; what is on its way from the engine comes on top
PAUSE_UNREAD_TOKENS = 1024


class EndKind(enum.Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"
    ADAPTER_FAILED = "adapter_failed"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    ERROR = "error"
    ENGINE_FAILED = "engine_failed"
    SLOW_READER = "slow_reader"


@dataclass(frozen=True)
class StreamEnd:
    kind: EndKind
    message: str = ""
    request_end: RequestEnd | None = None  # None: the engine failed


class OutputBatch(NamedTuple):
    outputs: Sequence[TokenOutput]
    end: StreamEnd | None = None


class OutputStream:
    """when_read: called after a read while the stream is paused."""

    def __init__(
        self,
        request: EngineRequest,
        when_read: Callable[[OutputStream], None] = lambda stream: None,
        pause_unread_tokens: int = PAUSE_UNREAD_TOKENS,
    ) -> None:
        self.request = request
        self.unfinished_choices = request.num_open
        self.is_paused = False
        self.is_too_slow = False
        self._when_read = when_read
        self._pause_unread_tokens = pause_unread_tokens
        self._pending: list[TokenOutput] = []
        self._pending_tokens = 0
        self._left_tokens = [request.max_tokens - len(request.emitted_of(choice)) for choice in range(request.n)]
        for choice, emitted in enumerate(request.emitted):
            if emitted is None:
                self._left_tokens[choice] = 0
        self._end: StreamEnd | None = None
        self._flush_at = float("-inf")
        self._grace_s = 0.0  # for an end that is near
        self._news = Waiter()
        self._ending = Waiter()

    @property
    def is_ended(self) -> bool:
        """Unread outputs may be left."""
        return self._end is not None

    async def has_something(self, timeout_s: float) -> None:
        if not self._pending and self._end is None:
            await self._news.wait(asyncio.get_running_loop().time() + timeout_s)

    async def read(self, *, interval_s: float = 0.0) -> OutputBatch:
        """At least one output, or the end. The next read gathers for `interval_s`, up to a third longer, and half as
        long again where the end is near.
        """
        loop = asyncio.get_running_loop()
        await self._wait_for_end(self._flush_at)
        while not self._pending and self._end is None:
            await self._news.wait()
        if self._is_end_near:
            await self._wait_for_end(self._flush_at + self._grace_s)
        self._flush_at, self._grace_s = _flush_time(loop.time(), interval_s), interval_s / 2
        batch = OutputBatch(self._pending, self._end)
        self._pending = []
        self._pending_tokens = 0
        if self.is_paused:
            self._when_read(self)
        return batch

    async def _wait_for_end(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while self._end is None and loop.time() < until:
            await self._ending.wait(until)

    @property
    def _is_end_near(self) -> bool:
        # Half as many tokens as have gathered are the last ones: a frame of their own would cost as much as another.
        return 2 * max(self._left_tokens) * self.request.n <= self._pending_tokens

    @property
    def is_full(self) -> bool:
        return self._pending_tokens >= self._pause_unread_tokens

    def put(self, output: TokenOutput) -> None:
        if output.finish_reason is not None:
            self.unfinished_choices -= 1
            self._left_tokens[output.choice] = 0
        else:
            self._left_tokens[output.choice] -= len(output.token_ids)
        if not self._pending:
            self._news.wake()
        self._pending.append(output)
        self._pending_tokens += len(output.token_ids) + len(output.prompt_logprobs)

    def end(self, end: StreamEnd) -> None:
        assert self._end is None
        self._end = end
        self._news.wake()
        self._ending.wake()


def _flush_time(now: float, interval_s: float) -> float:
    # On a grid, so that the frames of many streams leave together and their reader wakes once. It is a power of
    # two, a sixth to a third of the interval, and so stays the same while streams come and go.
    if interval_s <= 0.0:
        return now
    # interval_s / 3 is m * 2**e with m from 0.5 to 1: the power of two below it is 2**(e - 1).
    grid_s = math.ldexp(0.5, math.frexp(interval_s / 3)[1])
    return math.ceil((now + interval_s) / grid_s) * grid_s
