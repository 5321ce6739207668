"""The sending end of one router's stream: what it is still to be sent, in order, and then its end."""

from __future__ import annotations

import asyncio
from collections import deque

from manylora.v1 import scheduler_pb2
from manylora_shared.errors import ManyloraError, Overloaded
from manylora_shared.ids import RouterId

MAX_UNREAD = 100_000  # a router that leaves more answers unread loses its stream
_MAX_MESSAGES = 256


class RouterLine:
    def __init__(self, router_id: RouterId, session: int) -> None:
        self.router_id = router_id
        self.session = session
        self._outbox: deque[scheduler_pb2.ScheduleResponse] = deque()
        self._news = asyncio.Event()
        self._error: ManyloraError | None = None
        self._closed = False

    def send(self, message: scheduler_pb2.ScheduleResponse) -> None:
        if self._closed:
            return
        if len(self._outbox) >= MAX_UNREAD:
            self.close(Overloaded(f"{MAX_UNREAD} answers of the scheduler were not read"))
            return
        self._outbox.append(message)
        self._news.set()

    def close(self, error: ManyloraError | None = None) -> None:
        """After what was sent before; the first call counts."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._news.set()

    async def next(self) -> scheduler_pb2.ScheduleResponse | None:
        """As one message; None at a good end. Raises what `close` was given."""
        while not self._outbox:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._news.clear()
            await self._news.wait()
        messages = [self._outbox.popleft() for _ in range(min(len(self._outbox), _MAX_MESSAGES))]
        return messages[0] if len(messages) == 1 else scheduler_pb2.ScheduleResponse(more=messages)
