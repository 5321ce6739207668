"""A tenant's token bucket through real services: three routers, one account, to the token."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from manylora.client import Client, QuotaStatus, RequestFailed, Result, RetryPolicy, Sampling, Usage
from manylora.demo import BASE_FOLDER
from manylora.local.cluster import ClusterOptions, LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TENANT = "acme"
RATE, BURST = 300, 600
POLICY = f"""\
tenant_id: {TENANT}
classes:
  standard: {{weight: 1, token_bucket: {{rate_tps: {RATE}, burst_tps: {BURST}}}}}
  batch: {{weight: 1, token_bucket: {{rate_tps: 5, burst_tps: 50}}}}
quotas: {{concurrency: 60}}
"""
SECONDS = 12.0
STREAMS = 12
"""A router: together they ask for far more than the contract."""


def charged(usage: Usage) -> int:
    return usage.prompt_tokens - usage.cached_prompt_tokens + usage.completion_tokens


@dataclass
class Metered:
    """What one kind of caller saw."""

    tokens: int = 0
    completed: int = 0
    refused: int = 0
    cut: int = 0

    def add(self, result: Result) -> None:
        self.tokens += charged(result.usage)

    def add_failure(self, error: RequestFailed) -> float:
        """Checks that it is the quota's. Returns how long the server says to wait."""
        assert error.code == "RESOURCE_EXHAUSTED", error
        assert error.retry_after_s is not None, error
        assert {breach.tenant_id for breach in error.breaches} == {TENANT}
        if error.result is None:
            self.refused += 1
        else:
            assert error.result.outcome == "quota_exhausted"
            self.add(error.result)
            self.cut += 1
        return min(1.0, error.retry_after_s)


async def test_three_routers_share_one_exact_account(tmp_path: Path) -> None:
    flags = ("--fake-step-ms=2", "--sequence-slots=64", "--num-blocks=20000")
    options = ClusterOptions(
        model=BASE_FOLDER,
        model_name="fake",
        data=tmp_path / "data",
        workers=1,
        routers=3,
        worker_module="manylora_sim.worker",
        worker_flags=flags,
    )
    async with LocalCluster(options) as cluster, Client(cluster.router) as operator:
        await operator.tenants.apply(POLICY)
        key, _ = await operator.keys.create(["generate"], tenant=TENANT)
        await asyncio.gather(*(_known_at(address, key) for address in cluster.router_addresses))
        began = time.monotonic()
        found = await asyncio.gather(*(_load(address, key, i) for i, address in enumerate(cluster.router_addresses)))
        took_s = time.monotonic() - began
        account = await _settled(operator)
        metered = sum(each.tokens for each in found)
        print(f"metered {metered} in {took_s:.2f} s, of {RATE} a second and {BURST}: {found}")
        assert account.settled_tokens == metered
        assert sum(each.refused for each in found) > 0, "the load was too small to meet the quota"
        # The leader's term, and with it the bucket, began before the load: by then it was full at most.
        assert metered <= BURST + RATE * took_s
        assert metered >= 0.9 * RATE * took_s
        await _ends_in_mid_stream(cluster, operator, key)


async def _known_at(address: str, key: str) -> None:
    """Until the router has heard of the key: the others learn of what one has stored from etcd."""
    async with asyncio.timeout(10), Client(address, key=key) as client:
        while True:
            try:
                await client.list_models()
                return
            except RequestFailed as error:
                if error.code != "UNAUTHENTICATED":
                    raise
                await asyncio.sleep(0.02)


async def _load(address: str, key: str, index: int) -> Metered:
    metered = Metered()
    deadline = time.monotonic() + SECONDS
    rng = random.Random(index)
    retry = RetryPolicy(max_attempts=1)

    async def loop(client: Client) -> None:
        while time.monotonic() < deadline:
            prompt = [rng.randrange(5, 250) for _ in range(rng.randint(1, 40))]
            try:
                async with client.generate(
                    prompt,
                    max_tokens=rng.randint(1, 120),
                    ignore_eos=True,
                    sampling=Sampling(seed=rng.getrandbits(30)),
                ) as stream:
                    metered.add(await stream.collect())
                metered.completed += 1
            except RequestFailed as error:
                await asyncio.sleep(metered.add_failure(error))

    async with Client(address, key=key, retry=retry) as client, asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(loop(client))
    return metered


async def _settled(operator: Client) -> QuotaStatus:
    """The account once nothing runs any more."""
    async with asyncio.timeout(10):
        while True:
            quotas = (await operator.status()).scheduler.quotas
            (account,) = [q for q in quotas if (q.tenant_id, q.qos_class) == (TENANT, "standard")]
            if account.requests == 0:
                assert account.leased_tokens == 0
                return account
            await asyncio.sleep(0.05)


async def _ends_in_mid_stream(cluster: LocalCluster, operator: Client, key: str) -> None:
    """The batch class gains five tokens a second: an answer of 200 ends where the bucket does."""
    async with Client(cluster.router, key=key, retry=None) as client:
        with pytest.raises(RequestFailed) as raised:
            async with client.generate([7] * 10, qos_class="batch", max_tokens=200, ignore_eos=True) as stream:
                await stream.collect()
        error = raised.value
        assert error.code == "RESOURCE_EXHAUSTED"
        assert error.result is not None
        assert error.result.outcome == "quota_exhausted"
        used = charged(error.result.usage)
        assert used == 10 + len(error.result.token_ids)
        with pytest.raises(RequestFailed) as raised:
            await client.complete([7] * 60, qos_class="batch", max_tokens=5)
        assert raised.value.retry_after_s is None, "it can never fit"
        quotas = (await operator.status()).scheduler.quotas
        (account,) = [q for q in quotas if q.qos_class == "batch"]
        assert account.settled_tokens == used
