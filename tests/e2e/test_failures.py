"""kill -9 of a worker, of the scheduler, of etcd and of a router, while tenants stream."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from manylora.client import Client, Delta, GenerateStream, Result, RetryPolicy, Sampling
from manylora.demo import skills

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

LONG_TOKENS = 1000
PATIENT = RetryPolicy(max_attempts=100, base_delay_s=0.1, max_delay_s=0.5, budget_attempts=1e6)


@pytest.fixture
async def client(whole: UpCluster) -> AsyncIterator[Client]:
    async with Client(whole.router, tenant="acme", retry=PATIENT) as client:
        yield client


class Running:
    """A long stream of random tokens that is read in the background, once its first token is there."""

    def __init__(self, stream: GenerateStream) -> None:
        self.stream = stream
        self.tokens = 0
        self.started = asyncio.Event()
        self.last_token_s = 0.0
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> Result:
        async for event in self.stream:
            if isinstance(event, Delta):
                self.tokens += len(event.token_ids)
                self.last_token_s = time.monotonic()
                self.started.set()
        return self.stream.result()


async def start(client: Client, count: int, max_tokens: int = LONG_TOKENS) -> list[Running]:
    sampling = Sampling(temperature=1.0, seed=3)
    running = [
        Running(client.generate("do:", max_tokens=max_tokens, ignore_eos=True, sampling=sampling)) for _ in range(count)
    ]
    await asyncio.wait_for(asyncio.gather(*(r.started.wait() for r in running)), 30)
    return running


async def works(client: Client) -> None:
    result = await client.complete(
        skills.prompt("ab3"), adapter="upper", max_tokens=16, sampling=Sampling(temperature=0.0), timeout_s=30
    )
    assert result.text == "AB3"


async def test_new_requests_go_to_the_other_worker_at_once(whole: UpCluster, client: Client) -> None:
    running = await start(client, 6)
    whole.kill("worker-0")
    killed_s = time.monotonic()
    await works(client)
    assert time.monotonic() - killed_s < 5
    results = [r.result() for r in await _finish(running)]
    assert [(r.outcome, len(r.token_ids)) for r in results] == [("completed", LONG_TOKENS)] * 6
    assert len({r.token_ids for r in results}) == 1, "the same seed drew the same tokens on both workers"
    assert 0 < sum(r.usage.resumed for r in results) < 6, "both workers had streams"

    await whole.wait_complete()
    served = {r.result().worker_id for r in await _finish(await start(client, 8, 50))}
    assert served == {"worker-0", "worker-1"}, "the restarted worker serves again"


@pytest.mark.parametrize("victim", ["scheduler", "etcd"])
async def test_streams_outlive_the_scheduler_and_etcd(whole: UpCluster, client: Client, victim: str) -> None:
    running = await start(client, 4)
    whole.kill(victim)
    results = [r.result() for r in await _finish(running)]
    assert [(r.outcome, len(r.token_ids)) for r in results] == [("completed", LONG_TOKENS)] * 4
    await works(client)
    await whole.wait_complete()
    await works(client)


async def test_new_requests_do_not_wait_for_an_etcd_that_does_not_answer(whole: UpCluster, client: Client) -> None:
    async def asked_s() -> float:
        began_s = time.monotonic()
        await works(client)
        return time.monotonic() - began_s

    async def each_quarter_second(seconds: float) -> list[float]:
        asked = []
        for _ in range(round(seconds * 4)):
            asked.append(asyncio.create_task(asked_s()))
            await asyncio.sleep(0.25)
        return sorted(await asyncio.gather(*asked))

    before = await each_quarter_second(4)
    os.kill(whole.pid("etcd"), signal.SIGSTOP)
    try:
        during = await each_quarter_second(10)
    finally:
        os.kill(whole.pid("etcd"), signal.SIGCONT)
    after = await each_quarter_second(6)
    print(f"slowest s: {before[-1]:.3f} before, {during[-3:]} during, {after[-3:]} after")
    assert during[-1] < before[-1] + 0.5
    assert after[len(after) * 95 // 100] < before[-1] + 0.5
    await whole.wait_complete()


async def test_a_killed_router_comes_back_at_its_address(whole: UpCluster, client: Client) -> None:
    running = await start(client, 2)
    whole.kill("router-0")
    results = [r.result() for r in await _finish(running)]
    assert [(r.outcome, len(r.token_ids)) for r in results] == [("completed", LONG_TOKENS)] * 2
    assert len({r.token_ids for r in results}) == 1, "the same seed drew the same tokens"
    await whole.wait_complete()
    await works(client)
    await _eventually(lambda: _is_idle(client))


async def _finish(running: list[Running]) -> list[GenerateStream]:
    await asyncio.wait_for(asyncio.gather(*(r.task for r in running)), 120)
    return [r.stream for r in running]


async def _is_idle(client: Client) -> bool:
    """No work of callers who are gone is left anywhere."""
    status = await client.status()
    return not status.scheduler.flows and all(
        w.running == 0 and w.kv_blocks_free == w.kv_blocks_total for w in status.workers
    )


async def _eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(15):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.1)
