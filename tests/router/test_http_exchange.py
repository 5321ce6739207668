"""Streams that are silent, and readers that stop."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_fakes import http_front, request_bytes
from manylora_router.front.http import exchange
from manylora_router.front.http.connection import MAX_PIPELINED
from router_fakes import say, until

HI = '"messages": [{"role": "user", "content": "hi"}]'
BODY = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 200}).encode()


async def test_a_stream_that_waits_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.03)
    async with http_front() as front:
        front.cluster.scheduler.holds = True
        asking = asyncio.ensure_future(
            front.raw(request_bytes("/v1/completions", BODY, front.key, "connection: close"))
        )
        await until(lambda: bool(front.cluster.scheduler.queued))
        await asyncio.sleep(0.1)
        front.cluster.scheduler.grant(next(iter(front.cluster.scheduler.queued)))
        answer = await asking
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.index(b": waiting\n\n") < answer.index(b'data: {"id"')
        assert b"data: [DONE]" in answer


async def test_what_is_refused_after_a_sign_of_life_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.03)
    async with http_front() as front:
        front.cluster.scheduler.holds = True
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        asking = asyncio.ensure_future(
            front.raw(request_bytes("/v1/completions", body, front.key, "connection: close"))
        )
        await until(lambda: bool(front.cluster.scheduler.queued))
        await asyncio.sleep(0.1)
        await front.server.stop(0.0)
        answer = await asking
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'data: {"error": {"message": "the router is stopping"' in answer


@pytest.mark.parametrize("pad", ["", "x" * 200_000])  # read on the loop, and on a thread
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", '"input": "x", "metadata": {"x": %s}'),
        ("/v1/chat/completions", f'{HI}, "chat_template_kwargs": {{"x": %s}}'),
        (
            "/v1/chat/completions",
            f'{HI}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": %s}}}}',
        ),
        ("/v1/completions", '"prompt": "x", "nobody": %s'),
    ],
)
async def test_what_is_nested_too_deeply_is_refused_up_front(path: str, body: str, pad: str) -> None:
    most = exchange.MAX_BODY_DEPTH
    async with http_front() as front:
        for depth in (most, most + 1, 960, *range(970, 992), 5000, 30_000):
            for opens, closes in ("[", "]"), ('{"a":', "}"):
                nested = opens * depth + "1" + closes * depth
                data = f'{{"session_id": "{pad}", {body % nested}}}'.encode()
                answer = await front.raw(request_bytes(path, data, front.key, "connection: close"))
                assert answer.startswith(b"HTTP/1.1 400 "), answer
                assert b"nested too deeply" in answer or b"brackets" in answer or b"lists and objects" in answer
        assert not any(worker.executed for worker in front.cluster.workers)


async def test_deep_but_not_too_deep_is_read() -> None:
    nested = "[" * (exchange.MAX_BODY_DEPTH - 2) + "]" * (exchange.MAX_BODY_DEPTH - 2)
    data = f'{{"input": "x", "metadata": {{"x": {nested}}}}}'.encode()
    async with http_front() as front:
        answer = await front.raw(request_bytes("/v1/responses", data, front.key, "connection: close"))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert nested.encode() in answer


async def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SLOW_READER_S", 0.2)
    async with http_front(say("x" * 200, per_frame=1, pause_s=0.0)) as front:
        body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 200, "logprobs": 1}).encode()
        host, _, port = front.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        for _ in range(MAX_PIPELINED):  # as much as one connection's buffers do not take
            writer.write(request_bytes("/v1/completions", body, front.key))
        del reader
        await until(lambda: front.cluster.app.calls.counters.received > 1)
        await until(lambda: not front.server._server.server_state.connections, within_s=10.0)  # type: ignore[union-attr]
        writer.close()
        await front.cluster.at_rest()
