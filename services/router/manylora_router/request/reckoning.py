"""What requests are charged that were cut short: what their workers say that they computed, whoever cut them short.

Owns the requests whose worker has not said it yet; their leases stand until then.
"""

from __future__ import annotations

import asyncio
import logging

from manylora.v1 import worker_pb2
from manylora_shared.errors import RpcError
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Channel, methods_of

from manylora_router.links.channels import WorkerChannels
from manylora_router.request.token_lease import TokenLease

_LOG = logging.getLogger(__name__)
END_REQUEST = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["EndRequest"]
WORD_S = 10.0  # for a worker's word, which comes at its next token boundary


class Reckonings:
    def __init__(self, channels: WorkerChannels) -> None:
        self._channels = channels
        self._tasks: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, request_id: str, address: str, lease: TokenLease) -> None:
        """Settles `lease`, later."""
        channel = self._channels.acquire(address)
        task = asyncio.create_task(self._hear(request_id, channel, lease), name="reckoning")
        self._tasks[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[task]
            self._channels.release(address)
            lease.settle()
            if not task.cancelled():
                task.result()

        task.add_done_callback(ended)

    async def close(self) -> None:
        """What no worker has told of by now is settled without its word."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _hear(self, request_id: str, channel: Channel, lease: TokenLease) -> None:
        request = worker_pb2.EndRequestRequest(request_id=request_id)
        try:
            response = await channel.call(END_REQUEST, request, timeout=WORD_S)
        except RpcError as e:
            _LOG.info("a worker does not say what it computed", extra=fields(request=request_id, error=str(e)))
        else:
            lease.cut_short(response.finished)
