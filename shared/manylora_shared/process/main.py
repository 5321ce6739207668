"""The life of a service's process: its parts, its signals, its ready line, and its end in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store, StoreUnavailable
from manylora_shared.coordination.peers import PeerSecret
from manylora_shared.process.heap import freeze_started
from manylora_shared.process.last_resort import LastResort
from manylora_shared.process.settings import ServiceSettings
from manylora_shared.telemetry import Metrics, Telemetry
from manylora_shared.telemetry.metrics_server import MetricsServer
from manylora_shared.transport.base import Transport
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_shared.transport.tls import Tls

_LOG = logging.getLogger(__name__)
_COUNT_EVERY_S = 2.0
_RENEW_EVERY_S = 2.0  # between two looks at the certificates' files
_SAY_EVERY_S = 10.0


class App(Protocol):
    @property
    def instance_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Where others dial it."""

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Where it serves besides, by protocol."""

    async def start(self) -> None:
        """Returns when it serves."""

    async def failed(self) -> str | None:
        """Waits until it cannot go on. Returns why, or raises."""

    async def told_to_leave(self) -> None:
        """Waits until a caller wants it to end in order."""

    async def stop(self) -> None:
        """Ends in order; also what was started in part."""


@dataclass(frozen=True)
class Parts:
    """What an App is built from, and does not close."""

    transport: Transport
    store: Store
    telemetry: Telemetry
    rng: random.Random
    tls: Tls | None
    peer_secret: PeerSecret


async def look_for_etcd(settings: ServiceSettings) -> None:
    """Says it where none answers: for what takes long before `serve`."""
    store, _ = settings.etcd_store()
    try:
        await _answers(store, settings.etcd)
    finally:
        await store.close()


async def serve(
    service: str,
    settings: ServiceSettings,
    build: Callable[[Parts], Awaitable[App]],
    *,
    instance_id: str = "",
    acceptors: int = 1,
    asks_clients: bool = True,
    last_resort: LastResort | None = None,
) -> bool:
    """Runs a service until SIGTERM, SIGINT or a call ends it. Returns whether it was told to end.

    Args:
        instance_id: the configured one; empty: none is.
        acceptors: see GrpcTransport.
        asks_clients: whether who calls must show a certificate, where --tls-ca says whose.
        last_resort: of a process that does nothing else.
    """
    if last_resort is not None:
        last_resort.start()
    rng = random.SystemRandom()
    peer_secret = settings.peer_secret(rng.getrandbits)
    files = settings.tls_files
    tls = Tls(files, asks_clients=asks_clients and files.ca is not None) if files is not None else None
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    stop_wanted = asyncio.create_task(stopping.wait(), name="stop signal")
    async with contextlib.AsyncExitStack() as ending:
        ending.callback(stop_wanted.cancel)
        store, etcd_tls = settings.etcd_store()
        telemetry = Telemetry(
            service,
            instance_id=instance_id,
            otlp_endpoint=settings.otlp_endpoint,
            trace_file=settings.trace_file,
            has_exposition=settings.has_exposition,
        )
        ending.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        more: dict[str, str] = {}
        if settings.metrics_listen:
            metrics = MetricsServer(telemetry, settings.metrics_listen, tls.server_context() if tls else None)
            ending.push_async_callback(asyncio.to_thread, metrics.close)
            more["metrics"] = metrics.address
        ending.push_async_callback(store.close)
        silence = asyncio.create_task(_say_while_silent(store, settings.etcd), name="etcd's silence")
        ending.callback(silence.cancel)
        counting = asyncio.create_task(_count_tasks(telemetry), name="tasks")
        ending.callback(counting.cancel)
        if certified := [each for each in (tls, etcd_tls) if each is not None]:
            renewing = asyncio.create_task(_renew(certified, telemetry), name="certificates")
            ending.callback(renewing.cancel)
        transport = GrpcTransport(acceptors=acceptors, tls=tls)
        app = await build(Parts(transport, store, telemetry, rng, tls, peer_secret))
        ending.push_async_callback(app.stop)
        return await _until_stopped(service, app, more, stop_wanted, last_resort)


async def _renew(all_files: Sequence[Tls], telemetry: Telemetry) -> None:
    while True:
        ends = [end for files in all_files if (end := files.expires_unix_s) is not None]
        if ends:
            telemetry.gauge(Metrics.CERTIFICATE_EXPIRY, min(ends))
        await asyncio.sleep(_RENEW_EVERY_S)
        for files in all_files:
            await asyncio.to_thread(files.refresh)


async def _count_tasks(telemetry: Telemetry) -> None:
    while True:
        telemetry.gauge(Metrics.TASKS, len(asyncio.all_tasks()))
        await asyncio.sleep(_COUNT_EVERY_S)


async def _say_while_silent(store: Store, endpoints: str) -> None:
    while True:
        if await _answers(store, endpoints):
            return
        await asyncio.sleep(_SAY_EVERY_S)


async def _answers(store: Store, endpoints: str) -> bool:
    try:
        await store.get(keys.SCHEDULER_LEADER)
    except StoreUnavailable as e:
        _LOG.error("no etcd answers at %s (--etcd); it is asked again until one does: %s", endpoints, e.message)
        return False
    return True


async def _until_stopped(
    service: str,
    app: App,
    more: Mapping[str, str],
    stop_wanted: asyncio.Task[bool],
    last_resort: LastResort | None,
) -> bool:
    starting = asyncio.create_task(app.start(), name="start")
    await asyncio.wait([starting, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return True
    starting.result()
    freeze_started()
    told = {"ready": True, "service": service, "id": app.instance_id, "address": app.address}
    print(json.dumps({**told, **app.endpoints, **more}), flush=True)
    failing = asyncio.create_task(app.failed(), name="failure")
    leaving = asyncio.create_task(app.told_to_leave(), name="leave")
    await asyncio.wait([failing, leaving, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if failing.done():
        if last_resort is not None:
            last_resort.end_soon()
        _LOG.critical("the %s cannot go on: %s", service, failing.result())
        return False
    failing.cancel()
    return True
