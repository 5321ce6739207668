"""Bundles of calls, to the server that runs them, and of answers, to the client that reads them; and a status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from manylora.v1 import bundle_pb2, worker_pb2
from manylora_shared.errors import Code
from manylora_shared.transport.base import Service
from manylora_shared.transport.bundles.server import BundleServer
from manylora_shared.transport.handling import parse_request
from manylora_shared.transport.status import decode_error, encode_details
from manylora_worker.serving.wire import engine_request

from tests.fuzz.harness import Harness
from tests.fuzz.parsers.execute import MODEL

_WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class _Call:
    metadata: ClassVar[dict[str, str]] = {}
    peer = "peer"

    def time_remaining(self) -> None:
        return None


async def _execute(request: worker_pb2.ExecuteRequest, call: Any) -> AsyncIterator[worker_pb2.ExecuteResponse]:
    engine_request(request, MODEL)
    yield worker_pb2.ExecuteResponse()


async def _other(request: Any, call: Any) -> None:
    raise AssertionError("no such call is bundled")


async def _carried(message: bundle_pb2.CallBundle) -> None:
    handlers = {method.name: _other for method in _WORKER.methods} | {"Execute": _execute}
    server = BundleServer([Service(_WORKER, handlers)])

    async def bundles() -> AsyncIterator[bundle_pb2.CallBundle]:
        yield message
        for _ in range(5):
            await asyncio.sleep(0)

    (carry,) = server.service().handlers.values()
    async for answer in carry(bundles(), _Call()):
        for part in answer.parts:
            codes = (Code.OK, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
            assert part.WhichOneof("what") != "end" or part.end.code in codes, part


def run(data: bytes) -> None:
    encode_details(decode_error(Code.INVALID_ARGUMENT, "x", data))
    message = parse_request(bundle_pb2.CallBundle, data)
    assert isinstance(message, bundle_pb2.CallBundle)
    asyncio.run(_carried(message))


HARNESS = Harness(run)
