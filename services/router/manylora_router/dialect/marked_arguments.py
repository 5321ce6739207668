"""The grammar of arguments in Gemma's notation: bare keys, and strings between marks, without escapes.

Only schemas whose every word is kept are written; the others are refused by the word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from manylora_router.dialect.schemas import NUMBERS, Schema, check_shape, closed, kinds_of, resolved
from manylora_router.dialect.writing import ArgumentsGrammar, Marks, escaped, json_value, quoted

IGNORED = ("title", "description", "default", "examples", "deprecated", "$comment", "format", "$schema", "$id")
_DEFINED = ("$defs", "definitions", "$ref", "type", "enum", "const", "anyOf")
_OBJECTS = ("properties", "required", "additionalProperties")
_LISTS = ("items", "minItems", "maxItems")
_STRINGS = ("minLength", "maxLength")
_KNOWN = frozenset((*IGNORED, *_DEFINED, *_OBJECTS, *_LISTS, *_STRINGS, *NUMBERS))
_ALL_KINDS = ("object", "array", "string", "number", "boolean", "null")
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MOST = 1000  # of what a schema counts


def marked_arguments(quote: str, end: str) -> ArgumentsGrammar:
    """end: the mark behind a call, which no string may have in it."""

    def write(name: str, schema: Schema, marks: Marks) -> Iterator[str]:
        values = _Values(name, closed(schema), quote, end, marks)
        values.add(values.members(values.root, ""), name)
        return iter(values.rules)

    return write


class _Values:
    def __init__(self, name: str, root: Schema, quote: str, end: str, marks: Marks) -> None:
        self.root = root
        self.rules: list[str] = []
        self._name = name
        self._quote = quote
        self._end = end
        self._marks = marks
        self._references: dict[str, str] = {}

    def add(self, expression: str, name: str = "") -> str:
        """Its rule's name."""
        name = name or f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def members(self, schema: Schema, path: str) -> str:
        """Of an object, in their order; those that are not required may be left out."""
        properties: dict[str, Any] = schema.get("properties", {})
        required = schema.get("required", ())
        free = schema.get("additionalProperties", False)
        if free and properties:
            raise ValueError(f"{path}additionalProperties: is not supported beside properties")
        if free:
            value = self.value(free, f"{path}additionalProperties.")
            member = self.add(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {value}')
            return f'"{{" ({member} ("," {member})*)? "}}"'
        first = rest = '"}"'
        for key, inner in reversed(list(properties.items())):
            bare = _BARE.fullmatch(key)
            written = quoted(key) if bare else self._string_of(key)
            member = f'{written} ":" {self.value(inner, f"{path}properties.{key}.")}'
            if key in required:
                first, rest = self.add(f"{member} {rest}"), self.add(f'"," {member} {rest}')
            else:
                first = self.add(f"{member} {rest} | {first}")
                rest = self.add(f'"," {member} {rest} | {rest}')
        return f'"{{" {first}'

    def value(self, schema: Any, path: str) -> str:
        """The rule's name."""
        if isinstance(schema, dict) and "$ref" in schema:
            reference = str(schema["$ref"])
            if reference not in self._references:
                name = self._references[reference] = f"{self._name}_ref_{len(self._references)}"
                self.add(self.value(resolved(schema, self.root), f"{reference}."), name)
            return self._references[reference]
        if not isinstance(schema, dict):
            raise ValueError(f"{path.rstrip('.')}: is no schema")
        try:
            check_shape(schema)
        except ValueError as error:
            raise ValueError(f"{path}{error}") from None
        if unknown := next((key for key in schema if key not in _KNOWN), None):
            raise ValueError(f"{path}{unknown}: is not supported")
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self.add(" | ".join(self._literal(each) for each in values))
        if "anyOf" in schema:
            each_of = enumerate(schema["anyOf"])
            return self.add(" | ".join(self.value(each, f"{path}anyOf.{index}.") for index, each in each_of))
        kinds = kinds_of(schema) or (("object",) if "properties" in schema else _ALL_KINDS)
        return self.add(" | ".join(self._of_kind(kind, schema, path) for kind in kinds))

    def _of_kind(self, kind: str, schema: Schema, path: str) -> str:
        match kind:
            case "object":
                return self.add(self.members(schema, path))
            case "array":
                item = self.value(schema.get("items", {"type": "string"}), f"{path}items.")
                return self.add(_listed(item, *_sizes(schema, "Items", path)))
            case "string":
                return self._string(*_sizes(schema, "Length", path))
            case "null" | "boolean" | "number" | "integer":
                bounds = {key: schema[key] for key in NUMBERS if key in schema}
                return self.add(json_value({"type": kind, **bounds}))
        raise ValueError(f"{path}type: is not supported")

    def _string(self, least: int, most: int | None) -> str:
        quote = self._marks.lark(self._quote)
        times = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        name = f"{self._name}_{len(self.rules)}"
        if self._marks.is_token(self._quote):
            barred = "|".join(escaped(each) for each in (self._quote, self._end))
            self.rules.append(f"{name.upper()}: /(?s:.{times})/ & ~/(?s:.*({barred}).*)/")
        else:
            self.rules.append(f"{name.upper()}: /[^{escaped(self._quote[0])}]{times}/")
        body = f"{name.upper()}?" if not least else name.upper()
        return self.add(f"{quote} {body} {quote}")

    def _string_of(self, text: str) -> str:
        if self._quote in text or self._end in text:
            raise ValueError(f"{json.dumps(text)}: has one of the model's marks in it")
        quote = self._marks.lark(self._quote)
        return f"{quote} {quoted(text)} {quote}" if text else f"{quote} {quote}"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._string_of(value)
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(self._literal(each) for each in value), '"]"'])
        if isinstance(value, dict):
            raise ValueError("enum: an object is not supported")
        return quoted(json.dumps(value))


def _sizes(schema: Schema, what: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    for name, size in ((f"min{what}", least), (f"max{what}", most)):
        if size is not None and not (type(size) is int and 0 <= size <= _MOST):
            raise ValueError(f"{path}{name}: must be from 0 to {_MOST}")
    return least, most


def _listed(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return '"[" "]"'
    more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    items = f'{item} ("," {item}){more}'
    return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'
