"""A request's deadline, as what is awaited meets it."""

from __future__ import annotations

import asyncio

from manylora_shared.errors import DeadlineExceeded


class Deadline:
    """`async with`: raises DeadlineExceeded at a time of the event loop's clock; None: never."""

    def __init__(self, deadline: float | None) -> None:
        self._timeout = asyncio.timeout_at(deadline)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self._timeout.__aexit__(kind, error, None)
        except TimeoutError:
            raise deadline_exceeded() from None


def deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed")
