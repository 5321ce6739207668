"""Reading a JSON object: every type, and what is wrong with it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from manylora_router.front.http.fields import Fields, is_shallow, is_unicode
from manylora_shared.errors import InvalidRequest

READERS: dict[str, Any] = {
    "text": lambda fields: fields.text("a"),
    "flag": lambda fields: fields.flag("a"),
    "integer": lambda fields: fields.integer("a"),
    "number": lambda fields: fields.number("a"),
    "texts": lambda fields: fields.texts("a", most=2),
    "token_ids": lambda fields: fields.token_ids("a", most=2),
    "biases": lambda fields: fields.biases("a", most=2),
}


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        ("text", "x", "x"),
        ("flag", True, True),
        ("integer", 7, 7),
        ("integer", 7.0, 7),
        ("number", 7, 7.0),
        ("number", 0.5, 0.5),
        ("texts", "x", ("x",)),
        ("texts", ["x", "y", "z", "w"], ("x", "y", "z")),  # one too many, for admission to count
        ("token_ids", [1, 2, 3, 4], [1, 2, 3]),
        ("biases", {"1": 2, "3": -0.5}, {1: 2.0, 3: -0.5}),
    ],
)
def test_right_values(kind: str, value: Any, read: Any) -> None:
    fields = Fields({"a": value})
    assert READERS[kind](fields) == read
    fields.close()
    fields.check()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", 7),
        ("text", "\ud800"),
        ("flag", 1),
        ("flag", "true"),
        ("integer", "7"),
        ("integer", True),
        ("integer", 7.5),
        ("integer", -1),
        ("integer", -(10**400)),
        ("number", "7"),
        ("number", False),
        ("number", 10**400),
        ("number", float("inf")),
        ("number", 1e39),
        ("texts", [1]),
        ("texts", {"a": 1}),
        ("texts", ["\udc00"]),
        ("token_ids", [1.5]),
        ("token_ids", [-1]),
        ("token_ids", [True]),
        ("token_ids", "12"),
        ("biases", [1]),
        ("biases", {"x": 1}),
        ("biases", {"1": "1"}),
        ("biases", {"-1": 1}),
        ("biases", {"9" * 30: 1}),
    ],
)
def test_wrong_values_are_named_and_read_as_absent(kind: str, value: Any) -> None:
    fields = Fields({"a": value})
    READERS[kind](fields)
    fields.close()
    with pytest.raises(InvalidRequest) as wrong:
        fields.check()
    assert wrong.value.violations[0].field.startswith("a")


@pytest.mark.parametrize("kind", READERS)
def test_null_is_absent(kind: str) -> None:
    fields, absent = Fields({"a": None}), Fields({})
    assert READERS[kind](fields) == READERS[kind](absent)
    assert fields.found == []


def test_half_a_pair_is_found_in_the_time_of_a_copy() -> None:
    assert [is_unicode(text) for text in ("a", "é😀", "\ud800", "a\udc00")] == [True, True, False, False]
    text = "é" * (1 << 23)
    began = time.process_time()
    assert is_unicode(text)
    assert time.process_time() - began < 0.2  # a character at a time takes twice that


def test_depth_is_of_lists_and_objects() -> None:
    assert is_shallow(7, 0)
    assert is_shallow({"a": [[1], {}], "b": {}}, 3)
    assert not is_shallow({"a": [[1], {}], "b": {}}, 2)
    assert not is_shallow([[]], 1)


def test_what_nobody_reads_is_wrong_and_all_is_told_at_once() -> None:
    fields = Fields({"a": 1, "b": 2, "c": {"d": 3}, "e": "ok"})
    fields.text("a")
    fields.inner("c").close()
    fields.only("e", "ok")
    fields.close()
    assert [v.field for v in fields.found] == ["a", "c.d", "b"]


def test_a_neutral_value_is_of_its_type() -> None:
    fields = Fields({"a": 1, "b": True})
    fields.only("a", True)
    fields.only("b", True)
    assert [v.description for v in fields.found] == ["is not supported, except as true"]
