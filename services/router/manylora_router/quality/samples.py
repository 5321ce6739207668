"""A tenant's samples: JSON lines, each a prompt and what is expected of its answer."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.tenancy.adapter_gate import MAX_ANSWER_TOKENS, Judge

MAX_SAMPLES_BYTES = 1 << 20
MAX_SAMPLES = 512
MAX_VALUES = 1 << 17  # by their commas and opening brackets, those in texts included
MAX_MESSAGES = 256
_MAX_VIOLATIONS = 16
_STEP_BYTES = 8192
_KEYS = frozenset({"prompt", "messages", "expected", "judge", "max_tokens"})


@dataclass(frozen=True)
class Sample:
    prompt: str | None  # or messages
    messages: Sequence[tuple[str, str]]  # (role, content)
    expected: Any  # a text; of json_schema a JSON object; of json nothing
    judge: str | None  # None: the rule's
    max_tokens: int | None

    @property
    def asked(self) -> str:
        """For people to read."""
        return self.prompt if self.prompt is not None else "\n".join(f"{role}: {text}" for role, text in self.messages)


def parse_samples(data: bytes) -> list[Sample]:
    """Raises InvalidRequest with the lines at fault."""
    steps = parsing(data)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[Sample] = end.value
            return found


def parsing(data: bytes) -> Generator[None, None, list[Sample]]:
    """The same in steps of some milliseconds at most: all of it may be a fifth of a second's work."""
    if len(data) > MAX_SAMPLES_BYTES:
        raise InvalidRequest.of("samples", f"have {len(data)} bytes, more than {MAX_SAMPLES_BYTES}")
    if (num_values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_VALUES:
        raise InvalidRequest.of("samples", f"have some {num_values} values, more than {MAX_VALUES}")
    samples: list[Sample] = []
    problems: list[FieldViolation] = []
    left_bytes = _STEP_BYTES
    for number, line in enumerate(data.split(b"\n"), 1):
        if (left_bytes := left_bytes - len(line)) < 0:
            left_bytes = _STEP_BYTES
            yield
        if not line.strip():
            continue
        if len(problems) >= _MAX_VIOLATIONS:
            break
        if len(samples) >= MAX_SAMPLES:
            problems.append(FieldViolation("samples", f"are more than {MAX_SAMPLES}"))
            break
        try:
            samples.append(_sample(line))
        except ValueError as e:
            problems.append(FieldViolation("samples", f"line {number}: {e}"))
    if not samples and not problems:
        problems.append(FieldViolation("samples", "are none"))
    if problems:
        raise InvalidRequest.of_all(problems)
    return samples


def judges_of(samples: Sequence[Sample], judge: str) -> list[str]:
    """Of each, where the rule names `judge`. Raises InvalidRequest where a sample lacks what its judge needs."""
    judges = [sample.judge or judge for sample in samples]
    problems = [
        FieldViolation("samples", f"sample {number}: {wrong}")
        for number, (sample, each) in enumerate(zip(samples, judges, strict=True), 1)
        if (wrong := _lacks(sample, each))
    ]
    if problems:
        raise InvalidRequest.of_all(problems[:_MAX_VIOLATIONS])
    return judges


def _lacks(sample: Sample, judge: str) -> str:
    match judge:
        case Judge.JSON:
            return ""
        case Judge.JSON_SCHEMA:
            return "" if isinstance(sample.expected, dict) else "expected must be a JSON schema, an object"
        case _:
            return "" if isinstance(sample.expected, str) and sample.expected else "expected must be a text"


def _sample(line: bytes) -> Sample:
    """Raises ValueError."""
    try:
        loaded: Any = json.loads(line, parse_constant=_no_number)
        json.dumps(loaded, ensure_ascii=False).encode()  # no halves of characters
    except (ValueError, RecursionError) as e:
        raise ValueError(f"is not JSON: {e}") from e
    if not isinstance(loaded, dict):
        raise ValueError("must be a JSON object")
    if unknown := sorted(set(loaded) - _KEYS):
        raise ValueError(f"{unknown[0][:80]!r} is not one of {', '.join(sorted(_KEYS))}")
    prompt, messages = loaded.get("prompt"), loaded.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("needs prompt or messages, and not both")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise ValueError("prompt must be a text")
    judge, max_tokens = loaded.get("judge"), loaded.get("max_tokens")
    if judge is not None and judge not in tuple(Judge):
        raise ValueError(f"judge must be one of {', '.join(Judge)}")
    if max_tokens is not None and (type(max_tokens) is not int or not 0 < max_tokens <= MAX_ANSWER_TOKENS):
        raise ValueError(f"max_tokens must be a whole number from 1 to {MAX_ANSWER_TOKENS}")
    return Sample(prompt, _messages(messages), loaded.get("expected"), judge, max_tokens)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _messages(given: Any) -> list[tuple[str, str]]:
    if given is None:
        return []
    if not isinstance(given, list) or not 0 < len(given) <= MAX_MESSAGES:
        raise ValueError(f"messages must be a list of 1 to {MAX_MESSAGES}")
    return [_message(each) for each in given]


def _message(given: Any) -> tuple[str, str]:
    match given:
        case {"role": str(role), "content": str(content), **more} if isinstance(given, Mapping) and not more:
            return role, content
        case _:
            raise ValueError("a message has role and content, both texts, and nothing else")
