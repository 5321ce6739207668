"""Tokens a second of one answer with guesses by prompt lookup, or a draft model, and without, by turns.

`greedy`, `sampled` (temperature 1): the model's own answers, which repeat themselves or do not. `right`: each guess is
what the same request was answered before, instead of what lookup finds: the most that guesses can gain on this machine.

    python -m bench.speculation MODEL [--draft-model SMALL] [--device cuda] [--rows 1] [--tokens 400] [--rounds 3]

Prints JSON lines: {"bench": "speculation", "text", "rows", "tokens_per_s", "without", "ratio", "guessed", "right",
"tokens_per_step"}.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling, TokenOutput
from manylora_worker.kinds.guessing import MOST_GUESSES
from manylora_worker.kinds.sequence import Sequence as EngineSequence
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.models.build import build_engine
from manylora_worker.models.parts import EngineParts
from manylora_worker.planning.step_planner import PlannerLimits
from transformers import AutoTokenizer

TENANT = TenantId("t")
SLOTS = 16
PROMPT_TOKENS = 64
TEXTS: dict[str, Callable[[int], Sampling]] = {
    "greedy": lambda row: Sampling(seed=row, temperature=0.0),
    "sampled": lambda row: Sampling(seed=row, temperature=1.0),
    "right": lambda row: Sampling(seed=row, temperature=0.0),
}
_SETTLING = 6


@dataclass(frozen=True)
class Run:
    tokens_per_s: float  # from the first token on
    guessed: int
    right: int
    tokens_per_step: float
    answers: Mapping[RequestId, Sequence[int]]


def run(parts: EngineParts, arguments: argparse.Namespace, *, text: str, speculates: bool) -> Run:
    limits = EngineLimits(PlannerLimits(256, 128, SLOTS), AdapterCacheLimits(1 << 20, 1 << 20), max_requests=100)
    core = EngineCore(parts.runner, parts.backend, limits)
    classes = frozenset(QosClass) if speculates else frozenset[QosClass]()
    drafts = arguments.draft_model is not None
    core.set_share(TENANT, TenantShare(drafting=classes) if drafts else TenantShare(speculating=classes))
    rng = random.Random(3)
    for row in range(arguments.rows):
        prompt = arguments.prompt_ids or tuple(
            rng.randrange(3, parts.model.vocab_size - 3) for _ in range(PROMPT_TOKENS)
        )
        sampling = TEXTS[text](row)
        request = EngineRequest(
            RequestId(f"r{row}"), TENANT, QosClass.STANDARD, None, prompt, arguments.tokens, sampling
        )
        core.add(request, time.perf_counter())
    began: float | None = None
    count = 0
    answers: dict[RequestId, list[int]] = {}
    while core.has_work():
        outputs = step(core)
        for output in outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        if outputs and began is None:
            began = time.perf_counter()
            continue
        count += sum(len(output.token_ids) for output in outputs)
    assert began is not None
    stats = core.stats()
    assert not stats.failed_steps, core.step_error
    return Run(
        count / (time.perf_counter() - began),
        stats.guessed_tokens,
        stats.right_guesses,
        stats.generated_tokens / max(1, stats.steps * arguments.rows),
        answers,
    )


def step(core: EngineCore) -> list[TokenOutput]:
    """Each part of it at its own time, as a worker's loop does."""
    batch = core.begin_step(time.perf_counter())
    if batch is not None:
        core.submit(batch, time.perf_counter())
    if core.must_wait or (batch is None and core.num_in_flight):
        result = core.wait()
        core.end_step(result, time.perf_counter())
    return core.take_outputs()


def known(answers: Mapping[RequestId, Sequence[int]]) -> Callable[[EngineSequence, int], Sequence[int] | None]:
    """In the place of what guesses."""

    def guess(sequence: EngineSequence, most: int) -> Sequence[int] | None:
        if not sequence.group.speculates:
            return ()
        if sequence.num_pending_tokens:
            return None
        told = len(sequence.output_token_ids)
        most = min(most, MOST_GUESSES, sequence.max_output_tokens - told - 1)
        return answers[sequence.group.request.request_id][told : told + most]

    return guess


def settled(
    parts: EngineParts, arguments: argparse.Namespace, answers: Mapping[RequestId, Sequence[int]]
) -> Mapping[RequestId, Sequence[int]]:
    """What steps of so many guesses draw: a GPU's products of other shapes round otherwise, and near ties fall so."""
    for _ in range(_SETTLING):
        with mock.patch.object(EngineSequence, "guess", known(answers)):
            answers = run(parts, arguments, text="right", speculates=True).answers
    return answers


def prompt_ids(model: Path, text: str) -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": text}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--prompt", default="", help="text of every row, in place of drawn tokens")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.prompt_ids = prompt_ids(arguments.model, arguments.prompt) if arguments.prompt else ()
    settings = WorkerConfig(
        model=str(arguments.model), device=arguments.device, num_blocks=64 * SLOTS, host_kv_mb=0, sequence_slots=SLOTS,
        max_batch_tokens=256, device_adapter_mb=64, draft_model=str(arguments.draft_model or ""),
        threads=arguments.threads,
    )  # fmt: skip
    parts = build_engine(settings)
    try:
        for text in TEXTS if arguments.draft_model is None else ("greedy", "sampled"):
            warm = run(parts, arguments, text=text, speculates=False)
            guess: Callable[[EngineSequence, int], Sequence[int] | None] = EngineSequence.guess
            if text == "right":
                guess = known(settled(parts, arguments, warm.answers))
            found: dict[bool, list[Run]] = {True: [], False: []}
            with mock.patch.object(EngineSequence, "guess", guess):
                for _ in range(arguments.rounds):
                    for speculates, runs in found.items():
                        runs.append(run(parts, arguments, text=text, speculates=speculates))
            same = all(each.answers == warm.answers for runs in found.values() for each in runs)
            per_s, without = (statistics.median(each.tokens_per_s for each in found[on]) for on in (True, False))
            guessed, right = found[True][0].guessed, found[True][0].right
            line = {
                "bench": "speculation", "text": text, "device": arguments.device, "model": arguments.model.name,
                "rows": arguments.rows, "tokens": arguments.tokens, "tokens_per_s": round(per_s, 1),
                "without": round(without, 1), "ratio": round(per_s / without, 3), "guessed": guessed, "right": right,
                "tokens_per_step": round(found[True][0].tokens_per_step, 2),
                "draft": arguments.draft_model.name if arguments.draft_model else None,
                "same_answers": same,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    finally:
        parts.backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
