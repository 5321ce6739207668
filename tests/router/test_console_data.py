"""The console's data: whose key sees what, and that looking is bounded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from http_fakes import Front, http_front
from manylora.v1 import admin_pb2, common_pb2, status_pb2
from manylora_router.front.http.routes import Routes
from manylora_router.front.http.server import HttpServer
from router_fakes import say, until

PARTS = ("me", "status", "history", "adapters", "requests")
ALL = tuple(f"/console/api/{part}" for part in (*PARTS, "requests/" + "0" * 32))


async def get(front: Front, path: str, key: str = "", url: str = "") -> tuple[int, Any]:
    lines = [f"GET {path} HTTP/1.1", "host: x", "connection: close", *([f"authorization: Bearer {key}"] if key else [])]
    head, _, body = (await front.raw("\r\n".join([*lines, "", ""]).encode())).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def seen(front: Front, part: str, key: str) -> Any:
    status, document = await get(front, f"/console/api/{part}", key)
    assert status == 200, document
    return document


async def key_of(front: Front, **made: Any) -> str:
    known = len(front.cluster.app.directory.api_keys)
    key = await front.cluster.put_key(**made)
    await until(lambda: len(front.cluster.app.directory.api_keys) > known)
    return key


async def ask(front: Front, key: str, model: str = "tiny") -> str:
    async with front.openai(key) as client:
        answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hush"}])
    return answer.id


async def test_without_a_key_there_is_nothing() -> None:
    async with http_front() as front:
        gateway = await key_of(front, scopes=("gateway",))
        for path in ALL:
            assert (await get(front, path))[0] == 401
            assert (await get(front, path, "mlk-" + "0" * 16 + "-" + "0" * 64))[0] == 401
            assert (await get(front, path, gateway))[0] == 403, "it may act for tenants, and see none"
        assert (await get(front, "/console/api/nothing", front.key))[0] == 404


async def test_a_tenant_sees_its_own_and_an_operator_all() -> None:
    async with http_front() as front:
        operator = await key_of(front, scopes=("operator",))
        other = await key_of(front, tenant="other")
        front.cluster.scheduler.flows = [
            admin_pb2.FlowStatus(tenant_id=tenant, qos_class=common_pb2.QOS_CLASS_BATCH, running=1, debt_cost=5)
            for tenant in ("acme", "other")
        ]
        mine, theirs = await ask(front, front.key, "upper"), await ask(front, other, "secret")
        front.cluster.app.calls.close_step()
        for key, tenants in ((front.key, ["acme"]), (other, ["other"]), (operator, ["acme", "other"])):
            me = await seen(front, "me", key)
            assert (me["tenants"], me["operator"]) == (tenants, key == operator)
            assert me["may_read_usage"] == (key != other), "whose key may generate alone"
            status = await seen(front, "status", key)
            flows = [(flow["tenant_id"], flow["qos_class"], flow["debt_cost"]) for flow in status["scheduler"]["flows"]]
            assert flows == [(tenant, "batch", 5 if key == operator else 0) for tenant in tenants]
            assert len(status["workers"]) == (2 if key == operator else 0)
            history = await seen(front, "history", key)
            assert history["series"]["requests"] == [len(tenants)]
            assert sorted(each["tenant"] for each in history["tenants"]) == (tenants if key == operator else [])
            adapters = (await seen(front, "adapters", key))["adapters"]
            assert sorted(each["tenant"] for each in adapters) == tenants
            assert [each["versions"][0]["use"]["in_store"] for each in adapters] == [1] * len(tenants)
            requests = (await seen(front, "requests", key))["requests"]
            assert sorted(each["tenant"] for each in requests) == tenants
            assert {each["outcome"] for each in requests} == {"completed"}
            assert {each["swaps"] for each in requests} == ({0} if key == operator else {None}), "others' doing"
        for key, request_id, status_code in (
            (front.key, mine, 200),
            (front.key, theirs, 404),
            (other, mine, 404),
            (operator, mine, 200),
            (operator, theirs.rpartition("-")[2], 200),
            (operator, "resp_" + theirs.rpartition("-")[2], 200),
        ):
            assert (await get(front, f"/console/api/requests/{request_id}", key))[0] == status_code
        unknown = await get(front, "/console/api/requests/" + "f" * 32, front.key)
        assert unknown[1] == json.loads(
            json.dumps((await get(front, f"/console/api/requests/{theirs}", front.key))[1]).replace(
                theirs.rpartition("-")[2], "f" * 32
            )
        )


async def test_no_document_has_a_text_or_a_key() -> None:
    async with http_front(say("planted answer")) as front:
        operator = await key_of(front, scopes=("operator",))
        await ask(front, front.key)
        front.cluster.app.calls.close_step()
        for part in PARTS:
            told = json.dumps(await seen(front, part, operator))
            assert not [word for word in ("hush", "planted", "mlk-", operator, front.key) if word in told]


async def test_a_running_request_is_seen_as_it_goes_on() -> None:
    async with http_front(say("word " * 20, pause_s=0.1)) as front:
        asking = asyncio.create_task(ask(front, front.key))
        await until(lambda: any(call.record for call in front.cluster.app.calls.live.values()))
        stages = set()
        while not asking.done():
            (life,) = (await seen(front, "requests", front.key))["requests"]
            stages.add(life["stage"])
            one = await seen(front, f"requests/{life['request_id']}", front.key)
            assert one["completion_tokens"] >= life["completion_tokens"]
            await asyncio.sleep(0.05)
        assert "streaming" in stages
        await asking


async def test_who_looks_in_the_same_moment_shares_one_answer() -> None:
    async with http_front() as front:
        status, asked = front.cluster.app._status._scheduler_status, 0

        async def count() -> Any:
            nonlocal asked
            asked += 1
            return await status()

        front.cluster.app._status._scheduler_status = count  # type: ignore[method-assign]
        answers = await asyncio.gather(*(seen(front, "status", front.key) for _ in range(20)))
        assert asked <= 2
        assert all(answer["base_model"] == "tiny" for answer in answers)
        await asyncio.sleep(1.0)
        assert not front.cluster.app._status.moments.asked


async def test_names_are_told_as_they_are_and_as_json_alone() -> None:
    """A page makes text of them; whatever a worker or a policy says stands in no markup."""
    async with http_front() as front:
        operator = await key_of(front, scopes=("operator",))
        planted = "<img src=x onerror=alert(1)>"
        front.cluster.scheduler.adapters = [
            status_pb2.TenantAdapters(tenant_id="acme", pins=[status_pb2.PinStatus(name=planted, problem=planted)])
        ]
        lines = [
            "GET /console/api/status HTTP/1.1",
            "host: x",
            "connection: close",
            f"authorization: Bearer {operator}",
        ]
        raw = await front.raw("\r\n".join([*lines, "", ""]).encode())
        assert b"content-type: application/json" in raw
        assert b"x-content-type-options: nosniff" in raw
        assert b"cache-control: no-store" in raw
        (pin,) = json.loads(raw.partition(b"\r\n\r\n")[2])["scheduler"]["adapters"][0]["pins"]
        assert pin["problem"] == planted


@pytest.mark.parametrize("path", ["/console", "/console/app.js", *ALL])
async def test_where_it_is_off_there_is_none(path: str) -> None:
    async with http_front() as front:
        server = HttpServer(Routes(dataclasses.replace(front.cluster.app.door, console=None)))
        await server.start("127.0.0.1:0")
        try:
            off = dataclasses.replace(front, server=server)
            assert (await get(off, path, front.key))[0] == 404
        finally:
            await server.stop(0.0)
