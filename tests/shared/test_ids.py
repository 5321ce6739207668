"""What may be a name, and which rule one breaks that is none."""

from __future__ import annotations

import pytest
from manylora_shared.ids import is_valid_name, name_problem


@pytest.mark.parametrize("name", ["a", "0", "a.b-c_d", "a" * 64, "v1.2"])
def test_names(name: str) -> None:
    assert is_valid_name(name)
    assert name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is missing"),
        ("A", "has 'A'"),
        ("a/b", "has '/'"),
        ("a b", "has ' '"),
        ("a\n", r"has '\n'"),
        ("ä", r"has '\xe4'"),
        ("a" * 65, "has 65 characters, more than 64"),
        ("-a", "begins with '-'"),
        (".a", "begins with '.'"),
        ("a..b", "has '..'"),
    ],
)
def test_no_names(name: str, problem: str) -> None:
    assert not is_valid_name(name)
    assert (name_problem(name) or "").startswith(problem)
