"""`python -m manylora_sim.scheduler`: a scheduler as it is, or without what it is to be compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manylora_scheduler.__main__ import run
from manylora_scheduler.config import SchedulerConfig
from manylora_shared.process.main import App, Parts


@dataclass(frozen=True)
class ComparedSchedulerConfig(SchedulerConfig):
    """Scheduler that may decide as others do, for tests and benchmarks."""

    order: Literal["fair", "arrival"] = field(
        default="fair", metadata={"help": "arrival: first come, first served, with no regard to tenants"}
    )
    overload: bool = field(default=True, metadata={"help": "give up work under overload; off: everything waits"})


async def build(config: ComparedSchedulerConfig, parts: Parts) -> App:
    from manylora_scheduler.app import SchedulerApp  # once it is known whether it is to find compiled modules

    return SchedulerApp(
        config,
        transport=parts.transport,
        store=parts.store,
        telemetry=parts.telemetry,
        rng=parts.rng,
        order=config.order,
        overload=config.overload,
    )


if __name__ == "__main__":
    run(ComparedSchedulerConfig, build)
