"""Issuers' keys by file and URL: rotated, missing, away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from manylora_router.guard.tokens import Issuer
from manylora_router.links import token_keys
from manylora_router.links.token_keys import TokenKeys, load_issuers
from test_tokens import PRIVATE, PUBLIC


def document(*kids: str) -> bytes:
    keys = []
    for kid in kids:
        algorithm = jwt.get_algorithm_by_name(PUBLIC[kid].algorithm_name)
        keys.append({**algorithm.to_jwk(PRIVATE[kid].public_key(), as_dict=True), "kid": kid, "use": "sig"})
    return json.dumps({"keys": [*keys, {"kty": "unheard-of", "kid": "x"}]}).encode()


def issuer(jwks: str) -> Issuer:
    return Issuer(issuer="https://idp", audience="manylora", jwks=jwks)


@contextlib.asynccontextmanager
async def running(keys: TokenKeys) -> AsyncIterator[None]:
    task = asyncio.create_task(keys.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_keys, "FILE_REFRESH_S", 0.02)
    path = tmp_path / "keys.json"
    path.write_bytes(document("e"))
    source = issuer(str(path))
    keys = TokenKeys([source])
    assert keys.key_of(source, "e") == "asked"
    async with running(keys):
        await until(lambda: isinstance(keys.key_of(source, "e"), jwt.PyJWK))
        assert isinstance(keys.key_of(source, None), jwt.PyJWK)
        assert keys.key_of(source, "r") == "unknown"
        path.write_bytes(document("e", "r"))
        await until(lambda: isinstance(keys.key_of(source, "r"), jwt.PyJWK))
        path.write_bytes(b"{")
        await asyncio.sleep(0.1)
        assert isinstance(keys.key_of(source, "e"), jwt.PyJWK)
        path.write_bytes(document("r"))
        await until(lambda: keys.key_of(source, "e") == "unknown")


async def test_a_missing_key_is_fetched_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    served, asked = [document("e")], 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        keys.key_of(source, "a")  # it is asked for while they are read
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(served[0]), served[0]))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    source = issuer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys")
    keys = TokenKeys([source])
    async with server, running(keys):
        await until(lambda: isinstance(keys.key_of(source, "e"), jwt.PyJWK))
        served[0] = document("r")
        for _ in range(100):
            assert keys.key_of(source, "r") == "unknown"
        await asyncio.sleep(0.05)
        assert asked == 1
        monkeypatch.setattr(token_keys, "FLOOR_S", 0.0)
        assert keys.key_of(source, "r") == "asked"
        await until(lambda: isinstance(keys.key_of(source, "r"), jwt.PyJWK))
        assert asked == 2
        server.close()
        assert keys.key_of(source, "e") == "asked"
        await asyncio.sleep(0.1)
        assert isinstance(keys.key_of(source, "r"), jwt.PyJWK), "the last keys stay while it is away"


def test_a_file_of_issuers_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "issuers.yaml"
    for text in ("issuers: [", "issuers: []"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"issuers\.yaml: "):
            load_issuers(path)
