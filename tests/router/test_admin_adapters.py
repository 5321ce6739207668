"""Adapters that are uploaded, imported and removed through the router. What fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from manylora.v1 import admin_pb2, worker_pb2
from manylora_router.admin.adapters import MAX_UPLOADS, UPLOAD_IDLE_S
from manylora_router.admin.servicer import AdminServicer
from manylora_shared.coordination import keys
from manylora_shared.errors import Code, RpcError
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from router_fakes import ADMIN, RouterCluster, simulate, text_request

CONFIG = json.dumps({"r": 8}).encode()
WEIGHTS = b"weights" * 1000


async def call(cluster: RouterCluster, method: str, **fields: Any) -> Any:
    return await cluster.client.call(ADMIN[method], ADMIN[method].request_type(**fields))


def header(name: str = "lower", tenant_id: str = "acme", store_path: str = "") -> admin_pb2.AddAdapterRequest:
    inner = admin_pb2.AddAdapterHeader(tenant_id=tenant_id, name=name, store_path=store_path)
    return admin_pb2.AddAdapterRequest(header=inner)


def only_new(name: str) -> admin_pb2.AddAdapterRequest:
    return admin_pb2.AddAdapterRequest(header=admin_pb2.AddAdapterHeader(tenant_id="acme", name=name, only_new=True))


def chunk(file_name: str, data: bytes) -> admin_pb2.AddAdapterRequest:
    return admin_pb2.AddAdapterRequest(chunk=admin_pb2.FileChunk(file_name=file_name, data=data))


GOOD = [chunk(CONFIG_NAME, CONFIG), chunk(WEIGHTS_NAME, WEIGHTS[:3000]), chunk(WEIGHTS_NAME, WEIGHTS[3000:])]


async def upload(cluster: RouterCluster, *messages: admin_pb2.AddAdapterRequest) -> Any:
    stream = cluster.client.stream(ADMIN["AddAdapter"])
    for message in messages:
        await stream.write(message)
    await stream.close_send()
    return await stream.read()


def nothing_is_left(cluster: RouterCluster) -> None:
    assert cluster.files.incoming() == []
    assert not any(path.startswith("objects/") for path in cluster.files.files)
    assert keys.adapter("acme", "lower") not in cluster.store_server.keys


def test_upload_then_use_then_remove() -> None:
    async def test(cluster: RouterCluster) -> None:
        added = (await upload(cluster, header(), *GOOD)).adapter
        assert (added.tenant_id, added.name, added.max_lora_rank, added.size_bytes) == ("acme", "lower", 8, 1000)
        assert list(added.target_modules) == ["q_proj", "v_proj"]
        assert added.created_unix_s > 0
        assert cluster.files.read(added.version) == {CONFIG_NAME: CONFIG, WEIGHTS_NAME: WEIGHTS}
        assert cluster.files.incoming() == []
        validated = [path for worker in cluster.workers for path in worker.validated]
        assert validated == ["incoming/1"]
        answer = await cluster.ask(text_request(), x_adapter_id="lower")
        assert answer.frames[0].started.adapter_version == added.version
        listed = (await call(cluster, "ListAdapters", tenant_id="acme")).adapters
        assert [a.name for a in listed] == ["lower", "upper"]
        assert len((await call(cluster, "ListAdapters")).adapters) == 3
        assert (await upload(cluster, header(), *GOOD)).adapter == added
        with pytest.raises(RpcError) as error:
            await upload(cluster, only_new("lower"), *GOOD)
        assert error.value.code is Code.ALREADY_EXISTS
        same = (await upload(cluster, header("lower-2"), *GOOD)).adapter
        assert same.version == added.version
        await call(cluster, "RemoveAdapter", tenant_id="acme", name="lower")
        gone = await cluster.ask(text_request(), x_adapter_id="lower")
        assert gone.error is not None
        assert gone.error.code is Code.NOT_FOUND
        with pytest.raises(RpcError) as error:
            await call(cluster, "RemoveAdapter", tenant_id="acme", name="lower")
        assert error.value.code is Code.NOT_FOUND

    simulate(test)


def test_a_tokenizer_of_its_own_is_refused_by_name() -> None:
    async def test(cluster: RouterCluster) -> None:
        for brought, field in (
            ({"chat_template": "{{ x }}"}, "chat_template"),
            ({"added_tokens": {"<t>": 9}}, "added_tokens"),
        ):
            inner = admin_pb2.AddAdapterHeader(tenant_id="acme", name="lower", **brought)
            with pytest.raises(RpcError) as error:
                await upload(cluster, admin_pb2.AddAdapterRequest(header=inner), *GOOD)
            assert error.value.code is Code.INVALID_ARGUMENT
            assert [v.field for v in error.value.violations] == [field]
            nothing_is_left(cluster)

    simulate(test)


def test_import_from_the_store() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.files.files["imports/lower"] = {CONFIG_NAME: CONFIG, WEIGHTS_NAME: WEIGHTS}
        added = (await upload(cluster, header(store_path="imports/lower"))).adapter
        assert cluster.files.read(added.version)[WEIGHTS_NAME] == WEIGHTS

    simulate(test)


@pytest.mark.parametrize("path", ["imports/of-another", "imports/nothing", "../x", "objects/" + "a" * 64, "."])
def test_a_tenants_key_names_no_path_in_the_store(path: str) -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.files.files["imports/of-another"] = {CONFIG_NAME: CONFIG, WEIGHTS_NAME: WEIGHTS}
        made = await call(cluster, "CreateKey", tenant_id="acme", scopes=["admin"])
        stream = cluster.client.stream(ADMIN["AddAdapter"], metadata={"authorization": f"Bearer {made.key}"})
        await stream.write(header(store_path=path))
        await stream.close_send()
        with pytest.raises(RpcError, match=r"header\.store_path: only an operator's key") as error:
            await stream.read()
        assert error.value.code is Code.PERMISSION_DENIED
        nothing_is_left(cluster)

    simulate(test)


BAD_UPLOADS: dict[str, tuple[list[admin_pb2.AddAdapterRequest], str]] = {
    "nothing": ([], "header"),
    "no header": (GOOD, "header"),
    "empty message": ([admin_pb2.AddAdapterRequest()], "header"),
    "two headers": ([header(), header()], "chunk"),
    "bad name": ([header("../x")], "header.name"),
    "no name": ([header("")], "header.name"),
    "bad tenant": ([header(tenant_id="A")], "header.tenant_id"),
    "pickle": ([header(), chunk(CONFIG_NAME, CONFIG), chunk("adapter_model.bin", b"x")], "chunk.file_name"),
    "another file": ([header(), chunk("../../x", b"x")], "chunk.file_name"),
    "no weights": ([header(), chunk(CONFIG_NAME, CONFIG)], WEIGHTS_NAME),
    "no configuration": ([header(), chunk(WEIGHTS_NAME, WEIGHTS)], CONFIG_NAME),
    "not JSON": ([header(), chunk(CONFIG_NAME, b"{"), chunk(WEIGHTS_NAME, WEIGHTS)], CONFIG_NAME),
    "chunks with a path": ([header(store_path="imports/x"), *GOOD], "chunk"),
    "a path outside": ([header(store_path="../x")], "store_path"),
    "a large chunk": ([header(), chunk(WEIGHTS_NAME, b"x" * ((1 << 20) + 1))], "chunk.data"),
}


@pytest.mark.parametrize("name", BAD_UPLOADS)
def test_bad_uploads_leave_nothing(name: str) -> None:
    messages, field = BAD_UPLOADS[name]

    async def test(cluster: RouterCluster) -> None:
        with pytest.raises(RpcError) as error:
            await upload(cluster, *messages)
        assert error.value.code is Code.INVALID_ARGUMENT
        assert [v.field for v in error.value.violations] == [field]
        nothing_is_left(cluster)

    simulate(test)


def test_what_the_worker_finds_wrong_is_told_whole() -> None:
    async def test(cluster: RouterCluster) -> None:
        for worker in cluster.workers:
            worker.validation = worker_pb2.ValidateAdapterResponse(
                problems=[
                    worker_pb2.AdapterProblem(field="r", description="256 is over the limit of 64"),
                    worker_pb2.AdapterProblem(field="q_proj.lora_A.weight", description="has NaN"),
                ]
            )
        with pytest.raises(RpcError) as error:
            await upload(cluster, header(), *GOOD)
        assert error.value.code is Code.INVALID_ARGUMENT
        assert [v.field for v in error.value.violations] == ["r", "q_proj.lora_A.weight"]
        nothing_is_left(cluster)

    simulate(test)


def test_another_worker_validates_where_one_is_gone() -> None:
    async def test(cluster: RouterCluster) -> None:
        cluster.workers[0].refuse_with = RpcError(Code.UNAVAILABLE, "stopping")
        for index in range(6):
            await upload(cluster, header(f"a{index}"), *GOOD)
        cluster.workers[1].refuse_with = RpcError(Code.UNAVAILABLE, "stopping")
        with pytest.raises(RpcError) as error:
            await upload(cluster, header(), *GOOD)
        assert error.value.code is Code.UNAVAILABLE
        assert cluster.files.incoming() == []
        assert keys.adapter("acme", "lower") not in cluster.store_server.keys

    simulate(test)


def test_tenant_unknown_to_an_upload() -> None:
    async def test(cluster: RouterCluster) -> None:
        with pytest.raises(RpcError) as error:
            await upload(cluster, header(tenant_id="nobody"), *GOOD)
        assert error.value.code is Code.NOT_FOUND
        nothing_is_left(cluster)

    simulate(test)


@pytest.mark.parametrize("seed", range(8))
def test_upload_that_its_caller_leaves(seed: int) -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.client.stream(ADMIN["AddAdapter"])
        for message in [header(), *GOOD][: seed % 4 + 1]:
            await stream.write(message)
        await asyncio.sleep(random.Random(seed).random() * 0.01)
        stream.cancel()
        await cluster.at_rest()
        nothing_is_left(cluster)

    simulate(test, seed=seed)


def test_upload_that_stalls_is_given_up() -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.client.stream(ADMIN["AddAdapter"])
        await stream.write(header())
        await stream.write(GOOD[0])
        with pytest.raises(RpcError, match="behind 64 KiB a second"):
            await stream.read()
        nothing_is_left(cluster)

    simulate(test)


def test_upload_that_drips_is_given_up() -> None:
    """A byte now and then is no progress."""

    async def test(cluster: RouterCluster) -> None:
        stream = cluster.client.stream(ADMIN["AddAdapter"])
        await stream.write(header())
        begun = asyncio.get_running_loop().time()

        async def drip() -> None:
            for _ in range(180):
                await stream.write(chunk(WEIGHTS_NAME, b"w"))
                await asyncio.sleep(20)

        with pytest.raises(RpcError) as error:
            await drip()
        assert error.value.code is Code.DEADLINE_EXCEEDED
        assert asyncio.get_running_loop().time() - begun < 2 * UPLOAD_IDLE_S
        nothing_is_left(cluster)

    simulate(test)


def test_a_tenants_uploads_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: RouterCluster) -> None:
        held = [cluster.client.stream(ADMIN["AddAdapter"]) for _ in range(MAX_UPLOADS)]
        for index, stream in enumerate(held):
            await stream.write(header(f"a{index}"))
        await asyncio.sleep(0.1)
        with monkeypatch.context() as patched:
            patched.setattr(AdminServicer, "_stored_tenant", None)  # it asks the store
            with pytest.raises(RpcError, match="of tenant acme") as error:
                await upload(cluster, header(), *GOOD)
        assert error.value.code is Code.RESOURCE_EXHAUSTED
        assert (await upload(cluster, header(tenant_id="other"), *GOOD)).adapter.name == "lower"
        for stream in held:
            stream.cancel()

    simulate(test)


def test_a_new_name_at_once_is_registered_once() -> None:
    async def test(cluster: RouterCluster) -> None:
        async def one(index: int) -> Code:
            try:
                await upload(
                    cluster, only_new("lower"), chunk(CONFIG_NAME, CONFIG), chunk(WEIGHTS_NAME, b"w%d" % index)
                )
            except RpcError as e:
                return e.code
            return Code.OK

        codes = await asyncio.gather(*(one(i) for i in range(6)))
        assert sorted(codes) == [Code.OK] + [Code.ALREADY_EXISTS] * 5
        assert cluster.files.incoming() == []
        more = [
            upload(cluster, header(), chunk(CONFIG_NAME, CONFIG), chunk(WEIGHTS_NAME, b"v%d" % i)) for i in range(5)
        ]
        assert sorted(added.adapter.number for added in await asyncio.gather(*more)) == [2, 3, 4, 5, 6]

    simulate(test)


def test_tenant_deleted_during_an_upload() -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.client.stream(ADMIN["AddAdapter"])
        await stream.write(header())
        await asyncio.sleep(0.1)
        await call(cluster, "DeleteTenant", tenant_id="acme")
        for message in GOOD:
            await stream.write(message)
        await stream.close_send()
        with pytest.raises(RpcError) as error:
            await stream.read()
        assert error.value.code is Code.NOT_FOUND
        assert not any(key.startswith(keys.adapters_of("acme")) for key in cluster.store_server.keys)

    simulate(test)


def test_policy_changed_during_an_upload() -> None:
    async def test(cluster: RouterCluster) -> None:
        stream = cluster.client.stream(ADMIN["AddAdapter"])
        await stream.write(header())
        await asyncio.sleep(0.1)
        await call(cluster, "ApplyTenant", policy_yaml="tenant_id: acme\nclasses: {batch: {weight: 9}}")
        for message in GOOD:
            await stream.write(message)
        await stream.close_send()
        assert (await stream.read()).adapter.name == "lower"

    simulate(test)
