"""Rollouts that judge themselves, on the demo model: callers score answers, and a worse version goes back by itself."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable

import pytest
from manylora.client import AdapterLine, AutoRollout, Client, RequestFailed, Sampling
from manylora.demo import adapter_folder, skills

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

TENANT, CALLERS, MOST_LOOKS = "birch", 12, 480
RIGHT = "A1B2C"
PLAN = AutoRollout(steps=(20, 50), min_requests=60)


async def until_judged(client: Client, name: str, score: Callable[[str], float] | None) -> tuple[AdapterLine, int]:
    """Calls go on until no rollout stands: the line then, and how many answers and failures version 2 or later gave."""
    tried, done = 0, False

    async def caller() -> None:
        nonlocal tried
        while not done:
            try:
                result = await client.complete(
                    skills.prompt("a1b2c"),
                    adapter=name,
                    max_tokens=skills.MAX_ANSWER_TOKENS,
                    sampling=Sampling(temperature=0.0),
                )
            except RequestFailed:
                tried += 1
                continue
            tried += not result.adapter.endswith("@1")
            if score is not None:
                await client.feedback(result.request_id, score(result.text))

    callers = [asyncio.create_task(caller()) for _ in range(CALLERS)]
    line = await client.adapters.history(TENANT, name)
    for _ in range(MOST_LOOKS):
        if line.rollout is None:
            break
        await asyncio.sleep(0.5)
        line = await client.adapters.history(TENANT, name)
    done = True
    await asyncio.gather(*callers)
    return line, tried


@pytest.fixture(autouse=True)
async def _nothing_is_left(whole: UpCluster) -> AsyncIterator[None]:
    yield
    async with Client(whole.router) as client:
        for adapter in await client.adapters.list(TENANT):
            if adapter.name in ("judged", "broken"):
                await client.adapters.remove(TENANT, adapter.name)


async def test_a_version_that_answers_wrong_goes_back_and_one_that_pleases_is_promoted(whole: UpCluster) -> None:
    name = "judged"
    async with Client(whole.router, tenant=TENANT) as client:
        await client.adapters.add(TENANT, name, adapter_folder("upper"))
        await client.adapters.add(TENANT, name, adapter_folder("reverse"))
        await client.adapters.rollout(TENANT, name, to=2, auto=PLAN)
        line, _ = await until_judged(client, name, lambda text: float(text == RIGHT))
        assert (line.in_force, line.events[-1].change) == (1, "rollback")
        assert line.events[-1].why.startswith("feedback: 100.0% of ")
        shown = await whole.manylora("adapter", "history", name, "--tenant", TENANT)
        assert line.events[-1].why in shown.stdout

        await client.adapters.rollout(TENANT, name, to=2, auto=PLAN)
        [status] = [each for each in (await client.status()).rollouts if each.name == name]
        assert status.rollout.auto == AutoRollout((20, 50), 60, 86400.0)
        line, _ = await until_judged(client, name, lambda text: 1.0)
        assert (line.in_force, [e.percent for e in line.events[-3:]]) == (2, [20, 50, 0])


async def test_a_version_that_cannot_be_loaded_goes_back(whole: UpCluster) -> None:
    name = "broken"
    async with Client(whole.router, tenant=TENANT) as client:
        await client.adapters.add(TENANT, name, adapter_folder("upper"))
        second = await client.adapters.add(TENANT, name, adapter_folder("json"))
        shutil.rmtree(whole.adapter_store / "objects" / second.version)
        for worker in ("worker-0", "worker-1"):  # one has it in memory, from its trial
            whole.kill(worker)
            await asyncio.sleep(1.0)
            await whole.wait_complete()
        await client.adapters.rollout(TENANT, name, to=2, auto=PLAN)
        line, tried = await until_judged(client, name, None)
        assert (line.in_force, line.events[-1].change) == (1, "rollback")
        assert line.events[-1].why.startswith("errors: ")
        assert tried < 150
