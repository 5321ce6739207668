"""A server that speaks as much of OpenAI's API as a load needs, and misbehaves when told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

TOKENS_A_WORD = 2
OTHER_TOKENS = 5


class OpenAiServer:
    """A prompt's words are two tokens each, and five more. go: while it is not set, no answer begins."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.models = ["base", "lora-a"]
        self.gap_s = 0.0
        self.tells_usage = True
        self.go = asyncio.Event()
        self.go.set()
        self.answers: list[web.Response] = []  # instead of the next ones
        self.cut_after: int | None = None  # tokens
        self.error_after: int | None = None

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(({name.lower(): value for name, value in request.headers.items()}, body))
        if self.answers:
            return self.answers.pop(0)
        await self.go.wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if "messages" in body:
            await self._event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(body["max_tokens"]):
            if number == self.cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            if number == self.error_after:
                await self._event(response, {"error": {"message": "gone", "code": "worker_lost"}})
                return response
            said = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
            await self._event(response, {"choices": [{"index": 0, **said}]})
            await asyncio.sleep(self.gap_s)
        await self._event(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.tells_usage:
            usage = {"prompt_tokens": self._count(body), "completion_tokens": body["max_tokens"]}
            await self._event(response, {"choices": [], "usage": usage})
        await response.write(b": note\n\ndata: [DONE]\n\n")
        return response

    @staticmethod
    def _count(body: dict[str, Any]) -> int:
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        return OTHER_TOKENS + TOKENS_A_WORD * len(prompt.split()) if isinstance(prompt, str) else len(prompt)

    @staticmethod
    async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def openai_server() -> AsyncIterator[OpenAiServer]:
    server = OpenAiServer()
    app = web.Application()
    app.router.add_get("/v1/models", server._models)
    app.router.add_post("/v1/completions", server._complete)
    app.router.add_post("/v1/chat/completions", server._complete)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
