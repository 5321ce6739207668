"""`python -m manylora_worker`: a WorkerApp over an engine, gRPC and etcd, until SIGTERM or SIGINT.

Ends with 0 after a signal, with 1 where the worker cannot run or its engine has failed (who supervises it starts it
again), and with 2 on wrong settings.
"""

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

from manylora_worker import engines
from manylora_worker.app import WorkerApp
from manylora_worker.config import WorkerConfig
from manylora_worker.runtime import Runtime
from manylora_worker.validation import AdapterValidator

_LOG = logging.getLogger("manylora_worker")


async def run(config: WorkerConfig, runtime: Runtime, validator: AdapterValidator) -> bool:
    """Whether it ended because it was told to."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    stop_wanted = asyncio.create_task(stopping.wait(), name="stop signal")
    store = EtcdStore(config.etcd.split(","))
    telemetry = Telemetry(
        "worker", instance_id=config.worker_id, otlp_endpoint=config.otlp_endpoint, trace_file=config.trace_file
    )
    app = WorkerApp(
        config,
        transport=GrpcTransport(),
        store=store,
        runtime=runtime,
        validate=validator,
        telemetry=telemetry,
        rng=random.SystemRandom(),
    )
    try:
        return await _serve(app, stop_wanted)
    finally:
        stop_wanted.cancel()
        await app.stop()
        await store.close()
        await asyncio.to_thread(telemetry.shutdown)


async def _serve(app: WorkerApp, stop_wanted: asyncio.Task[bool]) -> bool:
    starting = asyncio.create_task(app.start(), name="start")
    await asyncio.wait([starting, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return True
    starting.result()
    freeze_started()
    print(json.dumps({"ready": True, "service": "worker", "id": app.worker_id, "address": app.address}), flush=True)
    failed = asyncio.create_task(app.wait_failed(), name="failure")
    await asyncio.wait([failed, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        _LOG.critical("the engine has failed: %s", failed.result())
        return False
    failed.cancel()
    return True


def main() -> None:
    config = load(WorkerConfig)
    logs.setup("worker", config.log_level, instance_id=config.worker_id)
    if not is_loopback(config.listen):
        _LOG.warning("--insecure: %s can be reached by others and callers are not authenticated", config.listen)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # while the model is loaded there is nothing to end in order
    try:
        was_told = asyncio.run(run(config, *engines.build(config)))
    except (OSError, ValueError) as e:
        _LOG.error("the worker cannot run: %s", e)
        sys.exit(1)
    sys.exit(0 if was_told else 1)


if __name__ == "__main__":
    main()
