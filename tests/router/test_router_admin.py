"""AdminService through the router: tenants, status, and garbage on every method."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manylora.v1 import common_pb2, inference_pb2
from manylora_router import app as app_module
from manylora_router.links.moments import MOMENT_S
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord
from manylora_shared.errors import Code, RpcError
from manylora_shared.stores.adapter_files import WEIGHTS_NAME
from manylora_shared.tenancy.policy import parse_policy
from router_fakes import ADAPTER_BYTES, ADMIN, LIST_MODELS, RouterCluster, say, simulate, text_request, until
from test_admin_adapters import GOOD, call, chunk, header, nothing_is_left, upload


def test_tenants() -> None:
    async def test(cluster: RouterCluster) -> None:
        first = await call(cluster, "ApplyTenant", policy_yaml="tenant_id: new\nclasses: {batch: {weight: 9}}")
        assert (first.tenant_id, first.version) == ("new", 1)
        same = await call(cluster, "ApplyTenant", policy_yaml='classes: {batch: {weight: 9}}\ntenant_id: "new" # !')
        assert same.version == 1
        assert (await cluster.ask(text_request(), x_tenant_id="new")).error is None
        changed = await call(cluster, "ApplyTenant", policy_yaml="tenant_id: new\n")
        assert changed.version == 2
        got = (await call(cluster, "GetTenant", tenant_id="new")).tenant
        assert (got.tenant_id, got.version, got.adapters) == ("new", 2, 0)
        assert "weight: 1" in got.policy_yaml
        listed = (await call(cluster, "ListTenants")).tenants
        assert [(t.tenant_id, t.adapters) for t in listed] == [("acme", 1), ("new", 0), ("other", 1)]
        assert (await call(cluster, "DeleteTenant", tenant_id="new")).removed_adapters == 0
        assert (await call(cluster, "DeleteTenant", tenant_id="acme")).removed_adapters == 1
        gone = await cluster.ask(text_request(), x_tenant_id="acme")
        assert gone.error is not None
        assert gone.error.code is Code.NOT_FOUND
        assert keys.adapter("acme", "upper") not in cluster.store_server.keys
        assert keys.adapter("other", "secret") in cluster.store_server.keys

    simulate(test)


def test_a_bad_policy_changes_nothing() -> None:
    async def test(cluster: RouterCluster) -> None:
        before = await cluster.store.get(keys.tenant("acme"))
        with pytest.raises(RpcError) as error:
            await call(cluster, "ApplyTenant", policy_yaml="tenant_id: acme\nclasses:\n  batch: {weight: 0}\nx: 1\n")
        assert error.value.code is Code.INVALID_ARGUMENT
        assert [v.field for v in error.value.violations] == ["classes.batch.weight", "x"]
        assert await cluster.store.get(keys.tenant("acme")) == before

    simulate(test)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["𠮷野家", "😀 GmbH"], ""),
        ([f"имя-{i}" for i in range(200)], ""),
        ([f"{i:03}" + "x" * 58 for i in range(256)], "more than 16384"),
    ],
)
def test_a_policy_that_is_applied_can_be_read_again(names: list[str], problem: str) -> None:
    async def test(cluster: RouterCluster) -> None:
        document = f"tenant_id: new\nsecurity: {{scrub_names: [{','.join(names)}]}}\n"
        if problem:
            with pytest.raises(RpcError, match=problem) as error:
                await call(cluster, "ApplyTenant", policy_yaml=document)
            assert error.value.code is Code.INVALID_ARGUMENT
            return
        await call(cluster, "ApplyTenant", policy_yaml=document)
        got = (await call(cluster, "GetTenant", tenant_id="new")).tenant
        assert parse_policy(got.policy_yaml).security.scrub_names == tuple(names)
        assert (await cluster.ask(text_request(), x_tenant_id="new")).error is None

    simulate(test)


def test_a_version_is_replaced_only_if_it_is_the_one_expected() -> None:
    async def test(cluster: RouterCluster) -> None:
        document = "tenant_id: new\nclasses: {{batch: {{weight: {}}}}}"

        async def apply(weight: int, expected: int) -> Any:
            return await call(cluster, "ApplyTenant", policy_yaml=document.format(weight), expected_version=expected)

        assert (await apply(1, 0)).version == 1
        for wrong in (0, 2):
            with pytest.raises(RpcError) as error:
                await apply(2, wrong)
            assert error.value.code is Code.ABORTED
            assert "version 1" in error.value.message
        assert (await apply(2, 1)).version == 2
        stored = await cluster.store.get(keys.tenant("new"))
        races = await asyncio.gather(*(apply(w, 2) for w in range(3, 9)), return_exceptions=True)
        assert [r.version for r in races if not isinstance(r, BaseException)] == [3]
        assert {r.code for r in races if isinstance(r, RpcError)} == {Code.ABORTED}
        after = await cluster.store.get(keys.tenant("new"))
        assert stored is not None
        assert after is not None
        assert after.version == stored.version + 1

    simulate(test)


def test_pins_that_no_worker_can_keep_are_refused_at_their_line() -> None:
    async def test(cluster: RouterCluster) -> None:
        async def register(tenant: str, name: str, size_bytes: int) -> None:
            record = AdapterRecord(tenant, name, f"uid-{tenant}-{name}", 8, size_bytes, ("q_proj",), 0.0)
            await cluster.store.put(keys.adapter(tenant, name), record.to_json())
            await until(lambda: f"{tenant}/{name}" in cluster.app.directory.adapters)

        async def apply(tenant: str, *names: str) -> str:
            """What is said against it; empty: nothing."""
            document = (
                f"tenant_id: {tenant}\nclasses: {{batch: {{weight: 1}}}}\nadapters:\n  pin: [{', '.join(names)}]\n"
            )
            answer = await asyncio.gather(call(cluster, "ApplyTenant", policy_yaml=document), return_exceptions=True)
            if not isinstance(answer[0], RpcError):
                return ""
            assert answer[0].code is Code.INVALID_ARGUMENT
            (violation,) = answer[0].violations
            assert violation.field == "adapters.pin"
            return str(violation.description)

        size = ADAPTER_BYTES
        assert await apply("acme", "not-there-yet") == ""
        for i in range(4):
            await register("acme", f"a{i}", size // 4)
            await register("other", f"o{i}", size // 4)
        assert (await apply("acme", "a0", "a1")).startswith(
            f"line 4: the pinned adapters take {size // 2} bytes, and another of its adapters {size // 4}: "
            "more than the tenant's share"
        )
        assert await apply("acme", "a0") == ""
        assert await apply("other", "o0") == ""
        stored = await cluster.store.get(keys.tenant("acme"))
        assert stored is not None
        assert b"a0" in stored.value
        assert b"a1" not in stored.value, "a refused policy changes nothing"
        await register("third", "huge", size // 2 + 1)
        assert "beside the largest adapter" in await apply("other", "o1")

    simulate(test)


def test_what_an_apply_would_change() -> None:
    async def test(cluster: RouterCluster) -> None:
        document = "tenant_id: acme\nclasses: {batch: {weight: 9}}"
        before = await cluster.store.get(keys.tenant("acme"))
        assert before is not None
        answer = await call(cluster, "ApplyTenant", policy_yaml=document, validate_only=True)
        assert (answer.version, answer.previous_policy_yaml) == (before.version, before.value.decode())
        assert "weight: 9" in answer.policy_yaml
        assert await cluster.store.get(keys.tenant("acme")) == before
        fresh = await call(cluster, "ApplyTenant", policy_yaml="tenant_id: new", validate_only=True)
        assert (fresh.version, fresh.previous_policy_yaml) == (0, "")
        with pytest.raises(RpcError) as error:
            await call(cluster, "ApplyTenant", policy_yaml="tenant_id: new\nx: 1", validate_only=True)
        assert [v.field for v in error.value.violations] == ["x"]

    simulate(test)


@pytest.mark.parametrize("method", ["GetTenant", "DeleteTenant", "RemoveAdapter", "ListAdapters"])
def test_unknown_tenants(method: str) -> None:
    async def test(cluster: RouterCluster) -> None:
        for tenant_id, code in (("nobody", Code.NOT_FOUND), ("../acme", Code.NOT_FOUND)):
            with pytest.raises(RpcError) as error:
                await call(cluster, method, tenant_id=tenant_id)
            assert error.value.code is code
            assert "tenant_id" in error.value.message

    simulate(test)


def test_policies_applied_at_once_do_not_overwrite_one_another() -> None:
    async def test(cluster: RouterCluster) -> None:
        documents = [f"tenant_id: new\nclasses: {{batch: {{weight: {w}}}}}" for w in range(1, 7)]
        versions = await asyncio.gather(*(call(cluster, "ApplyTenant", policy_yaml=d) for d in documents))
        assert sorted(v.version for v in versions) == [1, 2, 3, 4, 5, 6]

    simulate(test)


def test_deleting_a_tenant_of_many_adapters() -> None:
    async def test(cluster: RouterCluster) -> None:
        for index in range(250):
            await cluster.put_adapter("acme", f"a{index}", "c" * 64)
        assert (await call(cluster, "DeleteTenant", tenant_id="acme")).removed_adapters == 251
        assert not any(key.startswith(keys.adapters_of("acme")) for key in cluster.store_server.keys)

    simulate(test)


def test_store_that_is_away() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.store_server.set_up(False)
        with pytest.raises(RpcError) as error:
            await call(cluster, "ApplyTenant", policy_yaml="tenant_id: new")
        assert error.value.code is Code.UNAVAILABLE
        with pytest.raises(RpcError) as error:
            await upload(cluster, header(), *GOOD)
        assert error.value.code is Code.UNAVAILABLE
        nothing_is_left(cluster)
        cluster.store_server.set_up(True)
        assert (await call(cluster, "ApplyTenant", policy_yaml="tenant_id: new")).version == 1

    simulate(test)


def test_status_and_models() -> None:
    async def test(cluster: RouterCluster) -> None:
        status = await call(cluster, "GetStatus")
        assert (status.base_model, status.tenants, status.adapters) == ("tiny", 2, 2)
        assert (status.scheduler.reachable, status.scheduler.epoch) == (True, 1)
        assert [(w.worker_id, w.connected, w.running) for w in status.workers] == [
            ("worker-0", True, 3),
            ("worker-1", True, 3),
        ]
        assert [r.router_id for r in status.routers] == ["router-0"]
        metadata = {"x-tenant-id": "acme"}
        models = await cluster.client.call(LIST_MODELS, inference_pb2.ListModelsRequest(), metadata=metadata)
        assert (models.base_model, models.max_context_tokens, list(models.adapters)) == ("tiny", 256, ["upper"])
        with pytest.raises(RpcError) as error:
            await cluster.client.call(LIST_MODELS, inference_pb2.ListModelsRequest())
        assert error.value.code is Code.INVALID_ARGUMENT
        assert cluster.scheduler.server is not None
        await cluster.scheduler.server.stop(0.0)
        await asyncio.sleep(2 * MOMENT_S)
        status = await call(cluster, "GetStatus")
        assert status.scheduler.reachable is False
        assert [w.connected for w in status.workers] == [False, False]
        await cluster.store.delete(keys.SCHEDULER_LEADER)
        await asyncio.sleep(2 * MOMENT_S)
        assert (await call(cluster, "GetStatus")).scheduler.address == ""

    simulate(test)


def test_garbage_on_every_method_disturbs_nothing() -> None:
    """Well-formed messages with anything in them; bytes that are no message are the transport's tests."""

    async def test(cluster: RouterCluster) -> None:
        running = asyncio.create_task(cluster.ask(text_request(max_tokens=100)))
        for method in ADMIN.values():
            if method.client_streaming:
                continue
            request = method.request_type()
            for field in request.DESCRIPTOR.fields:
                if field.name in ("scopes", "networks", "by"):
                    getattr(request, field.name).append("\x00\u202e/../" * 20)
                elif field.type == field.TYPE_BYTES:
                    setattr(request, field.name, b"\xff{\n" * 20)
                elif field.cpp_type == field.CPPTYPE_STRING:
                    setattr(request, field.name, "\x00\u202e/../" * 20)
            if method.path.endswith(("ListTenants", "ListKeys", "GetStatus", "ReadAudit")):
                await cluster.client.call(method, request)
                continue
            with pytest.raises(RpcError) as error:
                await cluster.client.call(method, request)
            assert error.value.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), method.path
        answer = await running
        assert answer.finished.outcome == common_pb2.OUTCOME_COMPLETED

    simulate(test, script=say("x" * 100, pause_s=0.01))


def test_files_nobody_refers_to_are_collected_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: RouterCluster) -> None:
        now = app_module.HOUSEKEEPING_S

        def wall() -> float:
            return asyncio.get_running_loop().time()

        monkeypatch.setattr(cluster.app._clock, "now_unix_s", wall)
        monkeypatch.setattr(cluster.files, "_now_unix_s", wall)
        kept = (await upload(cluster, header("kept"), *GOOD)).adapter.version
        other = [GOOD[0], chunk(WEIGHTS_NAME, b"other")]
        gone = (await upload(cluster, header("gone"), *other)).adapter.version
        await asyncio.sleep(5 * now)
        await call(cluster, "RemoveAdapter", tenant_id="acme", name="gone")
        await asyncio.sleep(0.9 * now)
        assert f"objects/{gone}" in cluster.files.files
        await asyncio.sleep(2 * now)
        assert f"objects/{gone}" not in cluster.files.files
        assert f"objects/{kept}" in cluster.files.files

    simulate(test)
