"""Tokens a second of one answer with guesses by prompt lookup and without, by turns.

`repeats`: greedy answers of the model; a model of random weights soon repeats itself, which is the most that lookup can
gain. `sampled`: temperature 1, where a model of random weights repeats nothing, and no step should be worth a guess.

    python -m bench.speculation MODEL [--device cuda] [--rows 1] [--tokens 400] [--rounds 3]

Prints JSON lines: {"bench": "speculation", "text", "rows", "tokens_per_s", "without", "ratio", "guessed", "right"}.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from manylora_worker.models.parts import EngineParts
from manylora_worker.planning.step_planner import PlannerLimits

TENANT = TenantId("t")
SLOTS = 16
PROMPT_TOKENS = 64


def run(
    parts: EngineParts, arguments: argparse.Namespace, *, repeats: bool, speculates: bool
) -> tuple[float, int, int]:
    """Tokens a second from the first token on; how many were guessed, and how many rightly."""
    limits = EngineLimits(PlannerLimits(256, 128, SLOTS), AdapterCacheLimits(1 << 20, 1 << 20), max_requests=100)
    core = EngineCore(parts.runner, parts.backend, limits)
    core.set_share(TENANT, TenantShare(speculating=frozenset(QosClass) if speculates else frozenset()))
    rng = random.Random(3)
    for row in range(arguments.rows):
        prompt = tuple(rng.randrange(3, parts.model.vocab_size - 3) for _ in range(PROMPT_TOKENS))
        sampling = Sampling(seed=row, temperature=0.0 if repeats else 1.0)
        request = EngineRequest(
            RequestId(f"r{row}"), TENANT, QosClass.STANDARD, None, prompt, arguments.tokens, sampling
        )
        core.add(request, time.perf_counter())
    began: float | None = None
    count = 0
    while core.has_work():
        outputs = core.step(time.perf_counter())
        if outputs and began is None:
            began = time.perf_counter()
            continue
        count += sum(len(output.token_ids) for output in outputs)
    assert began is not None
    stats = core.stats()
    assert not stats.failed_steps, core.step_error
    return count / (time.perf_counter() - began), stats.guessed_tokens, stats.right_guesses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    settings = WorkerConfig(
        model=str(arguments.model), device=arguments.device, num_blocks=64 * SLOTS, host_kv_mb=0, sequence_slots=SLOTS,
        max_batch_tokens=256, device_adapter_mb=64,
    )  # fmt: skip
    parts = build_engine(settings)
    try:
        for text in ("repeats", "sampled"):
            run(parts, arguments, repeats=text == "repeats", speculates=True)  # warm
            found = {True: [], False: []}  # type: dict[bool, list[tuple[float, int, int]]]
            for _ in range(arguments.rounds):
                for speculates in found:
                    found[speculates].append(run(parts, arguments, repeats=text == "repeats", speculates=speculates))
            per_s, without = (statistics.median(each[0] for each in found[on]) for on in (True, False))
            _, guessed, right = found[True][0]
            line = {
                "bench": "speculation", "text": text, "device": arguments.device, "model": arguments.model.name,
                "rows": arguments.rows, "tokens": arguments.tokens, "tokens_per_s": round(per_s, 1),
                "without": round(without, 1), "ratio": round(per_s / without, 3), "guessed": guessed, "right": right,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    finally:
        parts.backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
