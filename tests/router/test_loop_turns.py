"""Turns on the router's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from manylora_router.links.loop_turns import LoopTurns, PoolTurns

NO_WEIGHTS: Mapping[str, int] = {}


class Passes:
    """Counts the passes of the event loop while it is entered."""

    def __init__(self) -> None:
        self.count = 0
        self._handle: asyncio.Handle | None = None

    def __enter__(self) -> Passes:
        self._again()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        self._handle.cancel()

    def _again(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._again)


async def take_all(turns: LoopTurns, tenants: str, weights: Mapping[str, int] = NO_WEIGHTS) -> list[tuple[str, int]]:
    """A task for each letter, in order: whose turn it was, and in which pass."""
    found: list[tuple[str, int]] = []
    with Passes() as passes:

        async def work(tenant: str) -> None:
            await turns.take((tenant, None), weights.get(tenant, 1))
            found.append((tenant, passes.count))

        await asyncio.gather(*(work(tenant) for tenant in tenants))
    return found


async def test_a_pass_has_one_turn() -> None:
    found = await take_all(LoopTurns(), "aaaaa")
    passes = [number for _, number in found]
    assert len(set(passes)) == len(passes) == 5


async def test_tenants_take_turns_whoever_came_first() -> None:
    found = await take_all(LoopTurns(), "aaaaaabbc")
    assert "".join(tenant for tenant, _ in found) == "aabcabaaa"


async def test_turns_are_in_proportion_to_weights() -> None:
    found = await take_all(LoopTurns(), "c" + "a" * 40 + "b" * 40, {"a": 3, "b": 1})
    first = [tenant for tenant, _ in found[1:41]]
    assert (first.count("a"), first.count("b")) == (30, 10)


async def test_who_waited_for_nothing_for_long_has_no_claim_to_more() -> None:
    turns = LoopTurns()
    await take_all(turns, "c" + "a" * 20)
    found = await take_all(turns, "c" + "a" * 10 + "b" * 10)
    first = [tenant for tenant, _ in found[1:11]]
    assert (first.count("a"), first.count("b")) == (5, 5)


async def test_nobody_waits_where_nobody_else_is() -> None:
    turns = LoopTurns()
    with Passes() as passes:
        for _ in range(3):
            before = passes.count
            await turns.take(("a", None), 1)
            assert passes.count == before
            await asyncio.sleep(0)
            await asyncio.sleep(0)


async def test_who_is_cancelled_while_it_waits_keeps_nobody_waiting() -> None:
    turns = LoopTurns()
    await turns.take(("a", None), 1)
    gone = [asyncio.create_task(turns.take(("b", None), 1)) for _ in range(3)]
    left = asyncio.create_task(turns.take(("c", None), 1))
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.wait_for(left, 60)
    assert all(task.cancelled() or task.done() for task in gone)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not turns._waiting.num_queued
    assert not turns._waiting.num_running
    await asyncio.wait_for(turns.take(("d", None), 1), 1.0)


async def hold_all(turns: PoolTurns, tenants: str, costs: Mapping[str, int] = NO_WEIGHTS) -> str:
    """A task for each letter, in order: who had a place, in the order of beginning."""
    found: list[str] = []

    async def work(tenant: str) -> None:
        async with turns.hold((tenant, None), 1, costs.get(tenant, 1)):
            found.append(tenant)
            for _ in range(3):
                await asyncio.sleep(0)

    await asyncio.gather(*(work(tenant) for tenant in tenants))
    return "".join(found)


async def test_a_pools_places_go_round_among_flows_by_what_they_cost() -> None:
    assert await hold_all(PoolTurns(1), "aaaaaabbc") == "abcabaaaa"
    assert await hold_all(PoolTurns(1), "c" + "a" * 4 + "b" * 8, {"a": 4}) == "cabbbbabbbbaa"
    assert (await hold_all(PoolTurns(2), "a" * 64 + "b")).index("b") <= 3, "a flood lets others by"


async def test_a_pool_has_so_many_places_whoever_is_cancelled() -> None:
    turns = PoolTurns(2)
    running = most = 0

    async def work() -> None:
        nonlocal running, most
        async with turns.hold(("a", None), 1, 5):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            finally:
                running -= 1

    tasks = [asyncio.create_task(work()) for _ in range(20)]
    for index in (0, 3, 19, 4, 1):
        await asyncio.sleep(0)
        tasks[index].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0)
    assert (most, running, turns._num_free) == (2, 0, 2)
    assert not turns._waiting.num_queued
    assert not turns._waiting.num_running
    assert not turns._costs
