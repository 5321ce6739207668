"""What a function's schema leaves open, closed."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_router.dialect.schemas import closed, kinds_of, resolved


def test_what_is_open_is_closed() -> None:
    found = closed({"properties": {"n": {"type": "number", "minimum": 0}, "i": {"type": "integer"}, "o": {}}})
    assert (found["type"], found["additionalProperties"]) == ("object", False)
    assert found["properties"]["n"] == {"type": "number", "minimum": 0, "maximum": 10**18}
    assert found["properties"]["i"] == {"type": "integer", "minimum": -(10**18), "maximum": 10**18}
    reference = found["properties"]["o"]["$ref"]
    assert resolved({"$ref": reference}, found)["anyOf"]
    depth = 0
    while lists := [each for each in resolved({"$ref": reference}, found)["anyOf"] if each.get("type") == "array"]:
        reference, depth = lists[0]["items"]["$ref"], depth + 1
    assert depth == 4


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"enum": [1, 2.5]}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"$ref": "#/x"}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "allOf": [{"properties": {"a": {"type": "string"}}}]},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}, "patternProperties": {}},
    ],
)
def test_what_a_schema_says_stays(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_references() -> None:
    root = {"$defs": {"a/b": {"type": "string"}, "c": {"$ref": "#/$defs/a~1b"}, "d": {"$ref": "#/$defs/d"}}}
    assert resolved({"$ref": "#/$defs/c"}, root) == {"type": "string"}
    for wrong in ("#/$defs/d", "#/$defs/e"):
        with pytest.raises(ValueError, match="leads"):
            resolved({"$ref": wrong}, root)


def test_kinds() -> None:
    assert [kinds_of({"type": each}) for each in ("null", ["a", 7], 7, None)] == [["null"], ["a"], [], []]
    with pytest.raises(ValueError, match="must be object"):
        closed({"type": "array"})
