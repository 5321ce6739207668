"""One server that speaks OpenAI's API: what it serves, how it counts, and one streamed request after the other."""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import aiohttp

from manylora.load.planning import prompts
from manylora.load.planning.mix import Mix, Tenant
from manylora.load.planning.prompts import Words
from manylora.load.planning.schedule import Piece, Planned
from manylora.load.tally import Sample

_SHORT, _LONG = 8, 72  # words of the prompts by which it is seen how a server counts
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_READ_BYTES = 1 << 16
_MAX_ERROR_BYTES = 1 << 16
_SHOWN_CHARS = 200
_MAX_EVENT_BYTES = 1 << 24
_UNANSWERED_S = 10.0  # for what is asked before the run


class EndpointFailed(Exception):
    """The message says what to do about it."""


class Endpoint:
    """url: without /v1. keys: of each tenant's name; empty: none is sent."""

    def __init__(
        self, url: str, mix: Mix, keys: Mapping[str, str], *, tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        self.url = url
        self.words = Words()
        self._mix = mix
        self._keys = keys
        self._model = ""
        self._url = url + _PATHS[mix.api]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_UNANSWERED_S),
            read_bufsize=_READ_BYTES,
            auto_decompress=True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def prepare(self) -> None:
        """Finds the model where none is named, and how long a word is. Raises EndpointFailed."""
        tenants = self._mix.tenants
        try:
            async with asyncio.timeout(_UNANSWERED_S * 3):
                served, why_not = await self._models(tenants[0])
                if served:
                    self._model = served[0]
                elif not all(tenant.model for tenant in tenants):
                    raise EndpointFailed(
                        f"{self.url}/v1/models names no model{why_not}: say which, with --model or `model`"
                    )
                if self._mix.prompts == "text":
                    await self._measure_words(tenants[0])
        except TimeoutError:
            raise EndpointFailed(f"{self.url} does not answer") from None
        except aiohttp.ClientError as error:
            raise EndpointFailed(self._told(error)) from None

    async def _models(self, tenant: Tenant) -> tuple[list[str], str]:
        """Empty: it has no such list, and perhaps says why."""
        async with self._session.get(f"{self.url}/v1/models", headers=self._headers(tenant)) as response:
            text = await response.text(errors="replace")
            said = error_in(text)[1] or text.strip()[:_SHOWN_CHARS]
            if response.status == 404:
                return [], f" (404: {said})"
            if response.status != 200:
                hint = " (--key, or `key` of the tenant)" if response.status in (401, 403) else ""
                raise EndpointFailed(f"{self.url}/v1/models: {response.status}: {said}{hint}")
        try:
            return [str(row["id"]) for row in json.loads(text)["data"]], ""
        except (ValueError, TypeError, KeyError):
            raise EndpointFailed(
                f"{self.url}/v1/models is no list of models: is that an OpenAI-compatible server?"
            ) from None

    async def _measure_words(self, tenant: Tenant) -> None:
        counted = []
        for words in (_SHORT, _LONG):
            planned = Planned(0.0, tenant, tenant.model, (Piece(f"words/{words}", words),), 1, 1)
            sample = Sample(planned, time.perf_counter())
            await self.send(sample)
            if sample.error:
                raise EndpointFailed(
                    f"{self._url}, model {planned.model or self._model}: {sample.error} {sample.detail}".rstrip()
                )
            counted.append(sample.prompt_tokens)
        if all(counted):
            self.words = prompts.words_from(_SHORT, counted[0], _LONG, counted[1])

    async def send(self, sample: Sample) -> None:
        """To its end, which is in the sample."""
        sample.sent_s = time.perf_counter()
        is_whole = False
        try:
            async with self._session.post(
                self._url, data=self._body(sample.planned), headers=self._headers(sample.planned.tenant)
            ) as response:
                if response.status != 200:
                    text = (await response.content.read(_MAX_ERROR_BYTES)).decode(errors="replace")
                    code, sample.detail = error_in(text)
                    sample.error = f"{response.status} {code}".strip()
                elif response.content_type != "text/event-stream":
                    sample.error = f"not a stream but {response.content_type}"
                else:
                    async for data in events(response.content):
                        is_whole |= _take(sample, data, time.perf_counter())
        except aiohttp.ClientConnectorError as error:
            sample.error = f"cannot connect {errno.errorcode.get(error.errno or 0, '')}".rstrip()
        except TimeoutError:
            sample.error = "timeout"
        except (aiohttp.ClientError, ConnectionError):
            sample.error = "connection lost"
        except (ValueError, TypeError, AttributeError) as error:  # of what the server sent
            sample.error = f"no event: {str(error)[:60]}"
        sample.ended_s = time.perf_counter()
        if not is_whole and not sample.error:
            sample.error = "stream cut short"

    def _headers(self, tenant: Tenant) -> dict[str, str]:
        key = self._keys.get(tenant.name, "")
        named = (
            ("authorization", f"Bearer {key}" if key else ""),
            ("x-tenant-id", tenant.tenant_id),
            ("x-request-class", tenant.qos_class),
            ("content-type", "application/json"),
        )
        return {name: value for name, value in named if value}

    def _body(self, planned: Planned) -> bytes:
        mix = self._mix
        body: dict[str, Any] = {
            "model": planned.model or self._model,
            "max_tokens": planned.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": planned.seed,
        }
        if mix.prompts == "ids":
            body["prompt"] = prompts.ids(planned.prompt)
        elif mix.api == "chat":
            body["messages"] = [{"role": "user", "content": self.words.text(planned.prompt)}]
        else:
            body["prompt"] = self.words.text(planned.prompt)
        if mix.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps({**body, **mix.body}).encode()

    def _told(self, error: aiohttp.ClientError) -> str:
        text = str(error)
        if isinstance(error, aiohttp.InvalidURL):
            return f"{self.url} is no address of a server"
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return (
                f"{self.url}: its certificate is not trusted ({error.certificate_error}); --tls-ca names who signs it"
            )
        if isinstance(error, aiohttp.ClientConnectorSSLError) or "SSL" in text:
            return f"{self.url} speaks no TLS, or another kind of it: http:// instead of https://? ({text})"
        if isinstance(error, aiohttp.ClientConnectorError):
            return f"{self.url}: nobody answers there ({error.os_error.strerror or text}). manylora's HTTP port is 7080"
        if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientConnectionError):
            return (
                f"{self.url} does not speak HTTP/1.1: is it a gRPC port (manylora's HTTP port is ten above it), "
                "or one with TLS (https://)?"
            )
        return f"{self.url}: {text}"


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of a stream's events, each of one line, as OpenAI's are. Raises ValueError where one never ends."""
    left = b""
    async for part in content.iter_any():
        lines = (left + part).split(b"\n")
        left = lines.pop()
        if len(left) > _MAX_EVENT_BYTES:
            raise ValueError("it does not end")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _take(sample: Sample, data: bytes, now: float) -> bool:
    """Whether the answer is whole with it."""
    if data == b"[DONE]":
        return True
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(data[:40])
    if event.get("error"):
        code, sample.detail = error_in(data.decode(errors="replace"))
        sample.error = f"in the stream: {code}"
    usage = event.get("usage")
    if usage:
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or 0)
        sample.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    choices = event.get("choices") or ()
    if any(_has_tokens(choice) for choice in choices):
        sample.token(now)
    return any(choice.get("finish_reason") for choice in choices)


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    """A chat's first event, which has the role alone, has none."""
    said = choice.get("delta")
    if said is None:
        return bool(choice.get("text") or choice.get("token_ids"))
    return any(said.get(part) for part in ("content", "reasoning_content", "reasoning", "tool_calls"))


def error_in(text: str) -> tuple[str, str]:
    """Code and message of an error in OpenAI's form, or in a web server's; empty where it has none."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        if isinstance(found, str):
            return "", found
        message = str(found.get("message") or found.get("detail") or "")
        codes = [found.get("code"), found.get("type")]
        return next((code for code in codes if isinstance(code, str) and code), ""), message
    except (ValueError, AttributeError):
        return "", ""
