"""Where one task waits."""

from __future__ import annotations

import asyncio

import pytest
from manylora_sim import loop as simulation
from manylora_worker.hosting.waiter import Waiter


def test_a_wake_that_finds_nobody_is_forgotten() -> None:
    async def main() -> None:
        loop, waiter = asyncio.get_running_loop(), Waiter()
        waiter.wake()
        loop.call_later(1.0, waiter.wake)
        loop.call_later(1.0, waiter.wake)
        await waiter.wait()
        assert loop.time() == 1.0
        await waiter.wait(until=4.0)
        assert loop.time() == 4.0

    simulation.run(main(), seed=1)


def test_one_waits_at_a_time_and_another_after_a_cancelled_one() -> None:
    async def main() -> None:
        waiter = Waiter()
        first = asyncio.create_task(waiter.wait())
        await asyncio.sleep(0.1)
        with pytest.raises(AssertionError, match="one waits"):
            await waiter.wait()
        first.cancel()
        await asyncio.sleep(0.1)
        await waiter.wait(until=5.0)
        assert asyncio.get_running_loop().time() == 5.0

    simulation.run(main(), seed=1)
