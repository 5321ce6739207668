"""The secret by which services know one another. It stands in a file that all of them have, and nowhere else.

Calls show it in their metadata; one without it ends with UNAUTHENTICATED before anything of it is read.
"""

from __future__ import annotations

import functools
import hmac
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from google.protobuf.message import Message

from manylora_shared.errors import Unauthenticated
from manylora_shared.metadata import PEER_KEY
from manylora_shared.telemetry.logs import hide
from manylora_shared.transport.base import Channel, Method, Server, ServerCall, Service, Stream, Transport, methods_of

MIN_CHARS = 32
_MAX_BYTES = 4096


class PeerSecret:
    def __init__(self, value: str) -> None:
        """Raises ValueError where it is none."""
        if len(value) < MIN_CHARS or not all("!" <= char <= "~" for char in value):
            raise ValueError(
                f"a secret of services has at least {MIN_CHARS} printable characters of ASCII, without spaces"
            )
        self._value = value
        hide(value)

    def __repr__(self) -> str:
        return "PeerSecret()"

    @classmethod
    def of_file(cls, path: Path, getrandbits: Callable[[int], int]) -> Self:
        """Makes the file where there is none. Raises OSError, or ValueError where it holds no secret."""
        if not path.exists():
            make_secret(path, f"{getrandbits(256):064x}\n")
        try:
            return cls(read_secret(path))
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None

    def metadata(self) -> dict[str, str]:
        return {PEER_KEY: self._value}

    def sign(self, data: bytes) -> bytes:
        """What only a service of this cluster can have made; the secret is not told by it."""
        return hmac.digest(self._value.encode(), b"manylora-signed-v1\0" + data, "sha256")

    def is_shown(self, call: ServerCall) -> bool:
        shown = call.metadata.get(PEER_KEY, "")
        return hmac.compare_digest(shown.encode(), self._value.encode())

    def check(self, call: ServerCall) -> None:
        """Raises Unauthenticated."""
        if not self.is_shown(call):
            raise Unauthenticated("only services of this cluster may call this; all have one --peer-secret-file")


def read_secret(path: Path) -> str:
    """A file's one line. Raises OSError where it cannot be read, or where anybody on the machine may."""
    with path.open(encoding="utf-8", errors="replace") as file:
        if os.fstat(file.fileno()).st_mode & 0o007:
            raise PermissionError(f"{path}: everybody on this machine may read it; its mode must be 0600 or 0640")
        return file.read(_MAX_BYTES).strip()


def make_secret(path: Path, text: str) -> None:
    """Whole or not at all; of several that make it at the same time, one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # of mode 0600
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another service was first
    finally:
        os.unlink(draft)


def guarded(service: Service, secret: PeerSecret) -> Service:
    methods = methods_of(service.descriptor)
    return Service(
        service.descriptor,
        {name: _guard(handler, methods[name], secret) for name, handler in service.handlers.items()},
        check=secret.check,
    )


def _guard(handler: Callable[..., Any], method: Method, secret: PeerSecret) -> Callable[..., Any]:
    if method.server_streaming:

        @functools.wraps(handler)
        def stream(request: Any, call: ServerCall) -> AsyncIterator[Any]:
            secret.check(call)
            answers: AsyncIterator[Any] = handler(request, call)
            return answers

        return stream

    @functools.wraps(handler)
    async def unary(request: Any, call: ServerCall) -> Any:
        secret.check(call)
        return await handler(request, call)

    return unary


class PeerTransport:
    """A transport whose calls show the secret."""

    def __init__(self, transport: Transport, secret: PeerSecret) -> None:
        self._transport = transport
        self._secret = secret

    async def serve(self, address: str, services: Sequence[Service]) -> Server:
        return await self._transport.serve(address, services)

    def connect(self, address: str) -> Channel:
        return _PeerChannel(self._transport.connect(address), self._secret)


class _PeerChannel:
    def __init__(self, channel: Channel, secret: PeerSecret) -> None:
        self._channel = channel
        self._secret = secret

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        return await self._channel.call(method, request, timeout=timeout, metadata=self._with_secret(metadata))

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        return self._channel.stream(method, request, timeout=timeout, metadata=self._with_secret(metadata))

    async def close(self) -> None:
        await self._channel.close()

    def _with_secret(self, metadata: Mapping[str, str] | None) -> dict[str, str]:
        return {**(metadata or {}), **self._secret.metadata()}
