"""The ledger's rows on their way through NATS JetStream, where routers are far from the database.

A router publishes batches and has them acknowledged; `Forwarder`, near the database, puts them there and acknowledges
in its turn. Both may repeat: the database counts a request id once. Reading goes to the database itself. The one place
that needs nats-py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from manylora_shared.errors import ServiceUnavailable
from manylora_shared.ledger.row import COLUMNS, UsageRow
from manylora_shared.ledger.usage import Query, Sum
from manylora_shared.ledger_sinks.base import Page, Sink, SinkDown
from manylora_shared.telemetry.logs import fields

_LOG = logging.getLogger(__name__)
STREAM, SUBJECT, CONSUMER = "MANYLORA_USAGE", "manylora.usage", "manylora-ledger"
VERSION = 1
_ROWS = 100  # of a message: some 60 KiB, of the server's 1 MiB
_TIMEOUT_S = 5.0
_CALL_S = 30.0
_ACK_S = 60.0  # for the database to take a batch
_FETCHED = 20  # messages
_IDLE_S = 5.0
_EMPTY_S = 1.0  # so long nothing came: there is nothing
_PAUSE_S = 0.25
_MAX_PAUSE_S = 10.0
T = TypeVar("T")
_FAILURES = (nats.errors.Error, OSError, TimeoutError, asyncio.TimeoutError, ValueError)


def encoded(rows: Sequence[UsageRow]) -> bytes:
    told = {"version": VERSION, "columns": list(COLUMNS), "rows": [row.values() for row in rows]}
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def decoded(data: bytes) -> list[UsageRow]:
    """Raises ValueError."""
    match json.loads(data):
        case {"version": int(version), "columns": [*columns], "rows": [*rows]} if version <= VERSION:
            return [UsageRow.of(columns, values) for values in rows]
    raise ValueError("a message of the usage stream is not of this version")


async def _connected(url: str, on_loss: Callable[[], None]) -> Client:
    async def told(error: Exception | None = None) -> None:
        _LOG.debug("nats: %s", error)

    async def lost() -> None:
        on_loss()

    options: dict[str, Any] = {
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,  # at the beginning, too
        "reconnect_time_wait": 0.1,
        "connect_timeout": _TIMEOUT_S,
        "error_cb": told,
    }
    client = await nats.connect(url, name="manylora usage ledger", disconnected_cb=lost, closed_cb=lost, **options)
    stream = client.jetstream(timeout=_TIMEOUT_S)
    try:
        await stream.stream_info(STREAM)
    except NotFoundError:
        # A message goes when it is acknowledged; a full stream refuses new ones, and does not forget old ones.
        config = StreamConfig(STREAM, subjects=[SUBJECT], storage=StorageType.FILE)
        config.retention, config.discard = RetentionPolicy.WORK_QUEUE, DiscardPolicy.NEW
        await stream.add_stream(config)
    return client


class JetStreamSink:
    """kept: the sink behind, which is read. url: asked for each connection."""

    def __init__(self, url: Callable[[], str], kept: Sink) -> None:
        self._url = url
        self._kept = kept
        self._client: Client | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ledger-nats", daemon=True)
        self._thread.start()

    def put(self, rows: Sequence[UsageRow]) -> None:
        batches = [rows[first : first + _ROWS] for first in range(0, len(rows), _ROWS)]
        try:
            self._wait(self._publish([encoded(batch) for batch in batches]))
        except _FAILURES as e:
            raise SinkDown(f"the usage ledger's NATS: {e or type(e).__name__}", retry_after_s=1.0) from None

    def page(self, query: Query, after: str, limit: int) -> Page:
        return self._kept.page(query, after, limit)

    def sums(self, query: Query, by: Sequence[str]) -> list[Sum]:
        return self._kept.sums(query, by)

    def close(self) -> None:
        with contextlib.suppress(*_FAILURES):
            self._wait(self._closed())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._kept.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(_CALL_S)
        finally:
            asked.cancel()

    async def _publish(self, messages: Sequence[bytes]) -> None:
        try:
            if self._client is None or not self._client.is_connected:
                await self._closed()
                self._client = await _connected(self._url(), lambda: None)
            stream = self._client.jetstream(timeout=_TIMEOUT_S)
            for data in messages:
                headers = {"Nats-Msg-Id": hashlib.sha256(data).hexdigest()}
                await stream.publish(SUBJECT, data, timeout=_TIMEOUT_S, stream=STREAM, headers=headers)
        except BaseException:
            await self._closed()
            raise

    async def _closed(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class Forwarder:
    """From the stream to a sink, near the sink. Several may run."""

    def __init__(self, url: Callable[[], str], sink: Sink) -> None:
        self._url = url
        self._sink = sink
        self._is_told = False  # that something is away
        self.rows = 0  # put, again or not

    def close(self) -> None:
        self._sink.close()

    async def run(self, *, until_empty: bool = False) -> None:
        """For ever, whatever is away; `until_empty`: until nothing waits."""
        pause_s = _PAUSE_S
        while True:
            lost = asyncio.Event()
            client: Client | None = None
            try:
                client = await _connected(self._url(), lost.set)
                if await self._forward(client, lost, until_empty=until_empty):
                    return
                pause_s = _PAUSE_S
            except (*_FAILURES, ServiceUnavailable) as e:
                self._tell(e)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            finally:
                if client is not None:
                    await client.close()
            await asyncio.sleep(pause_s)

    async def _forward(self, client: Client, lost: asyncio.Event, *, until_empty: bool) -> bool:
        """True: nothing waits; False: the line is lost. Raises SinkDown."""
        config = ConsumerConfig(ack_wait=_ACK_S)
        waiting = await client.jetstream(timeout=_TIMEOUT_S).pull_subscribe(SUBJECT, CONSUMER, STREAM, config)
        while not lost.is_set():
            try:
                messages = await waiting.fetch(_FETCHED, timeout=_EMPTY_S if until_empty else _IDLE_S)
            except (TimeoutError, nats.errors.TimeoutError):
                if until_empty and (await waiting.consumer_info()).num_ack_pending == 0:
                    return True
                continue
            await self._put(messages)
        return False

    async def _put(self, messages: Sequence[Msg]) -> None:
        rows: list[UsageRow] = []
        taken: list[Msg] = []
        for message in messages:
            try:
                rows += decoded(message.data)
            except (ValueError, TypeError) as e:
                _LOG.error("a message of the usage stream is left where it is: %s", e)
                await message.nak(delay=_ACK_S)
            else:
                taken.append(message)
        try:
            await asyncio.to_thread(self._sink.put, rows)
        except BaseException:
            for message in taken:
                await message.nak(delay=_EMPTY_S)
            raise
        for message in taken:
            await message.ack()
        self.rows += len(rows)
        if self._is_told:
            _LOG.info("usage rows are forwarded again", extra=fields(rows=len(rows)))
            self._is_told = False

    def _tell(self, error: Exception) -> None:
        if not self._is_told:
            _LOG.error("usage rows wait in the stream: %s", error or type(error).__name__)
        self._is_told = True
