"""A router on the in-memory network whose HTTP front is a real one, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import openai
from manylora_router.front.http.routes import Routes
from manylora_router.front.http.server import HttpServer
from router_fakes import RouterCluster, Script, until


@dataclass
class Front:
    cluster: RouterCluster
    server: HttpServer
    key: str
    """Of the tenant acme."""

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    def openai(self, key: str | None = None, **more: object) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, **more)  # type: ignore[arg-type]

    async def raw(self, data: bytes, *, until_closed: bool = True, within_s: float = 10.0) -> bytes:
        """What comes back for these bytes; nothing where the connection is cut."""
        host, _, port = self.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(within_s):
                with contextlib.suppress(ConnectionResetError):
                    return await (reader.read() if until_closed else reader.read(65536))
            return b""
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def http_front(script: Script | None = None, **more: object) -> AsyncIterator[Front]:
    cluster = RouterCluster(seed=1, script=script, delay_s=0.0001, **more)  # type: ignore[arg-type]
    await cluster.start()
    server = HttpServer(Routes(cluster.app.door))
    try:
        key = await cluster.put_key(tenant="acme", scopes=("generate", "admin"))
        await server.start("127.0.0.1:0")
        await until(lambda: len(cluster.app.directory.api_keys) > 1)
        yield Front(cluster, server, key)
        await cluster.at_rest()
    finally:
        await server.stop(0.0)
        await cluster.stop()


def request_bytes(path: str, body: bytes, key: str, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"authorization: Bearer {key}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
