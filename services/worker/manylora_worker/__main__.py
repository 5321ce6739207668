"""`python -m manylora_worker`. Ends with 0 after a signal, 1 where it cannot go on, 2 on wrong settings."""

from __future__ import annotations

import functools
import logging
import random
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import manylora_shared.transport.grpc_polling  # noqa: F401  before anything imports grpc
from manylora_shared.process import loop as service_loop
from manylora_shared.process.clock import SystemClock
from manylora_shared.process.config import load
from manylora_shared.process.last_resort import SILENCE_S, LastResort
from manylora_shared.process.main import Parts, look_for_etcd, serve
from manylora_shared.telemetry import logs
from manylora_shared.transport.bundles.server import UnbundlingTransport

from manylora_worker.app import WorkerApp
from manylora_worker.config import WorkerConfig
from manylora_worker.hosting.engine import C, EngineBuilder, host
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.kinds.api import FarBackend
from manylora_worker.models.parts import EngineParts

_LOG = logging.getLogger("manylora_worker")
_SILENCE = 2.0  # of a whole process, in times of an engine's


async def build(config: WorkerConfig, runtime: Runtime, engine: EngineParts, parts: Parts) -> WorkerApp:
    return WorkerApp(
        config,
        transport=UnbundlingTransport(parts.transport),
        store=parts.store,
        runtime=runtime,
        validate=engine.validator,
        constraints=engine.constraints,
        is_near=engine.backend.is_near if isinstance(engine.backend, FarBackend) else lambda uid: True,
        keyring=engine.keyring,
        telemetry=parts.telemetry,
        rng=parts.rng,
        peer_secret=parts.peer_secret,
        started_unix_s=SystemClock().now_unix_s(),
    )


def build_torch_engine(config: WorkerConfig, notify: Callable[[], None]) -> EngineParts:
    from manylora_worker.models.build import build_engine  # imports torch, which takes seconds

    return build_engine(config, notify)


def main() -> None:
    run(WorkerConfig, build_torch_engine)


def run(kind: type[C], build_engine: EngineBuilder[C]) -> NoReturn:
    config = load(kind)
    logs.setup("worker", config.log_level, instance_id=config.worker_id)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # while the model is loaded there is nothing to end in order
    try:
        config.peer_secret(random.SystemRandom().getrandbits)
        service_loop.run(look_for_etcd(config))  # before the model is loaded, which takes minutes
        runtime, engine = host(config, build_engine)
        build_app = functools.partial(build, config, runtime, engine)
        serving = serve(
            "worker",
            config,
            build_app,
            instance_id=config.worker_id,
            last_resort=LastResort(max(SILENCE_S, _SILENCE * config.stall_s) if config.stall_s else 0.0),
        )
        was_told = service_loop.run(serving)
    except (OSError, ValueError) as e:
        _LOG.error("the worker cannot run: %s", e)
        sys.exit(1)
    sys.exit(0 if was_told else 1)


if __name__ == "__main__":
    main()
