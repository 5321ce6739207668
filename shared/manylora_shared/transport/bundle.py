"""Many calls over one stream: what all of them have to say at a time goes as one message.

A message costs gRPC in Python some tenths of a millisecond on either side, whatever is in it, and a worker's step makes
tokens for dozens of calls at once. So a `BundleChannel` carries calls that have one request and a stream of responses
over one `Carry` stream (bundle.proto) to a `BundleServer`, which runs them by the very handlers that would answer them
one by one. Either side writes when it can, and then all that has gathered since. Every other call goes as it is.

What a caller sees is the same but for one thing: a call is not a stream of gRPC's, so it has no flow control there.
Instead its server sends no more responses than the caller has given it credit for (`WINDOW`, and as many again as were
read). Calls end each by itself, with their own status; when the stream breaks, all of them end with its status.

Both ends belong to one event loop each.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable
from typing import Generic, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from manylora.v1 import bundle_pb2

from manylora_shared.transport.base import Method, methods_of
from manylora_shared.transport.handling import MAX_MESSAGE_BYTES

DESCRIPTOR = bundle_pb2.DESCRIPTOR.services_by_name["BundleService"]
CARRY = methods_of(DESCRIPTOR)["Carry"]

PartT = TypeVar("PartT", bundle_pb2.CallPart, bundle_pb2.AnswerPart)

WINDOW = 32
"""Responses of a call that may be under way or unread."""
_MAX_BUNDLE_BYTES = 256 * 1024
"""A bundle takes no further part once it has so much."""
MAX_PART_BYTES = MAX_MESSAGE_BYTES - 64
"""So that a bundle of one part is a message that the other side takes."""


def bundled_methods(services: Iterable[ServiceDescriptor]) -> dict[str, Method]:
    """By path the methods with one request and a stream of responses."""
    found = [method for service in services for method in methods_of(service).values()]
    return {method.path: method for method in found if method.server_streaming and not method.client_streaming}


class Outgoing(Generic[PartT]):
    """Parts on their way out, for one writer."""

    def __init__(self) -> None:
        self._parts: collections.deque[PartT] = collections.deque()
        self._is_closed = False
        self._news = asyncio.Event()

    def put(self, part: PartT) -> None:
        """After `close`: nothing."""
        if not self._is_closed:
            self._parts.append(part)
            self._news.set()

    def close(self) -> None:
        """Nothing follows what is there."""
        self._is_closed = True
        self._news.set()

    async def next(self) -> list[PartT] | None:
        """What has gathered, at least one part and as much as a bundle takes; None: nothing follows."""
        while not self._parts:
            if self._is_closed:
                return None
            self._news.clear()
            await self._news.wait()
        parts, num_bytes = [self._parts.popleft()], 0
        while self._parts:
            num_bytes += parts[-1].ByteSize()
            if num_bytes + self._parts[0].ByteSize() > _MAX_BUNDLE_BYTES:
                break
            parts.append(self._parts.popleft())
        return parts
