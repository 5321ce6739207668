"""One channel over several routers. Owns which one calls go to: the same, until it fails to take a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from manylora_shared.errors import Code, RpcError
from manylora_shared.transport.base import Channel, Method, Stream, Transport
from manylora_shared.transport.grpc_transport import UNREACHABLE


def addresses(server: str) -> list[str]:
    """Of `HOST:PORT` or several, comma between."""
    return [address.strip() for address in server.split(",") if address.strip()] or [server]


def connect(transport: Transport, server: str) -> Channel:
    channels = [transport.connect(address) for address in addresses(server)]
    return channels[0] if len(channels) == 1 else RoutersChannel(channels)


class RoutersChannel:
    """Calls go on to the next router behind one that fails with UNAVAILABLE; what none took is sent once to each. What
    one took and did not finish is the caller's to repeat: the next attempt goes to the next router.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._current = 0

    def __len__(self) -> int:
        return len(self._channels)

    def behind(self, hops: int) -> Channel:
        """Of the router so many behind the one that calls go to."""
        return self._channels[(self._current + hops) % len(self._channels)]

    async def call(
        self,
        method: Method,
        request: Message,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        left = len(self._channels)
        while True:
            left -= 1
            index = self._current
            try:
                return await self._channels[index].call(method, request, timeout=timeout, metadata=metadata)
            except RpcError as error:
                self._failed(index, error)
                if error.label != UNREACHABLE or not left:
                    raise

    def stream(
        self,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        index = self._current
        stream = self._channels[index].stream(method, request, timeout=timeout, metadata=metadata)
        return _TellingStream(stream, lambda error: self._failed(index, error))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def _failed(self, index: int, error: RpcError) -> None:
        if error.code is Code.UNAVAILABLE and index == self._current:
            self._current = (index + 1) % len(self._channels)


class _TellingStream:
    def __init__(self, stream: Stream, on_failure: Callable[[RpcError], None]) -> None:
        self._stream = stream
        self._on_failure = on_failure

    async def read(self) -> Any:
        try:
            return await self._stream.read()
        except RpcError as error:
            self._on_failure(error)
            raise

    @property
    def has_message(self) -> bool:
        return self._stream.has_message

    async def write(self, message: Message) -> None:
        try:
            await self._stream.write(message)
        except RpcError as error:
            self._on_failure(error)
            raise

    async def close_send(self) -> None:
        await self._stream.close_send()

    def cancel(self) -> None:
        self._stream.cancel()
