from __future__ import annotations

import asyncio


class Waiter:
    """Where one task waits. A wake that finds nobody is forgotten."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self, until: float | None = None) -> None:
        """Until the next `wake`, or that time of the loop's clock."""
        assert self._future is None, "one waits at a time"
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = None if until is None else loop.call_at(until, self.wake)
        try:
            await self._future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
