"""Constraints as llguidance reads them, and what it says against them. Its limits hold here and in workers alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.errors import FieldViolation, shown

# A tenth of a second for the largest that passes, and some megabytes.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    max_grammar_size=100_000,
    max_lexer_states=20_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    verbose_errors=False,
)
_MAX_WORDS = 400  # of an error
_MAX_LOOKS = 64  # into parts of a schema, for the one that is refused
_MAX_LOOKED_BYTES = 1 << 20  # of all these parts with what they refer to
_MAX_RULES = 2_000  # what compiling takes grows faster than they
_MAX_GBNF_RULES = 512  # whose conversion is Python's
# A model that may put white space anywhere puts it everywhere, small ones until their last token.
_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
_OWN_OPTIONS = "x-guidance"  # llguidance's in a schema: they would take a keyword's meaning away
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# By keyword: where a schema has further ones.
_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_RULE = re.compile(r"(?P<name>\w+): %json (?P<schema>\{.*\})")
_REFUSED_SCHEMA = re.compile(r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: ")
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)  # or what is escaped already
_UNKNOWN_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises ValueError in place of a panic of llguidance, which is no Exception and would pass all who catch these."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"llguidance failed: {error}") from error


def grammar_of(constraint: Constraint) -> str:
    """Raises ValueError, with words, for what has no grammar."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(_schema(constraint.source))
        case ConstraintKind.JSON_OBJECT:
            return _of_schema({"type": "object"})
        case ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(constraint.source))
        case ConstraintKind.CHOICE:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choices)
            return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
        case ConstraintKind.GRAMMAR:
            source = constraint.source
            _check_rules(source)
            return str(LLMatcher.grammar_from_lark(_lark_of(source) if _GBNF.search(source) else source))
        case None:
            raise ValueError("says nothing")


def rule_of(constraint: Constraint, name: str) -> str:
    """The same as a rule of a larger grammar, in Lark, of one that `refusal` finds nothing against."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA | ConstraintKind.JSON_OBJECT:
            schema = _schema(constraint.source) if constraint.source else {"type": "object"}
            found = "%json " + json.dumps({**schema, _OWN_OPTIONS: _OPTIONS}, ensure_ascii=False)
        case ConstraintKind.REGEX:
            pattern = _SLASH.sub(lambda each: each[1] or "\\/", constraint.source).replace("\n", "\\n")
            found = f"/{pattern}/"
        case ConstraintKind.CHOICE:
            found = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choices)
        case ConstraintKind.GRAMMAR:
            source = constraint.source
            found = f"%lark {{\n{_lark_of(source) if _GBNF.search(source) else source}\n}}"
        case None:
            raise ValueError("says nothing")
    return f"{name}: {found}"


def refusal(constraint: Constraint) -> FieldViolation | None:
    """What is wrong with one whose `violations` are none; of a schema with the path to the part. Takes up to a tenth
    of a second, without the interpreter's lock.
    """
    where, path = "", tuple[str, ...]()
    try:
        with panics_as_errors():
            problem = _problem(grammar_of(constraint))
            where, schema = _refused_rule(constraint, problem)
            if schema is not None:
                path, problem = _refused_part(schema, problem)
    except (ValueError, RecursionError) as error:
        return FieldViolation(constraint.field, _words(error))
    if not problem:
        return None
    where += f"at {shown('.'.join(path))}: " if path else ""
    return FieldViolation(constraint.field, where + _words(problem))


def _check_rules(source: str) -> None:
    """Each has a colon; one that is a schema has more."""
    rules = sum(1 if _SCHEMA_RULE.fullmatch(line) else line.count(":") for line in source.split("\n"))
    for count, most in ((source.count("::="), _MAX_GBNF_RULES), (rules, _MAX_RULES)):
        if count > most:
            raise ValueError(f"has more than {most} rules")


def _lark_of(gbnf: str) -> str:
    try:
        return str(any_to_lark(gbnf))
    except Exception as error:  # it raises no narrower one for what is wrong with the text
        raise ValueError(str(error)) from error


def _refused_rule(constraint: Constraint, problem: str) -> tuple[str, dict[str, Any] | None]:
    """Where it is, and the schema, of a grammar one that is a rule by itself; None: there is none."""
    if problem and constraint.kind is ConstraintKind.JSON_SCHEMA:
        return "", _schema(constraint.source)
    if constraint.kind is not ConstraintKind.GRAMMAR or (found := _REFUSED_SCHEMA.match(problem)) is None:
        return "", None
    line = constraint.source.split("\n")[int(found["line"]) - 1 :][:1]
    if not line or (rule := _SCHEMA_RULE.fullmatch(line[0])) is None:
        return "", None
    try:
        return f"in {rule['name']}: ", json.loads(rule["schema"])
    except ValueError:
        return "", None


def _schema(source: str) -> Any:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
    if any(_OWN_OPTIONS in part for _, part in _parts(schema)):
        raise ValueError(f"must not have {_OWN_OPTIONS}")
    return schema


def _of_schema(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS))


def _problem(grammar: str) -> str:
    """Empty: there is none."""
    return str(LLMatcher.validate_grammar(grammar, limits=LIMITS))


def _refused_part(schema: dict[str, Any], problem: str) -> tuple[tuple[str, ...], str]:
    """The deepest part that is refused by itself, as far as looks go."""
    roots: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found: tuple[str, ...] = ()
    looked_bytes = 0
    for looks, (path, part) in enumerate(_parts(schema)):
        if looks == _MAX_LOOKS or looked_bytes > _MAX_LOOKED_BYTES:
            break
        if path[: len(found)] == found and path != found and "$ref" not in part:
            grammar = _of_schema({**roots, **part})
            looked_bytes += len(grammar)
            own = _problem(grammar)
            if own and not any(name in own for name in roots):
                found, problem = path, own
    if (key := _UNKNOWN_KEYS.search(problem)) is not None:
        found, problem = (*found, key.group(1)), "is not supported"
    return found, problem


def _parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Each schema in a schema, the outer ones first."""
    left: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while left:
        path, part = left.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for key, value in part.items():
            if key in _ONE:
                left.append(((*path, key), value))
            elif key in _LISTED and isinstance(value, list):
                left += [((*path, key, str(index)), each) for index, each in enumerate(value)]
            elif key in _NAMED and isinstance(value, dict):
                left += [((*path, key, name), each) for name, each in value.items()]


def _words(problem: object) -> str:
    words = " ".join(str(problem).split())
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."
