"""A rollout under load on the demo model: the versions answer differently, so the content says which one did."""

from __future__ import annotations

import asyncio

import pytest
from manylora.client import Client, Result, Sampling
from manylora.demo import adapter_folder, skills

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

TENANT, NAME, STREAMS = "birch", "rolled", 50
ANSWERS = {f"{NAME}@1": "A1B2C", f"{NAME}@2": "c2b1a"}
STEPS = (1, 10, 50, 100, 50, 10, 0)


async def test_fifty_streams_go_through_a_rollout_and_back(whole: UpCluster) -> None:
    server = whole.ready["router"]
    async with Client(server, tenant=TENANT) as client:
        await client.adapters.add(TENANT, NAME, adapter_folder("upper"))
        second = await client.adapters.add(TENANT, NAME, adapter_folder("reverse"))
        assert second.number == 2
        percent, done = 0, False
        wrong: list[str] = []
        shares: dict[int, list[str]] = {}

        async def stream() -> None:
            while not done:
                before = percent
                result = await client.complete(
                    skills.prompt("a1b2c"),
                    adapter=NAME,
                    max_tokens=skills.MAX_ANSWER_TOKENS,
                    sampling=Sampling(temperature=0.0),
                )
                note(result, before)

        def note(result: Result, before: int) -> None:
            if result.text != ANSWERS[result.adapter]:
                wrong.append(f"{result.adapter}: {result.text}")
            if before == percent:
                shares.setdefault(before, []).append(result.adapter)

        streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        for percent in STEPS:
            await client.adapters.rollout(TENANT, NAME, to=2, percent=percent)
            await asyncio.sleep(2.0)
        line = await client.adapters.promote(TENANT, NAME)
        assert line.in_force == 2
        assert (await client.adapters.rollback(TENANT, NAME)).in_force == 1
        done = True
        await asyncio.gather(*streams)
    assert wrong == []
    assert shares[100].count(f"{NAME}@2") > len(shares[100]) * 0.9
    assert 0.3 < shares[50].count(f"{NAME}@2") / len(shares[50]) < 0.7
