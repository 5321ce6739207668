"""A tenant's patterns: what compiling and matching them may cost is bounded, and what is wrong is told by its field.

Owns nothing. It matches as peft 0.21 does (check_target_module_exists, get_pattern_key), for paths without line breaks.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import regex
from manylora_shared.errors import InvalidRequest, shown

MAX_PATTERN_CHARS = 4096
MAX_GROUPS = 128  # opening brackets of a pattern: a parser's recursion is as deep
MAX_REPEATS = 10_000  # the counts of a pattern, multiplied: so often a compiled pattern may hold its text
COMPILE_BUDGET_S = 0.5  # of a core, for all patterns of one configuration
PATTERN_BUDGET_S = 2.0  # of a core, for all pattern matching of one adapter together
LAYER_GROUP = "idx"

_ANY_LAYER = rf".*?\.[^.]*\.(?P<{LAYER_GROUP}>\d+)\."
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CALL = re.compile(r"\(\?(?:R|[0-9]+|[+-][0-9]+|&|P[>&])")
_NAME = re.compile(r"(\^?)((?:[^\\^$*+?{}\[\]|()]|\\\.)*)")
_Named = dict[tuple[int, ...], dict[str, int]]  # by the places of dots that stand for any character, and by the rest

Wrap = Callable[[str], str]


def as_it_is(pattern: str) -> str:
    return pattern


def of_key(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def of_layers(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<{LAYER_GROUP}>\d+)\." if pattern else _ANY_LAYER


class PatternCheck:
    """Of one configuration's patterns, before any is matched."""

    def __init__(self) -> None:
        self._until_s = time.thread_time() + COMPILE_BUDGET_S
        self._known: dict[tuple[str, Wrap], str | None] = {}  # ranks and alphas often have the same keys

    def problem(self, value: Any, wrap: Wrap) -> str | None:
        """wrap: what it is matched as."""
        if not isinstance(value, str):
            return "is not a pattern"
        if len(value) > MAX_PATTERN_CHARS:
            return f"has more than {MAX_PATTERN_CHARS} characters"
        if (value, wrap) not in self._known:
            self._known[value, wrap] = self._found(value, wrap)
        return self._known[value, wrap]

    def _found(self, value: str, wrap: Wrap) -> str | None:
        if wrap is of_key and _NAME.fullmatch(value):
            return None  # never compiled
        if value.count("(") + value.count("[") > MAX_GROUPS:
            return f"has more than {MAX_GROUPS} groups and sets"
        braces = [re.findall("[0-9]+", text) for text in re.findall(r"\{[^}]*", value)]
        if math.prod(max([1, *(int(count[:9]) for count in counts)]) for counts in braces) > MAX_REPEATS:
            return f"repeats more than {MAX_REPEATS} times"
        if _CALL.search(_ESCAPED.sub("", value)):
            return "calls one of its groups, which can take any amount of memory, and which PEFT does not know"
        if time.thread_time() > self._until_s:
            return "comes after patterns that took too long to compile"
        return _problem_of(value, wrap)


def _problem_of(value: str, wrap: Wrap) -> str | None:
    """By compiling it alone, and in what PEFT puts around it: a comment or a group of its own may change that."""
    try:
        alone = regex.compile(value)
    except Exception as error:  # whatever its parser raises is about this text
        return f"is not a pattern: {error}"
    try:
        wrapped = regex.compile(wrap(value))
    except Exception as error:
        return f"is not a pattern where PEFT puts it, {shown(wrap(value))}: {error}"
    if wrap is of_layers and not (LAYER_GROUP in wrapped.groupindex and LAYER_GROUP not in alone.groupindex):
        return f"leaves no group {LAYER_GROUP!r} to what PEFT puts behind it"
    return None


class Matching:
    """Of one adapter, on the thread that made it: its time is counted, so that no busy machine refuses an adapter.
    Raises InvalidRequest, with the field, once the budget is used up or where a pattern cannot be matched.
    """

    def __init__(self) -> None:
        self._until_s = time.thread_time() + PATTERN_BUDGET_S
        self._compiled: dict[str, Any] = {}  # `regex` keeps some hundred

    def match(self, field: str, pattern: str, path: str) -> Any:
        return self._run(field, pattern, "match", path)

    def is_all_of(self, field: str, pattern: str, path: str) -> bool:
        return self._run(field, pattern, "fullmatch", path) is not None

    def left_s(self, field: str) -> float:
        left_s = self._until_s - time.thread_time()
        if left_s <= 0:
            raise InvalidRequest.of(field, "its patterns take too long to match")
        return left_s

    def _run(self, field: str, pattern: str, method: str, path: str) -> Any:
        while True:
            left_s = self.left_s(field)
            try:
                if pattern not in self._compiled:
                    self._compiled[pattern] = regex.compile(pattern)
                return getattr(self._compiled[pattern], method)(path, timeout=left_s)
            except TimeoutError:
                continue  # it counts the whole process's time: whether this thread's is used up, `left_s` tells
            except Exception as error:
                raise InvalidRequest.of(field, f"{shown(pattern)} cannot be matched: {error!r:.200}") from error


class FirstOf:
    """The first of a map's keys that fits a path. Keys that are names are looked up: trainers write one a module."""

    def __init__(self, field: str, keys: Iterable[str], matching: Matching) -> None:
        self._field, self._matching = field, matching
        self._names: dict[tuple[bool, int], _Named] = defaultdict(lambda: defaultdict(dict))  # by being all, by length
        self._patterns: list[tuple[int, str]] = []
        for index, key in enumerate(keys):
            if (found := _NAME.fullmatch(key)) is None:
                self._patterns.append((index, of_key(key)))
                continue
            characters = re.findall(r"\\?.", found[2], re.DOTALL)
            any_at = tuple(at for at, each in enumerate(characters) if each == ".")
            name = "".join(each[-1] for each in characters)
            self._names[bool(found[1]), len(characters)][any_at].setdefault(name, index)

    def __call__(self, path: str) -> int | None:
        """Its index."""
        if self._names:
            self._matching.left_s(self._field)  # lengths and dots of 4096 names can be as many
        starts = [0, *(at + 1 for at, each in enumerate(path) if each == ".")]
        ends = [path[start:] for start in starts]
        named = [each for end in ends if (each := self._named(end, is_all=False)) is not None]
        if (whole := self._named(path, is_all=True)) is not None:
            named.append(whole)
        first = min(named, default=None)
        for index, pattern in self._patterns:
            if first is not None and first < index:
                break
            if self._matching.match(self._field, pattern, path) is not None:
                return index
        return first

    def _named(self, end: str, *, is_all: bool) -> int | None:
        by_dots = self._names.get((is_all, len(end)), {})
        found = (names.get(_dotted(end, any_at)) for any_at, names in by_dots.items())
        return min((each for each in found if each is not None), default=None)


def _dotted(text: str, places: tuple[int, ...]) -> str:
    if all(text[at] == "." for at in places):
        return text
    characters = list(text)
    for at in places:
        characters[at] = "."
    return "".join(characters)
