"""The quality gate and the load test: a candidate, the version in force and the base model on a tenant's samples.

The candidate is asked by its digest, in requests that this router alone can make, and has no number yet.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from manylora_shared.ids import TenantId
from manylora_shared.process.config import python_environment
from manylora_shared.tenancy.adapter_gate import Against, GateRule

from manylora_router.admin.asking import (
    LOAD_REQUESTS,
    LOAD_TOKENS,
    Asking,
    CandidateFailed,
    Generate,
    Inconclusive,
    Lend,
    Subject,
    Tokenize,
)
from manylora_router.guard.admission import ModelLimits
from manylora_router.quality import judge_process
from manylora_router.quality.judges import COSTLY, score
from manylora_router.quality.report import Judged, Measured, Report, load_part, mean_score, quality_part
from manylora_router.quality.samples import Sample, judges_of

_LOG = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 60.0
_PROMPT_TOKENS = 32  # of the load test
JUDGE_S = 30.0


class QualityGate:
    def __init__(self, generate: Generate, tokenize: Tokenize, lend: Lend) -> None:
        self._generate = generate
        self._tokenize = tokenize
        self._lend = lend

    async def judge(
        self, report: Report, subjects: Sequence[Subject], rule: GateRule, samples: Sequence[Sample], pool: str
    ) -> Report:
        """The report with its stage quality. Raises InvalidRequest where a sample lacks what its judge needs."""
        judges = judges_of(samples, rule.judge)
        try:
            async with asyncio.timeout(rule.timeout_s):
                with self._lend(TenantId(report.tenant_id)) as authorization:
                    asking = Asking(self._generate, self._tokenize, TenantId(report.tenant_id), authorization, pool)
                    answers = await self._answers(asking, subjects, samples, judges, rule.max_tokens)
                judged: dict[str, list[Judged]] = {
                    subject.against: await _scored(judges, samples, given)
                    for subject, given in zip(subjects, answers, strict=True)
                }
        except TimeoutError:
            return report.left_open("quality", f"the samples were not answered and judged in {rule.timeout_s} s")
        except CandidateFailed as e:
            return report.failed("quality", f"the adapter does not run: {e}")
        except Inconclusive as e:
            return report.left_open("quality", str(e))
        scores: dict[str, float] = {against: mean_score(given) for against, given in judged.items()}
        report = report.with_part("quality", quality_part(rule, judges, samples, judged))
        if broken := rule.broken(scores):
            return report.failed("quality", *broken)
        return report.passed("quality", f"its score is {scores[Against.CANDIDATE]:.4g} on {len(samples)} samples")

    async def _answers(
        self,
        asking: Asking,
        subjects: Sequence[Subject],
        samples: Sequence[Sample],
        judges: Sequence[str],
        max_tokens: int,
    ) -> list[list[Judged]]:
        """By subject. Each sample is asked of all at about the same time, so that they meet the same load."""

        async def answer(index: int, subject: Subject) -> Judged:
            try:
                return await asking.answer(subject, samples[index], judges[index], max_tokens)
            except Inconclusive as e:
                raise Inconclusive(f"sample {index + 1}, {subject.against}: {e}") from e

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [[group.create_task(answer(i, subject)) for subject in subjects] for i in range(len(samples))]
        except ExceptionGroup as failures:
            known = [each for each in failures.exceptions if isinstance(each, CandidateFailed | Inconclusive)]
            if len(known) < len(failures.exceptions):
                raise
            # what the candidate does itself comes before what could not be found out
            raise min(known, key=lambda each: not isinstance(each, CandidateFailed)) from None
        return [[task.result() for task in each] for each in zip(*tasks, strict=True)]

    async def measure(
        self, report: Report, subjects: Sequence[Subject], sizes: Mapping[str, int], model: ModelLimits, pool: str
    ) -> Report:
        """The report with its stage load, which decides nothing unless the candidate does not run. Versions take turns,
        one request at a time: what differs is theirs.
        """
        measured: dict[str, list[Measured]] = {subject.against: [] for subject in subjects}
        num_tokens = max(1, min(_PROMPT_TOKENS, model.max_context_tokens - LOAD_TOKENS))
        step = max(1, model.vocab_size // num_tokens)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                with self._lend(TenantId(report.tenant_id)) as authorization:
                    asking = Asking(self._generate, self._tokenize, TenantId(report.tenant_id), authorization, pool)
                    for turn in range(LOAD_REQUESTS):
                        # another prompt each turn, so that none is found in the prefix cache
                        ids = [(turn + step * index) % model.vocab_size for index in range(num_tokens)]
                        for subject in subjects:
                            measured[subject.against].append(await asking.measure(subject, ids))
        except TimeoutError:
            return report.unknown("load", f"the requests were not answered in {LOAD_TIMEOUT_S:g} s")
        except CandidateFailed as e:
            return report.failed("load", f"the adapter does not run: {e}")
        except Inconclusive as e:
            return report.unknown("load", str(e))
        return report.with_part("load", load_part(measured, sizes)).passed("load")


async def _scored(judges: Sequence[str], samples: Sequence[Sample], answers: Sequence[Judged]) -> list[Judged]:
    """With their scores. Raises Inconclusive."""
    costly = [i for i, judge in enumerate(judges) if judge in COSTLY]
    scores: dict[int, float] = {}
    if costly:
        asked = [(judges[i], samples[i].expected, answers[i].answer) for i in costly]
        told = await asyncio.to_thread(in_a_process, asked)
        for i, value in zip(costly, told, strict=True):
            if isinstance(value, str):
                raise Inconclusive(f"sample {i + 1}: {value}")
            scores[i] = value
    for i, (judge, sample, answer) in enumerate(zip(judges, samples, answers, strict=True)):
        if i not in scores:
            scores[i] = answer.score if judge == "perplexity" else score(judge, sample.expected, answer.answer)
    return [Judged(answer.answer, scores[i]) for i, answer in enumerate(answers)]


def in_a_process(asked: Sequence[tuple[str, Any, str]]) -> list[float | str]:
    """Raises Inconclusive."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", judge_process.__name__],
            input=json.dumps(asked).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may quote an answer
            env=python_environment(),
            timeout=JUDGE_S,
            check=True,
        )
        told: list[float | str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as e:
        _LOG.warning("answers could not be judged: %s", type(e).__name__)
        raise Inconclusive("the patterns or schemas take too much time or memory to be judged") from None
    return told
