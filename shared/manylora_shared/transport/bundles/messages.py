"""Many calls over one stream (docs/decisions/0027): what all of them have to say at a time goes as one message."""

# A `BundleChannel` carries calls with one request and a stream of responses over one `Carry` stream to a
# `BundleServer`, which runs them by their own handlers. A server sends no more responses than its caller gave credit
# for: `WINDOW`, and as many again as were read. Of bundles it has `AHEAD` under way: what else it has to say waits, and
# goes with the next one. gRPC itself would take them one by one for as long as its buffers last, and a caller whose
# event loop is busy would read what was said seconds ago. When the stream breaks, all of its calls end with its status.

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
AHEAD = 4  # bundles
_MAX_BUNDLE_BYTES = 256 * 1024
MAX_PART_BYTES = MAX_MESSAGE_BYTES - 64  # a bundle of one part is a message that the other side takes


def bundled_methods(services: Iterable[ServiceDescriptor]) -> dict[str, Method]:
    found = [method for service in services for method in methods_of(service).values()]
    return {method.path: method for method in found if method.server_streaming and not method.client_streaming}


class Outgoing(Generic[PartT]):
    """For one writer."""

    def __init__(self) -> None:
        self._parts: collections.deque[PartT] = collections.deque()
        self._is_closed = False
        self._news = asyncio.Event()

    def put(self, part: PartT) -> None:
        if not self._is_closed:
            self._parts.append(part)
            self._news.set()

    def close(self) -> None:
        self._is_closed = True
        self._news.set()

    async def next(self) -> list[PartT] | None:
        """As much as a bundle takes; None: nothing follows."""
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
