"""A schema, regular expression, grammar or list of choices, as far as a router looks at it."""

from __future__ import annotations

import json

from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import refusal
from manylora_shared.errors import InvalidRequest

from tests.fuzz.harness import Harness


def run(data: bytes) -> None:
    """{kind: its source, or the document of which it is the text}"""
    try:
        ((name, source),) = json.loads(data).items()
        kind = ConstraintKind(name)
        text = source if isinstance(source, str) else json.dumps(source)
    except (ValueError, AttributeError, RecursionError):
        return
    if kind is ConstraintKind.CHOICE:
        if not isinstance(source, list) or not all(isinstance(each, str) for each in source):
            return
        constraint = Constraint.of_choices(iter(source))
    else:
        constraint = Constraint(kind, text)
    if found := constraint.violations():
        raise InvalidRequest.of_all(found)
    if (refused := refusal(constraint)) is not None:
        raise InvalidRequest.of_all([refused])


HARNESS = Harness(run, is_json=True)
