"""One look for all who ask in a moment."""

from __future__ import annotations

import asyncio

import pytest
from manylora_router.links.moments import MOMENT_S, Moments
from manylora_sim import loop as simulation


def test_once_a_moment_and_for_each_question() -> None:
    async def main() -> None:
        moments, asked = Moments(), []

        async def ask() -> int:
            asked.append(0)
            await asyncio.sleep(0.01)
            return len(asked)

        assert await asyncio.gather(*(moments.once(("a",), ask) for _ in range(9))) == [1] * 9
        assert await moments.once(("b",), ask) == 2
        assert await moments.once(("a",), ask) == 1
        await asyncio.sleep(2 * MOMENT_S)
        assert not moments.asked
        assert await moments.once(("a",), ask) == 3

    simulation.run(main(), seed=1)


def test_a_failure_is_everybodys_and_passes() -> None:
    async def main() -> None:
        moments = Moments()

        async def fail() -> None:
            raise ValueError("no")

        results = await asyncio.gather(*(moments.once(("a",), fail) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in results] == [ValueError] * 3
        await asyncio.sleep(2 * MOMENT_S)
        assert not moments.asked
        waiting = asyncio.ensure_future(moments.once(("b",), asyncio.Event().wait))
        await asyncio.sleep(0.01)
        moments.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    simulation.run(main(), seed=1)
