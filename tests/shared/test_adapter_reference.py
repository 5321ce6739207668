from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_shared.adapter_reference import (
    MAX_VERSION,
    AdapterPart,
    ReferenceProblem,
    format_reference,
    parse_reference,
)
from manylora_shared.ids import AdapterName

NAMES = st.from_regex(r"[a-z0-9](_|-|[a-z0-9]){0,20}", fullmatch=True)
WEIGHTS = st.integers(-10_000, 10_000).filter(bool).map(lambda n: n / 100)
PARTS = st.builds(AdapterPart, NAMES.map(AdapterName), st.none() | st.integers(1, MAX_VERSION), WEIGHTS)


def test_a_name_alone_is_its_version_in_force_with_weight_1() -> None:
    assert parse_reference("support") == (AdapterPart(AdapterName("support"), None, 1.0),)


def test_parts_have_versions_and_weights_of_their_own() -> None:
    assert parse_reference("a@3+b:0.5+c@2:-1.25") == (
        AdapterPart(AdapterName("a"), 3),
        AdapterPart(AdapterName("b"), None, 0.5),
        AdapterPart(AdapterName("c"), 2, -1.25),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is missing"),
        ("a+", "is missing"),
        ("A", "has 'A'"),
        ("a@", "a version is"),
        ("a@0", "a version is"),
        ("a@03", "a version is"),
        ("a@-1", "a version is"),
        ("a@2147483648", "a version is"),
        ("a@1@2", "a version is"),
        ("a:", "a weight is"),
        ("a:0", "a weight is"),
        ("a:1e3", "a weight is"),
        ("a:nan", "a weight is"),
        ("a:100.1", "a weight is"),
        ("a:1:2", "a weight is"),
        ("a:0.5@2", "a weight is"),
        ("a+a@2", "names 'a' twice"),
        ("a+b+c+d+e", "names 5 adapters"),
        ("a" * 500, "has 500 characters"),
        ("a@\u0663", "a version is"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(ReferenceProblem, match=says):
        parse_reference(text)


@given(st.lists(PARTS, min_size=1, max_size=4, unique_by=lambda part: part.name).map(tuple))
def test_what_is_written_is_read_back(parts: tuple[AdapterPart, ...]) -> None:
    assert parse_reference(format_reference(parts)) == parts


@given(st.text(max_size=40))
def test_any_text_is_parts_or_a_problem(text: str) -> None:
    try:
        parts = parse_reference(text)
    except ReferenceProblem:
        return
    assert parse_reference(format_reference(parts)) == parts
