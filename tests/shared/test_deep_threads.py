"""What would end the process on an ordinary stack: chains of references as long as a request's bytes allow."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import refusal
from manylora_shared.process.deep_threads import DeepThreads


def chained(length: int, wraps: str) -> Constraint:
    defs: dict[str, Any] = {f"a{i}": {wraps: {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return Constraint(
        ConstraintKind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {}}})
    )


CHAINS = {
    "references": chained(2700, "items"),
    "properties": chained(2000, "additionalProperties"),
    "rules": Constraint(
        ConstraintKind.GRAMMAR,
        "start: r0\n" + "\n".join(f"r{i}: {'(' * 25}r{i + 1}{')' * 25}" for i in range(1990)) + '\nr1990: "x"',
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_end_no_process(name: str) -> None:
    assert not CHAINS[name].violations()
    with DeepThreads(1) as threads:
        threads.submit(refusal, CHAINS[name]).result(60)


def test_other_threads_have_what_they_had() -> None:
    before = threading.stack_size()
    with DeepThreads(1) as threads:
        threads.submit(int).result(10)
        assert threading.stack_size() == before
