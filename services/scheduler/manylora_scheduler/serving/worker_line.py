"""The leader's line to a worker: one Control stream, dialled again while the worker is a member of the pool.

Owns its task, its outbox and what the worker tells for the status alone. Turns reports into events and sends commands.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from manylora.v1 import worker_pb2
from manylora_shared.errors import Code, RpcError
from manylora_shared.ids import AdapterUid, TenantId, WorkerId
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Channel, Stream, Transport, methods_of

from manylora_scheduler.core.events import Event, WorkerDisconnected, WorkerReported
from manylora_scheduler.core.reports import Owner
from manylora_scheduler.serving.told import Told
from manylora_scheduler.serving.wire import worker_report

_LOG = logging.getLogger(__name__)
CONTROL = methods_of(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"])["Control"]

_SNAPSHOT_TIMEOUT_S = 3.0
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class WorkerLine:
    """life: of its record. hello: the first message of every stream. post: takes the events; called between awaits.
    outranked: called where the worker obeys another leader. failed: gets the exception that ended the line, which only
    a bug does.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        address: str,
        *,
        life: tuple[str, str, float],
        hello: worker_pb2.ControlHello,
        transport: Transport,
        post: Callable[[Event], None],
        rng: random.Random,
        outranked: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.address = address
        self.life = life
        self.told: Told | None = None  # while the stream is up
        self._worker_id = worker_id
        self._hello = hello
        self._transport = transport
        self._post = post
        self._rng = rng
        self._outbox: asyncio.Queue[worker_pb2.ControlCommand] | None = None
        self._outranked = outranked
        self._failed = failed
        self._task = asyncio.create_task(self._run(), name=f"control {worker_id}")
        self._task.add_done_callback(self._ended)

    def prefetch(self, adapter_uid: AdapterUid, tenant_id: TenantId) -> None:
        """A hint: dropped where there is no stream."""
        if self._outbox is not None:
            prefetch = worker_pb2.PrefetchAdapter(adapter_uid=adapter_uid, tenant_id=tenant_id)
            self._outbox.put_nowait(worker_pb2.ControlCommand(prefetch=prefetch))

    def dedicate(self, owner: Owner | None) -> None:
        """Where there is no stream, the next one's snapshot says what the worker is not told yet."""
        if self._outbox is not None:
            uid, tenant_id = owner or ("", "")
            dedicate = worker_pb2.Dedicate(adapter_uid=uid, tenant_id=tenant_id)
            self._outbox.put_nowait(worker_pb2.ControlCommand(dedicate=dedicate))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    async def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while True:
            try:
                await self._serve()
            except RpcError as e:
                context = fields(worker=self._worker_id, address=self.address, error=str(e))
                _LOG.warning("control stream ended", extra=context)
                if e.code is Code.FAILED_PRECONDITION:  # the worker's Unready: by a greater epoch
                    self._outranked()
            was_connected, self._outbox = self._outbox is not None, None
            self.told = None
            if was_connected:
                backoff_s = _MIN_BACKOFF_S
                self._post(WorkerDisconnected(self._worker_id))
            await asyncio.sleep(backoff_s * (0.5 + self._rng.random()))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _serve(self) -> None:
        """From hello to the end of one stream. Raises RpcError."""
        channel: Channel = self._transport.connect(self.address)
        stream: Stream | None = None
        writer: asyncio.Task[None] | None = None
        try:
            stream = channel.stream(CONTROL)
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                await stream.write(worker_pb2.ControlCommand(hello=self._hello))
                first = await stream.read()
            if first is None or not first.snapshot:
                raise RpcError(Code.INTERNAL, "the worker's first report is no snapshot")
            self._outbox = asyncio.Queue()
            writer = asyncio.create_task(
                self._write_all(stream, self._outbox), name=f"control writer {self._worker_id}"
            )
            _LOG.info("control stream is up", extra=fields(worker=self._worker_id, address=self.address))
            self.told = Told()
            self.told.take(first)
            self._post(WorkerReported(self._worker_id, worker_report(first)))
            while (report := await stream.read()) is not None:
                self.told.take(report)
                self._post(WorkerReported(self._worker_id, worker_report(report)))
        except TimeoutError:
            raise RpcError(Code.UNAVAILABLE, "the worker sent no snapshot in time") from None
        finally:
            if stream is not None:
                stream.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])
            await channel.close()

    async def _write_all(self, stream: Stream, outbox: asyncio.Queue[worker_pb2.ControlCommand]) -> None:
        try:
            while True:
                await stream.write(await outbox.get())
        except RpcError:
            return  # the reader gets the same end and reports it
