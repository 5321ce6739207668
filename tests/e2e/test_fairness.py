"""Shares through real services: four tenants of weights 1:2:4:8, all backlogged, on one worker with the fake engine.

`--fairness-seconds N` measures the shares over N seconds instead of the default few; 60 is what the promise is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from manylora.client import Client, Delta, RequestFailed
from manylora.demo import BASE_FOLDER
from manylora.local_cluster import ClusterOptions, LocalCluster

pytestmark = pytest.mark.e2e

WEIGHTS = {"one": 1, "two": 2, "four": 4, "eight": 8}
STREAMS = 40
"""A tenant's: more than the slots that it gets, so that it always has requests waiting."""
PROMPT_TOKENS = 8
OUTPUT_TOKENS = (8, 16)
"""Drawn anew for each request, between these."""
SETTLE_S = 3.0
SPREAD_REQUESTS = 6
"""How many of its requests a flow may be before or behind its share: what it has running and how far boosts go."""
PROMISED_SECONDS, PROMISED_ERROR = 60.0, 0.02


class Load:
    """Every tenant's callers, and the cost (prompt + 2 * output tokens) of what has come to each."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rng = random.Random(3)
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self.cost = dict.fromkeys(WEIGHTS, 0)

    def start(self, tenant: str) -> None:
        self._tasks[tenant] = [asyncio.create_task(self._caller(tenant)) for _ in range(STREAMS)]

    async def stop(self, tenant: str) -> None:
        tasks = self._tasks.pop(tenant)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def stop_all(self) -> None:
        for tenant in list(self._tasks):
            await self.stop(tenant)

    async def over(self, seconds: float) -> dict[str, float]:
        """Each tenant's share of what comes in so many seconds; all that have callers must be backlogged throughout."""
        before = dict(self.cost)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(min(0.5, max(0.0, until - time.monotonic())))
            flows = (await self._client.status()).scheduler.flows
            waiting = {flow.tenant_id for flow in flows if flow.queued}
            assert waiting == set(self._tasks), f"{set(self._tasks) - waiting} had nothing waiting"
        got = {tenant: self.cost[tenant] - before[tenant] for tenant in WEIGHTS}
        return {tenant: cost / sum(got.values()) for tenant, cost in got.items()}

    async def _caller(self, tenant: str) -> None:
        while True:
            prompt = [self._rng.randrange(5, 250) for _ in range(PROMPT_TOKENS)]
            async with self._client.generate(
                prompt, tenant=tenant, max_tokens=self._rng.randint(*OUTPUT_TOKENS), ignore_eos=True
            ) as stream:
                prompt_cost = PROMPT_TOKENS
                async for event in stream:
                    if isinstance(event, Delta):
                        self.cost[tenant] += prompt_cost + 2 * len(event.token_ids)
                        prompt_cost = 0


@asynccontextmanager
async def backlogged(data: Path, *scheduler_flags: str) -> AsyncIterator[Load]:
    """A cluster where every tenant has more waiting than runs, for long enough that shares have settled."""
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name="fake",
        data=data,
        worker_flags=("--engine=fake", "--fake-step-ms=25", "--sequence-slots=24", "--num-blocks=4000"),
        scheduler_flags=("--no-overload", *scheduler_flags),  # it is the backlog that is measured
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as client:
        for tenant, weight in WEIGHTS.items():
            await client.tenants.apply(f"tenant_id: {tenant}\nclasses:\n  standard: {{weight: {weight}}}\n")
        load = Load(client)
        for tenant in WEIGHTS:
            load.start(tenant)
        try:
            await asyncio.sleep(SETTLE_S)
            yield load
        finally:
            with contextlib.suppress(RequestFailed):  # what went wrong has been raised by then
                await load.stop_all()


def entitled(weights: Mapping[str, int]) -> dict[str, float]:
    return {tenant: weight / sum(weights.values()) for tenant, weight in weights.items()}


async def test_backlogged_tenants_get_their_weights_shares(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = float(request.config.getoption("--fairness-seconds"))
    async with backlogged(tmp_path) as load:
        before = sum(load.cost.values())
        shares = await load.over(seconds)
        cost = sum(load.cost.values()) - before
    per_request = PROMPT_TOKENS + sum(OUTPUT_TOKENS)
    expected = entitled(WEIGHTS)
    errors = {tenant: shares[tenant] / expected[tenant] - 1 for tenant in WEIGHTS}
    print(f"\nshares over {seconds:g} s, {cost / per_request:.0f} requests: {_percent(shares)}")
    print(f"off by {_percent(errors)}")
    for tenant, error in errors.items():
        granularity = SPREAD_REQUESTS * per_request / (expected[tenant] * cost)
        allowed = PROMISED_ERROR if seconds >= PROMISED_SECONDS else PROMISED_ERROR + granularity
        assert abs(error) <= allowed, f"{tenant} is off by {error:.1%}, allowed are {allowed:.1%}"


async def test_idling_saves_nothing_up(tmp_path: Path) -> None:
    """A tenant that was idle while others worked gets its share when it is back: nothing of what it left to them."""
    async with backlogged(tmp_path) as load:
        await load.stop("eight")
        alone = await load.over(8.0)
        load.start("eight")
        await asyncio.sleep(0.5)
        back = await load.over(5.0)
    print(f"\nwithout it {_percent(alone)}; with it again {_percent(back)}")
    assert alone["eight"] < 0.05
    # It was left the service of 8 s: with that to its credit it would have nearly all of the next five.
    expected = entitled(WEIGHTS)["eight"]
    assert 0.8 * expected <= back["eight"] <= 1.15 * expected


async def test_in_order_of_arrival_weights_count_for_nothing(tmp_path: Path) -> None:
    """What the shares above are compared with: the same load with the scheduler's `--order arrival`."""
    async with backlogged(tmp_path, "--order=arrival") as load:
        shares = await load.over(5.0)
    print(f"\nin order of arrival: {_percent(shares)}")
    assert all(0.15 <= share <= 0.35 for share in shares.values())


def _percent(values: Mapping[str, float]) -> str:
    return ", ".join(f"{tenant} {100 * value:.2f} %" for tenant, value in values.items())
