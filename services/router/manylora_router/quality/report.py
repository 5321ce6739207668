"""A validation report: what was looked at before a version of an adapter was registered, in JSON that people may keep.

Stages stand in their order: format, compatibility, coverage, trial, quality, load. One that did not run is skipped.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from manylora_shared.errors import FieldViolation
from manylora_shared.tenancy.adapter_gate import Against, GateRule, Verdict

from manylora_router.quality.samples import Sample

FORMAT_VERSION = 1
MAX_REPORT_BYTES = 1 << 20
MAX_SHOWN_SAMPLES = 20
MAX_SHOWN_CHARS = 600  # of each text of these
_PASSED, _FAILED, _SKIPPED, _OPEN = "passed", "failed", "skipped", "inconclusive"
STAGES = ("format", "compatibility", "coverage", "trial", "quality", "load")


@dataclass(frozen=True)
class Measured:
    """One request's, in milliseconds."""

    ttft_ms: float
    token_ms: float  # for each after the first; 0: there was none
    adapter_wait_ms: float


@dataclass(frozen=True)
class Judged:
    """One answer."""

    answer: str
    score: float


@dataclass(frozen=True)
class Report:
    tenant_id: str
    name: str
    digest: str
    created_unix_s: float
    verdict: Verdict = Verdict.PASSED
    reasons: Sequence[str] = ()
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)  # base, adapter, modules, coverage, quality, load

    def passed(self, stage: str, *told: str) -> Self:
        return self._with(stage, _PASSED, told)

    def failed(self, stage: str, *told: str) -> Self:
        return replace(self._with(stage, _FAILED, told), verdict=Verdict.REJECTED, reasons=(*self.reasons, *told))

    def left_open(self, stage: str, *told: str) -> Self:
        return replace(self._with(stage, _OPEN, told), verdict=Verdict.INCONCLUSIVE, reasons=(*self.reasons, *told))

    def unknown(self, stage: str, *told: str) -> Self:
        """As left_open, of a stage that decides nothing."""
        return self._with(stage, _OPEN, told)

    def with_part(self, name: str, value: Any) -> Self:
        return replace(self, parts={**self.parts, name: value})

    def violated(self, violations: Sequence[FieldViolation]) -> Self:
        return self.with_part("problems", [{"field": v.field, "description": v.description} for v in violations])

    def _with(self, stage: str, state: str, told: Sequence[str]) -> Self:
        return replace(self, stages={**self.stages, stage: {"state": state, "told": list(told)}})

    def to_json(self) -> bytes:
        skipped = {"state": _SKIPPED, "told": []}
        report = {
            "format_version": FORMAT_VERSION,
            "tenant_id": self.tenant_id,
            "name": self.name,
            "digest": self.digest,
            "created_unix_s": self.created_unix_s,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "stages": [{"stage": stage, **self.stages.get(stage, skipped)} for stage in STAGES],
            **self.parts,
        }
        encoded = json.dumps(report, ensure_ascii=False).encode()
        if len(encoded) > MAX_REPORT_BYTES:  # thousands of modules with long paths
            report["modules"] = report["modules"][:256]
            encoded = json.dumps(report, ensure_ascii=False).encode()
        return encoded


def digest_of(report: bytes) -> str:
    return hashlib.sha256(report).hexdigest()


def quality_part(
    rule: GateRule, judges: Sequence[str], samples: Sequence[Sample], judged: Mapping[str, Sequence[Judged]]
) -> dict[str, Any]:
    """judged: by Against, in the samples' order."""
    candidate, before = judged[Against.CANDIDATE], judged.get(Against.BEFORE) or judged[Against.BASE]
    drops = [other.score - own.score for own, other in zip(candidate, before, strict=True)]
    worst = sorted(range(len(samples)), key=lambda i: (-drops[i], candidate[i].score, i))
    shown = [i for i in worst if drops[i] > 0 or candidate[i].score < 1][:MAX_SHOWN_SAMPLES]
    return {
        "samples": {"name": rule.samples, "count": len(samples)},
        "rule": {
            "judge": rule.judge,
            "min_score": rule.min_score,
            "max_drop": rule.max_drop,
            "min_gain": rule.min_gain,
            "max_tokens": rule.max_tokens,
        },
        "scores": {against: round(mean_score(answers), 6) for against, answers in judged.items()},
        "better": sum(drop < 0 for drop in drops),
        "worse": sum(drop > 0 for drop in drops),
        "shown": [_shown(i, judges[i], samples[i], {a: answers[i] for a, answers in judged.items()}) for i in shown],
    }


def mean_score(answers: Sequence[Judged]) -> float:
    return statistics.fmean(answer.score for answer in answers)


def _shown(index: int, judge: str, sample: Sample, judged: Mapping[str, Judged]) -> dict[str, Any]:
    expected = sample.expected if isinstance(sample.expected, str) else json.dumps(sample.expected)
    return {
        "sample": index + 1,
        "judge": judge,
        "asked": _cut(sample.asked),
        "expected": _cut(expected),
        "answers": {
            against: {"answer": _cut(each.answer), "score": round(each.score, 6)} for against, each in judged.items()
        },
    }


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def load_part(measured: Mapping[str, Sequence[Measured]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """By Against. sizes: bytes on the device."""
    return {
        against: {
            "requests": len(requests),
            "ttft_p50_ms": round(statistics.median(each.ttft_ms for each in requests), 3),
            "ttft_max_ms": round(max(each.ttft_ms for each in requests), 3),
            "token_p50_ms": round(statistics.median(each.token_ms for each in requests), 3),
            "adapter_wait_max_ms": round(max(each.adapter_wait_ms for each in requests), 3),
            "size_bytes": sizes.get(against, 0),
        }
        for against, requests in measured.items()
    }
