"""The grammar of an answer that must be calls, as its family's parser reads them: llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from manylora_router.dialect.schemas import Schema, closed

TokenOf = Callable[[str], int | None]
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Marks:
    """Texts as Lark. A mark that is a token of the model is that token: a grammar's text has no such tokens in it."""

    def __init__(self, marks: Collection[str], token_of: TokenOf) -> None:
        found = {mark: token_id for mark in marks if (token_id := token_of(mark)) is not None}
        self._tokens = found
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(found, key=len, reverse=True))) + ")")

    def lark(self, text: str) -> str:
        if not self._tokens:
            return quoted(text)
        parts = [part for part in self._split.split(text) if part]
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else quoted(part) for part in parts)

    def is_token(self, mark: str) -> bool:
        return mark in self._tokens

    def text_to(self, name: str, mark: str, *others: str) -> Iterator[str]:
        """Rules: `name` is any text and the mark behind it, and has neither this nor the others in it."""
        if mark not in self._tokens:
            yield f"{name}[suffix={quoted(mark)}]: /(?s:.*)/"
            return
        barred = "|".join(escaped(each) for each in (mark, *others))
        yield f"{name}: {name.upper()} {self.lark(mark)}"
        yield f"{name.upper()}: /(?s:.*)/ & ~/(?s:.*({barred}).*)/"


ArgumentsGrammar = Callable[[str, Schema, Marks], Iterator[str]]  # rules, one of them of this name


def json_arguments(name: str, schema: Schema, marks: Marks) -> Iterator[str]:
    yield f"{name}: {json_value(closed(schema))}"


def json_value(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)


@dataclass(frozen=True)
class Writing:
    """`head` and `tail` stand around a call's arguments; NAME in the head is the function's."""

    head: str
    tail: str
    begin: str = ""
    between: str | None = None  # None: an answer has one call
    end: str = ""
    arguments: ArgumentsGrammar = json_arguments


def calls(writing: Writing, functions: Mapping[str, Schema], marks: Marks, *, is_one: bool) -> Iterator[str]:
    """Rules of an answer, the first of them `calls`. Raises ValueError for a schema that is not supported."""
    more = "" if is_one or writing.between is None else f"({_lark(marks, writing.between)} call)*"
    yield f"calls: {_lark(marks, writing.begin)} call {more} {_lark(marks, writing.end)}"
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(functions)))
    for index, (name, schema) in enumerate(functions.items()):
        head = marks.lark(writing.head.replace("NAME", name))
        yield f"call_{index}: {head} parameters_{index} {_lark(marks, writing.tail)}"
        try:
            yield from writing.arguments(f"parameters_{index}", schema, marks)
        except ValueError as error:
            raise ValueError(f"{name}.parameters.{error}") from None


def _lark(marks: Marks, text: str) -> str:
    return marks.lark(text) if text else ""


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """In a regular expression of a grammar, where a slash ends it."""
    return re.escape(text).replace("/", "\\/")
