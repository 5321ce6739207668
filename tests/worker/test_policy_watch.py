"""The tenants' policies in a worker: bounds on KV memory, and pinned adapters."""

from __future__ import annotations

import asyncio
import random

import pytest
from manylora.v1 import common_pb2, status_pb2
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import Code
from manylora_shared.ids import QosClass, TenantId
from manylora_sim.store import MemoryStoreServer
from manylora_worker.adapters.pins import NO_ROOM_TO_PIN
from manylora_worker.serving import policy_watch as tenants_module

from tests.worker.worker_fakes import (
    OTHER_UID,
    UID,
    Scheduler,
    collect,
    config,
    eventually,
    make_engine,
    message,
    refused,
    running_worker,
)


def _policy(hard_mb: int, weight: int = 3) -> bytes:
    return (
        f"tenant_id: acme\nclasses: {{batch: {{weight: {weight}}}}}\nquotas: {{kv_hbm_mb_hard: {hard_mb}}}\n".encode()
    )


async def test_a_policy_bounds_a_tenants_kv_memory_and_changes_live() -> None:
    async with running_worker() as worker:
        store = worker.store.client()
        longest = message(max_tokens=62)  # 64 tokens are held at most: 4 blocks of 256 KiB, 1 MiB
        await store.put(keys.tenant("acme"), _policy(1))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("acme")) == 4)
        assert worker.engine.core._shares.weight((TenantId("acme"), QosClass.BATCH)) == 3
        assert (await collect(worker.execute(longest))).finished.outcome == common_pb2.OUTCOME_COMPLETED
        longer = message("r2", max_tokens=63)
        error = await refused(worker.execute(longer).read())
        assert (error.code, error.label, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, "quota_exceeded", None)
        assert [(b.quota, b.tenant_id, b.limit) for b in error.breaches] == [("quotas.kv_hbm_mb_hard", "acme", 1)]
        await collect(worker.execute(message("r3", tenant_id="beta", max_tokens=63)))

        await store.put(keys.tenant("acme"), b"tenant_id: acme\nquotas: {kv_hbm_mb_hard: none}\n")
        await store.put(keys.tenant("beta"), _policy(1).replace(b"acme", b"beta"))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("beta")) == 4)
        await store.put(keys.tenant("acme"), _policy(9).replace(b"acme", b"beta"))
        await store.put(keys.tenant("acme"), _policy(9) + b"# \xff")
        await store.put(keys.tenant("gamma"), _policy(1).replace(b"acme", b"gamma"))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("gamma")) == 4)
        assert (await refused(worker.execute(longer).read())).label == "quota_exceeded", "it stays in force"

        await store.put(keys.tenant("acme"), _policy(2))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("acme")) == 8)
        assert (await collect(worker.execute(longer))).finished.outcome == common_pb2.OUTCOME_COMPLETED
        await store.delete(keys.tenant("acme"))
        await eventually(lambda: worker.engine.core._shares.hard(TenantId("acme")) == 4096)


async def test_policies_are_in_force_before_a_worker_is_registered() -> None:
    """The scheduler cannot grant to a worker before it knows the tenants' bounds."""
    engine = make_engine(config())
    shares: list[int] = []
    async with running_worker(engine=engine, policies={"acme": _policy(1)}) as worker:
        await eventually(lambda: any(key.startswith(keys.WORKERS) for key in worker.store.keys))
        shares.append(worker.engine.core._shares.hard(TenantId("acme")))
    assert shares == [4]


async def test_a_cache_group_is_who_names_it_from_the_next_request_on() -> None:
    """The second tenant's first request finds what the first tenant's left, and nothing is charged for it."""
    policies = {name: f"tenant_id: {name}\nprefix_cache: {{group: friends}}\n".encode() for name in ("acme", "beta")}
    async with running_worker(policies=policies) as worker:
        names = iter(range(100))
        worker.engine.runner.shares = lambda reader, writer: True

        async def found(tenant: str, uid: str = "") -> int:
            prompt = list(range(1, 41))
            asked = message(f"r{next(names)}", tenant_id=tenant, adapter_uid=uid, prompt_token_ids=prompt, max_tokens=2)
            return int((await collect(worker.execute(asked))).finished.cached_prompt_tokens)

        assert [await found("acme"), await found("beta"), await found("other")] == [0, 32, 0]
        copies = [("acme", f"{UID}@acme"), ("beta", f"{UID}@beta"), ("beta", f"{OTHER_UID}@beta")]
        assert [await found(*each) for each in copies] == [0, 32, 0]
        counted = {tenant: tokens.prompt_tokens for (tenant, _), tokens in worker.engine.core.flows().items()}
        assert counted == {"acme": 80, "beta": 8 + 8 + 40, "other": 40}
        scope = worker.engine.core._shares.cache_scope
        store = worker.store.client()
        await store.put(keys.tenant("beta"), b"tenant_id: beta\n")
        await eventually(lambda: not scope(TenantId("beta")).is_group)
        assert await found("beta") == 0
        await store.put(keys.tenant("other"), policies["acme"].replace(b"acme", b"other"))
        await eventually(lambda: scope(TenantId("other")).is_group)
        assert await found("other") == 32


# -- pins


def _registered(name: str, uid: str, size_bytes: int = 1) -> bytes:
    return AdapterRecord("acme", name, uid, 8, size_bytes, ("q_proj",), 0.0).to_json()


def _pinning(*names: str, more: str = "") -> bytes:
    return f"tenant_id: acme\nadapters: {{pin: [{', '.join(names)}]{more}}}\n".encode()


async def test_pins_are_loaded_at_the_start_and_follow_the_names_and_the_policy() -> None:
    server = MemoryStoreServer(random.Random(0))
    store = server.client()
    await store.put(keys.adapter("acme", "one"), _registered("one", UID))
    await store.put(keys.tenant("acme"), _pinning("one", "later"))
    async with running_worker(settings=config(device_adapter_mb=4e-6), store=server) as worker:
        device = worker.engine.backend.on_device
        await eventually(lambda: list(device) == [f"{UID}@acme"])
        scheduler = Scheduler(worker)
        await scheduler.hello(1)

        async def told(*expected: tuple[str, str, bool, str]) -> None:
            wanted = [
                status_pb2.PinStatus(name=n, adapter_version=u, workers=1, on_device=int(d), problem=p)
                for n, u, d, p in expected
            ]
            await scheduler.read_until(lambda r: any(list(t.pins) == wanted for t in r.tenant_adapters))

        await told(("one", UID, True, ""), ("later", "", False, "no adapter has this name"))
        await store.put(keys.adapter("acme", "later"), _registered("later", OTHER_UID))
        await told(("one", UID, True, ""), ("later", OTHER_UID, True, ""))
        assert set(device) == {f"{UID}@acme", f"{OTHER_UID}@acme"}
        await store.put(keys.tenant("acme"), _pinning("one", "later", more=", share_copies: true"))
        await eventually(lambda: set(device) >= {UID, OTHER_UID})
        await store.put(keys.tenant("acme"), _pinning("one", "later"))
        third = "ef" * 32
        await store.delete(keys.adapter("acme", "one"))
        await store.put(keys.adapter("acme", "one"), _registered("one", third))
        await told(("one", third, True, ""), ("later", OTHER_UID, True, ""))
        await store.put(keys.adapter("acme", "one"), _registered("one", third, size_bytes=3))
        await told(("one", third, False, NO_ROOM_TO_PIN), ("later", OTHER_UID, True, ""))
        await store.put(keys.tenant("acme"), b"tenant_id: acme\n")
        await scheduler.read_until(lambda r: any(not t.pins for t in r.tenant_adapters))


async def test_a_pin_that_fails_to_load_is_logged_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenants_module, "PIN_RETRY_S", 0.05)
    server = MemoryStoreServer(random.Random(0))
    store = server.client()
    await store.put(keys.adapter("acme", "one"), _registered("one", UID))
    await store.put(keys.tenant("acme"), _pinning("one"))
    broken = [True]
    async with running_worker(
        settings=config(), store=server, error_of=lambda uid, tier: "the file is gone" if broken else None
    ) as worker:
        await eventually(lambda: worker.app._tenants._retry is not None)
        await asyncio.sleep(0.2)
        said = [record for record in caplog.records if record.message == "a pin is not kept"]
        assert len(said) == 1, "once, however often it is tried"
        broken.clear()
        await eventually(lambda: f"{UID}@acme" in worker.engine.backend.on_device)
