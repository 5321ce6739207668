"""Samples, reports and files of adapters: whose they are, how many there are, and what is not to be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manylora.v1 import admin_pb2
from manylora_router.admin.adapter_documents import MAX_SAMPLE_SETS
from manylora_shared.errors import Code, RpcError
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from router_fakes import ADMIN, RouterCluster, simulate
from test_admin_adapters import CONFIG, GOOD, WEIGHTS, call, header, upload

SAMPLES = b'{"prompt": "a", "expected": "b"}\n{"prompt": "c"}\n'


async def read(cluster: RouterCluster, **fields: Any) -> tuple[admin_pb2.AdapterInfo, dict[str, bytes]]:
    stream = cluster.client.stream(ADMIN["ReadAdapter"], admin_pb2.ReadAdapterRequest(tenant_id="acme", **fields))
    first = await stream.read()
    files: dict[str, bytes] = {}
    while (answer := await stream.read()) is not None:
        files[answer.chunk.file_name] = files.get(answer.chunk.file_name, b"") + answer.chunk.data
    return first.adapter, files


def test_samples_are_kept_under_their_tenant_and_counted() -> None:
    async def test(cluster: RouterCluster) -> None:
        put = (await call(cluster, "PutSamples", tenant_id="acme", name="golden", samples=SAMPLES)).samples
        assert (put.name, put.size_bytes, put.count) == ("golden", len(SAMPLES), 2)
        assert cluster.documents.kept["documents/acme/samples/golden"][0] == SAMPLES
        assert (await call(cluster, "ListSamples", tenant_id="other")).samples == []
        with pytest.raises(RpcError, match="samples: line 1: is not JSON"):
            await call(cluster, "PutSamples", tenant_id="acme", name="golden", samples=b"{")
        with pytest.raises(RpcError) as error:
            await call(cluster, "PutSamples", tenant_id="acme", name="../other", samples=SAMPLES)
        assert [v.field for v in error.value.violations] == ["name"]
        for number in range(MAX_SAMPLE_SETS - 1):
            await call(cluster, "PutSamples", tenant_id="acme", name=f"more-{number}", samples=SAMPLES)
        await call(cluster, "PutSamples", tenant_id="acme", name="golden", samples=SAMPLES)
        with pytest.raises(RpcError) as error:
            await call(cluster, "PutSamples", tenant_id="acme", name="one-more", samples=SAMPLES)
        assert error.value.code is Code.RESOURCE_EXHAUSTED
        await call(cluster, "RemoveSamples", tenant_id="acme", name="golden")
        with pytest.raises(RpcError) as error:
            await call(cluster, "RemoveSamples", tenant_id="acme", name="golden")
        assert error.value.code is Code.NOT_FOUND

    simulate(test)


def test_a_tenants_puts_leave_places_and_turns_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []  # as the store has them
    many = b'{"prompt": "a", "expected": [%s]}\n' % b", ".join([b"1"] * 200)

    async def test(cluster: RouterCluster) -> None:
        await cluster.put_tenant("other")
        put = cluster.documents.put

        async def slow(path: str, data: bytes) -> None:
            held.append(path.split("/")[1])
            await asyncio.sleep(60.0)
            await put(path, data)

        monkeypatch.setattr(cluster.documents, "put", slow)
        greedy = [call(cluster, "PutSamples", tenant_id="acme", name=f"s-{n}", samples=many * 100) for n in range(40)]
        asked = [asyncio.ensure_future(each) for each in greedy]
        await asyncio.sleep(1.0)
        refused = [each for each in asked if each.done()]
        assert len(refused) > 20, "each holds its message while it waits"
        for each in refused:
            with pytest.raises(RpcError, match="calls of tenant acme that put samples are under way"):
                each.result()
        await call(cluster, "PutSamples", tenant_id="other", name="golden", samples=SAMPLES)
        assert held[:2] == ["acme", "other"], "it waits for nobody"
        for each in asked:
            each.cancel()
        await asyncio.wait(asked)

    simulate(test)


def test_no_two_puts_at_a_time_take_a_tenants_last_place() -> None:
    async def test(cluster: RouterCluster) -> None:
        for number in range(MAX_SAMPLE_SETS - 1):
            await call(cluster, "PutSamples", tenant_id="acme", name=f"set-{number}", samples=SAMPLES)
        late = [call(cluster, "PutSamples", tenant_id="acme", name=f"late-{each}", samples=SAMPLES) for each in "abc"]
        ends = await asyncio.gather(*late, return_exceptions=True)
        assert [type(end) for end in ends].count(RpcError) == 2
        assert len((await call(cluster, "ListSamples", tenant_id="acme")).samples) == MAX_SAMPLE_SETS

    simulate(test)


def test_of_two_routers_that_take_the_last_place_none_exceeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: RouterCluster) -> None:
        for number in range(MAX_SAMPLE_SETS - 1):
            await call(cluster, "PutSamples", tenant_id="acme", name=f"set-{number}", samples=SAMPLES)
        put = cluster.documents.put

        async def both(path: str, data: bytes) -> None:
            await put(path.replace("mine", "others"), data)
            await put(path, data)

        monkeypatch.setattr(cluster.documents, "put", both)
        with pytest.raises(RpcError) as error:
            await call(cluster, "PutSamples", tenant_id="acme", name="mine", samples=SAMPLES)
        assert error.value.code is Code.RESOURCE_EXHAUSTED
        assert len((await call(cluster, "ListSamples", tenant_id="acme")).samples) == MAX_SAMPLE_SETS

    simulate(test)


def test_a_versions_files_are_read_back_and_one_that_is_not_served_is_not() -> None:
    async def test(cluster: RouterCluster) -> None:
        added = (await upload(cluster, header(), *GOOD)).adapter
        adapter, files = await read(cluster, name="lower")
        assert (adapter, files) == (added, {CONFIG_NAME: CONFIG, WEIGHTS_NAME: WEIGHTS})
        for fields in ({"name": "lower", "number": 2}, {"name": "secret"}, {"name": "nobody"}):
            with pytest.raises(RpcError) as error:
                await read(cluster, **fields)
            assert error.value.code is Code.NOT_FOUND
        with pytest.raises(RpcError) as error:
            await call(cluster, "GetAdapterReport", tenant_id="acme", name="upper")  # of an earlier release
        assert "version 1 has no report" in error.value.message

    simulate(test)


def test_only_operators_and_the_tenants_admins_may() -> None:
    async def test(cluster: RouterCluster) -> None:
        await upload(cluster, header(), *GOOD)
        mine = cluster.caller(await cluster.put_key(tenant="acme", scopes=("admin",)))
        others = [
            cluster.caller(await cluster.put_key(tenant="acme", scopes=("generate",))),
            cluster.caller(await cluster.put_key(tenant="other", scopes=("admin",))),
        ]
        for method in ("PutSamples", "ListSamples", "RemoveSamples", "GetAdapterReport"):
            request = ADMIN[method].request_type(tenant_id="acme")
            for name, value in (("name", "lower"), ("samples", SAMPLES)):
                if name in request.DESCRIPTOR.fields_by_name:
                    setattr(request, name, value)
            for caller in others:
                with pytest.raises(RpcError) as error:
                    await caller.call(ADMIN[method], request)
                assert error.value.code is Code.PERMISSION_DENIED
            request.tenant_id = ""
            await mine.call(ADMIN[method], request)
        for caller in others:
            stream = caller.stream(ADMIN["ReadAdapter"], admin_pb2.ReadAdapterRequest(tenant_id="acme", name="lower"))
            with pytest.raises(RpcError) as error:
                await stream.read()
            assert error.value.code is Code.PERMISSION_DENIED

    simulate(test)
