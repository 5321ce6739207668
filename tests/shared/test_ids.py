"""What may be a name, and which rule one breaks that is none."""

from __future__ import annotations

import pytest
from manylora_shared.ids import (
    AdapterDigest,
    TenantId,
    adapter_uid,
    digest_of,
    is_uid,
    is_valid_name,
    name_problem,
    owner_of,
)


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


def test_a_copy_is_of_a_content_and_may_have_an_owner() -> None:
    digest = AdapterDigest("ab" * 32)
    own, shared = adapter_uid(digest, TenantId("acme.eu-1")), adapter_uid(digest, None)
    assert own != shared
    assert [(digest_of(uid), owner_of(uid), is_uid(uid)) for uid in (own, shared)] == [
        (digest, "acme.eu-1", True),
        (digest, None, True),
    ]
    for wrong in ("", "@acme", "ab@acme", f"{digest}@", f"{digest}@a@b", f"{digest}@../x", f"{digest}/x"):
        assert not is_uid(wrong), wrong
