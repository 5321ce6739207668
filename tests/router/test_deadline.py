"""A request's deadline, as what is awaited meets it."""

from __future__ import annotations

import asyncio

import pytest
from manylora_router.request.deadline import Deadline
from manylora_shared.errors import DeadlineExceeded
from manylora_sim.loop import run


def test_what_takes_longer_ends_at_the_deadline() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceeded):
            async with Deadline(2.0):
                await asyncio.sleep(9.0)
        assert loop.time() == 2.0
        async with Deadline(5.0):
            await asyncio.sleep(1.0)

    run(main(), seed=1)


def test_without_one_it_never_ends_by_itself() -> None:
    async def main() -> None:
        async with Deadline(None):
            await asyncio.sleep(3000.0)

    run(main(), seed=1)


def test_another_timeout_inside_stays_what_it_is() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with Deadline(9.0), asyncio.timeout(1.0):
                await asyncio.sleep(5.0)

    run(main(), seed=1)
