"""What is asked in the same moment is answered once. Owns the answers that still stand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

MOMENT_S = 0.25  # for so long an answer stands
T = TypeVar("T")


class Moments:
    def __init__(self) -> None:
        self.asked: dict[tuple[str, ...], asyncio.Task[Any]] = {}

    def close(self) -> None:
        for task in list(self.asked.values()):
            task.cancel()
        self.asked.clear()

    async def once(self, what: tuple[str, ...], ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` answers, or has answered a moment ago. It goes on where a caller leaves: others may wait too."""
        task = self.asked.get(what)
        if task is None:
            self.asked[what] = task = asyncio.ensure_future(ask())
            loop = asyncio.get_running_loop()
            task.add_done_callback(lambda _: loop.call_later(MOMENT_S, self.asked.pop, what, None))
        answer: T = await asyncio.shield(task)
        return answer
