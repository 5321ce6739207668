"""What the router knows of the cluster, where the store has what cannot be read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, NotFound, RpcError
from router_fakes import RouterCluster, simulate, text_request, until
from test_admin_adapters import call

WRONG: list[Any] = [None, ["x", 3], {"a": 1}, -5, "\ud800", 1 << 70, True]


@pytest.mark.parametrize(
    "document", [b"quotas: nonsense\n", b"tenant_id: other\n", b"tenant_id: acme # nonsense \xff\n"]
)
def test_a_stored_policy_that_cannot_be_read_leaves_the_one_before_in_force(document: bytes) -> None:
    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("acme", "quotas: {max_output_tokens: 3}\n")
        await until(lambda: "max_output" in cluster.app.directory.tenants["acme"].policy_yaml)
        refused = await cluster.ask(text_request(max_tokens=4))
        assert refused.error is not None
        assert refused.error.code is Code.INVALID_ARGUMENT
        await cluster.store.put(keys.tenant("acme"), document)
        await until(lambda: cluster.app.directory.tenants["acme"].document == document)
        again = await cluster.ask(text_request(max_tokens=4))
        assert again.error is not None
        assert again.error.message == refused.error.message
        assert (await cluster.ask(text_request(max_tokens=3))).error is None
        got = (await call(cluster, "GetTenant", tenant_id="acme")).tenant
        assert got.policy_yaml == document.decode(errors="replace")
        listed = {each.tenant_id: each for each in (await call(cluster, "ListTenants")).tenants}["acme"]
        assert "the one before it is in force" in got.problem == listed.problem
        await call(cluster, "ApplyTenant", policy_yaml="tenant_id: acme")
        assert (await cluster.ask(text_request(max_tokens=4))).error is None
        assert not (await call(cluster, "GetTenant", tenant_id="acme")).tenant.problem
        applied = await cluster.store.get(keys.applied("acme"))
        assert applied is not None
        assert applied.value == cluster.app.directory.tenants["acme"].document
        await call(cluster, "DeleteTenant", tenant_id="acme")
        assert await cluster.store.get(keys.applied("acme")) is None

    simulate(test)


def test_records_with_wrong_types_are_named_and_left_out_and_all_else_is_listed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(cluster: RouterCluster) -> None:
        async def seen() -> tuple[Any, ...]:
            status = await call(cluster, "GetStatus")
            return (
                await call(cluster, "ListKeys"),
                await call(cluster, "ListAdapters"),
                sorted(worker.worker_id for worker in status.workers),
                sorted(router.router_id for router in status.routers),
                status.base_model,
            )

        before = await seen()
        planted = 0
        for prefix in (keys.API_KEYS, keys.WORKERS, keys.ROUTERS, keys.ADAPTERS):
            listing = await cluster.store.list(prefix)
            right = listing.kvs[0]
            own = {keys.API_KEYS: "key_id", keys.WORKERS: "worker_id", keys.ROUTERS: "router_id", keys.ADAPTERS: "name"}
            for field in json.loads(right.value):
                for wrong in WRONG:
                    name = f"bad{planted}"
                    record = {**json.loads(right.value), own[prefix]: name, field: wrong}
                    if wrong is True and isinstance(json.loads(right.value)[field], bool):
                        continue
                    if isinstance(wrong, int) and field.endswith("unix_s") and wrong is not True:
                        continue
                    path = f"{record['tenant_id']}/{name}" if prefix == keys.ADAPTERS and field != "tenant_id" else name
                    await cluster.store.put(prefix + str(path), json.dumps(record).encode())
                    planted += 1
            await cluster.store.put(f"{prefix}same", right.value)  # another's
        assert await seen() == before
        for prefix in (keys.API_KEYS, keys.WORKERS, keys.ROUTERS, keys.ADAPTERS):
            assert f"the record at {prefix}same is unreadable" in caplog.text
        assert f"the record at {keys.WORKERS}bad" in caplog.text
        assert (await cluster.ask(text_request())).error is None
        with pytest.raises(RpcError, match="its record cannot be read") as error:
            await call(cluster, "RevokeKey", key_id="same")
        assert error.value.code is NotFound.code
        await call(cluster, "DeleteTenant", tenant_id="other")

    simulate(test)


def test_a_worker_that_computes_another_model_changes_nothing_and_stands_in_the_status() -> None:
    async def test(cluster: RouterCluster) -> None:
        directory = cluster.app.directory
        before = directory.model
        assert before is not None
        workers = dict(directory.workers)
        record = next(iter(workers.values()))
        stray = dataclasses.replace(
            record, worker_id="a-stray", model_name="other", model_digest="e" * 64, vocab_size=7, started_unix_s=9.0
        )
        await cluster.store.put(keys.worker("a-stray"), stray.to_json())
        await until(lambda: "a-stray" in directory.kept_out)
        assert directory.model == before
        assert dict(directory.workers) == workers
        status = await call(cluster, "GetStatus")
        assert status.base_model == before.name
        (told,) = (worker for worker in status.workers if worker.kept_out)
        assert told.worker_id == "a-stray"
        assert "base model other (eeeeeeeeeeee), the pool's is tiny (000000000000)" in told.kept_out
        assert (await cluster.ask(text_request())).error is None
        for name in workers:
            await cluster.store.delete(keys.worker(name))
        await until(lambda: not directory.kept_out)
        assert directory.model is not None
        assert (directory.model.name, directory.model.limits.vocab_size) == ("other", 7)

    simulate(test)


def test_a_tenants_adapters_are_found_by_name_and_go_with_their_records() -> None:
    async def test(cluster: RouterCluster) -> None:
        directory = cluster.app.directory
        kvs = (await cluster.store.list(keys.ADAPTERS)).kvs
        record = json.loads(kvs[0].value)
        names = ["z", "a", "m"]
        for tenant in ("one", "one.two"):
            for name in names:
                changed = {**record, "tenant_id": tenant, "name": name}
                await cluster.store.put(keys.adapter(tenant, name), json.dumps(changed).encode())
        await until(lambda: len(directory.adapters_of("one.two")) == 3)
        assert [each.name for each in directory.adapters_of("one")] == sorted(names)
        await cluster.store.put(keys.adapter("one", "m"), b"{}")
        await cluster.store.delete(keys.adapter("one", "a"))
        await until(lambda: [each.name for each in directory.adapters_of("one")] == ["z"])
        await cluster.store.delete(keys.adapter("one", "z"))
        await until(lambda: not directory.adapters_of("one"))
        assert len(directory.adapters_of("one.two")) == 3
        assert "one" not in directory._by_tenant

    simulate(test)
