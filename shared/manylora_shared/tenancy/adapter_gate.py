"""The quality gate of a tenant's adapters: what its policy asks of a new version, and what its scores say to that."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_MAX_DROP = 0.02
DEFAULT_ANSWER_TOKENS = 128
MAX_ANSWER_TOKENS = 1024
DEFAULT_TIMEOUT_S = 120
MAX_TIMEOUT_S = 600
_ROUNDING = 1e-9


class Judge(enum.StrEnum):
    """How a sample's answer is scored, from 0 to 1."""

    EXACT = "exact"  # the expected text, but for white space around it
    CONTAINS = "contains"
    REGEX = "regex"  # the expected pattern matches the whole answer
    JSON = "json"  # it is a JSON document
    JSON_SCHEMA = "json_schema"  # the expected schema holds
    PERPLEXITY = "perplexity"  # 1 / perplexity of the expected text behind the prompt: nothing is generated


class Against(enum.StrEnum):
    CANDIDATE = "candidate"
    BEFORE = "before"  # the version in force
    BASE = "base"


class Verdict(enum.StrEnum):
    PASSED = "passed"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class GateRule:
    samples: str  # the name of the tenant's samples
    judge: str = Judge.EXACT
    min_score: float | None = None
    max_drop: float = DEFAULT_MAX_DROP  # below the version in force
    min_gain: float | None = None  # above the base model
    max_tokens: int = DEFAULT_ANSWER_TOKENS
    timeout_s: int = DEFAULT_TIMEOUT_S

    def broken(self, scores: Mapping[str, float]) -> list[str]:
        """Which of its bounds the scores break, for people to read. Scores are by Against."""
        score, told = scores[Against.CANDIDATE], []
        if self.min_score is not None and score < self.min_score - _ROUNDING:
            told.append(f"its score {score:.4g} is below min_score {self.min_score:g}")
        before = scores.get(Against.BEFORE)
        if before is not None and score < before - self.max_drop - _ROUNDING:
            told.append(
                f"its score {score:.4g} is more than max_drop {self.max_drop:g} below the {before:.4g} of the version "
                f"in force"
            )
        base = scores.get(Against.BASE)
        if self.min_gain is not None and base is not None and score < base + self.min_gain - _ROUNDING:
            told.append(
                f"its score {score:.4g} is not min_gain {self.min_gain:g} above the {base:.4g} of the base model"
            )
        return told
