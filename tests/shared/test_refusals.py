"""Refusals of an account that come too fast wait, and nobody waits for another's."""

from __future__ import annotations

import asyncio

import pytest
from manylora_shared.transport import places as module
from manylora_shared.transport.places import REFUSALS_PER_S, Refusals
from manylora_sim.loop import run


async def times(refusals: Refusals, account: str, count: int) -> list[float]:
    """When each of so many that come at once is told, in seconds from now."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one() -> float:
        await refusals.due(account)
        return round(loop.time() - began, 3)

    return sorted(await asyncio.gather(*(one() for _ in range(count))))


def test_an_account_is_refused_at_once_until_its_burst_is_over_then_at_its_rate() -> None:
    async def main() -> None:
        refusals = Refusals()
        await asyncio.sleep(10)
        fast, other = await asyncio.gather(times(refusals, "fast", 400), times(refusals, "other", 10))
        assert fast == [0.0] * 257 + [round(n / REFUSALS_PER_S, 3) for n in range(1, 144)]
        assert other == [0.0] * 10
        await asyncio.sleep(10)
        assert await times(refusals, "fast", 10) == [0.0] * 10

    run(main(), seed=0)


def test_where_too_many_wait_the_rest_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Places.__init__, "__kwdefaults__", {"few": 2})
    monkeypatch.setattr(module, "MAX_WAITING", 20)
    monkeypatch.setattr(module, "_KEPT_WAITING", 4)

    async def main() -> None:
        refusals = Refusals()
        await asyncio.sleep(10)
        told = await times(refusals, "fast", 400)
        assert sum(at > 0 for at in told) == 8
        assert sum(at > 0 for at in await times(refusals, "other", 400)) == 8, "of the places that came free"

    run(main(), seed=0)


def test_a_call_that_leaves_while_it_waits_gives_its_place_back() -> None:
    async def main() -> None:
        refusals = Refusals()
        await asyncio.sleep(10)
        tasks = [asyncio.create_task(refusals.due("fast")) for _ in range(300)]
        await asyncio.sleep(0.001)
        assert refusals._pace._waiting.num_held == 300 - 257
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert refusals._pace._waiting.num_held == 0

    run(main(), seed=0)


def test_what_accounts_were_told_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ACCOUNTS", 4)

    async def main() -> None:
        refusals = Refusals()
        for account in range(20):
            await refusals.due(str(account))
            await asyncio.sleep(2)
        assert len(refusals._pace._due_at) <= 6

    run(main(), seed=0)
