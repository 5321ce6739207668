"""Constraints are checked once, beside the loop, and by tenant."""

from __future__ import annotations

import time

import pytest
from manylora_router.text import constraints
from manylora_router.text.constraints import ConstraintCheck
from manylora_shared.constraints import grammar
from manylora_shared.constraints.constraint import Constraint, ConstraintKind

GOOD, BAD = Constraint(ConstraintKind.REGEX, "a+"), Constraint(ConstraintKind.REGEX, "(a")


async def test_what_is_good_is_remembered_of_its_tenant() -> None:
    check = ConstraintCheck()
    assert await check.violation("acme", GOOD) is None
    found = await check.violation("acme", BAD)
    assert found is not None
    assert found.field == "constraint.regex"
    assert [check.is_known(*each) for each in (("acme", GOOD), ("acme", BAD), ("zoo", GOOD))] == [True, False, False]
    check.close()


async def test_what_takes_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(grammar, "refusal", lambda constraint: time.sleep(0.1))
    check = ConstraintCheck()
    found = await check.violation("acme", GOOD)
    assert found is not None
    assert "takes longer" in found.description
    check.close()
