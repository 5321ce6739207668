"""The sampling parameters: type, default, range and words of each, for client, command line, router and worker.

Names are those of `manylora.v1.SamplingParams`. What a parameter does to a draw is for the workers' samplers to know.
"""

from __future__ import annotations

import enum
import itertools
import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Protocol, Self

from manylora_shared.errors import FieldViolation

MAX_TOP_LOGPROBS = 20
MAX_BAD_TOKENS = 1024
"""Tokens of all bad words of a request."""
MAX_LISTED = 8
"""Violations listed of one field; what follows is not told, or counted."""


MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a model's generation_config.json may set where a request sets nothing."""


class Kind(enum.Enum):
    NUMBER = enum.auto()
    COUNT = enum.auto()
    BIASES = enum.auto()
    """A number by token id."""
    WORDS = enum.auto()
    TOKENS = enum.auto()
    """Token ids."""


def _single(value: float) -> float:
    """Nearest in single precision; what is beyond it stays."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return value


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`; `is_open`: without `low` itself; `or_zero`: or 0."""

    low: float
    high: float = math.inf
    is_open: bool = False
    or_zero: bool = False

    def __contains__(self, value: float) -> bool:
        # As the wire has it, in single precision: what is above `low` here and `low` there is not above it.
        above = self.low < _single(value) if self.is_open else min(self.low, _single(self.low)) <= value
        return (above and value <= self.high and math.isfinite(value)) or (self.or_zero and value == 0)

    def __str__(self) -> str:
        if self.or_zero:
            return f"0, or {self.low:g} or more"
        if self.high == math.inf:
            return f"above {self.low:g}" if self.is_open else f"{self.low:g} or more"
        return f"above {self.low:g} and at most {self.high:g}" if self.is_open else f"from {self.low} to {self.high}"


@dataclass(frozen=True)
class Parameter:
    """One row of the table. `range`: of the number, of each bias, of each word's bytes; `max_entries`: of several."""

    name: str
    kind: Kind
    default: Any
    range: Range
    meaning: str
    max_entries: int = 0

    def violations(self, value: Any, vocab_size: int) -> Iterator[FieldViolation]:
        path = f"sampling.{self.name}"
        if self.max_entries and len(value) > self.max_entries:
            yield FieldViolation(path, f"has more than {self.max_entries} entries")
        elif self.kind is Kind.BIASES:
            wrong = (found for entry in sorted(value.items()) if (found := self._wrong_bias(entry, vocab_size)))
            for (token_id, problem), _ in zip(wrong, range(MAX_LISTED), strict=False):
                yield FieldViolation(f"{path}[{token_id}]", problem)
        elif self.kind is Kind.TOKENS:
            wrong_ids = ((index, each) for index, each in enumerate(value) if each >= vocab_size)
            for (index, token_id), _ in zip(wrong_ids, range(MAX_LISTED), strict=False):
                yield FieldViolation(f"{path}[{index}]", _outside_vocabulary(token_id, vocab_size))
        elif self.kind is Kind.WORDS:
            sizes = ((index, len(word.encode())) for index, word in enumerate(value))
            for index, num_bytes in (each for each in sizes if each[1] not in self.range):
                yield FieldViolation(f"{path}[{index}]", f"must have {self.range} bytes, not {num_bytes}")
        elif value not in self.range:
            yield FieldViolation(path, self._outside(value))

    def _wrong_bias(self, entry: tuple[int, float], vocab_size: int) -> tuple[int, str] | None:
        token_id, bias = entry
        if token_id >= vocab_size:
            return token_id, f"is outside the model's vocabulary of {vocab_size} tokens"
        return (token_id, self._outside(bias)) if bias not in self.range else None

    def _outside(self, value: float) -> str:
        return (
            f"must be {self.range}, not {value:g}" if isinstance(value, float) else f"must be {self.range}, not {value}"
        )


def _outside_vocabulary(token_id: int, vocab_size: int) -> str:
    return f"{token_id} is outside the model's vocabulary of {vocab_size} tokens"


class _Unset:
    """Marks a number as the table's, which nobody has given."""


class _UnsetFloat(float, _Unset): ...


class _UnsetInt(int, _Unset): ...


class _Message(Protocol):
    def HasField(self, name: Any, /) -> bool: ...


def _row(kind: Kind, default: Any, range_: Range, meaning: str, max_entries: int = 0) -> Any:
    metadata = {"kind": kind, "range": range_, "meaning": meaning, "max_entries": max_entries}
    if kind is Kind.BIASES:
        return field(default_factory=dict, metadata=metadata)
    if isinstance(default, float):
        default = _UnsetFloat(default)
    elif isinstance(default, int):
        default = _UnsetInt(default)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Each field is a row of the table: default, range and meaning stand here and only here."""

    temperature: float = _row(Kind.NUMBER, 1.0, Range(1e-5, or_zero=True), "0 takes the likeliest token")
    top_k: int = _row(Kind.COUNT, 0, Range(0, 2**32 - 1), "only the k likeliest tokens; 0: all")
    top_p: float = _row(Kind.NUMBER, 1.0, Range(0, 1, is_open=True), "only the likeliest tokens of this probability")
    min_p: float = _row(Kind.NUMBER, 0.0, Range(0, 1), "only tokens of this part of the likeliest one's probability")
    repetition_penalty: float = _row(
        Kind.NUMBER, 1.0, Range(0.01, 100), "divides the logits of tokens in prompt and output"
    )
    presence_penalty: float = _row(Kind.NUMBER, 0.0, Range(-2, 2), "taken from the logits of tokens in the output")
    frequency_penalty: float = _row(Kind.NUMBER, 0.0, Range(-2, 2), "the same for each time that a token is there")
    seed: int | None = _row(Kind.COUNT, None, Range(0, 2**64 - 1), "of the draws; default: the router draws one")
    top_logprobs: int | None = _row(
        Kind.COUNT, None, Range(0, MAX_TOP_LOGPROBS), "log-probabilities of a token and of so many others"
    )
    logit_bias: Mapping[int, float] = _row(Kind.BIASES, None, Range(-100, 100), "added to tokens' logits", 1024)
    min_tokens: int = _row(Kind.COUNT, 0, Range(0, 2**32 - 1), "nothing stops a choice before it has so many tokens")
    bad_words: Sequence[str] = _row(
        Kind.WORDS, (), Range(1, 64), "text whose tokens, as it is and behind a space, no output completes", 64
    )
    prompt_logprobs: int | None = _row(
        Kind.COUNT, None, Range(0, MAX_TOP_LOGPROBS), "log-probabilities of the prompt's tokens and of so many others"
    )
    allowed_token_ids: Sequence[int] = _row(
        Kind.TOKENS, (), Range(0, 2**32 - 1), "the only tokens that are drawn; none: all are", 1024
    )

    @classmethod
    def of_message(cls, message: _Message) -> Self:
        """What a SamplingParams says, defaults filled in; not checked."""
        given: dict[str, Any] = {}
        for row in PARAMETERS:
            # No more than is read: a message of millions costs nobody their copy before it is refused.
            if row.kind is Kind.BIASES:
                given[row.name] = dict(itertools.islice(getattr(message, row.name).items(), row.max_entries + 1))
            elif row.kind in (Kind.WORDS, Kind.TOKENS):
                given[row.name] = tuple(getattr(message, row.name)[: row.max_entries + 1])
            elif message.HasField(row.name):
                given[row.name] = getattr(message, row.name)
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """Those of a SamplingParams: numbers that were given, maybe at their defaults, and what is not empty."""
        values = ((row, getattr(self, row.name)) for row in PARAMETERS)
        return {
            row.name: value
            for row, value in values
            if value is not None
            and (not isinstance(value, _Unset) if row.kind in (Kind.NUMBER, Kind.COUNT) else value != row.default)
        }

    def or_else(self, defaults: Mapping[str, float]) -> Self:
        """With these for the numbers that nobody has given."""
        unset: dict[str, Any] = {
            name: value for name, value in defaults.items() if isinstance(getattr(self, name), _Unset)
        }
        return replace(self, **unset) if unset else self

    def violations(self, vocab_size: int) -> list[FieldViolation]:
        """Everything that is wrong, each as `sampling.FIELD`, in the table's order."""
        given = self.given()
        return [
            found for row in PARAMETERS if row.name in given for found in row.violations(given[row.name], vocab_size)
        ]


PARAMETERS = tuple(
    Parameter(
        name=each.name,
        default=each.default if each.default is not MISSING else {},
        **each.metadata,
    )
    for each in fields(Sampling)
)


def barred_too_much(
    bad_sequences: Sequence[Sequence[int]],
    stop_token_ids: Collection[int],
    vocab_size: int,
    allowed_token_ids: Collection[int] = (),
) -> str:
    """What is wrong with bad words in tokens; empty: nothing. stop_token_ids: those that min_tokens may bar besides."""
    num_tokens = sum(map(len, bad_sequences))
    if num_tokens > MAX_BAD_TOKENS:
        return f"has {num_tokens} tokens, more than {MAX_BAD_TOKENS}"
    if any(token_id >= vocab_size for sequence in bad_sequences for token_id in sequence):
        return f"has a token outside the model's vocabulary of {vocab_size} tokens"
    if not all(bad_sequences):
        return "has a word without a token"
    # Each bars one token at most at a time.
    is_all = len(bad_sequences) + len(stop_token_ids) >= vocab_size
    if allowed_token_ids:
        is_all = {*allowed_token_ids} <= {*stop_token_ids, *(sequence[-1] for sequence in bad_sequences)}
    return "leaves no token to draw" if is_all else ""
