"""The quality gate of a tenant's adapters: what its policy asks of a new version, and what its scores say to that."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

DEFAULT_MAX_DROP = 0.02
DEFAULT_ANSWER_TOKENS = 128
MAX_ANSWER_TOKENS = 1024
DEFAULT_TIMEOUT_S = 120
MAX_TIMEOUT_S = 600
_ROUNDING = 1e-9
_PART = re.compile(r"0(?:\.[0-9]{1,6})?|1(?:\.0{1,6})?")
_PARTS = ("min_score", "max_drop", "min_gain")


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


_Read = Callable[[str, yaml.Node], object]


class GateReader:
    """Of a policy's document. add: takes a violation. name, integer: of a node; None: it is none, which was added.
    mapping: hands each value to its key's reader, and returns the keys.
    """

    def __init__(
        self,
        add: Callable[[str, yaml.Node, str], None],
        name: Callable[[str, yaml.Node], str | None],
        integer: Callable[[str, yaml.Node, int, int], int | None],
        mapping: Callable[[str, yaml.Node, Mapping[str, _Read]], list[str] | None],
    ) -> None:
        self._add = add
        self._name = name
        self._integer = integer
        self._mapping = mapping
        self.rule: GateRule | None = None

    def read(self, path: str, node: yaml.Node) -> None:
        values: dict[str, Any] = {}

        def keep(name: str, value: object) -> None:
            if value is not None:
                values[name] = value

        readers: dict[str, _Read] = {
            "samples": lambda at, value: keep("samples", self._name(at, value)),
            "judge": lambda at, value: keep("judge", self._judge(at, value)),
            "max_tokens": lambda at, value: keep("max_tokens", self._integer(at, value, 1, MAX_ANSWER_TOKENS)),
            "timeout_s": lambda at, value: keep("timeout_s", self._integer(at, value, 1, MAX_TIMEOUT_S)),
        }

        def part_reader(name: str) -> _Read:
            return lambda at, value: keep(name, self._part(at, value))

        found = self._mapping(path, node, readers | {name: part_reader(name) for name in _PARTS})
        if found is not None and "samples" not in found:
            self._add(f"{path}.samples", node, "is missing: the name of the tenant's samples")
        self.rule = GateRule(**values) if "samples" in values else None

    def _judge(self, path: str, node: yaml.Node) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.value in tuple(Judge):
            return str(node.value)
        self._add(path, node, f"must be one of {', '.join(Judge)}")
        return None

    def _part(self, path: str, node: yaml.Node) -> float | None:
        if isinstance(node, yaml.ScalarNode) and _PART.fullmatch(node.value):
            return float(node.value)
        self._add(path, node, "must be a number from 0 to 1, e.g. 0.95")
        return None
