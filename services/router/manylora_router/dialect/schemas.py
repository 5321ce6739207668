"""JSON schemas of functions, as calls need them: what a schema leaves open is closed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LARGEST = 10**18
_SMALLEST_STEP = 1e-9
_FREE_DEPTH = 4  # of values of which a schema says nothing
_FREE = "manylora-free-"
_MOST_REFERENCES = 16  # from one to the next
_JOINED = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "enum", "const")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_SHAPES: Mapping[type, tuple[Sequence[str], str]] = {
    dict: (("properties", "$defs", "definitions"), "an object"),
    list: (("required", "enum", "anyOf"), "a list"),
    int: (("minLength", "maxLength", "minItems", "maxItems"), "a whole number"),
}
_SAYING = (*NUMBERS, "properties", "items", "pattern", "minLength", "maxLength", "minItems", "maxItems")


def closed(schema: Schema) -> dict[str, Any]:
    """Objects have no members that their schema does not name, values of which it says nothing are shallow, and numbers
    have 18 digits before the point and 9 behind it. Raises ValueError for what is no object's.
    """
    check_shape(schema)
    if schema.get("type", "object") != "object":
        raise ValueError("type: must be object")
    found: dict[str, Any] = _closed({**schema, "type": "object"})
    if f'"#/$defs/{_FREE}' in json.dumps(found):
        found["$defs"] = {**found.get("$defs", {}), **_free_values()}
    return found


def check_shape(schema: Schema) -> None:
    """Of its own words. Raises ValueError."""
    for kind, (words, shape) in _SHAPES.items():
        for word in words:
            if word in schema and type(schema[word]) is not kind:
                raise ValueError(f"{word}: must be {shape}")


def kinds_of(schema: Schema) -> Sequence[str]:
    """The types that it names."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return [each for each in kinds if isinstance(each, str)] if isinstance(kinds, list) else []


def resolved(schema: Any, root: Schema) -> Schema:
    """What a reference within `root` stands for. Raises ValueError for one that leads nowhere, or to no schema."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        check_shape(schema)
        if "$ref" not in schema:
            return schema
        found: Any = root
        for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
        if schema is None:
            raise ValueError("$ref: leads nowhere")
    raise ValueError("$ref: leads from one to the next without an end")


def _free(depth: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{_FREE}{depth}"}


def _free_values() -> dict[str, Any]:
    number = {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST, "multipleOf": _SMALLEST_STEP}
    kinds = [{"type": "string"}, number, {"type": "boolean"}, {"type": "null"}]
    found: dict[str, Any] = {f"{_FREE}0": {"anyOf": kinds}}
    for depth in range(1, _FREE_DEPTH + 1):
        inner = _free(depth - 1)
        lists = [{"type": "array", "items": inner}, {"type": "object", "additionalProperties": inner}]
        found[f"{_FREE}{depth}"] = {"anyOf": [_free(0), *lists]}
    return found


def _closed(schema: Any) -> Any:
    if schema is True:
        return _free(_FREE_DEPTH)
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(found.get(key), dict):
            found[key] = {name: _closed(each) for name, each in found[key].items()}
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = _closed(found[key])
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(found.get(key), list):
            found[key] = [_closed(each) for each in found[key]]
    kinds = kinds_of(found)
    if any(key in found for key in _JOINED):
        return found
    return found | (_closing(found, kinds) if kinds or any(key in found for key in _SAYING) else _free(_FREE_DEPTH))


def _closing(schema: Schema, kinds: Collection[str]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if ("object" in kinds or "properties" in schema) and not any(key in schema for key in _OPEN):
        more["additionalProperties"] = False if "properties" in schema else _free(_FREE_DEPTH)
    if "array" in kinds and "items" not in schema and "prefixItems" not in schema:
        more["items"] = _free(_FREE_DEPTH)
    if "number" in kinds or "integer" in kinds:
        if "exclusiveMinimum" not in schema:
            more["minimum"] = schema.get("minimum", -_LARGEST)
        if "exclusiveMaximum" not in schema:
            more["maximum"] = schema.get("maximum", _LARGEST)
        if "number" in kinds and not any(key in schema for key in NUMBERS):
            more["multipleOf"] = _SMALLEST_STEP
    return more
