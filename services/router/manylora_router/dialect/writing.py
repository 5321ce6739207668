"""The grammar of an answer that must be calls, or has calls in its text, as its family's parser reads them:
llguidance's Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

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


def calls(
    writing: Writing, functions: Mapping[str, Schema], marks: Marks, *, is_one: bool, free: Mapping[str, str] = {}
) -> Iterator[str]:
    """Rules of an answer, the first of them `calls`. Raises ValueError for a schema that is not supported.

    free: functions whose schema is not kept, with the mark that ends a call; empty: the arguments are any object.
    """
    more = "" if is_one or writing.between is None else f"({_lark(marks, writing.between)} call)*"
    yield f"calls: {_lark(marks, writing.begin)} call {more} {_lark(marks, writing.end)}"
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(functions)))
    for index, (name, schema) in enumerate(functions.items()):
        head = marks.lark(writing.head.replace("NAME", name))
        if free.get(name):
            yield f"call_{index}: {head} parameters_{index}"
            yield from marks.text_to(f"parameters_{index}", free[name])
            continue
        yield f"call_{index}: {head} parameters_{index} {_lark(marks, writing.tail)}"
        if name in free:
            yield f"parameters_{index}: {json_value({'type': 'object'})}"
            continue
        try:
            yield from writing.arguments(f"parameters_{index}", schema, marks)
        except ValueError as error:
            raise ValueError(f"{name}.parameters.{error}") from None


def text_and_calls(
    writing: Writing,
    opening: str,
    functions: Mapping[str, Schema],
    marks: Marks,
    *,
    is_one: bool,
    free: Mapping[str, str],
) -> Iterator[str]:
    """Rules, the first of them `said`: any text, in which `opening` begins calls and nothing else. As `calls` else."""
    is_list = bool(writing.begin)
    behind = replace(writing, begin=writing.begin.removeprefix(opening))
    if not is_list:
        behind = replace(writing, head=writing.head.removeprefix(opening))
    times = "?" if is_one else "*"
    if marks.is_token(opening):
        yield f"said: SAID? ({marks.lark(opening)} calls SAID?){times}"
    else:
        yield f"said: (opened calls){times} SAID?"
        yield from marks.text_to("opened", opening)
    yield f"SAID: /(?s:.+)/ & ~/(?s:.*({escaped(opening)}).*)/"
    yield from calls(behind, functions, marks, is_one=is_one or not is_list, free=free)


def _lark(marks: Marks, text: str) -> str:
    return marks.lark(text) if text else ""


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """In a regular expression of a grammar, where a slash ends it."""
    return re.escape(text).replace("/", "\\/")
