"""A tenant's adapter merged into a worker of its own, on the real cluster: answers stay what they were, the others
share the rest, and when the merged worker is lost the requests go on unmerged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from manylora.client import Client, ClusterStatus, RequestFailed, Result, Sampling
from manylora.demo import skills

from tests.e2e.conftest import UpCluster

pytestmark = pytest.mark.e2e

PLAIN = "tenant_id: acme\n"
POLICY = PLAIN + "adapters:\n  dedicated: {upper: 1}\n"
GREEDY = Sampling(temperature=0.0)


async def ask(client: Client, tenant: str = "acme", adapter: str | None = "upper", tokens: int = 12) -> Result:
    return await client.complete(
        skills.prompt("merged or not"),
        tenant=tenant,
        adapter=adapter,
        max_tokens=tokens,
        ignore_eos=True,
        sampling=GREEDY,
    )


async def until(client: Client, holds: Callable[[ClusterStatus], bool]) -> ClusterStatus:
    async with asyncio.timeout(60):
        while True:
            try:
                if holds(status := await client.status()):
                    return status
            except RequestFailed:
                pass
            await asyncio.sleep(0.1)


def merged(status: ClusterStatus) -> list[str]:
    return [w.worker_id for w in status.workers if w.dedicated_adapter == "upper" and not w.is_changing and w.connected]


@pytest.fixture
async def client(whole: UpCluster) -> AsyncIterator[Client]:
    async with Client(whole.router) as client:
        yield client
        await client.tenants.apply(PLAIN)
        await until(client, lambda s: all(w.connected and not w.dedicated_tenant for w in s.workers))


async def test_a_merged_worker_answers_the_same_and_is_missed_by_nobody(whole: UpCluster, client: Client) -> None:
    others = (("acme", "reverse"), ("birch", "words"), ("acme", None))
    before = await ask(client)
    before_others = [(await ask(client, tenant, adapter)).text for tenant, adapter in others]
    assert before.text not in before_others
    await client.tenants.apply(POLICY)
    (mine,) = merged(await until(client, lambda s: bool(merged(s))))
    shown = await whole.manylora("status")
    assert f"merged     {mine} acme/upper" in shown.stdout
    own = await asyncio.gather(*(ask(client) for _ in range(4)))
    assert {(each.text, each.worker_id) for each in own} == {(before.text, mine)}
    rest = await asyncio.gather(*(ask(client, tenant, adapter) for tenant, adapter in others))
    assert [each.text for each in rest] == before_others
    assert mine not in {each.worker_id for each in rest}

    long = [asyncio.create_task(ask(client, tokens=120)) for _ in range(3)]
    await asyncio.sleep(0.1)
    whole.kill(next(name for name in whole.ready["pids"] if name.startswith("worker") and name.endswith(mine[-1])))
    answers = await asyncio.gather(*long)
    assert {each.text for each in answers} == {(await ask(client, tokens=120)).text}
    assert answers[0].text.startswith(before.text)
    again = merged(await until(client, lambda s: bool(merged(s)) and all(w.connected for w in s.workers)))
    assert {(await ask(client)).worker_id} == set(again)

    await client.tenants.apply(PLAIN)
    await until(client, lambda s: not any(w.dedicated_tenant or w.is_changing for w in s.workers))
    assert (await ask(client)).text == before.text


async def test_more_than_the_pool_has_is_refused(client: Client) -> None:
    with pytest.raises(RequestFailed, match="line 3: asks for 2 dedicated workers of pool default: it has 2"):
        await client.tenants.apply(POLICY.replace("upper: 1", "upper: 2"))
