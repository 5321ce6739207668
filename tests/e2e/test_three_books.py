"""What callers got, what the ledger has and what the quotas settled is one sum, however requests end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from manylora.client import Client, Delta, RequestFailed, Sampling, Started, Usage
from manylora.reports.usage_page import Reconciled
from manylora.reports.usage_report import reconciled

from tests.e2e.conftest import UpCluster

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TENANT = "booked"
POLICY = f"""\
tenant_id: {TENANT}
quotas: {{concurrency: 60, resumes_per_s: 100, resumes_burst: 100}}
classes:
  standard: {{weight: 1}}
  batch: {{weight: 1, token_bucket: {{rate_tps: %d, burst_tps: 600}}}}
"""
REQUESTS = 60
SHARED = [7] * 64  # a prefix that is found from the second time on


class Callers:
    def __init__(self) -> None:
        self.got: dict[str, int] = {}  # tokens of a request's caller
        self.told: dict[str, Usage] = {}
        self.kinds: Counter[str] = Counter()

    async def ask(self, client: Client, kind: str, number: int) -> None:
        rng, request_id = random.Random(number), ""
        stream = client.generate(
            [*SHARED, 3 + number % 50],
            tenant=TENANT,
            qos_class="batch" if kind == "quota" else "standard",
            n=2 if number % 3 == 0 else 1,
            max_tokens=200 if kind != "whole" else rng.randrange(4, 40),
            ignore_eos=True,
            sampling=Sampling(temperature=1.0),
            timeout_s=0.3 if kind == "deadline" else 60,
        )
        try:
            async with stream:
                async for event in stream:
                    if isinstance(event, Started):
                        request_id = event.request_id
                        self.got[request_id] = 0
                    elif isinstance(event, Delta):
                        self.got[request_id] += len(event.token_ids)
                        if kind == "left" and self.got[request_id] > 5:
                            break
                else:
                    self.told[request_id] = stream.result().usage
        except RequestFailed as error:
            if error.result is not None and error.result.outcome == "quota_exhausted":
                self.told[request_id] = error.result.usage
                self.kinds["quota_exhausted"] += 1


@pytest.fixture
async def client(whole: UpCluster) -> AsyncIterator[Client]:
    async with Client(whole.router, retry=None) as client:
        await client.tenants.apply(POLICY % 1000)
        await client.complete(SHARED, tenant=TENANT, qos_class="batch", max_tokens=1)  # the bucket fills by this rate
        await client.tenants.apply(POLICY % 5)  # and keeps what it has
        yield client
        await client.tenants.delete(TENANT)


async def _books(client: Client) -> Sequence[Reconciled]:
    """At rest, when each begun request has its row."""
    status = await client.status()
    quotas = [quota for quota in status.scheduler.quotas if quota.tenant_id == TENANT] if status.scheduler else []
    if any(quota.requests for quota in quotas):
        return ()
    sums, _ = await client.usage.sums(["tenant", "class", "outcome"], tenant=TENANT)
    return reconciled(sums, quotas)


async def test_ledger_quotas_and_callers_have_one_sum(whole: UpCluster, client: Client) -> None:
    callers = Callers()
    kinds = [("whole", "left", "deadline", "quota", "whole")[number % 5] for number in range(REQUESTS)]
    first = asyncio.gather(*(callers.ask(client, kind, number) for number, kind in enumerate(kinds)))
    while sum(callers.got.values()) < 300 and not first.done():  # noqa: ASYNC110 - answers run
        await asyncio.sleep(0.01)
    whole.kill("worker-0")  # what ran there goes on elsewhere, or is told that it cannot
    await first
    await whole.wait_complete()
    rows: dict[str, dict[str, Any]] = {}
    books: Sequence[Reconciled] = ()
    async with asyncio.timeout(60):
        while not books or any(book.difference for book in books) or not callers.got.keys() <= rows.keys():
            await asyncio.sleep(0.2)
            rows = {row["request_id"]: row async for row in client.usage.rows(tenant=TENANT)}
            books = await _books(client)
    for request_id, got in callers.got.items():
        row = rows[request_id]
        assert row["completion_tokens"] >= got
        if (usage := callers.told.get(request_id)) is not None:
            assert row["completion_tokens"] == got == usage.completion_tokens
            assert (row["prompt_tokens"], row["cached_tokens"]) == (usage.prompt_tokens, usage.cached_prompt_tokens)
    outcomes = Counter(row["outcome"] for row in rows.values())
    assert outcomes.keys() >= {"completed", "cancelled", "quota_exhausted"}, outcomes
    assert any(row["cached_tokens"] for row in rows.values())
    assert any(row["resumes"] for row in rows.values()), "no answer went on: it proves little"
    assert any(row["choices"] == 2 for row in rows.values())
    assert all(book.lost == 0 for book in books)
