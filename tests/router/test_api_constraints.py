"""`response_format` and `structured_outputs` become one constraint."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_router.front.http.api.constraints import read_constraint
from manylora_router.front.http.fields import Fields
from manylora_shared.constraints.constraint import Constraint, ConstraintKind

SCHEMA = {"type": "object", "properties": {"\u00e4": {}}}
TEXT = '{"type": "object", "properties": {"\u00e4": {}}}'


def read(document: dict[str, Any]) -> tuple[Constraint | None, list[str]]:
    fields = Fields(document)
    constraint, _ = read_constraint(fields)
    fields.close()
    return constraint, [found.field for found in fields.found]


@pytest.mark.parametrize(
    ("document", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(ConstraintKind.JSON_OBJECT)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Constraint(ConstraintKind.JSON_SCHEMA, TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            Constraint(ConstraintKind.JSON_SCHEMA, TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint(ConstraintKind.JSON_SCHEMA, TEXT)),
        ({"structured_outputs": {"json": TEXT}}, Constraint(ConstraintKind.JSON_SCHEMA, TEXT)),
        ({"structured_outputs": {"json_object": True}}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"structured_outputs": {"grammar": "start: A"}}, Constraint(ConstraintKind.GRAMMAR, "start: A")),
        (
            {"structured_outputs": {"regex": "a+", "disable_fallback": True, "whitespace_pattern": None}},
            Constraint(ConstraintKind.REGEX, "a+"),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.of_choices(iter(["a", "b"]))),
    ],
)
def test_each_form_is_read(document: dict[str, Any], constraint: Constraint | None) -> None:
    assert read(document) == (constraint, [])


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format.more"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
    ],
)
def test_what_is_wrong_is_named(document: dict[str, Any], field: str) -> None:
    assert read(document)[1] == [field]
