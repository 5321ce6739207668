"""What policies ask of dedicated workers, by the registrations of the moment."""

from __future__ import annotations

import asyncio
import random

from manylora.v1 import scheduler_pb2
from manylora_scheduler.core.reports import Owner
from manylora_scheduler.serving.dedications import LOOK_S, Dedications, Wanted
from manylora_shared.coordination import keys
from manylora_shared.coordination.policies import StoredPolicy
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.ids import AdapterDigest, TenantId, adapter_uid
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer

from tests.scheduler.scripted_cluster import METHODS, Cluster, play

A = TenantId("acme")
ONE, TWO = AdapterDigest("1" * 64), AdapterDigest("2" * 64)


def stored(text: str) -> StoredPolicy:
    return StoredPolicy(text.encode(), text.encode(), 1, 1)


def registered(name: str, digest: AdapterDigest) -> bytes:
    return AdapterRecord("acme", name, digest, 8, 1, ("q_proj",), 0.0).to_json()


def test_it_follows_policies_and_versions_and_the_store_may_be_away() -> None:
    async def scenario() -> None:
        server, told = MemoryStoreServer(random.Random(1)), list[Wanted]()
        store = server.client()
        await store.put(keys.adapter(A, "x"), registered("x", ONE))
        policies = {
            "acme": stored("tenant_id: acme\nadapters: {dedicated: {x: 2, y: 1}}\n"),
            "b": stored("tenant_id: b\n"),
        }
        dedications = Dedications(store, policies, told.append)
        assert await dedications.wanted() == {"default": {Owner(adapter_uid(ONE, A), A): 2}}
        await store.put(keys.adapter(A, "x"), registered("x", TWO))
        assert await dedications.wanted() == {"default": {Owner(adapter_uid(TWO, A), A): 2}}
        dedications.policy_changed(A, stored("tenant_id: acme\nadapters: {dedicated: 7}\n"))
        assert await dedications.wanted(), "one that cannot be read leaves the last in force"
        for change in (stored("tenant_id: acme\n"), None):
            dedications.policy_changed(A, policies["acme"])
            assert await dedications.wanted()
            dedications.policy_changed(A, change)
            assert await dedications.wanted() == {}
        shared = "tenant_id: acme\nadapters: {dedicated: {x: 1}, share_copies: true}\n"
        dedications.policy_changed(A, stored(shared))
        assert await dedications.wanted() == {"default": {Owner(adapter_uid(TWO, None), A): 1}}
        await store.delete(keys.adapter(A, "x"))
        assert await dedications.wanted() == {}

    run(scenario(), seed=1)


def test_a_leader_dedicates_a_worker_and_says_who_should_have_one() -> None:
    async def scenario(cluster: Cluster) -> None:
        app = await cluster.scheduler("s0")
        workers = [await cluster.worker(name, slots=1) for name in ("w0", "w1")]
        await cluster.store.put(keys.adapter(A, "x"), registered("x", ONE))
        await cluster.leader()
        router, uid = await cluster.router(app), adapter_uid(ONE, A)
        channel = (await cluster.peer("cli")).connect(app.address)

        async def status() -> scheduler_pb2.GetSchedulerStatusResponse:
            return await channel.call(METHODS["GetSchedulerStatus"], scheduler_pb2.GetSchedulerStatusRequest())

        for number in range(120):
            await router.enqueue(f"r{number}", adapter_uid=uid if number % 5 else "", timeout_s=0.5)
            await asyncio.sleep(0.01)
        (advice,) = (await status()).scheduler.merge_advice
        assert (advice.pool, advice.tenant_id, advice.adapter_version) == ("default", "acme", ONE)
        assert (advice.workers, advice.pool_workers, round(advice.requests_part, 1)) == (1, 2, 0.8)
        await cluster.store.put(keys.tenant(A), b"tenant_id: acme\nadapters: {dedicated: {x: 1}}\n")
        await asyncio.sleep(3 * LOOK_S)
        (mine,) = [worker for worker in workers if worker.dedicated]
        assert mine.dedicated == [(uid, "acme")]
        told = await status()
        assert not told.scheduler.merge_advice
        assert [w.dedicated_version for w in told.workers if w.worker_id == mine.worker_id] == [ONE]
        assert [w.is_changing for w in told.workers] == [False, False]
        await cluster.store.put(keys.adapter(A, "x"), registered("x", TWO))
        await asyncio.sleep(2 * LOOK_S)
        assert mine.dedicated == [(uid, "acme"), (adapter_uid(TWO, A), "acme")]
        await cluster.store.delete(keys.tenant(A))
        await asyncio.sleep(3 * LOOK_S)
        assert all(worker.dedicated[-1:] in ([], [("", "")]) for worker in workers)

    play(scenario)
