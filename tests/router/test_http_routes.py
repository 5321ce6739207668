"""Whom the entrance lets in, and what it says to the others."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from http_fakes import http_front, request_bytes
from manylora_router.front.http import exchange
from manylora_shared.errors import InternalError, Overloaded, QuotaExceeded
from router_fakes import say, until


async def test_who_has_no_key_is_told_before_its_body_is_read() -> None:
    async with http_front() as front:
        for key in ("", "mlk-nobody"):
            answer = await front.raw(request_bytes("/v1/completions", b"not json", key, "connection: close"))
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b'"type":"authentication_error"' in answer
        lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-length: 9000000", "", ""]
        assert (await front.raw("\r\n".join(lines).encode(), until_closed=False)).startswith(b"HTTP/1.1 401 ")


async def test_other_paths_and_methods() -> None:
    async with http_front() as front, front.openai() as client:
        with pytest.raises(openai.NotFoundError):
            await client.get("/nowhere", cast_to=dict)
        with pytest.raises(openai.APIStatusError) as refused:
            await client.get("/completions", cast_to=dict)
        assert (refused.value.status_code, refused.value.response.headers["allow"]) == (405, "POST")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.post("/models", cast_to=dict)
        assert (refused.value.status_code, refused.value.response.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"prompt": NaN}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"\xff\xfe", 400),
        (b'{"n": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "hi", "temperature": 1e999}', 400),
        (b'{"prompt": "hi"}', 200),
        (b'{"prompt": "' + b"x" * (exchange.MAX_MESSAGE_BYTES + 1) + b'"}', 413),
    ],
)
async def test_bodies_of_every_kind(body: bytes, status: int) -> None:
    async with http_front() as front:
        answer = await front.raw(request_bytes("/v1/completions", body, front.key), until_closed=False)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:300]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])


async def test_a_packed_body_is_refused() -> None:
    async with http_front() as front:
        data = request_bytes("/v1/completions", b"{}", front.key, "content-encoding: gzip")
        assert (await front.raw(data, until_closed=False)).startswith(b"HTTP/1.1 415 ")


async def test_a_chunked_body_is_bounded_too() -> None:
    async with http_front() as front:
        head = request_bytes("/v1/completions", b"", front.key).replace(
            b"content-length: 0", b"transfer-encoding: chunked"
        )
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        assert (await front.raw(head + chunk * 80, until_closed=False)).startswith(b"HTTP/1.1 413 ")


async def test_half_a_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.05)
    async with http_front() as front:
        data = request_bytes("/v1/completions", b'{"prompt": "hi"}', front.key)
        assert (await front.raw(data[:-3], until_closed=False)).startswith(b"HTTP/1.1 408 ")


async def test_refusals_say_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with http_front() as front, front.openai() as client:
        for error, status, told in (
            (QuotaExceeded("no tokens", retry_after_s=1.5), 429, "2"),
            (Overloaded("full", retry_after_s=0.2), 503, "1"),
            (QuotaExceeded("never"), 429, None),
        ):

            def refuse(*args: object, error: Exception = error) -> None:
                raise error

            monkeypatch.setattr(front.cluster.app.intake, "_check_overload", refuse)
            with pytest.raises(openai.APIStatusError) as refused:
                await client.completions.create(model="tiny", prompt="hi")
            assert refused.value.status_code == status
            assert refused.value.response.headers.get("retry-after") == told
            assert (refused.value.response.headers.get("x-should-retry") == "false") == (told is None)


async def test_what_nobody_foresaw_is_a_500_without_its_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a secret")

    async with http_front() as front, front.openai() as client:
        monkeypatch.setattr(front.cluster.app.intake, "models", fail)
        with pytest.raises(openai.InternalServerError) as failed:
            await client.models.list()
        assert "secret" not in str(failed.value)
        assert failed.value.code == InternalError.label
    assert "a secret" in caplog.text


async def test_a_router_that_stops_says_so() -> None:
    async with http_front(say("x" * 200, pause_s=0.05)) as front, front.openai() as client:
        asking = asyncio.ensure_future(client.completions.create(model="tiny", prompt="hi", max_tokens=200))
        await until(lambda: any(worker.running for worker in front.cluster.workers))
        await front.server.stop(0.0)
        with pytest.raises(openai.InternalServerError) as stopped:
            await asking
        assert stopped.value.status_code == 503


async def test_metrics_are_for_operators() -> None:
    async with http_front() as front:
        for key, status in (("", 401), (front.key, 403)):
            answer = await front.raw(
                request_bytes("/metrics", b"", key).replace(b"POST", b"GET", 1), until_closed=False
            )
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:300]
