"""`python -m tests.sim.decisions [FOLDER]`: what is decided, as a JSON object of digests, in a process of its own.

By the compiled modules in FOLDER, or, without it, by the sources.

    seed N   a run of the simulated cluster under faults, and what became of each call
    grants   what the core sends in a backlog so long that flows lie in buckets
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from manylora_shared.process import compiled

SEEDS = (3, 7, 16, 19, 25)
FLOWS = 600
WORKERS = 50
DEPTH = 8
ROUNDS = 3000


def seed(number: int) -> list[str]:
    from tests.sim.test_cluster import play

    played = play(number)
    return [played.digest, *(call.describe() for call in played.result.calls)]


def grants() -> list[str]:
    from manylora_scheduler.core.events import Command

    from bench.scheduler import Cluster

    sent: list[str] = []

    class Noting(Cluster):
        def receive(self, commands: list[Command]) -> list[Command]:  # type: ignore[override]
            sent.extend(map(repr, commands))
            return super().receive(commands)  # type: ignore[return-value]

    world = Noting(FLOWS, WORKERS, DEPTH, seed=1)
    for _ in range(ROUNDS):
        world.round(1)
    world.core.check_invariants()
    assert len(sent) > ROUNDS, "too little was decided to tell anything"
    return sent


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main() -> None:
    sys.argv[1:], folders = ["--interpreted"], sys.argv[1:]  # bench.scheduler does not choose for itself
    for folder in folders:
        why_not = compiled.use(Path(folder))
        assert not why_not, why_not
    decided = {f"seed {number}": digest(seed(number)) for number in SEEDS} | {"grants": digest(grants())}
    import manylora_scheduler.core.core

    print(json.dumps({"core": manylora_scheduler.core.core.__file__, **decided}))


if __name__ == "__main__":
    main()
