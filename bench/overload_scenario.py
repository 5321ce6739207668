"""What is offered to the model of overload: classes, callers and the cluster that they meet.

Callers are *open* (they come by a Poisson process, or in groups, whatever happens to them) or *closed* (so many
streams, each of which asks again as soon as its last request has ended or was refused).

All tenants have the same weight and, but for a `large` one, the same load, in the classes' mix. So at a load of 1 all
classes fit just so; at 3 with the mix of MIX, interactive work alone still fits, and little else does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from manylora_shared.ids import QosClass

from bench.overload_worker import CHUNK_TOKENS


@dataclass(frozen=True)
class ClassLoad:
    """What requests of a class are like."""

    part: float
    """Of the offered cost; of a closed loop's requests."""
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    patience_s: float
    """The caller's deadline."""

    def slot_steps(self) -> float:
        """Steps that a request has a slot for, on average."""
        return sum(self.output_tokens) / 2 + sum(self.prompt_tokens) / 2 / CHUNK_TOKENS


MIX: Mapping[QosClass, ClassLoad] = {
    QosClass.INTERACTIVE: ClassLoad(0.25, (20, 200), (20, 80), 20.0),
    QosClass.STANDARD: ClassLoad(0.3, (50, 400), (40, 160), 30.0),
    QosClass.BATCH: ClassLoad(0.45, (100, 800), (100, 400), 120.0),
}


@dataclass(frozen=True)
class Scenario:
    load: float
    """Offered, as a part of what all slots can do; from `begins_s` to `ends_s`, and `base_load` outside."""
    overload: bool = True
    base_load: float = 0.5
    begins_s: float = 10.0
    ends_s: float = 90.0
    measured_from_s: float = 30.0
    until_s: float = 90.0
    workers: int = 8
    slots: int = 16
    parked: int = 16
    """Sequences that a worker takes beyond its slots; 0: none, and who has a slot keeps it."""
    step_s: float = 0.02
    tenants: int = 12
    seed: int = 1
    mix: Mapping[QosClass, ClassLoad] = field(default_factory=lambda: MIX)
    group: int = 1
    """So many calls come at once, on average: 1 is a Poisson process."""
    large: float = 0.0
    """Part of all calls that is the first tenant's, besides its even part of the others."""
    flooder: bool = False
    """All of the load beyond `base_load` is one tenant's interactive requests."""
    streams: int = 0
    """Callers in a closed loop, instead of the open load; a class's part is then of requests."""
    retry_s: float = 0.003
    """What it takes a caller of a closed loop to ask again after a refusal."""
    heeds_hints: bool = False
    """Callers of a closed loop wait as long as a refusal says."""
    refusal_cost_s: float = 0.0
    """By so much a refusal delays each worker's next step: where callers, routers and workers share cores."""


def random_scenario(seed: int, load: float, *, overload: bool = True) -> Scenario:
    """A cluster and callers of any kind, by seed: the same at each load. Interactive work fits at three times the load,
    taking up to 84 % of all slots; callers come by a Poisson process or in groups; one tenant may have 30 % of all."""
    rng = random.Random(f"mix {seed}")
    interactive = rng.uniform(0.08, 0.28)
    standard = rng.uniform(0.1, 0.9) * (1 - interactive)

    def kind(part: float, log2_output: tuple[float, float], patience_s: float) -> ClassLoad:
        output, prompt = round(2 ** rng.uniform(*log2_output)), round(2 ** rng.uniform(4, 9))
        prompts = max(1, prompt // 3), 2 * prompt - prompt // 3
        return ClassLoad(part, prompts, (max(1, output // 3), 2 * output - output // 3), patience_s)

    mix = {
        QosClass.INTERACTIVE: kind(interactive, (4, 7), 20.0),
        QosClass.STANDARD: kind(standard, (5, 8), 30.0),
        QosClass.BATCH: kind(1 - interactive - standard, (6, 8.5), 120.0),
    }
    slots, workers = rng.choice((8, 16, 24, 32)), rng.choice((2, 4, 6, 8))
    return Scenario(
        load=load,
        overload=overload,
        mix=mix,
        slots=slots,
        parked=slots,
        workers=workers,
        step_s=rng.choice((0.01, 0.02, 0.04)),
        tenants=rng.choice((2, 3, 6, 12, 24, 48)),
        group=rng.choice((1, 1, 3, 6)),
        large=rng.choice((0.0, 0.0, 0.3)),
        seed=seed,
        measured_from_s=25.0,
        ends_s=70.0,
        until_s=70.0,
    )
