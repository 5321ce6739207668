"""Keys and tokens at every front: ends, rotation, networks, and calls without any."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from http_fakes import Front, http_front
from manylora.v1 import admin_pb2
from manylora_router.guard.failures import BURST
from manylora_router.guard.tokens import Tokens
from manylora_shared.errors import Code, RpcError
from router_fakes import ADMIN, RouterCluster
from test_tokens import ISSUER, PUBLIC, token


def models(front: Front, given: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{front.url}/v1/models", headers={"authorization": f"Bearer {given}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())["error"]


async def admin(cluster: RouterCluster, method: str, **fields: Any) -> Any:
    request = getattr(admin_pb2, f"{method}Request")(**fields)
    return await cluster.client.call(ADMIN[method], request)


async def test_a_rotated_key_and_its_successor_are_both_right_for_a_while() -> None:
    async with http_front() as front:
        cluster, clock = front.cluster, front.cluster.clock
        made = await admin(
            cluster, "CreateKey", tenant_id="acme", scopes=["generate"], lifetime_s=100, networks=["127.0.0.0/8"]
        )
        assert made.info.expires_unix_s == clock.now_unix_s() + 100
        rotated = await admin(cluster, "RotateKey", key_id=made.info.key_id, overlap_s=30)
        assert (rotated.info.expires_unix_s, list(rotated.info.networks)) == (made.info.expires_unix_s, ["127.0.0.0/8"])
        assert rotated.replaced.expires_unix_s == clock.now_unix_s() + 30
        for key in (made.key, rotated.key):
            assert (await asyncio.to_thread(models, front, key))[0] == 200
        clock.advance(31)
        status, error = await asyncio.to_thread(models, front, made.key)
        assert (status, error["message"]) == (401, "this key expired 1 s ago")
        assert (await asyncio.to_thread(models, front, rotated.key))[0] == 200
        with pytest.raises(RpcError) as ended:
            await admin(cluster, "RotateKey", key_id=made.info.key_id, overlap_s=30)
        assert ended.value.code is Code.FAILED_PRECONDITION
        elsewhere = await admin(cluster, "CreateKey", tenant_id="acme", scopes=["generate"], networks=["192.0.2.0/24"])
        status, error = await asyncio.to_thread(models, front, elsewhere.key)
        assert (status, error["message"]) == (403, "this key may not be used from 127.0.0.1")


async def test_a_token_is_taken_and_its_class_holds() -> None:
    async with http_front() as front:
        front.cluster.app.callers._tokens = Tokens([ISSUER], lambda issuer, kid: PUBLIC.get(kid or "", "unknown"))
        given = token(exp=front.cluster.clock.now_unix_s() + 60)
        status, answer = await asyncio.to_thread(models, front, given)
        assert status == 200, answer
        status, error = await asyncio.to_thread(models, front, token(exp=1))
        assert (status, "this token expired" in error["message"]) == (401, True)


async def test_wrong_keys_are_too_many_and_right_ones_go_on() -> None:
    async with http_front() as front:
        answers = [await asyncio.to_thread(models, front, "wrong") for _ in range(int(BURST) + 2)]
        assert [status for status, _ in answers] == [401] * int(BURST) + [429] * 2
        assert "too many calls without a valid key come from 127.0.0.1" in answers[-1][1]["message"]
        assert (await asyncio.to_thread(models, front, front.key))[0] == 200


async def test_a_token_of_a_class_is_for_that_class_alone() -> None:
    issuer = dataclasses.replace(ISSUER, class_claim="plan")
    async with http_front() as front:
        front.cluster.app.callers._tokens = Tokens([issuer], lambda issuer, kid: PUBLIC.get(kid or "", "unknown"))
        given = token(exp=front.cluster.clock.now_unix_s() + 60, plan="batch")
        for asked, status in (("", 200), ("batch", 200), ("realtime", 403)):
            headers = {"x-request-class": asked} if asked else {}
            found, answer = await asyncio.to_thread(complete, front, given, headers)
            assert found == status, answer
        assert answer["message"] == "this token is for requests of class batch"


def complete(front: Front, given: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    sent = {"authorization": f"Bearer {given}", "content-type": "application/json", **headers}
    body = json.dumps({"model": front.cluster.app.intake.base_model, "prompt": "hi", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{front.url}/v1/completions", data=body, headers=sent)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())["error"]
