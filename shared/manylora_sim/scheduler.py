"""`python -m manylora_sim.scheduler`: a scheduler that may decide as others do, to be compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manylora_scheduler.__main__ import run
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.process.config import setting
from manylora_shared.process.main import App, Parts


@dataclass(frozen=True, kw_only=True)
class ComparedSchedulerConfig(SchedulerConfig):
    """Scheduler that may decide as others do, for tests and benchmarks."""

    order: Literal["fair", "arrival"] = setting("fair", "arrival: first come, first served, whoever it is")
    overload: bool = setting(True, "give up work under overload; off: everything waits")


async def build(config: ComparedSchedulerConfig, parts: Parts) -> App:
    from manylora_scheduler.app import SchedulerApp  # once it is known whether it is to find compiled modules

    return SchedulerApp(
        config,
        transport=parts.transport,
        store=parts.store,
        telemetry=parts.telemetry,
        rng=parts.rng,
        peer_secret=parts.peer_secret,
        order=config.order,
        overload=config.overload,
    )


if __name__ == "__main__":
    run(ComparedSchedulerConfig, build)
