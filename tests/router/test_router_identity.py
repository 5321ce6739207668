"""Who may call what at a router, and that nobody learns from a refusal what exists."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import pytest
from manylora.v1 import admin_pb2, inference_pb2
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, RpcError
from manylora_shared.tenancy.identity import split_key
from router_fakes import (
    ADMIN,
    GENERATE,
    LIST_MODELS,
    Answer,
    KeyedChannel,
    RouterCluster,
    read_all,
    say,
    simulate,
    text_request,
    until,
)

VERSIONS = {"RolloutAdapter", "PromoteAdapter", "RollbackAdapter", "RetireAdapter"}
DOCUMENTS = {"CheckAdapter", "GetAdapterReport", "ReadAdapter", "PutSamples", "ListSamples", "RemoveSamples"}
OPEN_TO_TENANTS = (
    VERSIONS
    | DOCUMENTS
    | {
        "GetTenant",
        "ListAdapters",
        "AddAdapter",
        "RemoveAdapter",
        "VerifyAdapters",
        "GetAdapterLine",
        "GetStatus",
        "GetUsage",
    }
)
"""Methods of AdminService that some key of a tenant may call, about its tenant."""


async def ask(cluster: RouterCluster, key: str, **metadata: str) -> Answer:
    sent = {name.replace("_", "-"): value for name, value in metadata.items()}
    return await read_all(cluster.caller(key).stream(GENERATE, text_request(), metadata=sent))


async def call(channel: KeyedChannel, rpc: str, **fields: Any) -> Any:
    method = ADMIN[rpc]
    if not method.client_streaming and not method.server_streaming:
        return await channel.call(method, method.request_type(**fields))
    if not method.client_streaming:
        return await channel.stream(method, method.request_type(**fields)).read()
    stream = channel.stream(method)
    header = admin_pb2.AddAdapterHeader(**{"name": "x", **fields})
    await stream.write(method.request_type(header=header))
    await stream.close_send()
    return await stream.read()


async def code_of(channel: KeyedChannel, rpc: str, **fields: Any) -> Code:
    try:
        await call(channel, rpc, **fields)
    except RpcError as e:
        return e.code
    return Code.OK


def refused(answer: Answer) -> tuple[Code, str]:
    assert answer.frames == []
    assert answer.error is not None
    return answer.error.code, answer.error.message


def test_without_a_valid_key_nothing_answers() -> None:
    async def test(cluster: RouterCluster) -> None:
        good = await cluster.put_key(tenant="acme")
        key_id, _ = split_key(good) or ("", "")
        wrong = f"mlk-{key_id}-{'0' * 64}"
        unknown = f"mlk-{'0' * 16}-{'0' * 64}"
        await until(lambda: key_id in cluster.app.directory.api_keys)
        assert (await ask(cluster, good)).error is None
        answers = {refused(await ask(cluster, key, x_tenant_id="acme")) for key in ("", "x", wrong, unknown)}
        assert [code for code, _ in answers] == [Code.UNAUTHENTICATED]
        for key in ("", wrong, unknown):
            channel = cluster.caller(key)
            for name in ADMIN:
                assert await code_of(channel, name) is Code.UNAUTHENTICATED, name
            with pytest.raises(RpcError) as error:
                await channel.call(LIST_MODELS, inference_pb2.ListModelsRequest())
            assert error.value.code is Code.UNAUTHENTICATED

    simulate(test)


def test_the_tenant_is_the_keys() -> None:
    async def test(cluster: RouterCluster) -> None:
        acme = await cluster.put_key(tenant="acme")
        gateway = await cluster.put_key(scopes=("gateway",))
        operator = await cluster.put_key(scopes=("operator",))
        admin = await cluster.put_key(tenant="acme", scopes=("admin",))
        await until(lambda: len(cluster.app.directory.api_keys) == 5)
        assert (await ask(cluster, acme)).error is None
        assert (await ask(cluster, acme, x_tenant_id="acme", x_adapter_id="upper")).error is None
        assert {request.tenant_id for request in cluster.scheduler.enqueued} == {"acme"}
        # What is said is the key's, and the same whether what was named exists.
        whose = "this key does not permit the call: it is for "
        for key, named, held in (
            (acme, "other", "generate in tenant acme"),
            (acme, "nobody", "generate in tenant acme"),
            (operator, "acme", "operator in no tenant"),
            (operator, "nobody", "operator in no tenant"),
            (admin, "acme", "admin in tenant acme"),
        ):
            assert refused(await ask(cluster, key, x_tenant_id=named)) == (Code.PERMISSION_DENIED, whose + held)
        assert (await ask(cluster, gateway, x_tenant_id="other")).error is None
        assert cluster.scheduler.enqueued[-1].tenant_id == "other"
        assert refused(await ask(cluster, gateway))[0] is Code.INVALID_ARGUMENT
        models = await cluster.caller(acme).call(LIST_MODELS, inference_pb2.ListModelsRequest())
        assert list(models.adapters) == ["upper"]

    simulate(test)


def test_an_absent_and_a_foreign_adapter_answer_alike() -> None:
    async def test(cluster: RouterCluster) -> None:
        acme = await cluster.put_key(tenant="acme")
        admin = await cluster.put_key(tenant="acme", scopes=("admin",))
        await until(lambda: len(cluster.app.directory.api_keys) == 3)
        foreign = refused(await ask(cluster, acme, x_adapter_id="secret"))
        with pytest.raises(RpcError) as kept:
            await call(cluster.caller(admin), "RemoveAdapter", tenant_id="acme", name="secret")
        await cluster.store.delete(keys.adapter("other", "secret"))
        await until(lambda: "other/secret" not in cluster.app.directory.adapters)
        assert refused(await ask(cluster, acme, x_adapter_id="secret")) == foreign
        assert foreign[0] is Code.NOT_FOUND
        with pytest.raises(RpcError) as absent:
            await call(cluster.caller(admin), "RemoveAdapter", tenant_id="acme", name="secret")
        assert (kept.value.code, kept.value.message) == (absent.value.code, absent.value.message)

    simulate(test)


def test_what_each_scope_may_administer() -> None:
    async def test(cluster: RouterCluster) -> None:
        generate = cluster.caller(await cluster.put_key(tenant="acme"))
        admin = cluster.caller(await cluster.put_key(tenant="acme", scopes=("admin",)))
        gateway = cluster.caller(await cluster.put_key(scopes=("gateway",)))
        await until(lambda: len(cluster.app.directory.api_keys) == 4)
        for name in ADMIN:
            assert await code_of(gateway, name) is Code.PERMISSION_DENIED, name
            if name not in OPEN_TO_TENANTS:
                assert await code_of(generate, name) is Code.PERMISSION_DENIED, name
                assert await code_of(admin, name) is Code.PERMISSION_DENIED, name
            elif name != "GetStatus":
                # Denied before it is looked up: a tenant that exists and one that does not answer alike.
                for tenant_id in ("other", "nobody"):
                    assert await code_of(generate, name, tenant_id=tenant_id) is Code.PERMISSION_DENIED, name
                    assert await code_of(admin, name, tenant_id=tenant_id) is Code.PERMISSION_DENIED, name
        for name in ("GetTenant", "AddAdapter", "RemoveAdapter", "VerifyAdapters", *VERSIONS, *DOCUMENTS):
            assert await code_of(generate, name, tenant_id="acme") is Code.PERMISSION_DENIED, name
        assert (await call(admin, "GetTenant")).tenant.tenant_id == "acme"
        for channel in (admin, generate):
            assert [a.name for a in (await call(channel, "ListAdapters")).adapters] == ["upper"]
        await call(admin, "RemoveAdapter", name="upper")
        assert (await call(generate, "ListAdapters", tenant_id="acme")).adapters == []

    simulate(test)


def test_keys_are_made_listed_and_revoked_at_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        made = await call(cluster.client, "CreateKey", tenant_id="acme", scopes=["generate"], name="ci")
        stored = await cluster.store.get(keys.api_key(made.info.key_id))
        assert stored is not None
        assert split_key(made.key) is not None
        assert made.key.rpartition("-")[2] not in stored.value.decode()
        answer = await ask(cluster, made.key)
        assert answer.error is None
        running = asyncio.create_task(ask(cluster, made.key))
        await until(lambda: any(w.running for w in cluster.workers))
        listed = (await call(cluster.client, "ListKeys")).keys
        assert {k.name for k in listed} == {"", "ci"}
        assert [k.key_id for k in (await call(cluster.client, "ListKeys", tenant_id="acme")).keys] == [made.info.key_id]
        assert made.key not in str(listed)
        revoked = await call(cluster.client, "RevokeKey", key_id=made.info.key_id)
        assert revoked.info.revoked_unix_s > 0
        assert refused(await ask(cluster, made.key))[0] is Code.UNAUTHENTICATED
        assert (await running).error is None
        again = await call(cluster.client, "RevokeKey", key_id=made.info.key_id)
        assert again.info.revoked_unix_s == revoked.info.revoked_unix_s
        assert await code_of(cluster.client, "RevokeKey", key_id="0" * 16) is Code.NOT_FOUND
        assert await code_of(cluster.client, "CreateKey", tenant_id="nobody", scopes=["generate"]) is Code.NOT_FOUND
        assert await code_of(cluster.client, "CreateKey", tenant_id="acme", scopes=["x"]) is Code.INVALID_ARGUMENT

    simulate(test, script=say("x" * 20, pause_s=0.05))


def test_another_routers_revocation_is_heard_of() -> None:
    async def test(cluster: RouterCluster) -> None:
        key = await cluster.put_key(tenant="acme")
        key_id, _ = split_key(key) or ("", "")
        await until(lambda: key_id in cluster.app.directory.api_keys)
        assert (await ask(cluster, key)).error is None
        record = cluster.app.directory.api_keys[key_id]
        await cluster.put_key_record(dataclasses.replace(record, revoked_unix_s=2.0))
        await until(lambda: cluster.app.directory.api_keys[key_id].revoked_unix_s > 0)
        assert refused(await ask(cluster, key))[0] is Code.UNAUTHENTICATED

    simulate(test)


def test_the_last_known_keys_hold_while_the_store_is_away() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.store_server.set_up(False)
        assert (await cluster.ask(text_request())).error is None
        assert refused(await ask(cluster, "", x_tenant_id="acme"))[0] is Code.UNAUTHENTICATED
        assert await code_of(cluster.client, "CreateKey", scopes=["operator"]) is Code.UNAVAILABLE
        cluster.store_server.set_up(True)

    simulate(test)


def test_a_deleted_tenants_keys_go_with_it() -> None:
    async def test(cluster: RouterCluster) -> None:
        mine = await cluster.put_key(tenant="acme")
        theirs = await cluster.put_key(tenant="other")
        await until(lambda: len(cluster.app.directory.api_keys) == 3)
        await call(cluster.client, "DeleteTenant", tenant_id="acme")
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        assert refused(await ask(cluster, mine))[0] is Code.UNAUTHENTICATED
        assert (await ask(cluster, theirs)).error is None

    simulate(test)


def test_keys_are_in_no_log_and_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    made: list[str] = []

    async def test(cluster: RouterCluster) -> None:
        answer = await call(cluster.client, "CreateKey", tenant_id="acme", scopes=["generate"], name="ci")
        made.append(answer.key)
        await ask(cluster, answer.key)
        await ask(cluster, answer.key, x_tenant_id="other")
        await ask(cluster, answer.key[:-1] + "x")
        await ask(cluster, answer.key + answer.key)
        await call(cluster.client, "RevokeKey", key_id=answer.info.key_id)
        refusal = await ask(cluster, answer.key)
        made.append(str(cluster.telemetry.recorded()))
        made.append(str(refusal.error))

    simulate(test)
    key, spans, error = made
    secret = key.rpartition("-")[2][:-1]
    assert len(secret) == 63
    for text in (spans, error, caplog.text, *(str(vars(record)) for record in caplog.records)):
        assert secret not in text
    assert "manylora.request" in spans
