"""Tenants with the same adapter, through the whole cluster: whether one's first request has a load of its own, which is
what its time would tell of the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from manylora_shared.ids import AdapterUid, TenantId, digest_of
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_sim.loop import run

from tests.sim.cluster import PINS, Cluster, adapters_of, digest_of_adapter
from tests.sim.traffic import Traffic

FIRST, SECOND = "acme", "bolt"
DIGEST = digest_of_adapter(FIRST, adapters_of(FIRST)[0])


async def loads_of_the_same(sharing: tuple[str, ...], loads: list[AdapterUid]) -> list[int]:
    """So many the first tenant's request had, and the second's after it."""
    cluster = Cluster(0, workers=1)
    await cluster.start()
    store = cluster.store_server.client()
    for tenant in (FIRST, SECOND):
        policy = replace(cluster.policies[TenantId(tenant)], share_copies=tenant in sharing)
        await cluster.put_policy(store, policy)
    await asyncio.sleep(1.0)
    traffic = Traffic(cluster, 0)
    found = []
    for tenant in (FIRST, SECOND, FIRST, SECOND):
        loads.clear()
        call = traffic.plain(tenant)
        call.adapter = adapters_of(tenant)[0]
        traffic.begin(call)
        await traffic.all_ended(10.0)
        assert call.finished is not None
        assert call.frames[0].started.adapter_version == DIGEST
        assert call.tokens_of(0) == call.reference(0)
        found.append(len([uid for uid in loads if digest_of(uid) == DIGEST]))
    return found


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [((), [1, 1, 0, 0]), ((FIRST,), [1, 1, 0, 0]), ((SECOND,), [1, 1, 0, 0]), ((FIRST, SECOND), [1, 0, 0, 0])],
)
def test_a_copy_is_shared_where_both_policies_say_so(
    sharing: tuple[str, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[AdapterUid] = []
    start = FakeAdapterBackend.start_host_load

    def start_host_load(self: FakeAdapterBackend, uid: AdapterUid) -> None:
        loads.append(uid)
        start(self, uid)

    monkeypatch.setitem(PINS, FIRST, ())
    monkeypatch.setattr(FakeAdapterBackend, "start_host_load", start_host_load)
    assert run(loads_of_the_same(sharing, loads), seed=0, limit_s=100).result == expected
