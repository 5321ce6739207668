"""Everything is restarted one by one, then routers are killed, under callers with the Python client: nobody sees it,
and the ledger of the restarts has to the token what callers got.

The model is a fake, so that every token is known beforehand. `ROLLING_ROUNDS=3 pytest tests/e2e/test_rolling.py -m
wide` restarts everything three times over.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from manylora.client import Client, Delta, Result, Sampling
from manylora.demo import BASE_FOLDER
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_sim.fake_runner import reference_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TENANT = "acme"
STREAMS = 24
TOKENS = 400
CALL_TOKENS = 2
PROMPT = [5, 6, 7]
NEW_EACH_S = 0.1
BACK_S = 60.0
ROUNDS = int(os.environ.get("ROLLING_ROUNDS", "1"))


@dataclass
class Load:
    """Streams one after the other in each of STREAMS tasks, and short calls beside them, until it is told to end."""

    client: Client
    results: list[tuple[int, Result]] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """The longest between two deltas, of each stream."""
    slowest_call_s: float = 0.0
    calls: int = 0
    _is_over: bool = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(self._streams(number))
            group.create_task(self._calls(group))

    def end(self) -> None:
        self._is_over = True

    async def _streams(self, number: int) -> None:
        seed = number
        while not self._is_over:
            sampling = Sampling(temperature=0.0) if number % 4 == 0 else Sampling(seed=seed)
            n = 2 if number % 4 == 1 else 1
            stream = self.client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, sampling=sampling, n=n)
            last = 0.0
            longest = 0.0
            async for event in stream:
                if isinstance(event, Delta):
                    now = time.monotonic()
                    longest = max(longest, now - last) if last else 0.0
                    last = now
            self.results.append((seed if number % 4 else -1, stream.result()))
            self.gaps_s.append(longest)
            seed += STREAMS

    async def _calls(self, group: asyncio.TaskGroup) -> None:
        while not self._is_over:
            group.create_task(self._call())
            await asyncio.sleep(NEW_EACH_S)

    async def _call(self) -> None:
        began = time.monotonic()
        result = await self.client.complete(PROMPT, max_tokens=CALL_TOKENS, ignore_eos=True)
        assert result.outcome == "completed"
        self.calls += 1
        self.slowest_call_s = max(self.slowest_call_s, time.monotonic() - began)

    def check(self) -> None:
        assert len(self.results) >= STREAMS
        for seed, result in self.results:
            assert result.outcome == "completed"
            assert result.usage.completion_tokens == TOKENS * len(result.choices)
            assert result.usage.prompt_tokens == len(PROMPT)
            for index, choice in enumerate(result.choices):
                right = reference_tokens(PROMPT, None, max(0, seed), index, TOKENS, greedy=seed < 0)
                assert list(choice.token_ids) == right, seed

    def told(self) -> dict[str, float]:
        gaps = sorted(self.gaps_s) or [0.0]
        return {
            "streams": len(self.results),
            "resumed": sum(result.usage.resumed > 0 for _, result in self.results),
            "calls": self.calls,
            "longest_pause_s": round(gaps[-1], 3),
            "pause_p95_s": round(gaps[len(gaps) * 95 // 100], 3),
            "slowest_call_s": round(self.slowest_call_s, 3),
        }


@asynccontextmanager
async def started(tmp_path: Path) -> AsyncIterator[tuple[LocalCluster, Client]]:
    """With an operator's client."""
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name="fake",
        data=tmp_path / "data",
        workers=2,
        routers=2,
        schedulers=2,
        worker_module="manylora_sim.worker",
        worker_flags=("--fake-step-ms=10", "--sequence-slots=64"),
    )
    async with LocalCluster(options) as cluster, Client(",".join(cluster.router_addresses)) as operator:
        await operator.tenants.apply(f"tenant_id: {TENANT}\n")
        await asyncio.sleep(0.5)  # the other router hears of the tenant
        yield cluster, operator


@asynccontextmanager
async def loaded(cluster: LocalCluster) -> AsyncIterator[Load]:
    """By a client with a retry budget of its own."""
    async with Client(",".join(cluster.router_addresses), tenant=TENANT) as client:
        load = Load(client)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(1.0)
        try:
            yield load
        finally:
            load.end()
            await running
    load.check()


async def back(cluster: LocalCluster, operator: Client, name: str, before: Mapping[str, Any]) -> None:
    """Until a new process of the name has said that it is ready, and all are there."""
    async with asyncio.timeout(BACK_S):
        while True:
            if cluster.children[name].ready is not before:
                status = await operator.status()
                workers = [w.connected and not w.draining for w in status.workers]
                routers = [r.answered for r in status.routers]
                if status.scheduler.reachable and workers == routers == [True, True]:
                    return
            await asyncio.sleep(0.05)


async def check_ledger(operator: Client, load: Load) -> None:
    """Prompts once, and each token once, whichever router had it."""
    right = {
        "prompt_tokens": len(PROMPT) * (len(load.results) + load.calls),
        "completion_tokens": sum(TOKENS * len(result.choices) for _, result in load.results) + CALL_TOKENS * load.calls,
        "unread_tokens": 0,
    }
    found: dict[str, int] = {}
    until = time.monotonic() + BACK_S
    while found != right and time.monotonic() < until:
        await asyncio.sleep(0.5)  # rows are shipped
        rows = [row async for row in operator.usage.rows(tenant=TENANT)]
        found = {name: sum(row[name] for row in rows) for name in right}
    assert found == right


async def test_nobody_sees_what_goes(tmp_path: Path) -> None:
    async with started(tmp_path) as (cluster, operator):
        async with loaded(cluster) as load:
            for _ in range(ROUNDS):
                for name in ("worker-0", "worker-1", "scheduler-1", "scheduler", "router-0", "router-1"):
                    before = cluster.children[name].ready
                    kind = await operator.drain(name)
                    assert name.startswith(kind)
                    await back(cluster, operator, name, before)
            restarted = load.told()
        await check_ledger(operator, load)
        async with loaded(cluster) as load:
            for name in ("router-0", "router-1"):
                before = cluster.children[name].ready
                os.kill(cluster.pids[name], signal.SIGKILL)
                await back(cluster, operator, name, before)
            killed = load.told()
    print(json.dumps({"bench": "rolling", "rounds": ROUNDS, "all_restarted": restarted, "and_routers_killed": killed}))
    assert restarted["resumed"] > STREAMS
