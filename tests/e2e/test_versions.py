"""A rollout under load on the demo model: the versions answer differently, so the content says which one did."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator

import pytest
from manylora.client import Client, Sampling
from manylora.demo import adapter_folder, skills

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

TENANT, NAME, STREAMS, USERS = "birch", "rolled", 50, 25
ANSWERS = {f"{NAME}@1": "A1B2C", f"{NAME}@2": "c2b1a"}
STEPS = (1, 10, 50, 100, 50, 10, 0)
CHANGING = -1  # in the place of a step
MANY = 100  # requests of a step, at least
TRUST = 5.0  # standard deviations beyond the two points that a share may be off


@pytest.fixture(autouse=True)
async def _nothing_is_left(whole: UpCluster) -> AsyncIterator[None]:
    yield
    async with Client(whole.router) as client:
        if NAME in {each.name for each in await client.adapters.list(TENANT)}:
            await client.adapters.remove(TENANT, NAME)


async def test_fifty_streams_go_through_a_rollout_and_back(whole: UpCluster) -> None:
    """Half of them are of a user each, who stays; each request of the others is of a new one: so shares of users are
    shares of requests.
    """
    async with Client(whole.ready["router"], tenant=TENANT) as client:
        await client.adapters.add(TENANT, NAME, adapter_folder("upper"))
        second = await client.adapters.add(TENANT, NAME, adapter_folder("reverse"))
        assert second.number == 2
        step, done = CHANGING, False
        serial = itertools.count()
        wrong: list[str] = []
        shares: dict[int, list[bool]] = {}  # by step: of new users, whether the answer was of version 2
        users: dict[int, dict[int, set[bool]]] = {}  # the same of those that stay

        async def stream(number: int) -> None:
            while not done:
                before = step
                stays = number < USERS
                result = await client.complete(
                    skills.prompt("a1b2c"),
                    adapter=NAME,
                    user=f"user-{number}" if stays else f"new-{next(serial)}",
                    max_tokens=skills.MAX_ANSWER_TOKENS if stays else 2,
                    sampling=Sampling(temperature=0.0),
                )
                answer = ANSWERS[result.adapter]
                if result.text != answer if stays else not result.text or not answer.startswith(result.text):
                    wrong.append(f"{result.adapter}: {result.text}")
                if before == step and stays:
                    users.setdefault(number, {}).setdefault(step, set()).add(result.adapter == f"{NAME}@2")
                elif before == step:
                    shares.setdefault(step, []).append(result.adapter == f"{NAME}@2")

        streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        for number, percent in enumerate(STEPS):
            step = CHANGING
            await client.adapters.rollout(TENANT, NAME, to=2, percent=percent, sticky="user")
            step = number
            async with asyncio.timeout(120):
                while len(shares.get(step, [])) < MANY:  # noqa: ASYNC110 - as answers come
                    await asyncio.sleep(0.05)
        step = CHANGING
        assert (await client.adapters.promote(TENANT, NAME)).in_force == 2
        assert (await client.adapters.rollback(TENANT, NAME)).in_force == 1
        done = True
        await asyncio.gather(*streams)
    assert wrong == []
    for step, percent in enumerate(STEPS):
        asked, got = percent / 100, shares[step]
        chance = math.sqrt(asked * (1 - asked) / len(got))
        assert abs(sum(got) / len(got) - asked) <= (0.02 + TRUST * chance if chance else 0.0), (percent, len(got))
    rising = STEPS.index(100) + 1
    for number, seen in users.items():
        assert all(len(seen[step]) == 1 for step in range(len(STEPS)) if step in seen), f"user {number} went to and fro"
        kept = [max(seen[step]) for step in range(rising) if step in seen]
        assert kept == sorted(kept), f"user {number} went back while the share grew"
