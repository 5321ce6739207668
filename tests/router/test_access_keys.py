"""Who makes, rotates and revokes whose keys."""

from __future__ import annotations

import pytest
from manylora.v1 import admin_pb2
from manylora_router.admin.access import keys as module
from manylora_shared.errors import Code, RpcError
from manylora_shared.tenancy.roles import Role
from manylora_shared.transport.base import Method
from router_fakes import ADMIN, GENERATE, KeyedChannel, RouterCluster, read_all, simulate, text_request, until


def test_an_admin_gives_away_no_more_than_it_has() -> None:
    async def test(cluster: RouterCluster) -> None:
        method = ADMIN["CreateKey"]
        revoke, rotate = ADMIN["RevokeKey"], ADMIN["RotateKey"]
        admin = cluster.caller(await cluster.put_role(Role.TENANT_ADMIN))
        few = cluster.caller(await cluster.put_key(tenant="acme", scopes=("keys:write", "keys:read")))
        staff = cluster.caller(await cluster.put_role(Role.CLUSTER_OPERATOR))
        foreign = await cluster.put_key(tenant="other")
        await until(lambda: len(cluster.app.directory.api_keys) == 5)

        async def code_of(channel: KeyedChannel, method: Method, **fields: object) -> tuple[Code, str]:
            try:
                await channel.call(method, method.request_type(**fields))
            except RpcError as e:
                return e.code, e.message
            return Code.OK, ""

        made = await admin.call(method, admin_pb2.CreateKeyRequest(role="generate", name="app"))
        assert (made.info.tenant_id, made.info.role) == ("acme", "generate")
        assert (await code_of(admin, method, role="admin"))[0] is Code.OK
        assert (await code_of(admin, method, role="owner"))[0] is Code.INVALID_ARGUMENT
        assert (await code_of(admin, method, scopes=["operator"]))[0] is Code.INVALID_ARGUMENT
        assert (await code_of(few, method, scopes=["keys:read"]))[0] is Code.OK
        assert (await code_of(few, method, role="generate"))[0] is Code.PERMISSION_DENIED
        owner = await cluster.client.call(method, admin_pb2.CreateKeyRequest(role="owner"))
        assert (await code_of(staff, method, role="owner"))[0] is Code.PERMISSION_DENIED
        assert (await code_of(staff, method, tenant_id="other", role="admin"))[0] is Code.OK
        assert (await code_of(staff, rotate, key_id=owner.info.key_id))[0] is Code.PERMISSION_DENIED
        assert (await code_of(staff, revoke, key_id=owner.info.key_id))[0] is Code.PERMISSION_DENIED
        # Another tenant's key answers as one that there is not.
        told = await code_of(admin, revoke, key_id=foreign[4:20])
        assert told[0] is Code.NOT_FOUND
        assert told[1].replace(foreign[4:20], "0" * 16) == (await code_of(admin, revoke, key_id="0" * 16))[1]
        listed = (await admin.call(ADMIN["ListKeys"], admin_pb2.ListKeysRequest())).keys
        assert {each.tenant_id for each in listed} == {"acme"}
        assert (await code_of(admin, revoke, key_id=made.info.key_id))[0] is Code.OK

    simulate(test)


def test_a_tenants_own_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OWN_KEYS", 3)

    async def test(cluster: RouterCluster) -> None:
        method = ADMIN["CreateKey"]
        admin = cluster.caller(await cluster.put_role(Role.TENANT_ADMIN))
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        request = admin_pb2.CreateKeyRequest(role="generate")
        first, second = [(await admin.call(method, request)).info.key_id for _ in range(2)]
        with pytest.raises(RpcError) as error:
            await admin.call(method, request)
        assert error.value.code is Code.RESOURCE_EXHAUSTED
        await admin.call(ADMIN["RevokeKey"], admin_pb2.RevokeKeyRequest(key_id=first))
        third = (await admin.call(method, request)).info.key_id
        await until(lambda: first not in cluster.app.directory.api_keys)
        assert {second, third} < set(cluster.app.directory.api_keys), "the one that had ended made room"
        assert (await cluster.client.call(method, admin_pb2.CreateKeyRequest(tenant_id="acme", role="generate"))).key

    simulate(test)


def test_a_keys_limits_go_to_the_scheduler_and_on_to_the_key_that_takes_its_place() -> None:
    async def test(cluster: RouterCluster) -> None:
        limits = {"requests_per_min": 3, "tokens_per_min": 500, "concurrency": 2}
        create = ADMIN["CreateKey"]
        made = await cluster.client.call(create, create.request_type(tenant_id="acme", role="generate", **limits))
        rotate = ADMIN["RotateKey"]
        rotated = await cluster.client.call(rotate, rotate.request_type(key_id=made.info.key_id))
        assert {name: getattr(rotated.info, name) for name in limits} == limits
        stream = cluster.caller(rotated.key).stream(GENERATE, text_request())
        assert (await read_all(stream)).error is None
        told = cluster.scheduler.enqueued[-1].key
        assert (told.key_id, told.requests_per_min, told.tokens_per_min) == (rotated.info.key_id, 3, 500)
        assert (await cluster.ask(text_request())).error is None
        assert not cluster.scheduler.enqueued[-1].HasField("key")
        for fields in ({"role": "viewer", "concurrency": 1}, {"tenant_id": "acme", "concurrency": 2_000_000_000}):
            with pytest.raises(RpcError) as error:
                await cluster.client.call(create, create.request_type(**{"role": "generate", **fields}))
            assert [v.field for v in error.value.violations] == ["concurrency"]

    simulate(test)
