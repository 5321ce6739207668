"""A tenant whose policy speculates gets the answers of one whose policy does not."""

from __future__ import annotations

import asyncio

import pytest
from manylora.client import Client, Result, Sampling, WorkerStatus

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

POLICY = "tenant_id: guesser\nclasses: {standard: {weight: 4, speculation: prompt_lookup}}"
PROMPT = "once once once once once once"


async def test_guesses_change_no_answer_and_are_counted(whole: UpCluster) -> None:
    async with Client(whole.router, tenant="acme") as plain, Client(whole.router, tenant="guesser") as guesser:
        await guesser.tenants.apply(POLICY)
        try:
            for sampling in (Sampling(temperature=0), Sampling(temperature=0.4, seed=7)):

                async def answer(client: Client, sampling: Sampling = sampling) -> Result:
                    return await client.complete(
                        PROMPT, sampling=sampling, n=2, max_tokens=160, ignore_eos=True, timeout_s=120
                    )

                expected, found = await answer(plain), await answer(guesser)
                assert [choice.token_ids for choice in found.choices] == [
                    choice.token_ids for choice in expected.choices
                ]
                assert found.usage.completion_tokens == expected.usage.completion_tokens
            async with asyncio.timeout(30):
                counted = await _that_guessed_rightly(guesser)
            assert all(worker.guessed_tokens >= worker.right_guesses for worker in counted)
        finally:
            await guesser.tenants.delete("guesser")


async def _that_guessed_rightly(client: Client) -> list[WorkerStatus]:
    while True:
        found = [worker for worker in (await client.status()).workers if worker.right_guesses]
        if found:
            return found
        await asyncio.sleep(0.1)
