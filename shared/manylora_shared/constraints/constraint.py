"""What the text of an answer must be, as client, router and worker speak of it."""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from manylora_shared.errors import FieldViolation

MAX_CHOICES = 1024
MAX_SOURCE_BYTES = 1 << 17  # of a schema, a grammar or all choices
MAX_REGEX_BYTES = 1 << 13


class ConstraintKind(enum.Enum):
    """Named as the fields of `manylora.v1.Constraint`."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class _Message(Protocol):
    def WhichOneof(self, name: Any, /) -> str | None: ...


@dataclass(frozen=True)
class Constraint:
    """`source`: schema, regex or grammar, or a JSON list of the choices. None: the message says nothing."""

    kind: ConstraintKind | None
    source: str = ""

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Self:
        source = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(ConstraintKind.JSON_SCHEMA, source)

    @classmethod
    def json_object(cls) -> Self:
        return cls(ConstraintKind.JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Of the whole text."""
        return cls(ConstraintKind.REGEX, pattern)

    @classmethod
    def grammar(cls, source: str) -> Self:
        """In llguidance's form of Lark, or in GBNF."""
        return cls(ConstraintKind.GRAMMAR, source)

    @classmethod
    def of_choices(cls, choices: Iterable[str]) -> Self:
        """One of these texts. No more than are allowed, and one, are read."""
        read = list(itertools.islice(choices, MAX_CHOICES + 1))
        return cls(ConstraintKind.CHOICE, json.dumps(read, ensure_ascii=False))

    @classmethod
    def of_message(cls, message: _Message) -> Self:
        name = message.WhichOneof("kind")
        if name is None:
            return cls(None)
        kind, value = ConstraintKind(name), getattr(message, name)
        if kind is ConstraintKind.CHOICE:
            return cls.of_choices(value.choices)
        if kind is ConstraintKind.JSON_OBJECT:
            return cls(kind if value else None)
        return cls(kind, value)

    def given(self) -> dict[str, Any]:
        """Those of a message."""
        assert self.kind is not None
        value: Any = self.source
        if self.kind is ConstraintKind.CHOICE:
            value = {"choices": self.choices}
        elif self.kind is ConstraintKind.JSON_OBJECT:
            value = True
        return {self.kind.value: value}

    @property
    def choices(self) -> list[str]:
        found: list[str] = json.loads(self.source)
        return found

    @property
    def field(self) -> str:
        return f"constraint.{self.kind.value}" if self.kind is not None else "constraint"

    @property
    def size_bytes(self) -> int:
        return len(self.source.encode(errors="surrogatepass"))

    @property
    def digest(self) -> bytes:
        assert self.kind is not None
        return hashlib.sha256(f"{self.kind.value}\0{self.source}".encode()).digest()

    def violations(self) -> list[FieldViolation]:
        """What is wrong before anything is compiled."""
        most = MAX_REGEX_BYTES if self.kind is ConstraintKind.REGEX else MAX_SOURCE_BYTES
        if self.kind is None:
            problem = f"must be one of {', '.join(kind.value for kind in ConstraintKind)}"
        elif self.size_bytes > most:
            problem = f"has {self.size_bytes} bytes; at most {most} are read"
        elif not _is_text(self.source):
            problem = "has half of a surrogate pair: it is no Unicode text"
        elif self.kind is ConstraintKind.CHOICE:
            problem = _wrong_choices(self.choices)
        elif self.kind is not ConstraintKind.JSON_OBJECT and not self.source.strip():
            problem = "is empty"
        else:
            problem = ""
        return [FieldViolation(self.field, problem)] if problem else []


def _is_text(source: str) -> bool:
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong_choices(choices: list[str]) -> str:
    if len(choices) > MAX_CHOICES:
        return f"has more than {MAX_CHOICES} texts"
    if not choices:
        return "has no text"
    return "" if all(choices) else "has an empty text"
