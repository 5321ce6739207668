"""Adapters' files in the store compared with their digests, for those who may."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manylora.v1 import admin_pb2
from manylora_shared.errors import Code, RpcError
from manylora_shared.ids import AdapterDigest
from manylora_shared.stores.adapter_files import WEIGHTS_NAME, object_path
from router_fakes import ADMIN, KeyedChannel, RouterCluster, simulate, until

from tests.router.test_admin_adapters import GOOD, header, upload


async def verified(channel: Any, **fields: str) -> dict[str, str]:
    stream = channel.stream(ADMIN["VerifyAdapters"], admin_pb2.VerifyAdaptersRequest(**fields))
    found = {}
    while (answer := await stream.read()) is not None:
        found[f"{answer.adapter.tenant_id}/{answer.adapter.name}"] = answer.problem
    return found


async def code_of(channel: KeyedChannel, **fields: str) -> Code:
    with pytest.raises(RpcError) as error:
        await verified(channel, **fields)
    return error.value.code


def test_what_is_damaged_is_named() -> None:
    async def test(cluster: RouterCluster) -> None:
        uid = (await upload(cluster, header(), *GOOD)).adapter.version
        await upload(cluster, header("again"), *GOOD)
        admin = cluster.caller(await cluster.put_key(tenant="acme", scopes=("admin",)))
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        assert await verified(admin, name="lower") == {"acme/lower": ""}
        folder = cluster.files.files[object_path(uid)]
        folder[WEIGHTS_NAME] = folder[WEIGHTS_NAME][:-1]
        expected = "it is not what was registered"
        assert (await verified(admin))["acme/lower"] == expected
        everybodys = await verified(cluster.client)
        assert (everybodys["acme/lower"], everybodys["acme/again"]) == (expected, expected)
        assert any(name.startswith("other/") for name in everybodys)
        await upload(cluster, header("mended"), *GOOD)
        assert await verified(admin, name="lower") == {"acme/lower": ""}

    simulate(test)


def test_who_may_and_what_is_unknown() -> None:
    async def test(cluster: RouterCluster) -> None:
        admin = cluster.caller(await cluster.put_key(tenant="acme", scopes=("admin",)))
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        assert await code_of(admin, tenant_id="other") is Code.PERMISSION_DENIED
        assert await code_of(admin, name="nothing") is Code.NOT_FOUND
        assert await code_of(cluster.client, name="upper") is Code.INVALID_ARGUMENT
        problem, is_asked = cluster.files.problem, asyncio.Event()

        async def never(uid: AdapterDigest) -> str:
            is_asked.set()
            await asyncio.Event().wait()
            return ""

        cluster.files.problem = never  # type: ignore[method-assign]
        first = admin.stream(ADMIN["VerifyAdapters"], admin_pb2.VerifyAdaptersRequest())
        await is_asked.wait()
        cluster.files.problem = problem  # type: ignore[method-assign]
        assert await code_of(admin) is Code.RESOURCE_EXHAUSTED, "one at a time"
        assert await verified(cluster.client)
        first.cancel()
        await asyncio.sleep(1)
        assert await verified(admin)

    simulate(test)
