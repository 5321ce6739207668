"""Constraints as they are said, and what is wrong with one by itself."""

from __future__ import annotations

import pytest
from manylora.v1 import common_pb2
from manylora_shared.constraints.constraint import Constraint, ConstraintKind

KINDS = [
    Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"string"}'),
    Constraint(ConstraintKind.JSON_OBJECT),
    Constraint(ConstraintKind.REGEX, "a+"),
    Constraint.of_choices(iter(["yes", "n\u00f6"])),
    Constraint(ConstraintKind.GRAMMAR, 'start: "a"'),
]


@pytest.mark.parametrize("constraint", KINDS, ids=lambda each: each.kind.value)
def test_each_kind_goes_over_the_wire(constraint: Constraint) -> None:
    assert Constraint.of_message(common_pb2.Constraint(**constraint.given())) == constraint
    assert constraint.violations() == []


def test_digests_tell_them_apart() -> None:
    assert len({each.digest for each in KINDS}) == len(KINDS)
    assert Constraint(ConstraintKind.REGEX, "a").digest != Constraint(ConstraintKind.GRAMMAR, "a").digest


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        (Constraint.of_message(common_pb2.Constraint()), "constraint", "must be one of"),
        (Constraint.of_message(common_pb2.Constraint(json_object=False)), "constraint", "must be one of"),
        (Constraint(ConstraintKind.REGEX, " "), "constraint.regex", "is empty"),
        (Constraint(ConstraintKind.REGEX, "a" * 8193), "constraint.regex", "8193 bytes"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "a" * 131073), "constraint.json_schema", "131073 bytes"),
        (Constraint.of_choices(iter([])), "constraint.choice", "has no text"),
        (Constraint.of_choices(iter(["a", ""])), "constraint.choice", "empty text"),
        (Constraint.of_choices(iter(["a"] * 9999)), "constraint.choice", "more than 1024"),
        (Constraint.of_choices(iter(["\ud800"])), "constraint.choice", "half of a surrogate pair"),
    ],
)
def test_what_is_wrong_is_named(constraint: Constraint, field: str, words: str) -> None:
    [found] = constraint.violations()
    assert found.field == field
    assert words in found.description
