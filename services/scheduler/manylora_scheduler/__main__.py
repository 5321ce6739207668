"""`python -m manylora_scheduler`: a SchedulerApp over gRPC and etcd, until SIGTERM or SIGINT."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

import manylora_shared.transport.grpc_polling  # noqa: F401  before anything imports grpc
from manylora_shared.process import compiled
from manylora_shared.process import loop as service_loop
from manylora_shared.process.config import load
from manylora_shared.process.heap import collect_seldom
from manylora_shared.process.last_resort import LastResort
from manylora_shared.process.main import App, Parts, serve
from manylora_shared.telemetry import logs

from manylora_scheduler.config import SchedulerConfig

_LOG = logging.getLogger("manylora_scheduler")
C = TypeVar("C", bound=SchedulerConfig)


async def build(config: SchedulerConfig, parts: Parts) -> App:
    from manylora_scheduler.app import SchedulerApp  # once it is known whether it is to find compiled modules

    return SchedulerApp(
        config,
        transport=parts.transport,
        store=parts.store,
        telemetry=parts.telemetry,
        rng=parts.rng,
        peer_secret=parts.peer_secret,
    )


def main() -> None:
    run(SchedulerConfig, build)


def run(kind: type[C], build: Callable[[C, Parts], Awaitable[App]]) -> NoReturn:
    config = load(kind)
    logs.setup("scheduler", config.log_level, instance_id=config.scheduler_id)
    collect_seldom()
    why_not = compiled.use()
    if why_not:
        _LOG.info("decisions are made by interpreted code", extra=logs.fields(why=why_not))
    else:
        _LOG.info("decisions are made by compiled code")
    try:
        was_told = service_loop.run(
            serve(
                "scheduler",
                config,
                functools.partial(build, config),
                instance_id=config.scheduler_id,
                last_resort=LastResort(),
            )
        )
    except (OSError, ValueError) as e:
        _LOG.error("the scheduler cannot run: %s", e)
        sys.exit(1)
    sys.exit(0 if was_told else 1)


if __name__ == "__main__":
    main()
