"""Looks at constraints for a router: `python -m manylora_router.text.constraint_process SOCKET_FD CPU_S WALL_S`."""

# llguidance compiles without a bound on time and cannot be stopped, so it does here, where all of it can be ended.
# Messages are JSON. The process says `null` once it can be asked; each [kind, source] then has one answer: null, or
# [field, description] of what is wrong. It ends with its socket.

from __future__ import annotations

import json
import os
import resource
import signal
import sys
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
_Found = dict[_Place, frozenset[str]]  # patterns and formats


def main(fd: int, cpu_s: float, wall_s: float) -> None:
    """cpu_s, wall_s: for one constraint, after which the process ends, by SIGPROF or SIGALRM, whether its router lives
    or not.
    """
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is its router's
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if most == resource.RLIM_INFINITY else min(most, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with Connection(fd) as router, DeepThreads(1) as threads:
        router.send_bytes(b"null")
        while True:
            try:
                kind, source = json.loads(router.recv_bytes())
            except EOFError:
                return
            _set_timers(cpu_s, wall_s)
            found = threads.submit(violation, Constraint(ConstraintKind(kind), source)).result()
            _set_timers(0.0, 0.0)
            router.send_bytes(json.dumps(found and [found.field, found.description]).encode())


def _set_timers(cpu_s: float, wall_s: float) -> None:
    """Nobody handles their signals, which end the process."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


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
    return next((place for place, patterns in found.items() if len(patterns) > MAX_PATTERNS), None)


class _Patterns:
    """By place in the schema's documents."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_PARTS

    def at(self, part: Any, depth: int, within: frozenset[str]) -> _Found:
        """within: the references that led here, which are followed once."""
        self._left -= 1
        found: _Found = {}
        if not isinstance(part, dict) or depth > _MAX_DEPTH or self._left < 0:
            return found
        if "pattern" in part or "format" in part:
            found[()] = frozenset([repr((part.get("pattern"), part.get("format")))])
        for each in _listed(part, "allOf"):
            _add(found, self.at(each, depth + 1, within))
        for name in ("anyOf", "oneOf"):
            one_of: _Found = {}  # the one with most at a place
            for each in _listed(part, name):
                for place, patterns in self.at(each, depth + 1, within).items():
                    one_of[place] = max(one_of.get(place, patterns), patterns, key=len)
            _add(found, one_of)
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in within:
            _add(found, self.at(self._target(reference), depth + 1, within | {reference}))
        for step, inner in _inner(part):
            _add(found, {(step, *place): each for place, each in self.at(inner, depth + 1, within).items()})
        return found

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#/"):
            return None
        found = self._root
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found


def _add(found: _Found, more: _Found) -> None:
    for place, patterns in more.items():
        found[place] = found.get(place, frozenset()) | patterns


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
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
