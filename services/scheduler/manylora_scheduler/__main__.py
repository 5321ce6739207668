"""`python -m manylora_scheduler`: a SchedulerApp over gRPC and etcd, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys

from manylora_shared import logs
from manylora_shared.config import is_loopback, load
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.heap import freeze_started
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.grpc_transport import GrpcTransport

from manylora_scheduler.app import SchedulerApp
from manylora_scheduler.config import SchedulerConfig

_LOG = logging.getLogger("manylora_scheduler")


async def run(config: SchedulerConfig) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    store = EtcdStore(config.etcd.split(","))
    telemetry = Telemetry(
        "scheduler", instance_id=config.scheduler_id, otlp_endpoint=config.otlp_endpoint, trace_file=config.trace_file
    )
    app = SchedulerApp(config, transport=GrpcTransport(), store=store, telemetry=telemetry, rng=random.SystemRandom())
    stop_wanted = asyncio.create_task(stopping.wait(), name="stop signal")
    try:
        starting = asyncio.create_task(app.start(), name="start")
        await asyncio.wait([starting, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            freeze_started()
            ready = {"ready": True, "service": "scheduler", "id": app.scheduler_id, "address": app.address}
            print(json.dumps(ready), flush=True)
            failing = asyncio.create_task(app.failed(), name="failure")
            await asyncio.wait([failing, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
            failing.cancel()
        else:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
    finally:
        stop_wanted.cancel()
        await app.stop()
        await store.close()
        await asyncio.to_thread(telemetry.shutdown)


def main() -> None:
    config = load(SchedulerConfig)
    logs.setup("scheduler", config.log_level, instance_id=config.scheduler_id)
    if not is_loopback(config.listen):
        _LOG.warning("--insecure: %s can be reached by others and callers are not authenticated", config.listen)
    try:
        asyncio.run(run(config))
    except (OSError, ValueError) as e:
        _LOG.error("the scheduler cannot run: %s", e)
        sys.exit(1)


if __name__ == "__main__":
    main()
