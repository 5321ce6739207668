"""The ledger of real processes that are killed: each request once, with the tokens that its caller got."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from manylora.client import Client, Delta, RequestFailed, Result, RetryPolicy, Sampling, Started
from manylora_shared.ledger.row import LOST

from tests.e2e.conftest import UpCluster

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TENANT = "counted"
REQUESTS = 300
ALONE = RetryPolicy(max_attempts=200, base_delay_s=0.05, max_delay_s=0.3, budget_attempts=1e6, resume_s=0.0)
NOTED_S = 1.0  # what may be missing of a lost row


@dataclass
class Caller:
    """What it saw of one request, or of each that it began."""

    got: dict[str, int] = field(default_factory=dict)
    result: Result | None = None


@pytest.fixture
async def client(whole: UpCluster) -> AsyncIterator[Client]:
    async with Client(whole.router, retry=ALONE) as client:
        await client.tenants.apply(f"tenant_id: {TENANT}")
        yield client
        await client.tenants.delete(TENANT)


async def _ask(client: Client, number: int, places: asyncio.Semaphore) -> Caller:
    caller, rng = Caller(), random.Random(number)
    async with places:
        try:
            stream = client.generate(
                f"do:{number % 7}ab" * (1 + number % 3),
                tenant=TENANT,
                max_tokens=rng.randrange(2, 120),
                n=1 + number % 2,
                ignore_eos=True,
                sampling=Sampling(temperature=1.0),
            )
            async with stream:
                request_id, leaves_at = "", rng.randrange(10) if number % 10 == 0 else None
                async for event in stream:
                    if isinstance(event, Started):
                        request_id = event.request_id
                        caller.got[request_id] = 0
                    elif isinstance(event, Delta):
                        caller.got[request_id] += len(event.token_ids)
                    if leaves_at is not None and caller.got.get(request_id, 0) >= leaves_at:
                        return caller
                caller.result = stream.result()
        except RequestFailed:
            pass
    return caller


async def _kill(whole: UpCluster, asked: list[asyncio.Task[Caller]]) -> None:
    for victim, share in (
        ("router-0", 0.2),
        ("worker-0", 0.35),
        ("router-0", 0.5),
        ("scheduler", 0.65),
        ("router-0", 0.8),
    ):
        while sum(task.done() for task in asked) < share * len(asked):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        whole.kill(victim)
        await whole.wait_complete()


async def _rows(client: Client, wanted: set[str]) -> dict[str, dict[str, Any]]:
    async with asyncio.timeout(60):  # a log of a router that is gone is found within ten seconds
        while True:
            rows = [row async for row in client.usage.rows(tenant=TENANT)]
            found = {row["request_id"]: row for row in rows}
            assert len(found) == len(rows), "a request has two rows"
            if wanted <= found.keys():
                return found
            await asyncio.sleep(0.5)


async def test_each_request_has_one_row_over_kills_of_everything(whole: UpCluster, client: Client) -> None:
    places = asyncio.Semaphore(12)
    asked = [asyncio.create_task(_ask(client, number, places)) for number in range(REQUESTS)]
    await _kill(whole, asked)
    callers = await asyncio.gather(*asked)
    await whole.wait_complete()
    begun = {request_id: got for caller in callers for request_id, got in caller.got.items()}
    rows = await _rows(client, set(begun))
    for caller in callers:
        if (result := caller.result) is not None:
            row = rows[result.request_id]
            usage = result.usage
            told = usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens
            assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == told
            assert row["outcome"] == "completed"
    lost = [row for row in rows.values() if row["outcome"] == LOST]
    assert lost, "no router died with a request: it proves little"
    for request_id, got in begun.items():
        row = rows[request_id]
        assert row["outcome"] == LOST or row["completion_tokens"] >= got
    assert all(row["completion_tokens"] <= begun.get(row["request_id"], 10**9) + 24 for row in lost)
    completed = sum(caller.result is not None for caller in callers)
    assert completed > REQUESTS // 2
    print(f"{len(begun)} begun, {completed} completed, {len(lost)} lost, {len(rows)} rows")
