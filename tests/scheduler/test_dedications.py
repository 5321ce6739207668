"""What policies ask of dedicated workers, by the registrations of the moment."""

from __future__ import annotations

import random

from manylora_scheduler.core.reports import Owner
from manylora_scheduler.serving.dedications import Dedications, Wanted
from manylora_shared.coordination import keys
from manylora_shared.coordination.policies import StoredPolicy
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.ids import AdapterDigest, TenantId, adapter_uid
from manylora_sim.loop import run
from manylora_sim.store import MemoryStoreServer

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
