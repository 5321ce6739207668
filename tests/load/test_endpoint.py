from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from manylora.load.endpoint import Endpoint, EndpointFailed
from manylora.load.planning.mix import mix_of
from manylora.load.planning.prompts import Words
from manylora.load.planning.schedule import Piece, Planned
from manylora.load.tally import Sample
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.load.openai_server import OpenAiServer

MALFORMED = (
    "[]",
    '"x"',
    '{"choices": [3]}',
    '{"choices": 3}',
    '{"usage": [3]}',
    '{"usage": {"prompt_tokens": "x"}}',
    '{"choices": [{"delta": 3}]}',
)
TENANT: dict[str, Any] = {"tenant_id": "acme", "class": "batch", "arrivals": {"rate": 1}}


@asynccontextmanager
async def endpoint(url: str, timeout_s: float = 5.0, **fields: Any) -> AsyncIterator[Endpoint]:
    mix = mix_of({"duration_s": 1, "tenants": {"acme": TENANT}, **fields}, lambda name: ())
    tls = ssl.create_default_context() if url.startswith("https") else None
    async with Endpoint(url, mix, {"acme": "k"}, tls=tls, timeout_s=timeout_s) as made:
        made.tenant = mix.tenants[0]  # type: ignore[attr-defined]
        yield made


async def sent(made: Endpoint, tokens: int = 4, model: str = "") -> Sample:
    tenant = made.tenant  # type: ignore[attr-defined]
    sample = Sample(Planned(0.0, tenant, model, (Piece("x", 25),), tokens, 9), time.perf_counter())
    await made.send(sample)
    return sample


async def test_a_completion_is_asked_and_counted(server: OpenAiServer) -> None:
    server.gap_s = 0.01
    async with endpoint(server.url, body={"temperature": 0}) as made:
        await made.prepare()
        assert made.words == Words(2.0, 5.0)
        sample = await sent(made)
    headers, body = server.asked[-1]
    assert headers["authorization"] == "Bearer k"
    assert (headers["x-tenant-id"], headers["x-request-class"]) == ("acme", "batch")
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("base", 4, True, 0)
    assert len(body["prompt"].split()) == 10
    assert (sample.error, sample.prompt_tokens, sample.output_tokens, sample.chunks) == ("", 25, 4, 4)
    assert len(sample.gaps_s) == 3
    assert sample.due_s < sample.sent_s < sample.first_s < sample.last_s < sample.ended_s
    assert max(sample.gaps_s) > 0.005


async def test_a_chat_s_role_is_no_token(server: OpenAiServer) -> None:
    async with endpoint(server.url, api="chat", ignore_eos=False) as made:
        sample = await sent(made, model="lora-a")
    _, body = server.asked[-1]
    assert body["messages"][0]["role"] == "user"
    assert body["model"] == "lora-a"
    assert "ignore_eos" not in body
    assert (sample.error, sample.chunks) == ("", 4)


async def test_ids_are_sent_as_they_are(server: OpenAiServer) -> None:
    async with endpoint(server.url, prompts="ids") as made:
        await made.prepare()
        sample = await sent(made)
    assert len(server.asked) == 1  # no words are measured
    assert sample.prompt_tokens == 25


async def test_without_usage_events_are_counted(server: OpenAiServer) -> None:
    server.tells_usage = False
    async with endpoint(server.url) as made:
        await made.prepare()
        sample = await sent(made)
    assert made.words == Words()
    assert (sample.error, sample.output_tokens, sample.tokens) == ("", None, 4)


async def test_each_failure_has_its_name(server: OpenAiServer) -> None:
    refusal = {"error": {"message": "too much", "type": "x", "code": "overloaded"}}
    server.answers = [
        web.json_response(refusal, status=429),
        web.Response(text="<html>", status=502),
        web.json_response({"choices": []}),
        web.Response(text="data: nonsense\n\n", content_type="text/event-stream"),
        web.Response(text='data: {"choices": []}\n\n', content_type="text/event-stream"),
        *(web.Response(text=f"data: {event}\n\n", content_type="text/event-stream") for event in MALFORMED),
    ]
    async with endpoint(server.url, timeout_s=60) as made:
        found = [(await sent(made)).error for _ in range(len(server.answers))]
        assert found[:3] == ["429 overloaded", "502", "not a stream but application/json"]
        assert found[4] == "stream cut short"
        assert all(error.startswith("no event: ") for error in (found[3], *found[5:]))
        server.cut_after = 2
        cut = await sent(made)
        assert (cut.error, cut.tokens) == ("connection lost", 2)
        server.cut_after, server.error_after = None, 1
        lost = await sent(made)
        assert (lost.error, lost.detail) == ("in the stream: worker_lost", "gone")
    async with endpoint(server.url, timeout_s=0.3) as made:
        server.error_after = None
        server.go.clear()
        assert (await sent(made)).error == "timeout"
        server.go.set()


async def failed(url: str, **fields: Any) -> str:
    async with endpoint(url, **fields) as made:
        with pytest.raises(EndpointFailed) as caught:
            await made.prepare()
    return str(caught.value)


async def test_what_is_no_such_server_is_told_before_the_run(server: OpenAiServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert "nobody answers there" in await failed(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert "speaks no TLS" in await failed(server.url.replace("http://", "https://"))
    assert "names no model (404: 404: Not Found): say which" in await failed(server.url + "/x")
    assert "404" in await failed(server.url + "/x", model="base")
    for url in ("http://a:b", "http://[::1"):
        assert "is no address" in await failed(url)
    server.models = []
    assert "names no model" in await failed(server.url)
    server.answers = [web.json_response({"error": {"message": "no such model", "code": "not_found"}}, status=404)]
    assert "model y: 404 not_found no such model" in await failed(server.url, model="y")


async def test_a_grpc_port_is_told() -> None:
    grpc = await GrpcTransport().serve("127.0.0.1:0", [])
    try:
        assert "is it a gRPC port" in await failed(f"http://{grpc.address}")
    finally:
        await grpc.stop(0)


async def test_a_server_that_wants_a_key_or_serves_something_else() -> None:
    replies = [web.json_response({"error": {"message": "who are you"}}, status=401), web.json_response({"x": 1})]

    async def models(request: web.Request) -> web.Response:
        return replies.pop(0)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        assert "401: who are you (--key" in await failed(url)
        assert "is that an OpenAI-compatible server?" in await failed(url)
    finally:
        await asyncio.wait_for(runner.cleanup(), 5)
