"""A fake router on a real port, and the command line in processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from manylora_shared.transport.grpc_transport import GrpcTransport

from tests.cli import forked
from tests.cli.fake_server import FakeRouter


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
async def address(router: FakeRouter) -> AsyncIterator[str]:
    server = await GrpcTransport().serve("127.0.0.1:0", router.services())
    server.set_serving(True)
    yield server.address
    await server.stop(0)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody will while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The only thing on stdout."""
        return json.loads(self.stdout)


class Manylora(Protocol):
    async def __call__(self, *arguments: str, stdin: str | bytes = "") -> Outcome: ...


@pytest.fixture
def manylora(address: str, tmp_path_factory: pytest.TempPathFactory) -> Manylora:
    """Runs the command against the fake router, whose address it has from the environment."""

    async def call(*arguments: str, stdin: str | bytes = "") -> Outcome:
        folder = tmp_path_factory.mktemp("streams")
        (folder / "stdin").write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        environment = {**os.environ, "MANYLORA_SERVER": address, "NO_COLOR": "1", "COLUMNS": "200"}
        process = forked.start(arguments, environment, folder)
        await asyncio.to_thread(process.join)
        exit_code = process.exitcode
        process.close()
        stdout, stderr = ((folder / name).read_bytes().decode() for name in ("stdout", "stderr"))
        return Outcome(exit_code, stdout, stderr)

    return call


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    """Two files that look like an adapter's; the weights are larger than one chunk."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 4096 * 2 + b"tail")
    return folder
