"""The process that looks at constraints: what it says, when it ends, and what it refuses unread."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
from manylora_router.text import constraint_process
from manylora_router.text.constraint_process import MAX_PATTERNS, crowded, violation
from manylora_shared.constraints.constraint import Constraint

SLOW = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}


@contextmanager
def process(cpu_s: float, wall_s: float = 60.0) -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    ours, theirs = Pipe()
    argv = [sys.executable, "-m", constraint_process.__name__, str(theirs.fileno()), str(cpu_s), str(wall_s)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ours, subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env=env) as child:
        theirs.close()
        assert json.loads(ours.recv_bytes()) is None
        yield ours, child


def test_it_answers_until_its_router_is_gone() -> None:
    with process(5.0) as (router, child):
        for kind, source, wrong in (("regex", "a+", None), ("regex", "(a", "constraint.regex")):
            router.send_bytes(json.dumps([kind, source]).encode())
            found = json.loads(router.recv_bytes())
            assert (found and found[0]) == wrong
        child.send_signal(signal.SIGINT)  # the terminal's, for the router
        router.send_bytes(json.dumps(["json_object", ""]).encode())
        assert json.loads(router.recv_bytes()) is None
        router.close()
        assert child.wait(10.0) == 0


@pytest.mark.parametrize(("cpu_s", "wall_s", "ended_by"), [(0.2, 60.0, signal.SIGPROF), (60.0, 0.2, signal.SIGALRM)])
def test_it_ends_by_itself_where_nobody_ends_it(cpu_s: float, wall_s: float, ended_by: signal.Signals) -> None:
    with process(cpu_s, wall_s) as (router, child):
        router.send_bytes(json.dumps(["grammar", f"start: %json {json.dumps(SLOW)}"]).encode())
        assert child.wait(60.0) == -ended_by


def strings(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f".*{i}.*", **more} for i in range(count)]


MANY = strings(MAX_PATTERNS + 1)
IN_A = [{"type": "object", "properties": {"a": each}} for each in MANY]
NAMED = {f"p{i}": each for i, each in enumerate(MANY)}
REFERRED = [{"$ref": f"#/$defs/{name}"} for name in NAMED]
TREE: dict[str, Any] = {"type": "string", "pattern": "a"}
NODE = {"type": "object", "properties": {f"n{i}": {"$ref": "#/$defs/n"} for i in range(9)}, "allOf": [TREE]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"allOf": MANY}, ()),
        ({"allOf": [{"allOf": MANY[:5]}, {"allOf": MANY[5:]}]}, ()),
        ({"allOf": IN_A}, ("a",)),
        ({"properties": {"b": {"items": {"allOf": MANY}}}}, ("b", "items")),
        ({"anyOf": [{"type": "null"}, {"allOf": MANY}]}, ()),
        ({"$defs": NAMED, "allOf": REFERRED}, ()),
        ({"allOf": strings(MAX_PATTERNS - 1, format="date"), "pattern": "a", "type": "string"}, None),
        ({"allOf": MANY[:MAX_PATTERNS]}, None),
        ({"anyOf": MANY}, None),
        ({"allOf": [{"properties": {"id": {"type": "string", "format": "uuid"}}}] * 20}, None),
        ({"properties": NAMED}, None),
        ({"allOf": [{"properties": {name: each}} for name, each in NAMED.items()]}, None),
        ({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, None),
        ({"$ref": "#/nowhere", "allOf": 7, "properties": []}, None),
        ([], None),
    ],
)
def test_patterns_that_one_text_must_match_are_counted_by_place(schema: Any, place: tuple[str, ...] | None) -> None:
    source = json.dumps(schema)
    assert crowded(source) == place
    if place is not None:
        found = violation(Constraint.json_schema(source))
        assert found is not None
        assert f"more than {MAX_PATTERNS} patterns" in found.description
        assert not place or ".".join(place) in found.description


def test_what_is_no_schema_is_the_compilers_matter() -> None:
    for source in ("{", "[" * 5000, '{"allOf": ' * 500 + "{}" + "}" * 500):
        assert crowded(source) is None
