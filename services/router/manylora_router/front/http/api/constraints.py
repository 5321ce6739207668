"""`response_format` and vLLM's `structured_outputs`: what an answer's text must be."""

from __future__ import annotations

import json
from typing import Any

from manylora_shared.constraints.constraint import Constraint, ConstraintKind

from manylora_router.front.http.fields import Fields, is_unicode

FORMAT = "response_format"
OUTPUTS = "structured_outputs"
_TEXTS = {"regex": ConstraintKind.REGEX, "grammar": ConstraintKind.GRAMMAR}
# What is so here whatever they say: there is nothing to fall back to, and no white space between a document's parts.
_HARMLESS = ("disable_fallback", "disable_any_whitespace")


def read_constraint(fields: Fields) -> tuple[Constraint | None, str]:
    """And which field it came from."""
    by_format = read_format(fields, FORMAT)
    outputs = fields.inner(OUTPUTS)
    by_outputs = _of_outputs(outputs)
    outputs.close()
    if by_format is not None and by_outputs is not None:
        fields.wrong(OUTPUTS, f"is given beside {FORMAT}: one constraint is kept")
    return (by_format, FORMAT) if by_format is not None else (by_outputs, OUTPUTS)


def read_format(fields: Fields, name: str) -> Constraint | None:
    """OpenAI's, in the form of chat completions or that of responses."""
    given = fields.inner(name)
    kind = given.text("type", "text")
    found: Constraint | None = None
    if kind == "json_object":
        found = Constraint(ConstraintKind.JSON_OBJECT)
    elif kind == "json_schema":
        inner = given.inner("json_schema") if given.peek("json_schema") is not None else given
        found = _schema(inner, "schema")
        inner.ignore("name", "description", "strict")
        if inner is not given:
            inner.close()
    elif kind != "text":
        given.wrong("type", "must be text, json_object or json_schema")
    given.close()
    return found


def _of_outputs(outputs: Fields) -> Constraint | None:
    found = [Constraint(kind, text) for name, kind in _TEXTS.items() if (text := outputs.text(name))]
    if outputs.peek("json") is not None:
        found.append(_schema(outputs, "json"))
    if outputs.flag("json_object"):
        found.append(Constraint(ConstraintKind.JSON_OBJECT))
    choices = outputs.raw("choice")
    if isinstance(choices, list) and all(isinstance(each, str) and is_unicode(each) for each in choices):
        found.append(Constraint.of_choices(iter(choices)))
    elif choices is not None:
        outputs.wrong("choice", "must be a list of strings")
    outputs.ignore(*_HARMLESS)
    outputs.only("disable_additional_properties", False)  # the schema says it
    outputs.only("whitespace_pattern")
    if len(found) > 1:
        outputs.wrong("", "has more than one constraint: one is kept")
    return found[0] if found else None


def _schema(fields: Fields, name: str) -> Constraint:
    """An object, or one as JSON."""
    value: Any = fields.raw(name)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | str) or not is_unicode(text):
        fields.wrong(name, "must be a JSON schema")
    return Constraint(ConstraintKind.JSON_SCHEMA, text)
