"""What llguidance takes, and what is said against the rest."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import panics_as_errors, refusal


def of_schema(schema: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


@pytest.mark.parametrize(
    "constraint",
    [
        of_schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}),
        Constraint(ConstraintKind.JSON_OBJECT),
        Constraint(ConstraintKind.REGEX, r"a/b\d+"),
        Constraint.of_choices(iter(['a"b', "\u00e4\n", "\\"])),
        Constraint(ConstraintKind.GRAMMAR, 'start: "a" start | "b"'),
        Constraint(ConstraintKind.GRAMMAR, 'root ::= "a" | "b" root'),
    ],
    ids=lambda each: f"{each.kind.value}",
)
def test_each_kind_compiles(constraint: Constraint) -> None:
    assert refusal(constraint) is None


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"items": UNIQUE}, "b": {}}}, "at 'properties.a.items.uniqueItems': is not supported"),
        ({"$defs": {"u": UNIQUE}, "$ref": "#/$defs/u"}, "at '$defs.u.uniqueItems': is not supported"),
        ({"anyOf": [{"type": "null"}, {"pattern": "(?=a)", "type": "string"}]}, "at 'anyOf.1': regex parse error"),
        ({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}]}, "at 'anyOf.0': Unsatisfiable"),
        ({"items": {"x-guidance": {"lenient": True}}}, "must not have x-guidance"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ("[1]", "must be a JSON object"),
        ("{", "is no JSON"),
    ],
)
def test_a_refused_schema_says_where(schema: Any, words: str) -> None:
    found = refusal(of_schema(schema))
    assert found is not None
    assert found.field == "constraint.json_schema"
    assert words in found.description


def bombs() -> dict[str, Constraint]:
    doubled: dict[str, Any] = {"type": "string"}
    for _ in range(12):
        halves = [{"anyOf": [doubled, {"type": name}]} for name in ("integer", "null")]
        doubled = {"allOf": halves}
    return {
        "allOf": of_schema(doubled),
        "depth": of_schema('{"items":' * 300 + "{}" + "}" * 300),
        "depth beyond the interpreter's": of_schema('{"items":' * 9000 + "{}" + "}" * 9000),
        "regex": Constraint(ConstraintKind.REGEX, "(" * 4000 + "a" + ")" * 4000),
        "grammar": Constraint(ConstraintKind.GRAMMAR, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
        "rules": Constraint(ConstraintKind.GRAMMAR, "\n".join(f'r{i}: r{i + 1} "a"' for i in range(6000))),
        "rules of GBNF": Constraint(ConstraintKind.GRAMMAR, "\n".join(f"r{i} ::= r{i + 1}" for i in range(2000))),
    }


@pytest.mark.parametrize("text", ["root ::= none", "root ::= [a", 'root ::= "a"{', 'a ::= "b"\na ::= "c"'])
def test_what_is_no_gbnf_is_refused(text: str) -> None:
    found = refusal(Constraint(ConstraintKind.GRAMMAR, text))
    assert found is not None
    assert found.field == "constraint.grammar"


def test_a_panic_is_a_refusal() -> None:
    """The library cuts its words amid a character."""
    found = [refusal(of_schema({"format": ["x" * length + "\u00e9" * 3]})) for length in range(90, 100)]
    assert all(each is not None for each in found)
    assert any("llguidance failed" in each.description for each in found if each is not None)
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt


def test_looks_for_the_refused_part_end() -> None:
    """Each of them takes all definitions along."""
    deep: Any = {"$ref": "#/$defs/x"}
    for _ in range(60):
        deep = {"items": deep}
    named = {f"d{i}": {"enum": [f"{i}-{j}" for j in range(40)]} for i in range(250)}
    schema = {**deep, "$defs": {"x": UNIQUE, **named, "all": {"anyOf": [{"$ref": f"#/$defs/{n}"} for n in named]}}}
    started = time.monotonic()
    assert refusal(of_schema({**schema, "prefixItems": [{"$ref": "#/$defs/all"}]})) is not None
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_refused_soon(name: str) -> None:
    started = time.monotonic()
    found = refusal(bombs()[name])
    assert found is not None
    assert len(found.description) < 600
    assert time.monotonic() - started < 5


def test_a_schema_in_a_grammar_is_refused_by_its_rule() -> None:
    for rule, words in (
        ('%json {"properties": {"a": {"uniqueItems": true}}}', "in a: at 'properties.a.uniqueItems': is not supported"),
        ('%json {"uniqueItems": true} | %json {}', "failed to compile JSON schema"),
    ):
        found = refusal(Constraint.grammar(f"start: a\na: {rule}"))
        assert found is not None
        assert words in found.description
    many = ", ".join(f'"{i}": {{"type": "null"}}' for i in range(1500))
    assert refusal(Constraint.grammar(f'start: a\na: %json {{"properties": {{{many}}}}}')) is None
