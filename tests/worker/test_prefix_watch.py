"""Public prefixes in a worker: those in the store are the engine's, from before it is registered on."""

from __future__ import annotations

import logging
import random

import pytest
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import PublicPrefixRecord
from manylora_sim.store import MemoryStoreServer

from tests.worker.worker_fakes import MODEL, Scheduler, collect, eventually, message, running_worker

SYSTEM = tuple(range(5, 69))
"""Four blocks."""


def record(name: str, token_ids: tuple[int, ...], model_digest: str = MODEL.digest) -> bytes:
    return PublicPrefixRecord(name, model_digest, token_ids, 1.0).to_json()


async def test_every_tenant_finds_what_stands_in_the_store_and_what_comes_and_goes() -> None:
    server = MemoryStoreServer(random.Random(0))
    store = server.client()
    await store.put(keys.public_prefix("system"), record("system", SYSTEM))
    async with running_worker(store=server) as worker:
        scheduler = Scheduler(worker)
        await scheduler.hello(1)
        await scheduler.read_until(lambda r: (r.public_kv_blocks, r.public_kv_blocks_declared) == (4, 4))
        for i, tenant in enumerate(["acme", "beta"]):
            prompt = [*SYSTEM, 9, i]
            result = await collect(worker.execute(message(tenant, tenant_id=tenant, prompt_token_ids=prompt)))
            assert result.finished.cached_prompt_tokens == len(SYSTEM)
        await store.put(keys.public_prefix("longer"), record("longer", (*SYSTEM, *SYSTEM[:16])))
        await scheduler.read_until(lambda r: (r.public_kv_blocks, r.public_kv_blocks_declared) == (5, 5))
        await store.delete(keys.public_prefix("longer"))
        await store.delete(keys.public_prefix("system"))
        await scheduler.read_until(lambda r: (r.public_kv_blocks, r.public_kv_blocks_declared) == (0, 0))
        result = await collect(worker.execute(message("late", tenant_id="late", prompt_token_ids=[*SYSTEM, 9])))
        assert result.finished.cached_prompt_tokens == 0
        assert not any(tenant.tenant_id == "*" for report in scheduler.reports for tenant in report.tenants)


async def test_what_is_not_this_models_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    server = MemoryStoreServer(random.Random(0))
    store = server.client()
    with caplog.at_level(logging.WARNING):
        async with running_worker(store=server) as worker:
            await store.put(keys.public_prefix("another"), record("another", SYSTEM, "of another model"))
            await store.put(keys.public_prefix("beyond"), record("beyond", (*SYSTEM[:-1], MODEL.vocab_size)))
            await store.put(keys.public_prefix("broken"), b'{"name": "broken"}')
            await store.put(keys.public_prefix("good"), record("good", SYSTEM[:32]))
            await eventually(lambda: worker.engine.core.stats().public_blocks == 2)
            assert worker.engine.core.stats().public_blocks_declared == 2
    said = {record.message for record in caplog.records}
    assert "a public prefix is of another model" in said
    assert "a public prefix has tokens that the model has not" in said
