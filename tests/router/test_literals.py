"""Python's literals and Gemma's."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manylora_router.dialect.literals import MAX_DEPTH, PYTHON, NotReadable, Reader, quoted_by

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(VALUES)
def test_pythons_literals_are_read_as_python_reads_them(value: Any) -> None:
    assert Reader(f"a={value!r})", PYTHON).members("=", ")") == {"a": value}


@pytest.mark.parametrize("text", [r"'\x41\u00e9\U0001F600\n\'\"\\'", '"it\'s"', "'a\\\nb'"])
def test_escapes(text: str) -> None:
    assert Reader(f"a={text})", PYTHON).members("=", ")") == {"a": ast.literal_eval(text)}


@pytest.mark.parametrize(
    "text", ["a=1", "a=", "a=b)", "=1)", "a=1 b=2)", "a='", "a=07)", "a={1: 2})", "a=" + "[" * (MAX_DEPTH + 2)]
)
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(NotReadable):
        Reader(text, PYTHON).members("=", ")")


def test_strings_between_marks_have_no_escapes() -> None:
    text = r'a:<q>x "\n} <q>,b_2:[{<q>k 1<q>:false}],}'
    assert Reader(text, quoted_by("<q>")).members(":", "}") == {"a": r'x "\n} ', "b_2": [{"k 1": False}]}
