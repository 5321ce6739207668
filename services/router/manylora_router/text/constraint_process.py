"""Looks at constraints for a router: `python -m manylora_router.text.constraint_process SOCKET_FD SECONDS`."""

# llguidance compiles without a bound on time and cannot be stopped, so it does here, where all of it can be ended.
# Messages are JSON. The process says `null` once it can be asked; each [kind, source] then has one answer: null, or
# [field, description] of what is wrong. It ends with its socket.

from __future__ import annotations

import functools
import json
import operator
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import refusal
from manylora_shared.errors import FieldViolation
from manylora_shared.process.deep_threads import DeepThreads

MAX_MEMORY_BYTES = 1 << 30
MAX_PATTERNS = 8  # that one text must match: each doubles what compiling takes
_MAX_DEPTH = 64
_MAX_PARTS = 2_000  # that are looked at
_NICENESS = 10  # answers that stream come first

_Place = tuple[str, ...]


def main(fd: int, seconds: float) -> None:
    """seconds: for one constraint, after which the process ends, whether its router lives or not."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is its router's
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with Connection(fd) as router, DeepThreads(1) as threads:
        router.send_bytes(b"null")
        while True:
            try:
                kind, source = json.loads(router.recv_bytes())
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles it: it ends the process
            found = threads.submit(violation, Constraint(ConstraintKind(kind), source)).result()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            router.send_bytes(json.dumps(found and [found.field, found.description]).encode())


def violation(constraint: Constraint) -> FieldViolation | None:
    if constraint.kind is ConstraintKind.JSON_SCHEMA and (place := crowded(constraint.source)) is not None:
        where = f"at {'.'.join(place)!r}: " if place else ""
        most = f"has more than {MAX_PATTERNS} patterns that one text must match"
        return FieldViolation(constraint.field, where + most)
    return refusal(constraint)


def crowded(source: str) -> _Place | None:
    """Where in its documents a schema has more than MAX_PATTERNS patterns, as far as it is looked at."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        return None  # the compiler says it in its words
    found = _Patterns(schema).at(schema, 0, frozenset())
    return next((place for place, count in found.items() if count > MAX_PATTERNS), None)


class _Patterns:
    """By place in the schema's documents."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_PARTS

    def at(self, part: Any, depth: int, within: frozenset[str]) -> Counter[_Place]:
        """within: the references that led here, which are followed once."""
        self._left -= 1
        found: Counter[_Place] = Counter()
        if not isinstance(part, dict) or depth > _MAX_DEPTH or self._left < 0:
            return found
        if "pattern" in part or "format" in part:
            found[()] += 1
        for each in _listed(part, "allOf"):
            found += self.at(each, depth + 1, within)
        for name in ("anyOf", "oneOf"):  # one of these is kept
            each_of = [self.at(each, depth + 1, within) for each in _listed(part, name)]
            found += functools.reduce(operator.or_, each_of, Counter[_Place]())
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in within:
            found += self.at(self._target(reference), depth + 1, within | {reference})
        for step, inner in _inner(part):
            found.update({(step, *place): count for place, count in self.at(inner, depth + 1, within).items()})
        return found

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#/"):
            return None
        found = self._root
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found


def _listed(part: Mapping[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def _inner(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("properties", "patternProperties"):
        if isinstance(found := part.get(name), dict):
            yield from found.items()
    for name in ("items", "additionalProperties"):
        if name in part:
            yield name, part[name]


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
